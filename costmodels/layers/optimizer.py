"""What optimizers keep and do for each parameter."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from costmodels.spec.hardware import Device
from costmodels.spec.layout import Optimizer
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import OPTIMIZERS, Bools, Floats, LayoutTable

ADAM_STATE = 8.0
"""Bytes of Adam's two fp32 moments, which the memory policies of engines count."""

NEWTON_SCHULZ_STEPS = 5


class Update(NamedTuple):
    """Bytes for each parameter."""

    layers: float
    """State of a parameter of a layer."""
    ends: float
    """State of a parameter of embedding or head."""
    traffic: float
    """Bytes that a step reads and writes: weight and gradient in fp32, and the state."""


UPDATES: dict[Optimizer, Update] = {
    "adam": Update(ADAM_STATE, ADAM_STATE, 28.0),
    "sgd": Update(4.0, 4.0, 20.0),
    # A mean for each row and column of a matrix (arXiv:1804.04235, section 3): 8 / hidden bytes at most. The
    # update is written and read once more, to be clipped.
    "adafactor": Update(0.01, 0.01, 20.0),
    # Momentum, and the means of Adafactor twice (arXiv:2307.02047, algorithm 2). The gradient is read for its
    # means, for the size of the update and to move the momentum; the momentum once more to move the weight.
    "came": Update(4.02, 4.02, 32.0),
    # Momentum of the matrices of the layers; Adam for the others (kellerjordan.github.io/posts/muon). Layers
    # have few of those (`has_matrices`).
    "muon": Update(4.0, ADAM_STATE, 20.0),
    # Two moments in 8 bits, each block of 256 with a scale in fp32 (arXiv:2110.02861, section 2).
    "adam8bit": Update(2.0 + 2 * 4 / 256, 2.0 + 2 * 4 / 256, 16.0),
}


def has_matrices(name: str, shape: Sequence[int]) -> bool:
    """Whether a parameter of a layer is a matrix, or a stack of them, whose updates Muon makes orthogonal.

    Adam has the others: vectors and stacks of biases, and what has two sides and is no matrix. Such are gates
    of one output [1, D], whose updates would only be scaled. So are the kernels [C, 4] of convolutions of one
    channel each, which Megatron-LM stores as [C, 1, 4] and counts with the vectors.
    """
    return len(shape) > 1 and min(shape[-2:]) > 1 and not name.endswith(("bias", "_conv"))


def _of(column: int, table: LayoutTable) -> Floats:
    values: Floats = np.array([UPDATES[kind][column] for kind in OPTIMIZERS])
    return values[table.optimizer]


def layer_state(table: LayoutTable) -> Floats:
    """Bytes of the optimizer's state for each parameter of the layers, [n]; master weights not counted."""
    return _of(0, table)


def end_state(table: LayoutTable) -> Floats:
    """Bytes of the optimizer's state for each parameter of embedding and head, [n]."""
    return _of(1, table)


def update_traffic(table: LayoutTable) -> Floats:
    """Bytes that a step reads and writes for each parameter, [n]."""
    return _of(2, table)


def orthogonal_rows(table: LayoutTable) -> Bools:
    """Rows whose optimizer makes the updates of whole matrices orthogonal."""
    result: Bools = table.optimizer == OPTIMIZERS.index("muon")
    return result


def newton_schulz_flops(model: ModelSpec) -> float:
    """FLOPs for each parameter of a layer to make its update orthogonal.

    Five steps, each of three products: 4 n m^2 + 2 m^3 for a matrix of n x m with m <= n
    (kellerjordan.github.io/posts/muon, on the runtime). The mean of the matrices of one layer, with experts
    if the model has some; latent attention is taken as plain attention.
    """
    h = model.hidden
    matrices = (2 + model.gated) * (model.experts or 1)
    shapes = [(model.q_size, 2), (model.kv_size, 2), (model.expert_ffn or model.ffn, matrices)]
    flops = parameters = 0.0
    for width, count in shapes:
        small, large = sorted((width, h))
        flops += count * NEWTON_SCHULZ_STEPS * (4.0 * large * small**2 + 2.0 * small**3)
        parameters += count * width * h
    return flops / parameters


def newton_schulz_rate(device: Device) -> float:
    """Peak FLOP/s of Newton-Schulz steps, which run in bf16 where the device has it."""
    return device.peak_flops.get("bf16") or max(device.peak_flops.values())

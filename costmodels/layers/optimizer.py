"""State and memory traffic of optimizers, in bytes for each parameter."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from costmodels.spec.hardware import Device
from costmodels.spec.layout import MuonMode, Optimizer
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import OPTIMIZERS, Bools, Floats, LayoutTable

ADAM_STATE = 8.0
"""Bytes of Adam's two fp32 moments, which the memory policies of engines include."""

NEWTON_SCHULZ_STEPS = 5


class Update(NamedTuple):
    """State and traffic of an optimizer, in bytes for each parameter."""

    layers: float
    """State bytes of a parameter in a layer."""
    ends: float
    """State bytes of a parameter in embedding or head."""
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
    """Return whether a parameter of a layer is a matrix, or a stack of matrices, that Muon makes orthogonal.

    Adam updates the other parameters: vectors, stacks of biases, and two-dimensional tensors that do not act
    as a matrix. These are gates of one output [1, D], whose updates would only be scaled, and kernels [C, 4]
    of depthwise convolutions, which Megatron-LM stores as [C, 1, 4] and treats as vectors.
    """
    return len(shape) > 1 and min(shape[-2:]) > 1 and not name.endswith(("bias", "_conv"))


def _of(column: int, table: LayoutTable) -> Floats:
    values: Floats = np.array([UPDATES[kind][column] for kind in OPTIMIZERS])
    return values[table.optimizer]


def layer_state(table: LayoutTable) -> Floats:
    """Bytes of the optimizer's state for each parameter of the layers, [n], without master weights."""
    return _of(0, table)


def end_state(table: LayoutTable) -> Floats:
    """Bytes of the optimizer's state for each parameter of embedding and head, [n]."""
    return _of(1, table)


def update_traffic(table: LayoutTable) -> Floats:
    """Bytes that a step reads and writes for each parameter, [n]."""
    return _of(2, table)


def orthogonal_rows(table: LayoutTable) -> Bools:
    """Rows whose optimizer orthogonalises the updates of whole matrices."""
    result: Bools = table.optimizer == OPTIMIZERS.index("muon")
    return result


class Matrix(NamedTuple):
    """Matrices of one shape in a layer."""

    outputs: int
    inputs: int
    number: int
    splits_outputs: bool
    """True where tensor-parallel ranks split the outputs; otherwise they split the inputs."""

    @property
    def parameters(self) -> int:
        """Parameters of all matrices of this shape."""
        return self.number * self.outputs * self.inputs


def layer_matrices(model: ModelSpec) -> list[Matrix]:
    """The matrices of one layer, with its experts if it has some.

    They are the mean of the model's layers; latent attention counts as plain attention.
    """
    h, width, copies = model.hidden, model.expert_ffn or model.ffn, model.experts or 1
    return [
        Matrix(model.q_size, h, 1, True),
        Matrix(model.kv_size, h, 2, True),
        Matrix(h, model.q_size, 1, False),
        Matrix(width, h, (1 + model.gated) * copies, True),
        Matrix(h, width, copies, False),
    ]


def _steps(short: Floats | float, long: Floats | float) -> Floats | float:
    """FLOPs of the Newton-Schulz steps: each step takes 4 n m^2 + 2 m^3 for an n x m matrix with m <= n."""
    return NEWTON_SCHULZ_STEPS * (4.0 * long * short**2 + 2.0 * short**3)


def matrix_flops(matrix: Matrix, mode: MuonMode, ranks: Floats) -> Floats:
    """FLOPs of one rank to orthogonalise the update of a matrix, [n].

    There are five steps of three GEMMs each (kellerjordan.github.io/posts/muon, on the runtime). Ranks that
    distribute a matrix always work along the side that is not split, even if it is the longer one.

    Args:
        ranks: ranks that split the matrix, [n].
    """
    one = np.ones_like(ranks)
    short, long = sorted((matrix.outputs, matrix.inputs))
    split, other = (
        (matrix.outputs, matrix.inputs) if matrix.splits_outputs else (matrix.inputs, matrix.outputs)
    )
    if mode == "distributed":
        parts = NEWTON_SCHULZ_STEPS * (4.0 * split / ranks * float(other) ** 2 + 2.0 * float(other) ** 3)
        return np.where(ranks > 1, parts, _steps(short, long) * one)
    if mode == "blockwise":
        mine = split / ranks
        return np.asarray(_steps(np.minimum(mine, other), np.maximum(mine, other)))
    shares = ranks if mode == "layer_sharded" else one
    return np.asarray(_steps(short, long) / shares)


def newton_schulz_flops(
    model: ModelSpec, mode: MuonMode = "duplicated", ranks: Floats | None = None
) -> Floats:
    """FLOPs of one rank for each parameter of the matrices of layers, [n]: the mean of `layer_matrices`.

    Args:
        ranks: ranks that split a matrix, [n]; one unless given.
    """
    ranks = np.ones(1) if ranks is None else np.asarray(ranks, dtype=np.float64)
    matrices = layer_matrices(model)
    flops = sum((one.number * matrix_flops(one, mode, ranks) for one in matrices), np.zeros(()))
    return np.asarray(flops / sum(one.parameters for one in matrices))


def orthogonal_bytes(model: ModelSpec, mode: MuonMode, ranks: Floats) -> Floats:
    """Bytes of tensors that the Newton-Schulz steps of the largest matrix take on one device, [n].

    `newton_schulz_tp` (emerging_optimizers, muon_utils.py) makes the normalised matrix and the result in
    fp32, both sides of a step in bf16, and its two squares. In mode `duplicated`, ranks also have the
    gathered parts and their concatenation. Ranks that update whole matrices also have the received parts.

    Args:
        ranks: ranks that split a matrix, [n].
    """
    found = np.zeros_like(ranks)
    for one in layer_matrices(model):
        whole, short = float(one.outputs * one.inputs), float(min(one.outputs, one.inputs))
        side = short
        if mode == "distributed":
            side = float(one.inputs if one.splits_outputs else one.outputs)
        gathered = {"duplicated": 8.0, "layer_sharded": 4.0}.get(mode, 0.0)
        held = np.where(ranks > 1, whole if gathered else whole / ranks, whole)
        found = np.maximum(found, held * (12.0 + gathered * (ranks > 1)) + 4.0 * side**2)
    return found


def largest_matrix(model: ModelSpec, ranks: Floats) -> Floats:
    """Parameters of the largest matrix of a layer on one of the ranks that split it, [n]."""
    return max(one.outputs * one.inputs for one in layer_matrices(model)) / ranks


def newton_schulz_rate(device: Device) -> float:
    """Peak FLOP/s of Newton-Schulz steps, which run in bf16 where the device supports it."""
    return device.peak_flops.get("bf16") or max(device.peak_flops.values())

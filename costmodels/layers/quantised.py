"""Frozen matrices in 4 bits, NF4 with scales that are quantised too: which ones, and their bytes.

Dettmers et al. (QLoRA, arXiv:2305.14314, section 3): blocks of weights share a scale of 8 bits, and groups of
scales a factor in fp32, which is 4 + 8/64 + 32/(64 x 256) = 4.127 bits for each weight.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from costmodels.layers.adapters import LinearLayer, linear_layers
from costmodels.spec.model import ModelSpec
from costmodels.spec.model_parts import MlpKind
from costmodels.spec.table import Floats

BLOCK = 64
"""Weights that share a scale: neighbours among the inputs of one output."""

GROUP = 256
"""Scales that share one fp32 scale: those of the same inputs of neighbouring outputs."""


def quantised_layers(model: ModelSpec, mlp: MlpKind) -> list[LinearLayer]:
    """Layers in 4 bits of a block with an MLP of kind `mlp` and the first layer's attention.

    All that can have adapters, whether they do or not.
    """
    if model.lora is None or model.lora.quantize_base is None:
        return []
    return [layer for _, layer in linear_layers(model, mlp)]


def quantised_names(model: ModelSpec) -> frozenset[str]:
    """Names of the matrices in 4 bits of a whole model, as the bundled runtime has them."""
    found: set[str] = set()
    for index in range(model.layers):
        kind = model.layer_kind(index)
        layers = quantised_layers(model.with_attention(kind.attention), kind.mlp)
        found.update(f"layers.{index}.{layer.module}.weight" for layer in layers)
    return frozenset(found)


def matrix_bytes(inputs: Any, outputs: Any) -> Floats:
    """Bytes of a matrix in 4 bits: codes and scales, the last block of an output filled up, and factors."""
    blocks = np.ceil(np.asarray(inputs, dtype=np.float64) / BLOCK)
    result: Floats = blocks * (outputs * (BLOCK / 2 + 1) + 4 * np.ceil(np.asarray(outputs) / GROUP))
    return result


def turned_back_at_once(model: ModelSpec, mlp: MlpKind, tensor_parallel: Floats) -> Floats:
    """Weights of a block's matrices that are in the format that computes at a time, on one rank.

    As many as an MLP has, of the largest: traces of compiled layers show three to four of a gated one in
    backward. Layers that are not compiled hold one, and the codes of another as indices.
    """
    found = np.zeros_like(tensor_parallel)
    for layer in quantised_layers(model, mlp):
        inputs, outputs = layer.sides(tensor_parallel)
        found = np.maximum(found, inputs * outputs)
    result: Floats = (2 + model.gated) * found
    return result


def block_parameters(model: ModelSpec, mlp: MlpKind, tensor_parallel: Floats) -> Floats:
    """Weights of the quantised matrices of a block on one of `tensor_parallel` ranks."""
    found = np.zeros_like(tensor_parallel)
    for layer in quantised_layers(model, mlp):
        inputs, outputs = layer.sides(tensor_parallel)
        found = found + inputs * outputs
    return found


def block_bytes(model: ModelSpec, mlp: MlpKind, tensor_parallel: Floats) -> Floats:
    """Bytes of the same."""
    found = np.zeros_like(tensor_parallel)
    for layer in quantised_layers(model, mlp):
        found = found + matrix_bytes(*layer.sides(tensor_parallel))
    return found


def quantised_parameters(model: ModelSpec) -> int:
    """Weights in 4 bits of a whole model."""
    one = np.ones(())
    total = 0.0
    for leading, layers in ((True, model.leading_layers), (False, model.routed_layers)):
        if layers:
            total += layers * float(model.mean(lambda spec, mlp: block_parameters(spec, mlp, one), leading))
    return round(total)

"""Frozen 4-bit matrices (NF4 with quantised scales): the affected layers, and their bytes.

The format is QLoRA's (Dettmers et al., arXiv:2305.14314, section 3). A block of 64 weights shares an 8-bit
scale, and 256 scales share an fp32 scale: 4 + 8/64 + 32/(64 x 256) = 4.127 bits for each weight.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from costmodels.layers.adapters import LinearLayer, linear_layers
from costmodels.spec.model import ModelSpec
from costmodels.spec.model_parts import MlpKind
from costmodels.spec.table import Floats

BLOCK = 64
"""Number of weights that share a scale: neighbouring inputs of one output."""

GROUP = 256
"""Number of scales that share one fp32 scale: those of the same inputs of neighbouring outputs."""


def quantised_layers(model: ModelSpec, mlp: MlpKind) -> list[LinearLayer]:
    """Layers in 4 bits of a block with an MLP of kind `mlp` and the first layer's attention.

    These are all layers that can have adapters, even if they have none.
    """
    if model.lora is None or model.lora.quantize_base is None:
        return []
    return [layer for _, layer in linear_layers(model, mlp)]


def quantised_names(model: ModelSpec) -> frozenset[str]:
    """Names of the 4-bit matrices of a whole model in the bundled runtime."""
    found: set[str] = set()
    for index in range(model.layers):
        kind = model.layer_kind(index)
        layers = quantised_layers(model.with_attention(kind.attention), kind.mlp)
        found.update(f"layers.{index}.{layer.module}.weight" for layer in layers)
    return frozenset(found)


def matrix_bytes(inputs: Any, outputs: Any) -> Floats:
    """Bytes of a 4-bit matrix: codes, scales (with the last block of each output padded), and fp32 scales."""
    blocks = np.ceil(np.asarray(inputs, dtype=np.float64) / BLOCK)
    result: Floats = blocks * (outputs * (BLOCK / 2 + 1) + 4 * np.ceil(np.asarray(outputs) / GROUP))
    return result


def turned_back_at_once(model: ModelSpec, mlp: MlpKind, tensor_parallel: Floats) -> Floats:
    """Number of a block's weights that are dequantised at the same time, on one rank.

    It is the largest matrix times the number of the MLP's matrices: traces of compiled layers show three to
    four of a gated MLP in backward. Layers that are not compiled hold one matrix, and the codes of another as
    indices.
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
    """Bytes of the quantised matrices of a block on one of `tensor_parallel` ranks."""
    found = np.zeros_like(tensor_parallel)
    for layer in quantised_layers(model, mlp):
        found = found + matrix_bytes(*layer.sides(tensor_parallel))
    return found


def quantised_parameters(model: ModelSpec) -> int:
    """Number of 4-bit weights of a whole model."""
    one = np.ones(())
    total = 0.0
    for leading, layers in ((True, model.leading_layers), (False, model.routed_layers)):
        if layers:
            total += layers * float(model.mean(lambda spec, mlp: block_parameters(spec, mlp, one), leading))
    return round(total)

"""Linear layers of a block that can have low-rank adapters, and their split by tensor parallelism."""

from typing import Literal, NamedTuple

import numpy as np

from costmodels.spec.model import ModelSpec
from costmodels.spec.model_parts import LoraTarget, MlpKind
from costmodels.spec.table import Floats


class LinearLayer(NamedTuple):
    """A linear layer that can have an adapter."""

    module: str
    """The module's place in a block of the runtime, such as `attention.query`."""
    inputs: int
    outputs: int
    split: Literal["columns", "rows", "whole"]
    """The dimension that tensor-parallel ranks split: outputs (with matrix B), inputs (with matrix A), or
    none."""

    def sides(self, tensor_parallel: Floats | float = 1.0) -> tuple[Floats | float, Floats | float]:
        """Numbers of inputs and outputs on one rank."""
        inputs = self.inputs / (tensor_parallel if self.split == "rows" else 1.0)
        return inputs, self.outputs / (tensor_parallel if self.split == "columns" else 1.0)

    def parameters(self, rank: int, tensor_parallel: Floats | float = 1.0) -> Floats | float:
        """Parameters of the adapter on one rank."""
        inputs, outputs = self.sides(tensor_parallel)
        return rank * (inputs + outputs)


def linear_layers(model: ModelSpec, mlp: MlpKind) -> list[tuple[LoraTarget, LinearLayer]]:
    """The linear layers that can have adapters, in a block with an MLP of kind `mlp` and the first layer's
    attention.

    Routed experts and their router have none.
    """
    every = [*_attention(model)]
    width = {"dense": model.ffn, "experts": model.shared_expert_ffn, "none": 0}[mlp]
    if width:
        place = "mlp" if mlp == "dense" else "mlp.shared"
        every += [
            ("up", LinearLayer(f"{place}.up", model.hidden, width, "columns")),
            ("down", LinearLayer(f"{place}.down", width, model.hidden, "rows")),
        ]
        if model.gated:
            every.append(("gate", LinearLayer(f"{place}.gate", model.hidden, width, "columns")))
    return every


def adapted_layers(model: ModelSpec, mlp: MlpKind) -> list[LinearLayer]:
    """The layers of `linear_layers` that have adapters."""
    if model.lora is None:
        return []
    return [layer for target, layer in linear_layers(model, mlp) if target in model.lora.targets]


def _attention(model: ModelSpec) -> list[tuple[LoraTarget, LinearLayer]]:
    h, mla, kind = model.hidden, model.latent_attention, model.attention_pattern[0]
    if kind in ("linear", "none"):
        return []
    if mla is None:
        return [
            ("query", LinearLayer("attention.query", h, model.q_size, "columns")),
            ("key", LinearLayer("attention.key", h, model.kv_size, "columns")),
            ("value", LinearLayer("attention.value", h, model.kv_size, "columns")),
            ("output", LinearLayer("attention.output", model.q_size, h, "rows")),
        ]
    queries, values = (
        model.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim),
        model.heads * mla.v_head_dim,
    )
    latent, both = mla.kv_lora_rank, model.heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    found: list[tuple[LoraTarget, LinearLayer]] = [
        ("query", LinearLayer("attention.query", mla.q_lora_rank or h, queries, "columns")),
        ("key", LinearLayer("attention.compress.latent", h, latent + mla.qk_rope_head_dim, "whole")),
        ("value", LinearLayer("attention.key_value", latent, both, "columns")),
        ("output", LinearLayer("attention.output", values, h, "rows")),
    ]
    if mla.q_lora_rank:
        found.append(("query", LinearLayer("attention.compress.query", h, mla.q_lora_rank, "whole")))
    return found


def block_parameters(model: ModelSpec, mlp: MlpKind, tensor_parallel: Floats | float = 1.0) -> Floats:
    """Parameters of the adapters of a block on one of `tensor_parallel` ranks, in the shape of
    `tensor_parallel`."""
    rank = 0 if model.lora is None else model.lora.rank
    found = np.zeros_like(tensor_parallel, dtype=np.float64)
    for layer in adapted_layers(model, mlp):
        found = found + layer.parameters(rank, tensor_parallel)
    return found


def adapter_parameters(model: ModelSpec) -> int:
    """Parameters of all adapters of a model."""
    total = 0.0
    for leading, layers in ((True, model.leading_layers), (False, model.routed_layers)):
        if layers:
            total += layers * float(model.mean(block_parameters, leading))
    return round(total)

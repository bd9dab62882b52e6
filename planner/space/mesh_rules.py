"""Rules for the division of a stage's layers over its devices: tensor, expert and context parallelism."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from costmodels.spec.model import ModelSpec
from costmodels.spec.table import ALL_TO_ALL, Ints, LayoutTable
from planner.space.rule import Rule, divisors


def tensor_parallel_choices(model: ModelSpec) -> str:
    """The tensor-parallel degrees that a model's shape allows, as text."""
    common = math.gcd(model.heads, model.hidden, _dense_width(model), model.shared_expert_ffn)
    return ", ".join(str(degree) for degree in divisors(common) if _shares_kv_heads(model, degree))


def _shares_kv_heads(model: ModelSpec, tp: Ints | int) -> Any:
    """Return whether ranks get whole key/value heads, or equal groups of ranks share one head.

    The weights stay split, so their columns must be divisible too. Latent attention has as many key/value
    heads as query heads; they are made from a latent that every rank holds.
    """
    kv = model.kv_heads
    if model.latent_attention is not None:
        return model.heads % tp == 0
    # A norm over all key heads counts each of them once.
    shared = (tp % kv == 0) & (not _has_wide_norms(model))
    return ((kv % tp == 0) | shared) & (kv * model.head_dim % tp == 0)


def _has_wide_norms(model: ModelSpec) -> bool:
    """Return whether keys have a norm over all heads together."""
    return model.qk_norm and model.qk_norm_width == "all"


def _dense_width(model: ModelSpec) -> int:
    """Columns of the dense MLP; 0 where every layer has experts."""
    return model.ffn if model.moe_layers < model.layers else 0


def _sequence_parts(d: LayoutTable) -> Ints:
    """Equal parts into which context parallelism cuts the sequence."""
    return np.where(d.context_parallel_form == ALL_TO_ALL, 1, 2) * d.context_parallel


def _divides(name: str, size: Callable[[ModelSpec], int], what: str) -> Rule:
    return Rule(
        name,
        lambda model, d: size(model) % d.tensor_parallel != 0,
        lambda model, d: (
            f"tensor_parallel {d.tensor_parallel} does not divide {size(model)} {what}; "
            f"use {tensor_parallel_choices(model)}"
        ),
    )


MESH_RULES: tuple[Rule, ...] = (
    _divides("tensor_parallel_heads", lambda model: model.heads, "heads"),
    Rule(
        "tensor_parallel_kv_heads",
        lambda model, d: ~_shares_kv_heads(model, d.tensor_parallel),
        lambda model, d: (
            f"tensor_parallel {d.tensor_parallel} does not divide {model.kv_heads} kv_heads, which have one "
            f"norm together; use {tensor_parallel_choices(model)}"
            if _has_wide_norms(model)
            else f"tensor_parallel {d.tensor_parallel} neither divides {model.kv_heads} kv_heads of width "
            f"{model.head_dim} nor is a multiple that splits their {model.kv_heads * model.head_dim} "
            f"columns; use {tensor_parallel_choices(model)}"
        ),
    ),
    _divides("tensor_parallel_ffn", _dense_width, "columns of the MLP (ffn)"),
    _divides("tensor_parallel_hidden", lambda model: model.hidden, "columns of the residual (hidden)"),
    _divides(
        "tensor_parallel_shared_experts",
        lambda model: model.shared_expert_ffn,
        "columns of the shared experts (shared_expert_ffn)",
    ),
    Rule(
        "expert_parallel_dense",
        lambda model, d: (d.expert_parallel * d.expert_tensor_parallel > 1) & (model.experts == 0),
        lambda model, d: (
            f"expert_parallel {d.expert_parallel} and expert_tensor_parallel {d.expert_tensor_parallel} "
            f"need a mixture of experts, and {model.name} has none; use 1 and 1"
        ),
    ),
    Rule(
        "expert_parallel",
        lambda model, d: model.experts % d.expert_parallel != 0,
        lambda model, d: (
            f"expert_parallel {d.expert_parallel} does not divide {model.experts} experts; "
            f"use {', '.join(map(str, divisors(model.experts)))}"
        ),
    ),
    Rule(
        "expert_tensor_parallel",
        lambda model, d: model.expert_ffn % d.expert_tensor_parallel != 0,
        lambda model, d: (
            f"expert_tensor_parallel {d.expert_tensor_parallel} does not divide the {model.expert_ffn} "
            f"columns of an expert (expert_ffn); use {', '.join(map(str, divisors(model.expert_ffn)))}"
        ),
    ),
    Rule(
        "expert_parallel_group",
        lambda model, d: (
            d.tensor_parallel
            * d.context_parallel
            * d.data_parallel
            % (d.expert_parallel * d.expert_tensor_parallel)
            != 0
        ),
        lambda model, d: (
            f"expert_parallel {d.expert_parallel} x expert_tensor_parallel {d.expert_tensor_parallel} "
            f"does not divide the {d.tensor_parallel * d.context_parallel * d.data_parallel} devices "
            "of a stage"
        ),
    ),
    # Of the same devices, each with a part of all its experts, or with all of a part of them: the latter
    # send no more tokens and gather none. But more ranks wait for a fuller one where experts are not balanced
    # by force: there the former may be faster by some percent of a step.
    Rule(
        "expert_tensor_parallel_spread",
        lambda model, d: (
            (d.expert_tensor_parallel > 1)
            & (d.expert_parallel > 1)
            & (model.experts % (d.expert_parallel * d.expert_tensor_parallel) == 0)
        ),
        lambda model, d: (
            f"expert_parallel {d.expert_parallel} x expert_tensor_parallel {d.expert_tensor_parallel} "
            f"gathers more tokens than expert_parallel {d.expert_parallel * d.expert_tensor_parallel} x 1, "
            f"which divides {model.experts} experts too"
        ),
        redundant=True,
        reserve=True,
        # Beside a fixed expert_parallel, Megatron-LM's default for the other is the tensor-parallel degree.
        lifted_by=(("expert_tensor_parallel",), ("expert_parallel",)),
    ),
    # Every tensor-parallel rank routes tokens of its own, with sequence parallelism or without.
    Rule(
        "expert_tokens",
        lambda model, d: (
            (d.tensor_parallel > 1)
            & (model.experts > 0)
            & (model.seq % (d.tensor_parallel * d.context_parallel) != 0)
        ),
        lambda model, d: (
            f"tensor_parallel {d.tensor_parallel} x context_parallel {d.context_parallel} does not divide "
            f"seq {model.seq}, whose tokens they share out to route them to experts; use tensor_parallel 1"
        ),
    ),
    # Causal attention is balanced by giving each rank one chunk from either end of the sequence; an exchange
    # of tokens for heads needs no balance.
    Rule(
        "context_parallel",
        lambda model, d: (d.context_parallel > 1) & (model.seq % _sequence_parts(d) != 0),
        lambda model, d: (
            f"context_parallel {d.context_parallel} needs a sequence that {_sequence_parts(d)} divides, "
            f"not {model.seq}"
        ),
    ),
    Rule(
        "context_parallel_heads",
        lambda model, d: (
            (d.context_parallel_form == ALL_TO_ALL)
            & (model.heads % (d.tensor_parallel * d.context_parallel) != 0)
        ),
        lambda model, d: (
            f"context_parallel_form all_to_all: tensor_parallel {d.tensor_parallel} x context_parallel "
            f"{d.context_parallel} does not divide {model.heads} heads; use all_gather or ring"
        ),
    ),
)

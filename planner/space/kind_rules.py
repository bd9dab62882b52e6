"""Rules for layers other than plain attention: splits that the bundled runtime does not support.

The search for an engine with `Abilities.splits_plain_layers` proposes no layout that breaks one, and the
runtime refuses such a plan.
"""

from __future__ import annotations

import numpy as np

from costmodels.pytorch import Version, installed_version, parsed_version
from costmodels.spec.hardware import NARROW
from costmodels.spec.layout import SPLIT_BACKWARD
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import RING, SCHEDULES, Bools, LayoutTable
from planner.space.rule import Rule, divisors

KEEPS_FUNCTIONS: Version = (2, 13)
"""The first PyTorch version whose split-backward schedules find the nodes of Python autograd Functions."""


def _in_ring(d: LayoutTable) -> Bools:
    found: Bools = (d.context_parallel > 1) & (d.context_parallel_form == RING)
    return found


def has_windows(model: ModelSpec) -> bool:
    """Return whether some layers attend to a window only."""
    return bool({"window", "chunk"} & {*model.attention_pattern}) and model.window < model.seq


def _key_heads(model: ModelSpec) -> int:
    """Key heads of linear-attention layers; 0 without such layers."""
    sizes = model.linear_attention
    return sizes.key_heads if sizes is not None and "linear" in model.attention_pattern else 0


def _splits_backward(d: LayoutTable) -> Bools:
    found: Bools = d.runs(*SPLIT_BACKWARD)
    return found


KIND_RULES: tuple[Rule, ...] = (
    Rule(
        "ring_window",
        lambda model, d: _in_ring(d) & has_windows(model),
        lambda model, d: (
            f"context_parallel_form ring has no windows, and layers of {model.name} see {model.window} of "
            f"{model.seq} tokens; use all_gather or all_to_all"
        ),
        of_mesh=True,
    ),
    Rule(
        "ring_sinks",
        lambda model, d: _in_ring(d) & model.attention_sinks,
        lambda model, d: (
            f"context_parallel_form ring has no attention sinks, as {model.name} has them; use all_gather or "
            "all_to_all"
        ),
        of_mesh=True,
    ),
    Rule(
        "ring_softcap",
        lambda model, d: _in_ring(d) & (model.attention_softcap > 0),
        lambda model, d: (
            f"context_parallel_form ring has no caps of attention's scores, as {model.name} has them; use "
            "all_gather or all_to_all"
        ),
        of_mesh=True,
    ),
    Rule(
        "ring_gate",
        lambda model, d: _in_ring(d) & model.attention_gate,
        lambda model, d: (
            f"context_parallel_form ring has no gate of attention's output, as {model.name} has it; use "
            "all_gather or all_to_all"
        ),
        of_mesh=True,
    ),
    Rule(
        "linear_context",
        lambda model, d: (d.context_parallel > 1) & (_key_heads(model) > 0),
        lambda model, d: (
            f"context_parallel {d.context_parallel}: layers of linear attention of {model.name} hand a state "
            "from token to token, which ranks that share a sequence do not; use 1"
        ),
        of_mesh=True,
    ),
    Rule(
        "linear_heads",
        lambda model, d: np.gcd(d.tensor_parallel, _key_heads(model)) != d.tensor_parallel,
        lambda model, d: (
            f"tensor_parallel {d.tensor_parallel} does not divide the {_key_heads(model)} key heads of "
            f"{model.name}'s linear attention; use one of {', '.join(map(str, divisors(_key_heads(model))))}"
        ),
        of_mesh=True,
    ),
    Rule(
        "mtp_split_backward",
        lambda model, d: _splits_backward(d) & (model.mtp is not None),
        lambda model, d: (
            f"schedule {SCHEDULES[int(d.schedule)]} splits backward passes, and the losses of multi-token "
            "prediction come together in one that it does not split; use schedule 1f1b or interleaved"
        ),
    ),
)
"""The rules in the order of their use."""

FLOAT8_RULE = Rule(
    "fp8_split_backward",
    lambda model, d: _splits_backward(d),
    lambda model, d: (
        f"schedule {SCHEDULES[int(d.schedule)]} splits backward passes, in which PyTorch "
        f"{installed_version()} loses GEMMs in 8 bits; install PyTorch 2.13 or later, pin precision=bf16, "
        "or use schedule 1f1b or interleaved"
    ),
)


def kind_rules(precision: str) -> tuple[Rule, ...]:
    """`KIND_RULES`, and rules for features that the installed PyTorch, if any, lacks in a precision."""
    version = installed_version()
    loses = version != "" and parsed_version(version) < KEEPS_FUNCTIONS
    return (*KIND_RULES, *((FLOAT8_RULE,) if loses and precision in NARROW else ()))

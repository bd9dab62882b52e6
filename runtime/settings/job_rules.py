"""Rules from a job's flags against layouts, for the search and for the check of a given plan.

The search proposes no layout that breaks one of these rules, and a plan that breaks one is refused before a
rank starts. The rules need no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from costmodels.errors import InputError
from costmodels.spec.layout import SPLIT_BACKWARD, Layout
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import RING, SCHEDULES, LayoutTable
from planner.options.batch import BatchOptions
from planner.space.rule import Rule
from runtime.settings.batch_ramp import check_numbers, ramp_rule

SPLIT_SCHEDULES = [SCHEDULES.index(schedule) for schedule in SPLIT_BACKWARD]

NO_MASK = (
    "--reset-attention-mask: context_parallel_form ring has no mask of documents; pin all_gather or "
    "all_to_all (--pin context_parallel_form=all_gather)"
)


def compile_refusal(schedule: str) -> str:
    """The error message for compiled layers under a split-backward schedule."""
    return (
        f"--compile: schedule {schedule} splits backward, which PyTorch does not do with compiled layers; "
        "leave the flag out, or pin schedule 1f1b or interleaved"
    )


COMPILE_RULE = Rule(
    "compile_schedule",
    lambda model, d: np.isin(d.schedule, SPLIT_SCHEDULES),
    lambda model, d: compile_refusal(SCHEDULES[int(d.schedule)]),
    of_mesh=True,
)

STATES_GO_ON = (
    "--reset-attention-mask: layers of linear attention carry their state over the ends of documents; leave "
    "the flag out"
)

NO_GRAPHS = (
    "--reset-attention-mask: documents begin and end elsewhere in each microbatch, and cuda_graphs are "
    "always the same kernels; leave one of the two out"
)

MASK_RULE = Rule(
    "reset_attention_mask",
    lambda model, d: (
        ((d.context_parallel > 1) & (d.context_parallel_form == RING))
        | ("linear" in model.attention_pattern)
        | d.cuda_graphs
    ),
    lambda model, d: (
        STATES_GO_ON if "linear" in model.attention_pattern else NO_GRAPHS if d.cuda_graphs else NO_MASK
    ),
    of_mesh=True,
)

POSITIONS_RULE = Rule(
    "reset_position_ids",
    lambda model, d: d.cuda_graphs,
    lambda model, d: NO_GRAPHS.replace("--reset-attention-mask", "--reset-position-ids"),
    of_mesh=True,
)

PACK_RULE = replace(
    MASK_RULE,
    name="pack_documents",
    message=lambda model, d: MASK_RULE.message(model, d).replace(
        "--reset-attention-mask", "--pack-documents"
    ),
)

BY_FLAG: dict[str, Callable[[Any], Rule]] = {
    "compile": lambda given: COMPILE_RULE,
    "reset_attention_mask": lambda given: MASK_RULE,
    "pack_documents": lambda given: PACK_RULE,
    "reset_position_ids": lambda given: POSITIONS_RULE,
    "rampup_batch_size": ramp_rule,
}
"""Fields of groups of flags, and the rule that follows from each given value."""


def job_rules(*groups: object) -> tuple[Rule, ...]:
    """The rules that follow from the flags of `groups` (dataclasses)."""
    return tuple(
        rule(getattr(group, name))
        for name, rule in BY_FLAG.items()
        for group in groups
        if getattr(group, name, None)
    )


def reachable_batch(batch: BatchOptions, *groups: object) -> BatchOptions:
    """`batch` with the largest maximum that the batch ramp in `groups` can reach, if there is a ramp."""
    most = batch.max_global_batch_size
    for group in groups:
        ramp = getattr(group, "rampup_batch_size", None)
        if ramp and most is not None:
            check_numbers(ramp)
            start, increment, _ = ramp
            if most >= start:
                return replace(batch, max_global_batch_size=most - (most - start) % increment)
    return batch


def check_rules(rules: Sequence[Rule], spec: ModelSpec, layout: Layout) -> None:
    """Raise `InputError` with the message of the first of `rules` that `layout` breaks."""
    degrees = LayoutTable.one(layout)
    for rule in rules:
        if bool(rule.broken(spec, degrees)):
            raise InputError(rule.message(spec, degrees))

"""What pipeline ranks do, in which order: read from PyTorch's schedules, without ranks or models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from costmodels.layout import Schedule

SCHEDULES: dict[Schedule, type] = {
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "interleaved_zb": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}

FORWARD_ACTIONS = ("F", "SEND_F", "RECV_F", "UNSHARD", "RESHARD")
"""What a forward pass needs of PyTorch's actions."""


class Action(NamedTuple):
    """One piece of work of a pipeline rank."""

    kind: str
    """F forward, B backward, or its halves: I gradients of inputs, W gradients of weights."""
    stage: int
    micro_batch: int


def action_order(
    schedule: Schedule, pipeline_parallel: int, chunks: int, micro_batches: int
) -> list[list[Action]]:
    """The actions of each pipeline rank, in the order in which it runs them.

    Raises:
        ValueError: the schedule does not take this number of micro batches.
    """
    if schedule == "1f1b":
        return [
            _one_forward_one_backward(rank, pipeline_parallel, micro_batches)
            for rank in range(pipeline_parallel)
        ]
    stage = SimpleNamespace(
        stage_index=0,
        num_stages=pipeline_parallel * chunks,
        group_size=pipeline_parallel,
        group_rank=0,
        submod=None,
    )
    kind: Any = SCHEDULES[schedule]
    orders = kind([stage] * chunks, n_microbatches=micro_batches).pipeline_order
    return [
        [
            Action(part.computation_type.value, part.stage_index, part.microbatch_index)
            for action in orders[rank]
            if action is not None
            for part in action.sub_actions or (action,)
        ]
        for rank in range(pipeline_parallel)
    ]


def _one_forward_one_backward(rank: int, pipeline_parallel: int, micro_batches: int) -> list[Action]:
    """What Schedule1F1B runs; its own `pipeline_order` counts the last rank's micro batches from 1."""
    if micro_batches < pipeline_parallel:
        raise ValueError(f"1f1b needs at least {pipeline_parallel} micro batches, not {micro_batches}")
    warm_up = pipeline_parallel - rank
    order = [Action("F", rank, number) for number in range(warm_up)]
    for number in range(micro_batches):
        order.append(Action("B", rank, number))
        if number + warm_up < micro_batches:
            order.append(Action("F", rank, number + warm_up))
    return order


def forward_only(actions: list[Any]) -> list[Any]:
    """Those of one rank's actions in PyTorch's form, communication included, that a forward pass needs."""
    parts = [part for action in actions for part in action.sub_actions or (action,)]
    return [part for part in parts if part.computation_type.value in FORWARD_ACTIONS]

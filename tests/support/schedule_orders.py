"""The orders of pipeline schedules, without ranks or models: what is alive, and who waits how long."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from costmodels.spec.layout import Schedule
from runtime.parallel.pipeline import SCHEDULES


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
        ValueError: the schedule does not take this number of microbatches.
    """
    if schedule == "1f1b":
        return [
            _one_forward_one_backward(rank, pipeline_parallel, micro_batches)
            for rank in range(pipeline_parallel)
        ]
    orders = planned(schedule, pipeline_parallel, chunks, micro_batches).pipeline_order
    return [
        [
            Action(part.computation_type.value, part.stage_index, part.microbatch_index)
            for action in orders[rank]
            if action is not None
            for part in action.sub_actions or (action,)
        ]
        for rank in range(pipeline_parallel)
    ]


def planned(
    schedule: Schedule, pipeline_parallel: int, chunks: int, micro_batches: int, **options: int
) -> Any:
    """PyTorch's schedule of a pipeline rank that has no layers."""
    stage = SimpleNamespace(
        stage_index=0,
        num_stages=pipeline_parallel * chunks,
        group_size=pipeline_parallel,
        group_rank=0,
        submod=None,
    )
    kind: Any = SCHEDULES[schedule]
    return kind([stage] * chunks, n_microbatches=micro_batches, **options)


def _one_forward_one_backward(rank: int, pipeline_parallel: int, micro_batches: int) -> list[Action]:
    """The order of Schedule1F1B; its own `pipeline_order` counts the last rank's microbatches from 1."""
    if micro_batches < pipeline_parallel:
        raise ValueError(f"1f1b needs at least {pipeline_parallel} microbatches, not {micro_batches}")
    warm_up = pipeline_parallel - rank
    order = [Action("F", rank, number) for number in range(warm_up)]
    for number in range(micro_batches):
        order.append(Action("B", rank, number))
        if number + warm_up < micro_batches:
            order.append(Action("F", rank, number + warm_up))
    return order


def most_alive(order: Sequence[Action]) -> int:
    """Chunks of a rank whose activations are alive at most: from F until B, or until W where B is split."""
    alive = most = 0
    for action in order:
        alive += {"F": 1, "I": 0, "B": -1, "W": -1}[action.kind]
        most = max(most, alive)
    return most


def alive_by_stage(order: Sequence[Action]) -> dict[int, int]:
    """The most microbatches that each stage of a rank keeps activations of."""
    alive: Counter[int] = Counter()
    most: Counter[int] = Counter()
    for action in order:
        alive[action.stage] += {"F": 1, "I": 0, "B": -1, "W": -1}[action.kind]
        most[action.stage] = max(most[action.stage], alive[action.stage])
    return dict(most)


def most_waiting(order: Sequence[Action]) -> int:
    """Chunks of a rank at most that have had I and wait for W."""
    waiting = most = 0
    for action in order:
        waiting += {"I": 1, "W": -1}.get(action.kind, 0)
        most = max(most, waiting)
    return most


def makespan(orders: Sequence[Sequence[Action]], seconds: Callable[[str, int], float]) -> float:
    """Seconds from the first to the last action, when each rank keeps its order and sends take no time.

    A rank's idle time is this less the sum of `seconds(kind, stage)` over its order.
    """
    stages = 1 + max(action.stage for order in orders for action in order)
    done: dict[tuple[str, int, int], float] = {}
    clock = [0.0] * len(orders)
    position = [0] * len(orders)
    while any(place < len(order) for place, order in zip(position, orders, strict=True)):
        before = list(position)
        for rank, order in enumerate(orders):
            while position[rank] < len(order):
                action = order[position[rank]]
                needed = _input_of(action, stages)
                if needed is not None and needed not in done:
                    break
                start = max(clock[rank], 0.0 if needed is None else done[needed])
                clock[rank] = start + seconds(action.kind, action.stage)
                kind = "B" if action.kind == "I" else action.kind
                done[kind, action.stage, action.micro_batch] = clock[rank]
                position[rank] += 1
        assert position != before, "the orders wait for each other"
    return max(clock)


def _input_of(action: Action, stages: int) -> tuple[str, int, int] | None:
    """The pass that must be finished before `action`, apart from earlier ones of its rank; I counts as B."""
    kind, stage, micro_batch = action
    if kind == "F":
        return ("F", stage - 1, micro_batch) if stage else None
    if kind in ("B", "I"):
        return ("B", stage + 1, micro_batch) if stage + 1 < stages else ("F", stage, micro_batch)
    return "B", stage, micro_batch

"""Play out the orders of pipeline schedules: what is alive, and who waits how long."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from runtime.schedule_order import Action


def most_alive(order: Sequence[Action]) -> int:
    """Chunks of a rank whose activations are alive at most: from F until B, or until W where B is split."""
    alive = most = 0
    for action in order:
        alive += {"F": 1, "I": 0, "B": -1, "W": -1}[action.kind]
        most = max(most, alive)
    return most


def alive_by_stage(order: Sequence[Action]) -> dict[int, int]:
    """The most micro batches that each stage of a rank keeps activations of."""
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
    """What must be finished before `action`, apart from what its rank did before; I counts as B."""
    kind, stage, micro_batch = action
    if kind == "F":
        return ("F", stage - 1, micro_batch) if stage else None
    if kind in ("B", "I"):
        return ("B", stage + 1, micro_batch) if stage + 1 < stages else ("F", stage, micro_batch)
    return "B", stage, micro_batch

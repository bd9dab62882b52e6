"""Orders of passes, and bubble and memory of split backward, against what PyTorch's schedules run."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import get_args

import numpy as np
import pytest

from costmodels.errors import InputError
from costmodels.ranks.rank_layers import all_ranks, in_flight
from costmodels.spec.layout import SCHEDULE_TRAITS, SPLIT_BACKWARD, Layout, Schedule, even_split
from costmodels.spec.schedules import WEIGHTS, orders, schedule_exists
from costmodels.spec.table import LayoutTable
from costmodels.time.bubble import bubble_seconds, split_bubble_seconds
from tests.support.schedule_orders import Action, action_order


def layout_of(schedule, pipeline, chunks, micro_batches, split=None):
    return Layout(
        pipeline_parallel=pipeline,
        virtual_pipeline_parallel=chunks,
        schedule=schedule,
        layers_per_stage=split or (1,) * (pipeline * chunks),
        global_batch_size=micro_batches,
    )


def played_seconds(orders: list[list[Action]], seconds: dict[str, list[float]]) -> float:
    """The end of the last action, in seconds; `seconds` of each kind by stage."""
    stages = len(seconds["F"])
    done: dict[tuple[str, int, int], float] = {}
    clock, position = [0.0] * len(orders), [0] * len(orders)
    while any(position[rank] < len(order) for rank, order in enumerate(orders)):
        before = list(position)
        for rank, order in enumerate(orders):
            while position[rank] < len(order):
                kind, stage, index = order[position[rank]]
                if kind == "F":
                    needs = ("F", stage - 1, index) if stage else None
                elif kind == "W":
                    needs = ("I", stage, index)
                else:
                    needs = ("I", stage + 1, index) if stage < stages - 1 else ("F", stage, index)
                if needs and needs not in done:
                    break
                took = seconds["I"][stage] + seconds["W"][stage] if kind == "B" else seconds[kind][stage]
                clock[rank] = max(clock[rank], done.get(needs, 0.0) if needs else 0.0) + took
                done["I" if kind == "B" else kind, stage, index] = clock[rank]
                position[rank] += 1
        assert position != before, "the schedule is stuck"
    return max(clock)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", *SPLIT_BACKWARD])
@pytest.mark.parametrize(
    "pipeline", [1, 2, 3, 4, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (7, 8))]
)
def test_orders_are_those_of_pytorch(schedule, pipeline):
    chunk_counts = {"1f1b": [1], "zbv": [2], "dualpipev": [2]}.get(schedule, [2, 3, 5])
    compared = 0
    for chunks in chunk_counts:
        for micro_batches in (1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 19, 24, 33):
            try:
                expected = action_order(schedule, pipeline, chunks, micro_batches)
            except ValueError:
                # Megatron-LM runs 1F1B with fewer microbatches than ranks.
                assert schedule == "1f1b" or not schedule_exists(schedule, pipeline, chunks, micro_batches)
                continue
            found = orders(schedule, pipeline, chunks, micro_batches)
            for order, actions in zip(found, expected, strict=True):
                columns = (order.kind.tolist(), order.stage.tolist(), order.micro_batch.tolist())
                passes = [("FBIW"[kind], stage, number) for kind, stage, number in zip(*columns, strict=True)]
                assert passes == [tuple(action) for action in actions]
            compared += 1
    assert compared > len(chunk_counts)


@pytest.mark.parametrize(
    ("schedule", "chunks", "micro_batches"),
    [("interleaved", 2, 9), ("interleaved_zb", 1, 8), ("dualpipev", 2, 7), ("zbv", 3, 8), ("1f1b", 2, 8)],
)
def test_schedules_that_do_not_run_are_named(schedule, chunks, micro_batches):
    with pytest.raises(InputError, match=f"schedule {schedule} does not run {micro_batches} microbatches"):
        orders(schedule, 4, chunks, micro_batches)


CASES = [(2, 2, 8), (4, 2, 8), (4, 2, 20), (8, 2, 32)]


@pytest.mark.parametrize(("pipeline", "chunks", "micro_batches"), [*CASES, (4, 3, 16)])
@pytest.mark.parametrize("schedule", SPLIT_BACKWARD)
@pytest.mark.parametrize("seconds", [(1, 1, 1), (1, 1.4, 0.7), (1, 2, 1), (1, 2.5, 0.5), (1.5, 1.6, 1)])
def test_the_bubble_is_that_of_the_schedule(schedule, pipeline, chunks, micro_batches, seconds):
    if chunks > 2 and schedule != "interleaved_zb":
        return
    layout = layout_of(schedule, pipeline, chunks, micro_batches)
    stages = pipeline * chunks
    played = played_seconds(
        action_order(schedule, pipeline, chunks, micro_batches),
        {kind: [time] * stages for kind, time in zip("FIW", seconds, strict=True)},
    )
    f, i, w = (np.full((1, 1), time * chunks) for time in seconds)
    bubble, _ = split_bubble_seconds(LayoutTable.of([layout]), f, i, w, np.full((1, 1), float(pipeline)))
    assert micro_batches * chunks * sum(seconds) + bubble[0] == pytest.approx(played)


@pytest.mark.parametrize("schedule", SPLIT_BACKWARD)
def test_a_head_makes_its_rank_the_slowest_and_the_others_wait(schedule):
    pipeline, micro_batches = 4, 24
    layout = layout_of(schedule, pipeline, 2, micro_batches)
    times = {kind: [time] * 7 + [1.5 * time] for kind, time in (("F", 1.0), ("I", 1.3), ("W", 1.0))}
    played = played_seconds(action_order(schedule, pipeline, 2, micro_batches), times)
    f, i, w = (
        np.array([[sum(times[kind][stage] for stage in layout.stages_of(rank)) for rank in range(pipeline)]])
        for kind in "FIW"
    )
    bubble, _ = split_bubble_seconds(LayoutTable.of([layout]), f, i, w, np.ones((1, pipeline)))
    assert micro_batches * (f + i + w).max() + bubble[0] == pytest.approx(played, rel=0.05)


def test_zero_bubble_schedules_leave_less_idle_than_interleaving():
    time = np.full((1, 1), 2.0)
    count, chunks = np.full((1, 1), 4.0), np.full(1, 2.0)
    interleaved = bubble_seconds(3 * time, count, chunks)[0]
    for schedule in SPLIT_BACKWARD:
        table = LayoutTable.of([layout_of(schedule, 4, 2, 16)])
        assert split_bubble_seconds(table, time, time, time, count)[0][0] == pytest.approx(interleaved / 3)


@pytest.mark.parametrize(("pipeline", "chunks", "micro_batches"), [*CASES, (4, 3, 16)])
@pytest.mark.parametrize("schedule", SPLIT_BACKWARD)
@pytest.mark.parametrize("layers", [48, 55])
def test_what_is_in_flight_is_what_the_schedule_keeps(schedule, pipeline, chunks, micro_batches, layers):
    """Activations stay until the gradients of weights; what waits for those is counted too."""
    if chunks > 2 and schedule != "interleaved_zb":
        return
    split = even_split(layers, pipeline * chunks)
    ranks = all_ranks(split, pipeline, layers, schedule)
    found = in_flight(ranks, np.float64(micro_batches))["dense"]
    for rank, order in enumerate(action_order(schedule, pipeline, chunks, micro_batches)):
        alive = waiting = most_alive = most_waiting = 0
        for kind, stage, _ in order:
            alive += split[stage] * {"F": 1, "I": 0, "W": -1, "B": -1}[kind]
            waiting += split[stage] * {"I": 1, "W": -1}.get(kind, 0)
            most_alive, most_waiting = max(alive, most_alive), max(waiting, most_waiting)
        if layers == 48:
            assert found[rank] == most_alive
            assert ranks.backlog[rank] == most_waiting
        assert found[rank] >= most_alive and ranks.backlog[rank] >= most_waiting
        assert found[rank] <= 1.35 * most_alive


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", *SPLIT_BACKWARD])
def test_ranks_hold_the_stages_that_the_layout_gives_them(schedule):
    chunks = 1 if schedule == "1f1b" else 2
    split = even_split(13, 3 * chunks)
    layout = layout_of(schedule, 3, chunks, 6, split)
    ranks = all_ranks(split, 3, 5, schedule)
    held = [layout.stages_of(rank) for rank in range(3)]
    kinds: dict[int, Counter[bool]] = defaultdict(Counter)
    for rank, stages in enumerate(held):
        for stage in stages:
            kinds[rank].update(layer < 5 for layer in layout.layer_range(stage))
    assert ranks.dense.tolist() == [kinds[rank][True] for rank in range(3)]
    assert ranks.moe.tolist() == [kinds[rank][False] for rank in range(3)]
    assert ranks.first.tolist() == [0 in stages for stages in held]
    assert ranks.last.tolist() == [len(split) - 1 in stages for stages in held]


def test_block_recomputation_marks_the_first_layers_of_each_stage():
    ranks = all_ranks((3, 2, 1, 2), 2, 4, "interleaved", block=2)  # the first four layers are dense
    assert (ranks.dense.tolist(), ranks.dense_plain.tolist()) == ([2, 1], [1, 0])
    assert (ranks.moe.tolist(), ranks.moe_plain.tolist()) == ([1, 3], [0, 0])


def test_layers_that_recompute_together_keep_one_input():
    together = all_ranks((6, 5), 2, 11, "1f1b", together=4)
    assert together.dense.tolist() == [6, 5]
    assert together.dense_in_flight.tolist() == [2 * 2, 2]


@pytest.mark.parametrize("schedule", get_args(Schedule))
def test_traits_of_a_schedule_are_those_of_its_order(schedule: Schedule) -> None:
    traits = SCHEDULE_TRAITS[schedule]
    pipeline, micro_batches = 4, 64
    every = orders(schedule, pipeline, traits.least_chunks, micro_batches)
    passes = [len(order.kind) / len(set(order.stage)) / micro_batches for order in every]
    # Whole backward passes may be split at the end.
    assert {round(count) for count in passes} == {traits.steady_passes}
    assert any((order.kind == WEIGHTS).any() for order in every) == traits.splits_backward
    assert (set(every[0].stage) == {0, 2 * pipeline - 1}) == traits.in_v
    assert schedule_exists(schedule, pipeline, traits.least_chunks, micro_batches + 1) != traits.in_rounds
    least = traits.least_micro_batches * pipeline
    assert schedule_exists(schedule, pipeline, traits.least_chunks, least or pipeline)
    assert not least or not schedule_exists(schedule, pipeline, traits.least_chunks, least - 1)

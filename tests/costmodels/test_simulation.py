"""The simulated pipeline: against longest paths, PyTorch's orders, long schedules and the closed forms."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from costmodels.errors import InputError
from costmodels.ranks.rank_layers import Ranks
from costmodels.spec.layout import SPLIT_BACKWARD, V_SCHEDULES, Layout, Schedule
from costmodels.spec.table import LayoutTable
from costmodels.time import simulation
from costmodels.time.bubble import bubble_seconds, message_wait_seconds, send_seconds, split_bubble_seconds
from costmodels.time.simulation import StageSeconds, graph, pipeline_seconds, simulate, steady_period
from tests.support.schedule_orders import Action, action_order, makespan

SCHEDULES: tuple[Schedule, ...] = ("1f1b", "interleaved", *SPLIT_BACKWARD)


def chunks_of(schedule: Schedule, wanted: int = 2) -> int:
    return 1 if schedule == "1f1b" else 2 if schedule in V_SCHEDULES else max(wanted, 2)


def equal(stages: int, forward=1.0, inputs=1.25, weights=0.75, send=0.0) -> StageSeconds:
    f, i, w = (np.full(stages, seconds) for seconds in (forward, inputs, weights))
    return StageSeconds(f, i, w, send=np.full(stages - 1, send))


def unequal(stages: int, rng: np.random.Generator, spread: float, send: float) -> StageSeconds:
    f, i, w = (rng.uniform(1 - spread, 1 + spread, stages) for _ in range(3))
    return StageSeconds(f, i, w, send=rng.uniform(0, send, stages - 1))


@st.composite
def problems(draw, most_ranks=5, most=12):
    """A schedule with its pipeline, chunks and microbatches, and seconds of its stages."""
    schedule = draw(st.sampled_from(SCHEDULES))
    pipeline = draw(st.integers(1 if schedule == "1f1b" else 2, most_ranks))
    chunks = chunks_of(schedule, draw(st.integers(2, 3)))
    micro_batches = draw(st.integers(1, most))
    if schedule in ("interleaved", "interleaved_zb"):
        micro_batches = pipeline * max(1, micro_batches // pipeline)
    if schedule in V_SCHEDULES:
        micro_batches += 2 * pipeline
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread, send = draw(st.sampled_from([0.0, 0.01, 0.5])), draw(st.sampled_from([0.0, 0.1, 2.0]))
    return (schedule, pipeline, chunks, micro_batches), unequal(pipeline * chunks, rng, spread, send)


def longest_path(schedule, pipeline, chunks, micro_batches, seconds: StageSeconds) -> float:
    """The makespan from PyTorch's order and the dependencies of passes, as a path through a graph."""
    stages = pipeline * chunks
    actions = action_order(schedule, pipeline, chunks, micro_batches)
    rank_of = {action.stage: rank for rank, order in enumerate(actions) for action in order}
    took = {"F": seconds.forward, "I": seconds.inputs, "W": seconds.weights}
    took["B"] = seconds.inputs + seconds.weights
    backward = {(a.stage, a.micro_batch): a for order in actions for a in order if a.kind in "BI"}
    forward = {(a.stage, a.micro_batch): a for order in actions for a in order if a.kind == "F"}
    paths: nx.DiGraph[Any] = nx.DiGraph()
    for order in actions:
        for action in order:
            # Each edge carries the seconds of the pass before it and what lies between the two.
            paths.add_edge(action, "end", seconds=took[action.kind][action.stage])
        sent: list[Action] = []
        for action, later in zip_longest(order, order[1:]):
            target = action.stage + (1 if action.kind == "F" else -1)
            own = took[action.kind][action.stage]
            if later is not None:
                paths.add_edge(action, later, seconds=own)
            if action.kind == "W" or not 0 <= target < stages or rank_of[target] == rank_of[action.stage]:
                continue
            # A message leaves after its pass and after the message before it.
            way = seconds.send[min(action.stage, target)]
            paths.add_edge(action, ("sent", action), seconds=own)
            paths.add_edge(
                ("sent", action),
                (forward if action.kind == "F" else backward)[target, action.micro_batch],
                seconds=way,
            )
            if sent:
                before = seconds.send[
                    min(sent[-1].stage, sent[-1].stage + (1 if sent[-1].kind == "F" else -1))
                ]
                paths.add_edge(("sent", sent[-1]), ("sent", action), seconds=before)
            sent.append(action)
            if schedule == "1f1b" and later is not None:
                paths.add_edge(("sent", action), later, seconds=way)
    return nx.dag_longest_path_length(paths, weight="seconds")


@settings(max_examples=40, deadline=None)
@given(problem=problems())
def test_the_makespan_is_the_longest_path(problem):
    (schedule, pipeline, chunks, micro_batches), seconds = problem
    assume(schedule != "1f1b" or micro_batches >= pipeline)  # PyTorch refuses fewer.
    played = simulate(schedule, pipeline, chunks, micro_batches, seconds).seconds
    assert played == pytest.approx(longest_path(schedule, pipeline, chunks, micro_batches, seconds))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_sends_it_is_the_makespan_of_the_orders(schedule):
    chunks = chunks_of(schedule, 3)
    seconds = unequal(4 * chunks, np.random.default_rng(1), 0.4, 0.0)
    kinds = {"F": seconds.forward, "I": seconds.inputs, "W": seconds.weights}
    kinds["B"] = seconds.inputs + seconds.weights
    orders = action_order(schedule, 4, chunks, 12)
    expected = makespan(orders, lambda kind, stage: float(kinds[kind][stage]))
    assert simulate(schedule, 4, chunks, 12, seconds).seconds == pytest.approx(expected)


@settings(max_examples=30, deadline=None)
@given(problem=problems())
def test_each_rank_runs_one_pass_at_a_time_and_nothing_before_it_arrives(problem):
    (schedule, pipeline, chunks, micro_batches), seconds = problem
    played = simulate(schedule, pipeline, chunks, micro_batches, seconds)
    found = played.graph
    for rank in range(pipeline):
        own = np.flatnonzero(found.rank == rank)
        assert (played.start[own][1:] >= played.end[own][:-1] - 1e-9).all()
    waits = np.flatnonzero(found.needs)
    assert (played.start[waits] >= played.arrive[found.needs[waits] - 1] - 1e-9).all()
    leaves = played.arrive - np.append(0.0, seconds.send)[found.sent]
    assert (leaves >= played.end - 1e-9).all()
    for rank in range(pipeline):
        own = np.flatnonzero((found.rank == rank) & (found.sent > 0))
        assert (leaves[own][1:] >= played.arrive[own][:-1] - 1e-9).all()
    whole = (seconds.forward + seconds.inputs + seconds.weights).sum() * micro_batches
    assert played.busy.sum() == pytest.approx(whole)
    assert played.busy + played.idle == pytest.approx(np.full(pipeline, played.seconds))
    assert (played.idle >= -1e-9).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("pipeline", "wanted"), [(2, 2), (3, 3), (8, 2)])
def test_longer_schedules_have_more_whole_periods(schedule, pipeline, wanted):
    """The period of a steady state, on which `pipeline_seconds` rests.

    A schedule of one more period is the same up to the end of its steady state, and then again one period
    later. Passes before that end need nothing from behind it. Passes behind it need nothing from before the
    last period.
    """
    chunks, period = chunks_of(schedule, wanted), steady_period(schedule, pipeline)
    count = 4 * pipeline
    short, long = (graph(schedule, pipeline, chunks, number) for number in (count, count + period))
    per_rank = len(short.before) // pipeline
    starts = {}
    columns = []
    for found in (short, long):
        by_rank = [np.flatnonzero(found.rank == rank) for rank in range(pipeline)]
        columns.append([(found.kind[own], found.stage[own], found.micro_batch[own]) for own in by_rank])
    for rank in range(pipeline):
        own = np.flatnonzero(short.rank == rank)
        last = short.before[rank * per_rank :][:per_rank]
        start = int(np.searchsorted(own, last[0]))
        starts[rank] = start
        assert own[start : start + per_rank].tolist() == last.tolist()
        assert own[start + per_rank : start + 2 * per_rank].tolist() == (
            short.after[rank * per_rank :][:per_rank].tolist()
        )
        end = start + per_rank
        for name, (few, many) in enumerate(zip(columns[0][rank], columns[1][rank], strict=True)):
            shift = period if name == 2 else 0
            assert many[: end + per_rank].tolist() == few[: end + per_rank].tolist()
            assert many[end + per_rank :].tolist() == (few[end:] + shift).tolist()
    place = np.zeros(len(short.rank), dtype=np.int64)
    for rank in range(pipeline):
        own = np.flatnonzero(short.rank == rank)
        place[own] = np.arange(len(own)) - starts[rank] - per_rank  # From the end of the steady state.
    needs = np.flatnonzero(short.needs)
    needed = place[short.needs[needs] - 1]
    assert (needed[place[needs] >= 0] >= -per_rank).all()
    assert (needed[place[needs] < per_rank] < per_rank).all()


@settings(max_examples=40, deadline=None)
@given(problem=problems(), rounds=st.integers(8, 30))
def test_long_schedules_take_what_all_their_passes_take(problem, rounds):
    (schedule, pipeline, chunks, _), seconds = problem
    micro_batches = rounds * pipeline
    expected = simulate(schedule, pipeline, chunks, micro_batches, seconds).seconds
    found = pipeline_seconds(schedule, pipeline, chunks, micro_batches, seconds)
    assert found == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equal_stages_are_not_played_to_the_end(schedule, monkeypatch):
    played = []
    original = simulation.graph
    monkeypatch.setattr(simulation, "graph", lambda *problem: played.append(problem[3]) or original(*problem))
    chunks = chunks_of(schedule)
    seconds = equal(4 * chunks, send=0.01)
    found = pipeline_seconds(schedule, 4, chunks, 4000, seconds)
    assert max(played) <= 64
    each = chunks * 3.0
    assert found == pytest.approx(4000 * each, rel=0.01)


def test_a_pipeline_that_is_too_long_and_never_steady_is_left_to_the_closed_forms(monkeypatch):
    monkeypatch.setattr(simulation, "MOST_PASSES", 200)
    assert pipeline_seconds("interleaved", 4, 2, 8, equal(8)) is not None
    assert pipeline_seconds("interleaved", 4, 2, 12, equal(8)) is not None
    assert pipeline_seconds("interleaved", 4, 2, 16, equal(8)) is None


def test_schedules_that_do_not_run_have_no_time():
    assert pipeline_seconds("interleaved", 4, 2, 9, equal(8)) is None
    with pytest.raises(InputError, match="schedule interleaved does not run 9 microbatches"):
        simulate("interleaved", 4, 2, 9, equal(8))


def test_one_rank_runs_its_micro_batches_in_turn():
    played = simulate("1f1b", 1, 1, 3, equal(1))
    assert played.seconds == pytest.approx(3 * 3.0)
    assert played.idle.tolist() == [0.0]


def test_fewer_micro_batches_than_ranks_still_pass_through():
    """Megatron-LM runs them, PyTorch's Schedule1F1B does not: f + b of every rank, and of the others."""
    assert simulate("1f1b", 8, 1, 2, equal(8)).seconds == pytest.approx((8 - 1 + 2) * 3.0)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pipeline", [2, 4])
@pytest.mark.parametrize("send", [4.0, 10.0])
def test_no_rank_sends_more_than_its_link_carries(schedule, pipeline, send):
    """Both the simulation and the closed form are bound by messages that take longer than compute."""
    chunks, micro_batches = chunks_of(schedule), 8 * pipeline
    seconds = equal(pipeline * chunks, send=send)
    found = simulate(schedule, pipeline, chunks, micro_batches, seconds)
    sent = np.bincount(found.graph.rank[found.graph.sent > 0], minlength=pipeline).max() * send
    assert found.seconds >= sent
    parts = closed(schedule, pipeline, chunks, micro_batches, seconds)
    own = micro_batches * seconds.slowest_rank(schedule, pipeline)
    assert own + sum(parts) == pytest.approx(found.seconds, rel=0.16)


@settings(max_examples=30, deadline=None)
@given(problem=problems(), more=st.floats(0, 1))
def test_slower_messages_never_make_a_step_shorter(problem, more):
    (schedule, pipeline, chunks, micro_batches), seconds = problem
    slower = StageSeconds(seconds.forward, seconds.inputs, seconds.weights, seconds.send + more)
    found, usual = (simulate(schedule, pipeline, chunks, micro_batches, each) for each in (slower, seconds))
    assert found.seconds >= usual.seconds * (1 - 1e-12)


def table_of(schedule, pipeline, chunks, micro_batches) -> LayoutTable:
    layout = Layout(
        pipeline_parallel=pipeline,
        virtual_pipeline_parallel=chunks,
        schedule=schedule,
        layers_per_stage=(1,) * (pipeline * chunks),
        global_batch_size=micro_batches,
    )
    return LayoutTable.of([layout])


def ranks_of(pipeline: int) -> Ranks:
    """Ranks of one layer each in a table of one row."""
    zero, rank = np.zeros((1, pipeline)), np.arange(pipeline)[None, :]
    fields = dict.fromkeys(Ranks.__dataclass_fields__, zero)
    ends = {"first": rank == 0, "last": rank == pipeline - 1}
    return Ranks(**fields | {"count": zero + 1, "dense": zero + 1} | {k: v * 1.0 for k, v in ends.items()})


def closed(schedule, pipeline, chunks, micro_batches, seconds: StageSeconds) -> tuple[float, float]:
    """Bubble and sends in closed form."""
    table = table_of(schedule, pipeline, chunks, micro_batches)
    shape = (chunks, pipeline)
    place = np.arange(pipeline * chunks).reshape(shape)
    if schedule in V_SCHEDULES:
        place[1] = place[1, ::-1].copy()
    f, i, w = (x[place].sum(axis=0)[None, :] for x in (seconds.forward, seconds.inputs, seconds.weights))
    count, total = np.ones((1, pipeline)), f + i + w
    slow = int(total.argmax())
    spare = np.zeros(1)
    if schedule in SPLIT_BACKWARD:
        bubble, spare = split_bubble_seconds(table, f, i, w, count)
    else:
        bubble = bubble_seconds(total, count, np.full(1, float(chunks)))
    message = np.full(1, seconds.send.max(initial=0.0))
    held = message_wait_seconds(table, total, ranks_of(pipeline), message, seconds.waits)
    split = w if schedule in SPLIT_BACKWARD else 0 * w
    passes = f[:, slow], (i + w)[:, slow], split[:, slow]
    sends = send_seconds(table, message, held, spare, *passes, seconds.waits)
    return float(bubble[0]), float(sends[0])


@pytest.mark.parametrize("pipeline", [2, 4, 8])
@pytest.mark.parametrize("rounds", [2, 5])
@pytest.mark.parametrize("send", [0.0, 0.05, 0.3])
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("interleaved", 5)])
def test_closed_forms_of_equal_stages_are_exact(schedule, chunks, pipeline, rounds, send):
    """(pp - 1) (f + b) / vpp, and the messages that no computation hides."""
    micro_batches = rounds * pipeline
    seconds = equal(pipeline * chunks, send=send)
    whole = pipeline_seconds(schedule, pipeline, chunks, micro_batches, seconds)
    bubble, sends = closed(schedule, pipeline, chunks, micro_batches, seconds)
    assert bubble == pytest.approx((pipeline - 1) * 3.0)
    assert micro_batches * chunks * 3.0 + bubble + sends == pytest.approx(whole)


@pytest.mark.parametrize("pipeline", [2, 4, 8])
@pytest.mark.parametrize("rounds", [2, 5])
@pytest.mark.parametrize("send", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("chunks", [2, 5])
def test_closed_forms_of_ranks_that_wait_for_what_they_send_are_close(chunks, pipeline, rounds, send):
    """All messages but those of the ends take time: those of a rank that computes meanwhile are a bound."""
    micro_batches = rounds * pipeline
    seconds = replace(equal(pipeline * chunks, send=send), waits=True)
    whole = pipeline_seconds("interleaved", pipeline, chunks, micro_batches, seconds)
    bubble, sends = closed("interleaved", pipeline, chunks, micro_batches, seconds)
    assert micro_batches * chunks * 3.0 + bubble + sends == pytest.approx(whole, rel=2e-3)
    meanwhile = replace(seconds, waits=False)
    assert whole >= pipeline_seconds("interleaved", pipeline, chunks, micro_batches, meanwhile)


@pytest.mark.parametrize("pipeline", [2, 4, 8])
@pytest.mark.parametrize("send", [0.0, 0.05, 0.3, 0.9])
@pytest.mark.parametrize("chunks", [2, 4])
def test_the_closed_form_of_zero_bubbles_is_exact(chunks, pipeline, send):
    """ZB-H1: (pp - 1) (f + i - w), and messages that half of the gradients of weights do not hide."""
    seconds = equal(pipeline * chunks, send=send)
    whole = pipeline_seconds("interleaved_zb", pipeline, chunks, 6 * pipeline, seconds)
    bubble, sends = closed("interleaved_zb", pipeline, chunks, 6 * pipeline, seconds)
    assert bubble == pytest.approx((pipeline - 1) * (1.0 + 1.25 - 0.75))
    rel = 1e-9 if 2 * send <= 0.75 else 0.06  # Hidden or not while the pipeline fills.
    assert 6 * pipeline * chunks * 3.0 + bubble + sends == pytest.approx(whole, rel=rel)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pipeline", [4, 8])
@pytest.mark.parametrize("rounds", [2, 8])
@pytest.mark.parametrize("send", [0.0, 0.1])
def test_closed_forms_with_embedding_and_head_are_close(schedule, pipeline, rounds, send):
    """The first stage a little slower than the others, the last one by up to half a layer of two."""
    chunks = chunks_of(schedule)
    stages, micro_batches = pipeline * chunks, rounds * pipeline
    for head in (0.02, 0.1, 0.3):
        seconds = equal(stages, inputs=1.1, weights=0.9, send=send)
        for times in (seconds.forward, seconds.inputs, seconds.weights):
            times[0] *= 1.01
            times[-1] *= 1 + head
        whole = pipeline_seconds(schedule, pipeline, chunks, micro_batches, seconds)
        parts = closed(schedule, pipeline, chunks, micro_batches, seconds)
        own = micro_batches * seconds.slowest_rank(schedule, pipeline)
        assert own + sum(parts) == pytest.approx(whole, rel=0.025)

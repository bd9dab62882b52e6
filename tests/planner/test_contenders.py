"""Layouts that are priced first: the ranking is the one that pricing all of them gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from costmodels import ModelSpec, price
from costmodels.pricing import peak_memory
from costmodels.spec.table import ARRAY_FIELDS
from planner import search
from planner.objective import slowness
from planner.problem import resolve_problem
from planner.ranking import contenders
from planner.ranking.first_plans import Ranked
from planner.solve import bounds, further, grid_bounds, recompute, solutions
from planner.solve.bounds import floor_of
from planner.solve.concatenation import concatenate_tables
from planner.solve.fit import fit
from planner.solve.pace import least_pace
from planner.solve.solutions import FIRST
from tests.support import models
from tests.support.models import TINY_EXPERTS

TINY = models.TINY.model_copy(update={"layers": 8})

PROBLEMS: list[tuple[ModelSpec, dict[str, Any]]] = [
    (TINY, {"global_batch_size": 24}),
    (TINY, {"max_global_batch_size": 30, "objective": "step-time"}),
    (TINY, {"global_batch_size": 16, "pin": ["offload_activations=true", "recompute=none,full"]}),
    (TINY_EXPERTS, {"max_global_batch_size": 16, "device_memory_gib": 11.2}),
]


@pytest.mark.parametrize(("model", "job"), PROBLEMS)
def test_no_layout_beats_the_floor_of_its_space(model, job):
    problem = resolve_problem(model, 16, **job)
    where, space = (problem.model, problem.cluster, problem.engine), problem.space()
    prices = price(*where, space.table)
    least = floor_of(*where, space, problem.objective).of(np.arange(len(prices)))
    # Copies of ZeRO's shards may spare the exchange.
    seconds = prices.step_time_s - prices.time["data_parallel"]
    paces = slowness(problem.objective, space.table.global_batch_size, seconds)
    assert (least <= paces).all()
    assert np.median(least / paces) > 0.4


@pytest.mark.parametrize(("model", "job"), PROBLEMS)
def test_the_ranking_is_the_same_however_many_are_priced(model, job, monkeypatch):
    monkeypatch.setattr(contenders, "FEW", 10**6)
    every = search(model, world_size=16, **job)
    assert every.ranking.tail is None
    for name, number in {"FEW": 100, "SAMPLE": 50, "PLACES": 40}.items():
        monkeypatch.setattr(contenders, name, number)
    some = search(model, world_size=16, **job)
    assert some.ranking.tail is not None and 40 <= len(some.ranking.places) < some.feasible / 4
    assert (some.feasible, some.rejected, some.solutions) == (every.feasible, every.rejected, every.solutions)
    for rank in (0, 45, every.feasible - 1):
        one, other = some.plan(rank), every.plan(rank)
        assert (one.layout, one.estimate, one.reason) == (other.layout, other.estimate, other.reason)
    tables = [each.table.take(each.fitting) for each in (some, every)]
    assert tables[0].splits == tables[1].splits
    for name in ARRAY_FIELDS:
        assert (getattr(tables[0], name) == getattr(tables[1], name)).all()


def test_the_first_plans_are_the_same_however_many_rows_a_round_solves(monkeypatch):
    """Plans that earlier rounds find leave out only layouts that are slower."""
    job: dict[str, Any] = {
        "model": "llama2-70b",
        "world_size": 32,
        "device": "a100-40g",
        "max_global_batch_size": 64,
    }
    known = first_layouts(search(**job, prefer="fastest"))
    for module in (recompute, solutions):
        monkeypatch.setattr(module, "ROUND", 16)
    assert first_layouts(search(**job, prefer="fastest")) == known
    monkeypatch.setattr(bounds.Worth, "beside", lambda worth, _: worth)
    assert first_layouts(search(**job, prefer="fastest")) == known


def first_layouts(result):
    """The first plans and their step times."""
    return [(plan.layout, plan.estimate.step_time_s) for plan in result.plans(FIRST)]


def test_the_pace_of_a_layout_is_that_of_its_price_or_less():
    job: dict[str, Any] = {
        "world_size": 16,
        "device": "h100",
        "global_batch_size": 32,
        "device_memory_gib": 60.0,
    }
    problem = resolve_problem("qwen3-30b-a3b", **job)
    space = problem.space()
    where = problem.model, problem.cluster, problem.constants
    floor = floor_of(*where, space, problem.objective)
    pace = least_pace(problem, space, floor, bounds.Worth(problem.objective, np.inf))
    rows = np.flatnonzero(np.isfinite(pace))
    some = rows[:: max(1, len(rows) // 4000)]
    prices = price(*where, space.table.take(some))
    real = slowness(problem.objective, prices.table.global_batch_size, prices.step_time_s)
    assert (pace[some] <= real * (1 + 1e-9)).all()
    alone = (prices.table.zero_stage == 0) & (prices.table.pipeline_parallel == 1)
    assert alone.any() and pace[some][alone] == pytest.approx(real[alone])
    # Rows that fit have model states that fit.
    fits = fit(*where, space)
    assert np.isfinite(pace[fits.rows]).all()


def test_no_further_layouts_leave_a_ranking_as_it_is() -> None:
    model = ModelSpec(name="small", layers=8, hidden=1024, heads=8, vocab=32000, seq=2048)
    found = search(model, world_size=8, device="a100-80g", max_global_batch_size=32)
    ranked = Ranked(found.ranking, found.rows, found.legal)
    none = found.ranking.prices.take(np.zeros(0, dtype=np.int64))
    same, rows = ranked.beside(none)
    assert not len(rows) and rows.dtype == np.int64
    assert same.ranking.places.tolist() == ranked.ranking.places.tolist()


@pytest.mark.parametrize(
    ("model", "job"),
    [
        ("deepseek-v2-lite", {"device": "a100-40g", "world_size": 8, "max_global_batch_size": 16}),
        ("llama2-7b", {"device": "a100-40g", "world_size": 8, "max_global_batch_size": 32}),
        ("gpt3-175b", {"device": "l40s", "world_size": 64, "max_global_batch_size": 128}),
        ("mixtral-8x7b", {"device": "h100", "world_size": 16, "max_global_batch_size": 32}),
        ("llama3-8b", {"device": "a100-40g", "world_size": 8, "max_global_batch_size": 16, "engine": "nemo"}),
    ],
)
def test_further_layouts_left_out_for_their_memory_fit_with_no_recomputation(
    model: str, job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = resolve_problem(model, **job)
    where = problem.model, problem.cluster, problem.constants
    space = problem.space()
    found, worth = fit(*where, space), bounds.Worth(problem.objective, 1e90)
    some = further.further_space(problem, space, found, worth, "other")
    monkeypatch.setattr(grid_bounds, "recomputation_seconds", lambda *_: np.zeros((1,) * 6))
    monkeypatch.setattr(grid_bounds, "least_bytes", lambda *given: 2 * [np.zeros(len(given[-1]))])
    every = further.further_space(problem, space, found, worth, "other")
    assert some is not None and every is not None
    names = [name for name in ARRAY_FIELDS if name != "split"]
    kept = {tuple(row) for row in np.column_stack([getattr(some.table, name) for name in names]).tolist()}
    rows = np.column_stack([getattr(every.table, name) for name in names]).tolist()
    out = np.array([place for place, row in enumerate(rows) if tuple(row) not in kept])
    assert len(out) > 100 and len(rows) == len(out) + len(kept)
    left_out = every.table.take(out[:: max(1, len(out) // 2000)])
    # Each stands for the same layout with fewer microbatches too.
    table = concatenate_tables([left_out, recompute.with_fewest_micro_batches(left_out)])
    assert (peak_memory(*where, table) > problem.cluster.memory_bytes).all()
    kinds = recompute.recompute_kinds(problem.pins, problem.engine)
    rows_that_fit, _ = recompute.fastest_that_fit(*where, table, kinds, usual=True)
    assert not len(rows_that_fit)

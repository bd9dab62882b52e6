"""Degrees that are solved: what the search adds to the enumerated layouts, and what pins leave of it."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from costmodels.pricing import peak_memory, price
from costmodels.spec.table import LayoutTable
from planner import search
from planner.ranking.result import SearchResult
from planner.space.rules import first_violation
from runtime.settings.checks import check_job
from tests.support.layouts import layouts_of

SMALL: dict[str, Any] = {"model": "gpt-22b", "world_size": 8, "max_global_batch_size": 16}


def solutions(result: SearchResult) -> LayoutTable:
    return result.table.take(np.arange(result.legal - result.solutions, result.legal))


def recomputations(result: SearchResult) -> set[str]:
    # Steps of fewer microbatches than the batch holds are listed too, which fit without any, or as pinned.
    most = result.problem.batch.size
    full = [
        layout
        for layout in layouts_of(solutions(result))
        if layout.global_batch_size + layout.micro_batch_size * layout.data_parallel > most
    ]
    return {str(layout.recompute) for layout in full} - {"none"}


@pytest.mark.parametrize(
    "question",
    [
        {"model": "llama2-70b", "world_size": 256, "local_world_size": 4, "max_global_batch_size": 2048},
        {
            "model": "qwen3-30b-a3b",
            "world_size": 64,
            "local_world_size": 4,
            "device": "v100-32g",
            "max_global_batch_size": 256,
        },
    ],
)
def test_no_solved_layout_is_listed_already(question: dict[str, Any]) -> None:
    result = search(**{"device": "h100", **question})
    layouts = [plan.layout for plan in result.plans(40)]
    assert len(set(layouts)) == len(layouts)


def test_the_best_plan_recomputes_no_more_than_it_must() -> None:
    result = search(**SMALL, device_memory_gib=74.0, pin=["pp=1", "zero_replicas=1"], prefer="fastest")
    best = result.best
    assert best is not None and result.solutions > 0
    layout = best.layout
    assert (layout.recompute, layout.recompute_method) == ("selective", "block")
    uniform = ["pp=1", "recompute_method=uniform", "mbs=1,2,4,8,16"]
    enumerated = search(**SMALL, device_memory_gib=74.0, pin=uniform, prefer="fastest")
    assert not recomputations(enumerated) and enumerated.best is not None
    assert best.estimate.tokens_per_s > 1.03 * enumerated.best.estimate.tokens_per_s
    # One layer less does not fit.
    fewer = layout.model_copy(update={"recompute_num_layers": layout.recompute_num_layers - 1})
    problem = result.problem
    where = problem.model, problem.cluster, problem.engine
    held = peak_memory(*where, LayoutTable.of([layout, fewer]))
    assert held[0] <= problem.cluster.memory_bytes < held[1]


@pytest.mark.parametrize(
    ("pin", "forbid", "kinds"),
    [
        (None, None, {"selective", "full"}),
        (None, "recompute=full", {"selective"}),
        (None, "recompute=selective", {"full"}),
        ("recompute=none,full", None, {"full"}),
        (None, "recompute_method=block", set()),
        ("recompute=full", None, set()),
        ("recompute_modules=mlp", None, set()),
    ],
)
def test_pins_say_what_may_be_solved_for(pin: Any, forbid: Any, kinds: set[str]) -> None:
    pins = ["pp=1", "zero_replicas=1", "mbs=1,2,4,8,16", *([pin] if pin else [])]
    assert recomputations(search(**SMALL, pin=pins, forbid=forbid, device_memory_gib=55)) <= kinds
    if len(kinds) == 1:
        assert recomputations(search(**SMALL, pin=pins, forbid=forbid, device_memory_gib=55)) == kinds


def test_no_number_of_copies_is_faster_than_the_one_found() -> None:
    job: dict[str, Any] = {"model": "llama3-8b", "world_size": 512, "device": "h100"}
    job |= {"max_global_batch_size": 1024, "pin": ["tp=1", "pp=1", "cp=1"], "prefer": "fastest"}
    free = search(**job)
    assert free.best is not None and free.best.layout.zero_replicas > 1
    pins = job.pop("pin")
    for copies in (1, 2, 4, 8, 16, 32):
        pinned = search(**job, pin=[*pins, f"zero_replicas={copies}"]).best
        assert pinned is not None
        assert pinned.estimate.tokens_per_s <= free.best.estimate.tokens_per_s * (1 + 1e-9)


def test_an_objective_of_memory_solves_nothing_and_one_of_time_does() -> None:
    assert search(**SMALL, objective="memory").solutions == 0
    assert search(**SMALL, objective="step-time").solutions > 0


@pytest.mark.parametrize(
    "job",
    [
        SMALL,
        {"model": "gpt-22b", "world_size": 2, "max_global_batch_size": 16},
        pytest.param(
            {
                "model": "mixtral-8x7b",
                "world_size": 64,
                "device": "h100",
                "max_global_batch_size": 256,
                "device_memory_gib": 48.0,
            },
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"model": "llama3-405b", "world_size": 16384, "device": "h100", "global_batch_size": 2048},
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda job: job["model"],
)
def test_what_is_solved_fits_and_the_runtime_takes_it(job: dict[str, Any]) -> None:
    result = search(**job)
    found = solutions(result)
    assert len(found) == result.solutions > 0
    problem = result.problem
    held = peak_memory(problem.model, problem.cluster, problem.engine, found)
    assert (held <= problem.cluster.memory_bytes).all()
    layouts = layouts_of(found)
    first = layouts_of(result.table.take(result.fitting[:500]))
    assert len(set(layouts)) == len(layouts) and len(set(first)) == len(first)
    for layout in layouts:
        check_job(problem.model, layout, job["world_size"])


@pytest.mark.parametrize(
    ("model", "world"), [("gpt3-125m", 17), *(("gpt2-small", world) for world in (3, 5, 6, 7, 13))]
)
def test_every_micro_batch_under_a_maximum_counts(model: str, world: int) -> None:
    """No pinned microbatch is faster than the plan of a free search."""
    job: dict[str, Any] = {"model": model, "world_size": world, "local_world_size": world}
    job |= {"device": "h100", "max_global_batch_size": 128, "prefer": "fastest"}
    best = search(**job).best
    assert best is not None
    most = 128 // world
    for size in range(1, most + 1, 1 + most // 16):
        pinned = search(**job, pin=[f"mbs={size}"]).best
        assert pinned is not None
        assert pinned.estimate.tokens_per_s <= best.estimate.tokens_per_s * (1 + 1e-9)
    # 7 x 17 = 119 sequences are more than 4 x 17 = 68, the most of a power of two.
    assert world != 17 or best.layout.micro_batch_size == 7


def test_unequal_chunks_are_looked_at_where_they_are_faster_or_all_that_fits() -> None:
    job: dict[str, Any] = {"model": "mindformers-gpt-13b", "device": "tpu-v5p", "global_batch_size": 64}
    best = search(**job, world_size=11, local_world_size=11).best
    assert best is not None
    # 40 layers in 22 stages of two and of one.
    assert (best.layout.schedule, len(best.layout.layers_per_stage)) == ("zbv", 22)
    big: dict[str, Any] = {"model": "gpt3-175b", "device": "rtx-pro-6000", "max_global_batch_size": 60}
    assert search(**big, world_size=40, pin="schedule=zbv").feasible


def test_no_other_stage_for_one_layer_makes_the_first_plan_faster() -> None:
    job: dict[str, Any] = {"device": "a100-pcie-80g", "world_size": 20, "local_world_size": 5}
    result = search("llama3-8b", **job, global_batch_size=32)
    best, problem = result.best, result.problem
    assert best is not None
    split = best.layout.layers_per_stage
    assert best.layout.schedule == "zbv" and sorted(split, reverse=True) != list(split)
    others = []
    for source, target in product(range(len(split)), repeat=2):
        moved = list(split)
        moved[source] -= 1
        moved[target] += 1
        if moved[source] and source != target:
            others.append(best.layout.model_copy(update={"layers_per_stage": tuple(moved)}))
    where = problem.model, problem.cluster, problem.engine
    own, prices = (price(*where, LayoutTable.of(some)) for some in ([best.layout], others))
    seconds = prices.step_time_s[prices.peak_memory_bytes <= problem.cluster.memory_bytes]
    assert seconds.min() >= own.step_time_s[0] * (1 - 2e-4)


def test_counts_do_not_depend_on_how_many_plans_are_asked_for() -> None:
    result = search("llama2-7b", world_size=16, device="l40s", memory_margin_gib=6, max_global_batch_size=64)
    feasible, rejected = result.feasible, result.rejected
    assert all(plan.fits for plan in result.plans(40))
    assert (result.feasible, result.rejected) == (feasible, rejected)
    for plan in result.closest(5):
        assert plan.estimate.peak_memory_bytes > plan.cluster.memory_bytes


def test_all_that_is_solved_beside_offload_is_a_layout() -> None:
    """Few microbatches of 14 sequences fit with whole layers recomputed, which leave nothing to offload."""
    result = search(
        "mixtral-8x7b",
        world_size=5,
        local_world_size=5,
        device="l40s",
        max_global_batch_size=120,
        prefer="fastest",
    )
    assert result.offloads
    assert all(first_violation(result.problem.model, each) is None for each in layouts_of(result.table))

"""Plans of the bundled engine are held to the exact bytes of its runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import planner
from costmodels import Layout, ModelSpec, estimate, price
from costmodels.catalogue import load_model
from costmodels.spec.record import GIB
from costmodels.spec.table import LayoutTable
from costmodels.tapes.player import rank_peaks
from planner.inputs.cluster import resolve_cluster
from planner.inputs.engine import resolve_engine
from planner.ranking.exact_memory import verifiable
from planner.ranking.first_plans import EXACT_PLACES

GPT = ModelSpec(name="gpt", layers=8, hidden=1024, heads=16, vocab=8192, seq=1024)
PINS = ["schedule=1f1b", "pp=2", "tp=1", "recompute=none"]


def search(**options: object) -> planner.SearchResult:
    return planner.search(
        GPT,
        world_size=2,
        device="a100-80g",
        global_batch_size=8,
        pin=PINS,
        **options,  # type: ignore[arg-type]
    )


def test_a_plan_shows_the_bytes_of_the_runtime() -> None:
    plan = search().best
    assert plan is not None
    assert plan.estimate.exact
    totals, _ = rank_peaks(GPT, [plan.layout], compiled=True)
    workspaces = 2 * 8320 * 1024
    allocated = [stage.allocated - workspaces for stage in plan.estimate.memory]
    assert allocated == pytest.approx(totals[0].tolist())
    again = planner.evaluate(plan.layout, model=GPT, device="a100-80g")
    assert again.memory == plan.estimate.memory
    assert again.peak_memory_bytes == max(stage.total for stage in again.memory)


def test_a_plan_that_does_not_fit_by_exact_bytes_is_rejected_under_the_rule_of_memory() -> None:
    whole = search(memory_margin_gib=0.0)
    assert whole.feasible
    needs = sorted(plan.estimate.peak_memory_bytes for plan in whole.plans(whole.feasible))
    # Exactly what one of them needs, less a little.
    limit = (needs[0] + needs[-1]) / 2 / GIB
    some = search(memory_margin_gib=0.0, device_memory_gib=limit)
    kept = some.plans(some.feasible)
    assert len(kept) == np.count_nonzero(np.array(needs) <= limit * GIB)
    assert all(plan.fits and plan.estimate.peak_memory_bytes <= limit * GIB for plan in kept)
    assert some.rejected["device_memory"] == some.legal - some.feasible


@pytest.mark.slow
def test_as_many_plans_as_are_shown_fit_by_their_exact_bytes() -> None:
    job: dict[str, Any] = {"world_size": 8, "global_batch_size": 32, "memory_margin_gib": 0.0}
    job["pin"] = ["schedule=1f1b", "cp=1", "recompute=none"]
    whole = planner.search(GPT, **job)
    plans, problem = whole.plans(40), whole.problem
    table = LayoutTable.of([plan.layout for plan in plans])
    closed = price(problem.model, problem.cluster, problem.engine, table).peak_memory_bytes
    exact = np.array([plan.estimate.peak_memory_bytes for plan in plans])
    # Closed forms let this one in, and its exact bytes do not.
    place = int((closed / exact).argmin())
    assert closed[place] < exact[place]
    some = planner.search(GPT, **job, device_memory_gib=(closed[place] + exact[place]) / 2 / GIB)
    first = [some.plan(rank) for rank in range(min(40, some.ranked))]
    left_out = [plan.layout for plan in first if not plan.fits]
    assert left_out and not {plan.layout for plan in first[:EXACT_PLACES]} & set(left_out)
    found = some.settle(40)
    assert found.ranked < some.ranked and found.settle(20) is found
    assert found.rejected["device_memory"] == found.legal - found.feasible
    shown = some.plans(40)
    assert [plan.layout for plan in shown] == [plan.layout for plan in found.plans(40)]
    assert all(plan.fits for plan in shown) and not {plan.layout for plan in shown} & set(left_out)
    for plan in shown:
        assert plan.estimate.peak_memory_bytes <= some.problem.cluster.memory_bytes


def test_only_the_bundled_engine_on_gpus_is_verified() -> None:
    layout = Layout(
        pipeline_parallel=2,
        layers_per_stage=(4, 4),
        global_batch_size=8,
        precision="bf16",
    )
    table = LayoutTable.of([layout])
    gpus, cpus = resolve_cluster("a100-80g", 2), resolve_cluster("cpu", 2)
    bundled, megatron = resolve_engine("bundled"), resolve_engine("megatron")
    assert verifiable(GPT, gpus, bundled, table).all()
    assert not verifiable(GPT, gpus, megatron, table).any()
    assert not verifiable(GPT, cpus, bundled, table).any()


def test_a_plan_without_tapes_has_the_memory_of_closed_forms_and_says_so() -> None:
    unknown = GPT.model_copy(update={"activation": "relu2", "norm": "rmsnorm", "qk_norm": True})
    plan = planner.search(unknown, world_size=2, device="a100-80g", global_batch_size=8, pin=PINS).best
    assert plan is not None and not plan.estimate.exact
    problem = plan.model, plan.cluster, plan.engine
    assert plan.estimate.memory == estimate(*problem, plan.layout).memory


def test_a_tape_of_the_first_stage_is_split_in_others():
    """A rank of a V has the first stage, whose backward is one pass, and the last one, whose is two."""
    found = planner.evaluate(
        Layout(
            tensor_parallel=4,
            sequence_parallel=True,
            pipeline_parallel=2,
            virtual_pipeline_parallel=2,
            schedule="dualpipev",
            layers_per_stage=(2, 2, 2, 2),
            global_batch_size=4,
        ),
        model=load_model("gpt-22b", layers=8),
        device="a100-80g",
    )
    assert found.exact

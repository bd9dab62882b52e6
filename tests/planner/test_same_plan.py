"""All questions name the same plan for the same job."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import planner
from costmodels import ModelSpec
from planner import Plan, explain, search, sizes, suggest
from planner.explanation.explanation import explain_plan
from planner.formats.check import check
from planner.formats.targets import export
from planner.objective import gain, metric
from planner.report.contents import gather
from tests.support.models import SMALL, SMALL_EXPERTS

MODELS = [
    SMALL,
    ModelSpec(name="wide", layers=6, hidden=4096, heads=32, kv_heads=8, vocab=32000, seq=4096, gated=True),
    SMALL_EXPERTS,
]


def drawn(seed: int) -> tuple[ModelSpec, dict[str, Any]]:
    """A question."""
    draw = random.Random(seed)
    job: dict[str, Any] = {
        "world_size": draw.choice([4, 6, 8, 16]),
        "device": draw.choice(["h100", "a100-40g", "l40s"]),
        "global_batch_size": draw.choice([24, 48, 96]),
        "engine": draw.choice([None, "megatron", "torchtitan"]),
        "objective": draw.choice(["throughput", "throughput", "step-time"]),
        "prefer": draw.choice([None, None, "fastest"]),
        "headroom": draw.choice([None, "15%"]),
    }
    return draw.choice(MODELS), job


def same(one: Plan, other: Plan) -> bool:
    return one.layout == other.layout and one.estimate == other.estimate


@pytest.mark.parametrize("seed", range(6))
def test_all_name_the_plan_that_suggest_names(seed: int) -> None:
    model, job = drawn(seed)
    plan = suggest(model, **job)
    assert same(search(model, **job).plan(0), plan)
    found = explain(model, layout=plan.layout.describe(), what_if=False, **job)
    assert found.result.best is not None and same(found.result.best, plan)
    assert found.verdicts[0].outcome == "first" and found.verdicts[0].plan is not None
    assert found.verdicts[0].plan.layout == plan.layout
    [size] = sizes(model, **job).sizes
    assert size.plan is not None and same(size.plan, plan)
    again = explain_plan(plan, what_if=False).result.best
    assert again is not None and same(again, plan)
    assert same(gather(plan).rivals[0], plan)
    where = {"model": model, "device": job["device"], "engine": job["engine"]}
    assert planner.evaluate(plan.layout, **where) == plan.estimate


@pytest.mark.parametrize("seed", range(2))
def test_what_a_change_buys_is_the_plan_of_the_changed_question(seed: int) -> None:
    model, job = drawn(seed)
    result = search(model, **job)
    found = {change.kind: change for change in explain(model, **job).changes}
    twice = {**job, "global_batch_size": 2 * job["global_batch_size"]}
    after = search(model, **twice)
    assert found["batch"].plan is not None and same(found["batch"].plan, after.plan(0))
    # The gain compares the fastest plans before and after.
    best, before = (each.plan(each.first_faster).estimate for each in (after, result))
    objective = result.problem.objective
    assert found["batch"].figure == metric(objective, best)
    assert found["batch"].ratio == pytest.approx(gain("throughput", best.tokens_per_s, before.tokens_per_s))


@pytest.mark.parametrize("seed", range(3))
def test_a_check_proposes_the_same_plan(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    model = MODELS[seed % 2]
    job: dict[str, Any] = {"world_size": 8, "device": "h100", "engine": "megatron"}
    batch = draw.choice([32, 64])
    plan = suggest(model, global_batch_size=batch, **job)
    worse = suggest(model, global_batch_size=batch, pin=["tp=8", "recompute=full", "mbs=1"], **job)
    script = tmp_path / "train.sh"
    flags = export(worse, to="megatron").text.replace("\n", " ")
    script.write_text(f"torchrun --nproc_per_node 8 pretrain_gpt.py {flags} --lr 1e-4\n")
    answer = check(script, device="h100")
    assert answer.best is not None and answer.best.layout == plan.layout
    assert answer.gain is not None and answer.gain > 1


@pytest.mark.parametrize("seed", range(6))
def test_a_pin_that_the_first_and_the_fastest_satisfy_changes_nothing(seed: int) -> None:
    model, job = drawn(seed + 20)
    result = search(model, **job)
    first, fastest = result.plan(0).layout, result.plan(result.first_faster).layout
    names = ("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel", "zero_stage")
    for name in names:
        values = {getattr(first, name), getattr(fastest, name)}
        pin = ",".join(map(str, sorted(values)))
        pinned = search(model, pin=[f"{name}={pin}"], **job)
        assert pinned.plan(0).layout == first, name
        if len(values) > 1:
            break  # One choice of several values is enough.

"""`memory_margin_gib`: one number instead of driver context, communicators and fragmentation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from costmodels.errors import InputError
from planner import Plan, evaluate, search, suggest
from planner.inputs.cluster import resolve_cluster
from tests.support.models import TINY

GIB = 2**30

JOB: dict[str, Any] = {"model": TINY, "world_size": 8, "device": "a100-80g", "global_batch_size": 16}


def test_the_margin_replaces_what_is_estimated() -> None:
    usual, bare, roomy = (
        suggest(**JOB, pin=["dp=8"], memory_margin_gib=gib).estimate for gib in (None, 0.0, 3.0)
    )
    assert usual.memory[0].overhead > 0
    tensors = max(stage.allocated for stage in bare.memory)
    assert bare.peak_memory_bytes == pytest.approx(tensors)
    assert roomy.peak_memory_bytes == pytest.approx(tensors + 3 * GIB)
    assert {stage.overhead for stage in roomy.memory} == {3 * GIB}


def test_plans_must_leave_the_margin_free() -> None:
    one = {**JOB, "pin": ["dp=8", "recompute=none"], "device_memory_gib": 4.0}
    assert search(**one, memory_margin_gib=1.0).feasible
    assert not search(**one, memory_margin_gib=3.9999).feasible


def test_a_saved_plan_keeps_its_margin_and_is_priced_alike(tmp_path: Path) -> None:
    plan = suggest(**JOB, memory_margin_gib=2.5)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.cluster.memory_margin_bytes == 2.5 * GIB
    again = evaluate(plan.layout, model=TINY, device="a100-80g", memory_margin_gib=2.5)
    assert again == plan.estimate
    assert evaluate(plan.layout, model=TINY, device="a100-80g") != plan.estimate


def test_plans_from_before_the_margin_load(tmp_path: Path) -> None:
    plan = suggest(**JOB)
    values = plan.model_dump(mode="json")
    del values["cluster"]["memory_margin_bytes"]
    for stage in values["estimate"]["memory"]:
        parts = ("reserve", "context", "communicators", "margin")
        stage["overhead"] = sum(stage.pop(part) for part in parts)
        stage["activations"] += stage.pop("communication") + stage.pop("temporaries")
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(values))
    for old, new in zip(Plan.load(file).estimate.memory, plan.estimate.memory, strict=True):
        assert (old.total, old.overhead) == pytest.approx((new.total, new.overhead))


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf"), 2.0**31])
def test_a_margin_that_is_none_is_refused(wrong: float) -> None:
    with pytest.raises(InputError, match=r"^memory_margin_gib \S+: expected a number of GiB of at least 0"):
        resolve_cluster("a100-80g", 8, memory_margin_gib=wrong)

"""Tapes that a plan lacks are recorded where PyTorch is loaded anyway, and are played later without it."""

from __future__ import annotations

from pathlib import Path

import pytest

import planner
from costmodels import ModelSpec
from costmodels.tapes import store
from planner.plan import Plan
from runtime.dryrun.missing_tapes import BackgroundRecording, unrecorded

ODD = ModelSpec(
    name="odd",
    layers=2,
    hidden=256,
    ffn=512,
    heads=4,
    vocab=1000,
    seq=128,
    max_positions=128,
    norm="rmsnorm",
    qk_norm=True,
    gated=True,
)
"""No model of the catalogue has such layers."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store.clear_caches()
    return tmp_path


def first_plan(device: str) -> Plan:
    return planner.suggest(ODD, world_size=1, device=device, global_batch_size=2)


@pytest.mark.slow
def test_what_is_recorded_beside_training_makes_the_next_estimate_exact(cache: Path) -> None:
    plan = first_plan("h100")
    assert not plan.estimate.exact
    assert [one.unit for one in unrecorded(plan)] == ["dense"]
    plan.save(cache / "plan.json")
    with BackgroundRecording(plan, cache / "plan.json") as recording:
        recording.start()
        assert recording.process is not None
        assert recording.process.wait() == 0
    store.clear_caches()
    assert not unrecorded(plan)
    assert first_plan("h100").estimate.exact


def test_nothing_is_recorded_where_no_tape_is_played(cache: Path) -> None:
    plan = planner.suggest(ODD, world_size=1, device="h100", global_batch_size=2, engine="megatron")
    with BackgroundRecording(plan, cache / "plan.json") as recording:
        recording.start()
        assert recording.process is None

"""A rank of a job run for real on one device: what its seconds go to, and what is refused."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from costmodels.catalogue import load_device
from planner import Plan, evaluate, suggest
from planner.history.step_parts import StepParts, predicted_parts
from runtime.dryrun import rank_profile
from runtime.dryrun.rank_profile import OWN, rank_prediction, stands_in, whole_step
from tests.support.commands import Command


@pytest.fixture(scope="module")
def plan() -> Plan:
    return suggest(
        model="gpt2-nano",
        world_size=4,
        device="cpu",
        global_batch_size=16,
        pin=["tp=2", "pp=2", "mbs=2", "schedule=1f1b", "vpp=1"],
    )


def test_two_steps_tell_what_a_micro_batch_takes_and_what_a_step_takes_once() -> None:
    few = StepParts(products=2.0, optimizer=5.0, host_gaps=1.0, collectives={"all_reduce": 1.0})
    many = StepParts(products=4.0, optimizer=5.0, host_gaps=2.0, collectives={"all_reduce": 2.0})
    found = whole_step({2: few, 4: many}, 64)
    assert found == pytest.approx(
        {"products": 64.0, "attention": 0.0, "elementwise": 0.0, "optimizer": 5.0, "host_gaps": 64.0}
    )
    # Noise makes nothing shrink, nor grow faster than in proportion.
    assert whole_step({2: many, 4: few}, 64)["products"] == 4.0
    assert whole_step({2: few, 4: many.scaled(3.0)}, 8)["products"] == 8.0
    assert whole_step({1: few}, 1)["products"] == 2.0


def test_the_prediction_of_the_only_stage_is_that_of_the_plan() -> None:
    plan = suggest(model="gpt2-nano", world_size=2, device="cpu", global_batch_size=16, pin="dp=2")
    expected = predicted_parts(plan.estimate.time)
    found = rank_prediction(plan, 0)
    assert found == pytest.approx({name: expected[name] for name in OWN})


def test_stages_have_predictions_of_their_own(plan: Plan) -> None:
    first, last = (rank_prediction(plan, rank) for rank in (0, 1))
    assert last["products"] > first["products"], "the head is on the last stage"


@pytest.mark.slow
def test_the_last_stage_of_a_job_runs_alone(plan: Plan, planner_command: Command, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    plan.save(file)
    code, out, err = planner_command("profile", "--plan", file, "--rank", "3", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert (found["pipeline_rank"], found["micro_batches"]) == (1, [2, 4])
    assert all(found["measured"][name] > 0 for name in OWN)
    assert found["step_s"] == pytest.approx(sum(found["measured"].values()) + sum(found["network"].values()))
    assert found["network"]["tensor_parallel"] == plan.estimate.time.tensor_parallel


@pytest.mark.parametrize(
    ("device", "words", "line"),
    [
        ("cpu", (), "--plan FILE is missing"),
        ("cpu", ("--rank", "4"), "--rank 4: the plan has ranks 0 to 3"),
        ("h100", (), "the plan is for h100, and this machine has no such device"),
    ],
)
def test_what_cannot_run_is_refused_in_a_line(
    plan: Plan,
    planner_command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    words: tuple[str, ...],
    line: str,
) -> None:
    monkeypatch.setattr("runtime.dryrun.rank_profile.local_device_count", lambda: 0)
    file = tmp_path / "plan.json"
    changed = plan
    if device != "cpu":
        changed = suggest(model="gpt2-nano", world_size=4, device=device, global_batch_size=16)
    changed.save(file)
    given = () if "missing" in line else ("--plan", file)
    code, out, err = planner_command("profile", *given, *words)
    assert (code, out) == (2, "")
    assert [said for said in err.splitlines() if "error" in said] == err.splitlines()[-1:]
    assert err.splitlines()[-1].startswith(f"planner: error: {line}")


@pytest.fixture(scope="module")
def h100_plan() -> Plan:
    return suggest(
        model="gpt2-small", world_size=8, device="h100", global_batch_size=64, pin="precision=bf16"
    )


def test_a_device_of_the_same_maker_stands_in(
    h100_plan: Plan, planner_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured exactly as predicted for the h200, the step is the plan's once it is scaled to the h100."""
    h200, plan = load_device("h200"), h100_plan
    here = evaluate(plan.layout, model=plan.model, device="h200")
    seconds = {name: predicted_parts(here.time)[name] for name in OWN}
    monkeypatch.setattr(rank_profile, "local_device_count", lambda: 1)
    monkeypatch.setattr(rank_profile, "detect_device", lambda ranks: h200)
    monkeypatch.setattr(rank_profile, "accelerator_type", lambda: "cuda")
    monkeypatch.setattr(rank_profile, "real_rank", lambda *given: nullcontext())
    monkeypatch.setattr(rank_profile, "_step", lambda *given: StepParts())
    monkeypatch.setattr(rank_profile, "whole_step", lambda *given: seconds)
    file = tmp_path / "plan.json"
    plan.save(file)
    code, out, err = planner_command("profile", "--plan", file, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert (found["device"], found["plan_device"]) == ("h200", "h100")
    assert found["predicted"] == pytest.approx(seconds)
    assert found["plan_measured"] == pytest.approx(
        {name: predicted_parts(plan.estimate.time)[name] for name in OWN}
    )
    assert found["step_s"] < found["plan_step_s"], "an h200 reads its memory faster"
    _, out, _ = planner_command("profile", "--plan", file)
    assert "h200 stands in for h100" in " ".join(out.split())


@pytest.mark.parametrize(("name", "taken"), [("h200", True), ("a100-80g", True), ("mi300x", False)])
def test_only_devices_of_the_same_maker_and_kind_stand_in(h100_plan: Plan, name: str, taken: bool) -> None:
    assert stands_in(load_device(name), h100_plan) is taken
    in_8_bits = h100_plan.model_copy(
        update={"layout": h100_plan.layout.model_copy(update={"precision": "fp8"})}
    )
    assert stands_in(load_device(name), in_8_bits) is (name == "h200"), "an A100 has no fp8"


def test_a_rank_without_room_is_refused(
    plan: Plan, planner_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.dryrun.rank_profile.available_memory", lambda: 1e6)
    file = tmp_path / "plan.json"
    plan.save(file)
    code, _, err = planner_command("profile", "--plan", file)
    assert code == 2 and "pipeline rank 0 of the plan needs" in err

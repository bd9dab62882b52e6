"""Constants from a history: of a machine that is made up, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from costmodels.calibration.machine_fit import with_constants
from costmodels.catalogue import load_device, load_engine
from costmodels.catalogue.measured_devices import Machine, own_file, read_devices
from costmodels.errors import InputError
from costmodels.spec.hardware import Device
from planner import Plan, evaluate, search
from planner.history.file import PastRun, append, history_file
from planner.history.refit import FEWEST_LAYOUTS, median_error, refits
from planner.history.step_parts import StepParts, predicted_parts
from tests.support.commands import Command

TORCH = "2.15.0"


@pytest.fixture(autouse=True)
def few_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.history.refit.FOLDS", 2)


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    """Plans that ran: layouts of two ranks that differ in all terms."""
    problem = {"world_size": 2, "device": "cpu", "global_batch_size": 16}
    pins = ("dp=2,zero=1,mbs=1", "dp=2,zero=0,mbs=4", "tp=2,mbs=4", "tp=2,mbs=16", "pp=2,mbs=2", "dp=2,mbs=8")
    return [search("gpt2-nano", **problem, pin=pin.split(",")).plans(1)[0] for pin in pins]  # type: ignore[arg-type]


def machine_as_it_is(slower: float = 3.0) -> Device:
    """This machine's CPU as it is made up to be: slow at all, and slower still at attention and launches."""
    device, engine = load_device("cpu", ranks=2), load_engine("bundled")
    own = engine.for_device(device)
    constants = {
        "gemm.efficiency": own.gemm.efficiency / slower,
        "attention.efficiency": own.attention.efficiency / (2 * slower),
        "elementwise.passes": own.elementwise.passes * slower,
        "host.layer_overhead": own.host.layer_overhead * 2 * slower,
    }
    if own.gemm.fp32_efficiency is not None:
        constants["gemm.fp32_efficiency"] = own.gemm.fp32_efficiency / slower
    return with_constants(device, engine, constants)


def run_of(plan: Plan, device: Device, with_parts: bool = True, **changes: object) -> PastRun:
    """A run of a plan on a device."""
    ranks = plan.layout.world_size
    seen = evaluate(plan.layout, model=plan.model, device=device, local_world_size=ranks, engine="bundled")
    found, estimate = predicted_parts(seen.time), plan.estimate
    waits = found.pop("communication")
    fields = {
        "date": "2026-11-23",
        "machine": Machine.here(),
        "software": {"torch": f"{TORCH}+cpu"},
        "model": plan.model,
        "layout": plan.layout,
        "cluster": plan.cluster,
        "engine": plan.engine.name,
        "compiled": False,
        "records": 4,
        "step_time_s": seen.step_time_s,
        "peak_memory_bytes": estimate.peak_memory_bytes,
        "predicted_step_time_s": estimate.step_time_s,
        "predicted_low_s": estimate.step_time_low_s,
        "predicted_high_s": estimate.step_time_high_s,
        "predicted_peak_bytes": estimate.peak_memory_bytes,
        "predicted": StepParts(products=estimate.step_time_s),
        "parts": StepParts(**found, collectives={"all_reduce": waits}) if with_parts else None,
    }
    return PastRun.model_validate(fields | changes)


@pytest.mark.parametrize("with_parts", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_layouts_that_the_fit_has_not_seen_come_out_right(plans: list[Plan], with_parts: bool) -> None:
    truth = machine_as_it_is()
    runs = [run_of(plan, truth, with_parts) for plan in plans]
    (found,) = refits([*runs, runs[0]], TORCH)
    assert (found.ranks, found.runs, len(found.steps)) == (2, 7, 6)
    assert median_error(found.before) > 0.5
    # Each fit leaves three of six out; parts of steps say more than whole ones.
    assert median_error(found.left_out) < (0.08 if with_parts else 0.12)
    assert median_error(found.after) < 0.05
    assert found.is_better and "7 runs of 6 layouts" in found.device.source


def test_constants_that_teach_nothing_are_not_kept(plans: list[Plan]) -> None:
    """Nothing can come nearer than what is predicted exactly."""
    plain = load_device("cpu", ranks=2)
    runs = [run_of(plan, plain) for plan in plans]
    (found,) = refits(runs, TORCH)
    assert median_error(found.before) == pytest.approx(0.0, abs=1e-6)
    assert not found.is_better


def test_too_little_is_refused_with_what_is_missing(plans: list[Plan]) -> None:
    runs = [run_of(plan, load_device("cpu", ranks=2)) for plan in plans]
    elsewhere = Machine(host="elsewhere", processor="other", cores=3)
    for some, line in (
        ([], "the history holds no run"),
        ([runs[0].model_copy(update={"machine": elsewhere})], "1 runs, none of them on this machine"),
        ([runs[0].model_copy(update={"software": {"torch": "2.0.0"}})], f"none with PyTorch {TORCH}"),
        (runs[:2] + runs[:2], f"of 2 layouts with as many ranks: at least {FEWEST_LAYOUTS} are needed"),
    ):
        with pytest.raises(InputError, match=line):
            refits(some, TORCH)


@pytest.mark.slow
def test_the_command_writes_the_file_that_plans_are_made_with(
    plans: list[Plan], planner_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr("cli.from_history.full_version", lambda: TORCH)
    code, _, err = planner_command("calibrate", "--from-history")
    assert code == 2 and "the history holds no run" in err
    for plan in plans:
        append(run_of(plan, machine_as_it_is()))
    with history_file().open("a") as file:
        file.write("torn\n")
    code, out, err = planner_command("calibrate", "--from-history", "--json")
    assert code == 0, err
    told = json.loads(out)
    assert (told["lines_left_out"], told["ranks"][0]["layouts"]) == (1, len(plans))
    errors = told["ranks"][0]["median_error_percent"]
    assert errors["left_out"] < errors["before"]
    kept = read_devices(own_file("cpu"), here=True)
    assert list(kept.devices) == [2] and "gpt2-nano" in kept.models
    code, out, _ = planner_command("calibrate", "--from-history")
    assert code == 0 and "layouts that were left out" in out

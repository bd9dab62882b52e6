"""Devices that were measured on this machine are planned with; files not to be trusted are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from costmodels import Device, Layout
from costmodels.catalogue import load_device
from costmodels.catalogue.measured_devices import Machine, MeasuredDevices, own_file
from costmodels.errors import InputError
from costmodels.spec.hardware import MeasuredCollective
from planner.api import evaluate
from planner.inputs.cluster import resolve_cluster
from planner.inputs.device import resolve_device
from tests.support.commands import Command

LAYOUT = Layout(data_parallel=2, layers_per_stage=(4,), global_batch_size=2, precision="fp32")


def measured(**changes: Any) -> MeasuredDevices:
    """This machine's CPU, with a tenth of the catalogue's FLOP/s for each of two ranks."""
    plain = load_device("cpu", ranks=2)
    device = plain.model_copy(
        update={
            "peak_flops": {"fp32": plain.peak_flops["fp32"] / 10},
            "constants": {"bundled": {"gemm": {"efficiency": 0.6}}},
            "collectives": (
                MeasuredCollective(collective="all_reduce", devices=2, nodes=1, bus_bandwidth=1e9),
            ),
            "source": "measured here",
        }
    )
    fields = {
        "machine": Machine.here(),
        "date": "2026-11-23",
        "software": {"PyTorch": "2.15"},
        "devices": {2: device},
    }
    return MeasuredDevices.model_validate(fields | changes)


def test_what_was_measured_here_is_planned_with() -> None:
    before = evaluate(LAYOUT, model="gpt2-nano", device="cpu")
    measured().save(own_file("cpu"))
    cluster = resolve_cluster("cpu", 2)
    assert cluster.device.source == "measured here" and cluster.measured == cluster.device.collectives
    after = evaluate(LAYOUT, model="gpt2-nano", device="cpu")
    assert after.time.compute > 2 * before.time.compute


def test_measured_constants_come_before_those_of_the_architecture() -> None:
    from costmodels.catalogue import load_engine

    engine = load_engine("bundled")
    assert engine.for_device(load_device("cpu")).gemm.efficiency != 0.6
    measured_engine = engine.for_device(measured().device(2))
    assert measured_engine.gemm.efficiency == 0.6
    assert measured_engine.elementwise == engine.for_device(load_device("cpu")).elementwise


def test_a_file_says_what_is_on_the_device_of_another_machine(tmp_path: Path) -> None:
    file = tmp_path / "there.json"
    measured(machine=Machine(host="there", processor="other", cores=3)).save(file)
    device = resolve_device(str(file), ranks=2)
    assert device.constants and device == measured().device(2)
    assert resolve_cluster(str(file), 2).devices_per_node == 2


def test_a_share_of_a_cpu_is_smaller_the_more_ranks_share_it() -> None:
    two, four = measured().device(2), measured().device(4)
    assert four.peak_flops["fp32"] == pytest.approx(two.peak_flops["fp32"] / 2)
    assert four.memory_bytes == pytest.approx(two.memory_bytes / 2)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    from costmodels.catalogue.measured_devices import read_devices

    measured().save(tmp_path / "cpu.json")
    assert read_devices(tmp_path / "cpu.json", here=True) == measured()


def _changed(change: Callable[[dict[str, Any]], object]) -> str:
    content = json.loads(measured().model_dump_json())
    change(content)
    return json.dumps(content)


def _device(content: dict[str, Any]) -> dict[str, Any]:
    device: dict[str, Any] = content["devices"]["2"]
    return device


WRONG: dict[str, tuple[Callable[[], str], str]] = {
    "another host": (
        lambda: _changed(lambda all_: all_["machine"].update(host="elsewhere")),
        "measured on another machine .host elsewhere",
    ),
    "other cores": (lambda: _changed(lambda all_: all_["machine"].update(cores=4096)), "cores 4096, here"),
    "cut short": (lambda: measured().model_dump_json()[:-40], "cut short"),
    "empty": (lambda: "", "cut short"),
    "no devices": (lambda: _changed(lambda all_: all_.update(devices={})), "at least 1"),
    "another list": (lambda: "[1]", "none of planner calibrate"),
    "of the future": (lambda: _changed(lambda all_: all_.update(version=7)), "version 7"),
    "negative": (
        lambda: _changed(lambda all_: _device(all_).update(memory_bandwidth=-1)),
        "devices.2.memory_bandwidth is -1",
    ),
    "not finite": (
        lambda: _changed(lambda all_: _device(all_)["peak_flops"].update(fp32=float("inf"))),
        "finite",
    ),
    "no number": (lambda: _changed(lambda all_: _device(all_).update(cores="many")), "cores is 'many'"),
    "too fast": (
        lambda: _changed(lambda all_: _device(all_)["peak_flops"].update(fp32=1e30)),
        "peak_flops fp32 of 2 ranks is 1e.30 a second, which no device has",
    ),
    "waits for ever": (
        lambda: _changed(lambda all_: _device(all_)["collectives"][0].update(latency=1e6)),
        "latency of 1e.06 s",
    ),
    "an efficiency above one": (
        lambda: _changed(lambda all_: _device(all_)["constants"]["bundled"]["gemm"].update(efficiency=3.0)),
        "constants of bundled: gemm.efficiency is 3.0",
    ),
    "a constant of none": (
        lambda: _changed(lambda all_: _device(all_)["constants"]["bundled"].update(luck={})),
        "constants of bundled: luck",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_files_that_are_not_to_be_trusted_are_refused_in_one_line(name: str) -> None:
    text, reason = WRONG[name]
    path = own_file("cpu")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text())
    with pytest.raises(InputError, match=reason) as refused:
        resolve_cluster("cpu", 2)
    assert "\n" not in str(refused.value) and re.search(r"device file|device cpu", str(refused.value))


def test_suggest_says_that_it_planned_with_measurements(planner_command: Command, tmp_path: Path) -> None:
    measured().save(own_file("cpu"))
    flags = ("--model", "gpt2-nano", "--world-size", "2", "--global-batch-size", "2", "--top", "1")
    code, out, _ = planner_command("suggest", *flags, "--device", "cpu")
    assert code == 0 and "cpu is measured here" in out
    code, _, err = planner_command("suggest", *flags, "--device", tmp_path / "none.json")
    assert code == 2 and "cannot read device file" in err and err.count("\n") == 1


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_measured_devices: None) -> None:
    """A folder of configuration of each test's own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def test_ranks_below_one_are_refused() -> None:
    with pytest.raises(InputError, match="ranks is 0"):
        measured().device(0)


def test_a_device_needs_no_measurements() -> None:
    device = load_device("h100")
    assert device.constants == {} and Device.model_validate(device.model_dump()) == device

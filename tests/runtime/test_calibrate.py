"""Layouts for calibration tell costs of features apart, and plans use the file of a calibration."""

from __future__ import annotations

from pathlib import Path

import pytest

from costmodels.catalogue import load_device, load_model
from costmodels.catalogue.measured_devices import own_file, read_devices
from costmodels.spec.table import LayoutTable
from planner.inputs.device import resolve_device
from runtime.calibrate import choice, local, result
from runtime.parallel.ranks import Ranks
from tests.support.commands import Command

RANKS = Ranks(0, 0, 2, 2)


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_measured_devices: None) -> None:
    """A folder of configuration of each test's own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def test_every_way_is_among_the_layouts_with_one_micro_batch_and_with_several() -> None:
    spec = load_model("gpt2-nano")
    table = choice.small_problem(spec, load_device("cpu", 2), RANKS).table
    chosen = [layout for _, layout in choice.in_turns([(spec, table)])]
    assert len(chosen) < len(table) / 2 and len(set(chosen)) == len(chosen)
    for has in (
        lambda one: one.tensor_parallel == 2 and one.sequence_parallel,
        lambda one: one.tensor_parallel == 2 and not one.sequence_parallel,
        lambda one: one.data_parallel == 2 and one.zero_stage == 0,
        lambda one: one.data_parallel == 2 and one.zero_stage > 0,
        lambda one: one.zero_stage == 3,
        lambda one: one.context_parallel == 2 and one.context_parallel_form == "ring",
    ):
        assert {one.micro_batches > 1 for one in chosen if has(one)} == {False, True}
    assert {one.schedule for one in chosen if one.pipeline_parallel == 2} >= {"1f1b", "zbv"}
    # A calibration that has time for few sees both kinds of batches and several ways.
    assert {one.micro_batches > 1 for one in chosen[:2]} == {False, True}


def test_experts_are_exchanged_by_ranks_of_every_degree() -> None:
    spec = load_model("gpt2-nano").model_copy(update={"experts": 4, "top_k": 2, "expert_ffn": 64})
    table = choice.small_problem(spec, load_device("cpu", 2), RANKS).table
    chosen = [layout for _, layout in choice.in_turns([(spec, table)]) if layout.expert_parallel == 2]
    degrees = ("data_parallel", "tensor_parallel", "context_parallel")
    several = {(name, one.micro_batches > 1) for one in chosen for name in degrees if getattr(one, name) == 2}
    assert several == {(name, more) for name in degrees for more in (False, True)}


def test_a_large_model_is_cut_until_its_steps_are_short() -> None:
    spec, device = load_model("gpt2-xl"), load_device("cpu", 2)
    small = choice.cut_to_size(spec, device, RANKS)
    assert small.layers == choice.LAYERS and small.hidden == spec.hidden
    assert choice.SHORTEST <= small.seq < spec.seq
    nano = load_model("gpt2-nano")
    assert choice.cut_to_size(nano, device, RANKS).seq == nano.seq


def test_models_take_turns() -> None:
    spec = load_model("gpt2-nano")
    other = spec.model_copy(update={"name": "other"})
    table = choice.small_problem(spec, load_device("cpu", 2), RANKS).table
    one = LayoutTable.of([table.layout(0)])
    assert [model.name for model, _ in choice.in_turns([(spec, table), (other, one)])][:3] == [
        "gpt2-nano",
        "other",
        "gpt2-nano",
    ]


def test_what_no_model_did_comes_before_what_another_one_did() -> None:
    spec = load_model("gpt2-nano")
    table = choice.small_problem(spec, load_device("cpu", 2), RANKS).table
    alone = [layout for _, layout in choice.in_turns([(spec, table)])]
    models = [(spec.model_copy(update={"name": name}), table) for name in ("one", "two", "three")]
    every = list(choice.in_turns(models))
    first = [layout for _, layout in every[: len(alone) + 2]]
    assert {one.tensor_parallel for one in first} == {1, 2}
    assert {one.schedule for one in first} >= {one.schedule for one in alone}
    assert {one.context_parallel_form for one in first} >= {one.context_parallel_form for one in alone}
    # In the end each model was measured doing all of it.
    assert len(set(every)) == len(every) and len(every) > 2.5 * len(alone)


@pytest.mark.ranks
def test_two_ranks_calibrate_a_tiny_model_and_plans_use_it(tmp_path: Path) -> None:
    tiny = load_model("gpt2-nano", layers=2, hidden=32, heads=2, kv_heads=2, head_dim=16, ffn=64, seq=16)
    plain = load_device("cpu", 2)
    told: list[float] = []
    found = local.measure_machine([tiny], plain, 2, 0.5, lambda share, what: told.append(share))
    assert found.products and found.attention and found.copy_bytes_per_s > 0
    assert {call.collective for call in found.calls} >= {"all_reduce"}
    assert found.steps and all(step.peak_bytes > 1e7 for step in found.steps)
    assert told == sorted(told) and told[0] == 0.0
    lines = list(result.finish(found, plain, [tiny], None))
    assert lines[-1] == f"wrote {own_file('cpu')}" and any(line.startswith("the plan ") for line in lines)
    device = resolve_device("cpu", 2)
    assert device.constants["bundled"]["gemm"] and device.context_bytes > 0
    # Another number of ranks comes beside it.
    result.keep(own_file("cpu"), 4, device, [tiny])
    assert sorted(read_devices(own_file("cpu"), here=True).devices) == [2, 4]


def test_what_was_measured_can_be_forgotten(planner_command: Command) -> None:
    code, out, _ = planner_command("calibrate", "--forget")
    assert code == 0 and "nothing was measured" in out
    device = load_device("cpu", 2).model_copy(update={"source": "measured"})
    result.keep(own_file("cpu"), 2, device, [])
    code, out, _ = planner_command("calibrate", "--forget")
    assert code == 0 and "removed" in out and not own_file("cpu").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--world-size", "two"), "expected numbers of ranks"),
        (("--world-size", "0"), "must be at least 1"),
        (("--world-size", "2,5000"), "start at most"),
        (("--model", "gpt9"), "unknown model"),
        (("--seconds", "0"), "1 to 3600"),
        (("--save", "file.yaml"), "ends in .json"),
    ],
)
def test_wrong_flags_are_refused_before_anything_is_measured(
    planner_command: Command, flags: tuple[str, str], said: str
) -> None:
    code, _, err = planner_command("calibrate", *flags)
    assert code == 2 and said in err and err.count("\n") <= 2

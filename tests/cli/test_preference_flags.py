"""The flags that say which of the plans that tie is first, and a layout that is pasted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from costmodels.catalogue import engine_names, load_engine

JOB = (
    "suggest",
    "--model",
    "llama3-8b",
    "--world-size",
    "8",
    "--device",
    "h100",
    "--global-batch-size",
    "64",
)


def first(planner_command: Any, *words: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The answer, and its first plan."""
    code, out, err = planner_command(*JOB, "--json", *words)
    assert code == 0, err
    answer = json.loads(out)
    return answer, answer["plans"][0]


def test_the_fastest_is_named_and_given_where_it_is_preferred(planner_command: Any) -> None:
    code, out, _ = planner_command(*JOB)
    assert code == 0
    said = " ".join(out.split())
    answer, simple = first(planner_command)
    other, fastest = first(planner_command, "--prefer", "fastest")
    assert (answer["prefer"], other["prefer"]) == ("simple", "fastest") and other["fastest_place"] == 1
    gain = fastest["estimate"]["tokens_per_s"] / simple["estimate"]["tokens_per_s"] - 1
    assert gain > 0 and f"{100 * gain:.1f} % faster by the estimate, " in said
    [named] = [plan for plan in answer["plans"] if plan["place"] == answer["fastest_place"]]
    chance = named["chance_faster"]
    assert f"{100 * chance:.0f} % likely to be the faster one; --prefer fastest gives it" in said
    assert named["layout"] == fastest["layout"]


def test_a_runner_up_says_how_likely_it_is_the_faster_one(planner_command: Any) -> None:
    _, out, _ = planner_command(*JOB, "--prefer", "fastest")
    answer, _ = first(planner_command, "--prefer", "fastest")
    chance = answer["plans"][1]["chance_faster"]
    assert 0.3 < chance < 0.5
    assert f"; {100 * chance:.0f} % likely to be the faster one" in " ".join(out.split())


def test_headroom_is_left(planner_command: Any) -> None:
    answer, plan = first(planner_command, "--headroom", "10%")
    limit = answer["cluster"]["memory_bytes"]
    assert answer["headroom_gib"] == pytest.approx(0.1 * limit / 2**30)
    assert plan["estimate"]["peak_memory_bytes"] <= 0.9 * limit
    assert first(planner_command)[1]["estimate"]["peak_memory_bytes"] > 0.9 * limit


def test_points_come_from_a_file(planner_command: Any, tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("kinds: {tensor_parallel: 100}\nzero_stage: {3: 0}\n")
    _, plan = first(planner_command, "--prefer", str(mine))
    assert plan["layout"]["tensor_parallel"] == 1 < first(planner_command)[1]["layout"]["tensor_parallel"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--prefer", "speed"), "prefer speed: expected one of simple, fastest, or a YAML file of points"),
        (("--headroom", "much"), "headroom 'much': expected GiB of a device to leave free"),
        (("--layout", "fast"), "layout: 'fast': expected name=value"),
    ],
)
def test_wrong_words_end_in_one_line(planner_command: Any, words: tuple[str, ...], line: str) -> None:
    code, out, err = planner_command(*JOB, *words)
    assert code == 2 and out == "" and line in err and len(err.strip().splitlines()) == 1


def test_a_printed_layout_is_planned_whole_and_with_its_batch(planner_command: Any) -> None:
    _, plan = first(planner_command, "--prefer", "fastest")
    printed = "tp=2+sp pp=2 dp=2 zero=1 mbs=2 x 8 recompute=none"
    code, out, err = planner_command(*JOB[:7], "--layout", printed, "--json")
    assert code == 0, err
    answer = json.loads(out)
    layout = answer["plans"][0]["layout"]
    assert answer["batch"]["size"] == 2 * 2 * 8
    assert (layout["tensor_parallel"], layout["sequence_parallel"], layout["schedule"]) == (2, True, "1f1b")
    assert layout["virtual_pipeline_parallel"] == 1 and layout["recompute"] == "none"
    # Without the number of microbatches it is a part of a layout, and --pin takes the same.
    for words in (("--layout", "tp=2+sp pp=2"), ("--pin", "tp=2+sp pp=2")):
        answer, part = first(planner_command, *words)
        assert (part["layout"]["tensor_parallel"], part["layout"]["pipeline_parallel"]) == (2, 2)
        assert answer["batch"]["size"] == 64
    assert plan["layout"]["tensor_parallel"] == 1


def test_a_layout_that_names_its_micro_batches_takes_all_devices(planner_command: Any) -> None:
    code, out, err = planner_command(*JOB[:7], "--layout", "pp=2 mbs=1 x 8", "--json")
    assert code == 0, err
    answer = json.loads(out)
    layout = answer["plans"][0]["layout"]
    assert (layout["tensor_parallel"], layout["pipeline_parallel"], layout["data_parallel"]) == (1, 2, 4)
    assert answer["batch"]["size"] == 4 * 8
    code, _, err = planner_command(*JOB[:7], "--layout", "tp=3 mbs=1 x 8")
    assert code == 2 and "--layout tp=3 mbs=1 x 8: its other degrees take 3 devices: no divisor of" in err


DEVICES = {"mindspeed": "ascend-910b-64g", "mindformers": "ascend-910b-64g"}
"""Devices of engines that do not run on a GPU of NVIDIA's."""

RUNS = {
    "bundled": "launch --plan",
    "megatron": "script",
    "mindspeed": "script",
    "nemo": "megatron-bridge",
    "fsdp": "torchtitan",
    "mindformers-dynamic": "mindformers",
}
"""A word of the command, where it is not the engine's name."""


@pytest.mark.parametrize("engine", engine_names())
def test_the_line_that_runs_a_plan_is_a_command_that_works(
    planner_command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.chdir(tmp_path)  # Long paths are cut where lines end.
    device = DEVICES.get(engine.partition("-")[0], "h100")
    file = "plan.json"
    asked = ("--model", "gpt2-medium", "--world-size", "4", "--device", device, "--global-batch-size", "16")
    code, out, err = planner_command("suggest", *asked, "--engine", engine, "--save", file)
    assert code == 0, err
    [run] = re.findall(r"run: planner (.*?)(?: on each| \(after|\n\n)", out, re.DOTALL)
    words = run.split()
    run = " ".join(words)
    assert RUNS.get(engine, "to") in run and "NAME" not in words
    if engine == "bundled":
        assert run == f"launch --plan {file}"
        return
    code, out, err = planner_command(*words)
    assert code == 0 and out, err


def test_a_plan_without_words_is_run_as_the_nearest_job(
    planner_command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = "plan.json"
    asked = (*JOB, "--engine", "mindformers-dynamic", "--device", "ascend-910b-64g", "--save", file)
    code, out, err = planner_command(*asked, "--pin", "cp=2 cp_form=ring")
    assert code == 0, err
    assert f"run: planner export {file} --to mindformers --nearest" in " ".join(out.split())
    assert planner_command("export", file, "--to", "mindformers")[0] == 5
    assert planner_command("export", file, "--to", "mindformers", "--nearest")[0] == 0


def test_an_engine_of_ones_own_names_what_plans_can_be_written_for(
    planner_command: Any, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(load_engine("megatron").model_copy(update={"name": "mine"}).model_dump_json())
    code, out, err = planner_command(*JOB, "--engine", str(mine))
    assert code == 0, err
    assert "run: planner export plan.json --to NAME, one of megatron, megatron-bridge, " in " ".join(
        out.split()
    )


def test_the_flags_that_are_named_give_the_fastest(planner_command: Any) -> None:
    asked = ("--prefer", "fastest", "--headroom", "10%")
    code, out, _ = planner_command(*JOB, *asked)
    assert code == 0
    # A plan that leaves too little memory is not first although the fastest is preferred.
    assert "the faster one; --headroom 0 gives it" in " ".join(out.split())
    answer, _ = first(planner_command, *asked)
    [fastest] = [plan for plan in answer["plans"] if plan["place"] == answer["fastest_place"] != 1]
    _, plan = first(planner_command, *asked[:2], "--headroom", "0")
    assert plan["layout"] == fastest["layout"]
    _, out, _ = planner_command(*JOB, "--headroom", "10%")
    assert "the faster one; --prefer fastest --headroom 0 gives it" in " ".join(out.split())


def test_headroom_that_no_plan_leaves_is_said(planner_command: Any) -> None:
    answer, plan = first(planner_command, "--headroom", "70")
    left = (answer["cluster"]["memory_bytes"] - plan["estimate"]["peak_memory_bytes"]) / 2**30
    assert left < 70
    [note] = [note for note in answer["notes"] if note.startswith("headroom of ")]
    assert note.startswith(f"headroom of 70.0 GiB: the plan leaves {left:.1f} GiB, and no plan ")
    assert not [note for note in first(planner_command)[0]["notes"] if note.startswith("headroom of ")]

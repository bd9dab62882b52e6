"""`planner check` as a user types it: what it prints for people and for programs, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner import Plan
from tests.support.commands import Command

SCRIPT = """#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
TP=8
ARGS="
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 11008
    --seq-length 4096 --max-position-embeddings 4096 --vocab-size 32000 --swiglu --bf16
    --tensor-model-parallel-size $TP
    --micro-batch-size 1 --global-batch-size 64
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
"
torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py $ARGS --lr 1e-4
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script of Megatron-LM that runs, and badly."""
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT)
    return path


def test_it_says_what_would_be_better_as_flags(planner_command: Command, script: Path) -> None:
    saved = script.with_name("best.json")
    code, out, err = planner_command("check", script, "--device", "a100-80g", "--save", saved)
    assert (code, err) == (0, "")
    assert "legal: yes   fits: yes" in out
    assert "as it is: tp=8 pp=1 dp=2 zero=0 mbs=1 x 32 recompute=full" in out
    assert "- --recompute-method uniform   (line 9)" in out
    assert "x the tokens/s" in out
    best = Plan.load(saved)
    assert best.engine.name == "megatron" and f"best:     {best.layout.describe()}" in out


def test_json_holds_everything(planner_command: Command, script: Path) -> None:
    code, out, _ = planner_command("check", script, "--json", "--device", "a100-80g")
    answer = json.loads(out)
    assert code == 0
    assert (answer["framework"], answer["legal"], answer["fits"]) == ("megatron", True, True)
    assert answer["gain"] > 1.05
    assert answer["plan"]["layout"]["tensor_parallel"] == 8
    assert answer["step_time_s"] == answer["plan"]["estimate"]["step_time_s"]
    assert answer["best"]["estimate"]["step_time_s"] * answer["gain"] == pytest.approx(answer["step_time_s"])
    assert {"flag": "--tensor-model-parallel-size", "before": "8", "line": 7}.items() <= answer["changes"][
        0
    ].items()
    assert answer["flags"]["training"] == ["--lr"]


def test_what_does_not_fit_ends_with_3_and_says_what_it_lacks(planner_command: Command, script: Path) -> None:
    script.write_text(
        SCRIPT.replace("TP=8", "TP=1")
        .replace("--recompute-granularity full", "")
        .replace("--recompute-method uniform --recompute-num-layers 1", "")
    )
    code, out, _ = planner_command("check", script, "--device", "a100-40g")
    assert code == 3
    assert "fits: no" in out and "too_big: " in out and "lacks" in out
    assert "best:     tp=" in out


def test_what_is_illegal_ends_with_2_and_names_the_line(planner_command: Command, script: Path) -> None:
    script.write_text(SCRIPT.replace("TP=8", "TP=5"))
    code, out, _ = planner_command("check", script, "--device", "a100-80g")
    assert code == 2
    assert (
        f"illegal: {script}:7: --tensor-model-parallel-size: 16 devices are not a multiple of tensor 5" in out
    )
    assert "best:     tp=" in out


def test_software_that_is_known_and_not_read_is_one_line(planner_command: Command, tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    file.write_text("model: {_component_: torchtune.models.llama3.llama3_8b}\nbatch_size: 2\n")
    code, out, err = planner_command("check", file)
    assert (code, out) == (2, "")
    assert f"file {file} is of torchtune, whose files are not read" in err and len(err.splitlines()) == 1


def test_what_is_not_said_is_asked_for(planner_command: Command, script: Path) -> None:
    script.write_text(SCRIPT.replace("--nnodes 2", "--nnodes $NODES"))
    code, out, _ = planner_command("check", script)
    assert code == 2 and "${NODES} is not set in the file; give --world-size" in out
    code, out, _ = planner_command("check", script, "--define", "NODES=2")
    assert code == 2 and "legal: yes   fits: not known" in out and "give --device" in out
    assert "as read: tp=8" in out and "best:" not in out
    code, out, _ = planner_command("check", script, "--define", "NODES=2", "--device", "a100-80g")
    assert code == 0 and "fits: yes" in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "Missing argument"),
        (("none.sh",), "cannot read file none.sh"),
        (("SCRIPT", "--define", "5"), "NAME=VALUE"),
        (("SCRIPT", "--device", "nvidia"), "unknown device"),
        (("SCRIPT", "--engine", "mindspeed"), "does not run on a100-80g"),
    ],
)
def test_wrong_input_is_one_line(
    planner_command: Command, script: Path, arguments: tuple[str, ...], expected: str
) -> None:
    words = [str(script) if word == "SCRIPT" else word for word in arguments]
    code, out, err = planner_command("check", *words)
    assert (code, out) == (2, "")
    assert expected in err and len(err.splitlines()) == 1


def test_what_would_fit_is_said_in_flags_of_the_script(planner_command: Command, script: Path) -> None:
    script.write_text(
        SCRIPT.replace("TP=8", "TP=4")
        .replace("--micro-batch-size 1", "--micro-batch-size 8")
        .replace("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", "")
    )
    code, out, _ = planner_command("check", script, "--device", "a100-80g", "--json")
    answer = json.loads(out)
    assert code == 3 and answer["proposals"]
    whole = answer["plan"]["layout"]
    for one in answer["proposals"]:
        differ = {name for name, value in one["layout"].items() if value != whole[name]}
        saved = ("recompute", "zero_", "offload_", "micro_batch", "sequence_")
        assert differ and all(name.startswith(saved) for name in differ)
        assert one["peak_memory_bytes"] <= answer["plan"]["cluster"]["memory_bytes"]
    [recompute] = [one for one in answer["proposals"] if "recomputation" in one["what"]]
    flags = [change["flag"] for change in recompute["changes"]]
    assert flags and all(flag.startswith("--recompute") for flag in flags)
    # Written into the script, they make a job that fits and takes as long as was said.
    changed = " ".join(f"{one['flag']} {one['after']}" for one in recompute["changes"])
    script.write_text(script.read_text().replace("--bf16", f"--bf16 {changed}"))
    code, again, _ = planner_command("check", script, "--device", "a100-80g", "--json")
    assert code == 0 and json.loads(again)["step_time_s"] == pytest.approx(recompute["step_time_s"])
    _, shown, _ = planner_command("check", script, "--device", "a100-40g")
    assert "changes that would fit, the smallest of each kind:" in shown


def test_the_best_plan_is_the_one_that_suggest_names(planner_command: Command, script: Path) -> None:
    _, out, _ = planner_command("check", script, "--device", "a100-80g", "--json")
    dims = SCRIPT[SCRIPT.index("--num-layers") : SCRIPT.index("--tensor-model")].split()
    asked = ("suggest", *dims, "--world-size", "16", "--local-world-size", "8", "--device", "a100-80g")
    code, plans, err = planner_command(*asked, "--global-batch-size", "64", "--engine", "megatron", "--json")
    assert code == 0, err
    assert json.loads(out)["best"]["layout"] == json.loads(plans)["plans"][0]["layout"]


def test_where_no_layout_of_the_job_fits_other_jobs_are_proposed(
    planner_command: Command, script: Path
) -> None:
    small = SCRIPT.replace("--nnodes 2", "--nnodes 1").replace("--nproc_per_node 8", "--nproc_per_node 2")
    script.write_text(small.replace("--num-layers 32", "--num-layers 96").replace("TP=8", "TP=2"))
    code, out, _ = planner_command("check", script, "--device", "a100-40g", "--json")
    answer = json.loads(out)
    assert code == 3 and answer["best"] is None
    assert "devices" in [one["kind"] for one in answer["proposals"]]

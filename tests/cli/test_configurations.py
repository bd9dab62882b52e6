"""Configurations of other software: converted, and trained in small, from the files as they stand."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from tests.support.commands import Command, told
from tests.support.guides import guide

SCRIPT = """
torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 8 --hidden-size 1024 --num-attention-heads 8 \\
  --seq-length 2048 --max-position-embeddings 2048 --vocab-size 32000 --micro-batch-size 1 \\
  --global-batch-size 16 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \\
  --use-distributed-optimizer --lr 1e-4 --train-iters 500 --clip-grad 2.5 --some-flag-of-mine 3 --bf16
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script of Megatron-LM for eight devices."""
    file = tmp_path / "train.sh"
    file.write_text(SCRIPT)
    return file


def test_a_script_becomes_a_file_of_other_software(
    planner_command: Command, script: Path, tmp_path: Path
) -> None:
    out_file = tmp_path / "deepspeed.json"
    words = ("convert-config", script, "--to", "deepspeed", "--out", out_file)
    code, out, err = planner_command(*words)
    assert (code, out) == (5, "") and "pipeline_parallel=2" in err and not out_file.exists()
    code, out, err = planner_command(*words, "--nearest")
    assert (code, out) == (0, "") and f"saved {out_file}" in err
    assert json.loads(out_file.read_text())["train_batch_size"] == 16
    assert "not expressible in deepspeed: pipeline_parallel=2: stages are made in code" in err
    assert "not converted: --lr 1e-4 --train-iters 500 --clip-grad 2.5" in err


def test_flags_of_training_go_along_between_megatrons(planner_command: Command, script: Path) -> None:
    code, out, err = planner_command("convert-config", script, "--to", "mindspeed")
    words = shlex.split(out)
    assert code == 0 and words[words.index("--clip-grad") + 1] == "2.5" and "not converted" not in err
    assert words[words.index("--tensor-model-parallel-size") + 1] == "2"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("none.sh", "--to", "megatron"), "none.sh"),
        (("SCRIPT",), "--to is missing: expected megatron"),
        (("SCRIPT", "--to", "deepsped"), "did you mean deepspeed?"),
        (("SCRIPT", "--to", "nanotron", "--world-size", "6"), "6 devices are not a multiple of"),
    ],
)
def test_what_cannot_be_converted_is_one_line(
    planner_command: Command, script: Path, arguments: tuple[str, ...], expected: str
) -> None:
    code, out, err = planner_command(
        "convert-config", *(script if word == "SCRIPT" else word for word in arguments)
    )
    assert (code, out) == (2, "") and expected in err and len(err.splitlines()) == 1


def test_what_is_otherwise_here_is_listed_first(planner_command: Command, script: Path) -> None:
    words = ["--config", script, "--scale-down", "2", "--device", "cpu", "--print-command"]
    code, out, err = planner_command("launch", *words)
    assert code == 0 and told(err) == ""
    assert "(megatron): settings that differ here" in out.splitlines()[0]
    assert "--some-flag-of-mine" in out and "hidden 1024 ->" in out
    assert out.splitlines()[-1] == "layout: tp=2 pp=1 dp=1 zero=0 mbs=1 x 2 recompute=none"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--scale-down", "2"), "--scale-down is about the files of --config"),
        (("--config", "SCRIPT", "--plan", "p.json"), "both say the layout; give one"),
        (
            ("--config", "SCRIPT", "--tp", "2"),
            "--config decides model, batch and layout: --tensor-model-parallel-size",
        ),
        (("--config", "SCRIPT", "--scale-down", "0"), "--scale-down 0"),
        (("--config", "SCRIPT"), "is for 8 devices, and this machine has"),
        (("--config", "none.sh"), "none.sh"),
    ],
)
def test_wrong_flags_beside_a_configuration_are_one_line(
    planner_command: Command, script: Path, arguments: tuple[str, ...], expected: str
) -> None:
    words = [script if word == "SCRIPT" else word for word in arguments]
    code, _, err = planner_command("launch", *words, "--device", "cpu", "--print-command")
    assert code == 2 and expected in told(err) and len(told(err).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "ranks", "layout"),
    [
        ("mindformers-gpt2-13b.txt", 8, "tp=2 pp=2 dp=2 zero=1 mbs=2 x 4 recompute=full"),
        ("mindformers-dynamic-gpt.txt", 2, "tp=1 pp=1 dp=1 zero=0 mbs=1 x 2 recompute=none"),
        ("pai-llmacc.txt", 2, "layout: tp="),
    ],
)
def test_guides_are_jobs_in_small(planner_command: Command, name: str, ranks: int, layout: str) -> None:
    words = ["--config", guide(name), "--scale-down", ranks, "--device", "cpu", "--print-command"]
    code, out, _ = planner_command("launch", *map(str, words))
    assert code == 0 and layout in out.splitlines()[-1]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "ranks", "layout"),
    [
        ("mindformers-gpt2-13b.txt", 4, "tp=2 pp=2 dp=1 zero=0 mbs=2 x 4 recompute=full"),
        ("mindformers-dynamic-gpt.txt", 1, "tp=1 pp=1 dp=1 zero=0 mbs=1 x 2 recompute=none"),
        ("mindspeed-moe.txt", 4, "recompute=selective(activation) offload=activations"),
        ("pai-llmacc.txt", 2, "on 2 x cpu"),
    ],
)
def test_guides_train_in_small(
    planner_command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    ranks: int,
    layout: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--config", guide(name), "--scale-down", ranks, "--device", "cpu"]
    code, out, err = planner_command(
        "launch", *map(str, words), "--train-iters", "2", "--eval-iters", "0", "--log-dir", "logs"
    )
    assert code == 0, err
    assert layout in out
    records = [json.loads(line) for line in (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()]
    assert [record["iteration"] for record in records if "lm_loss" in record or "loss" in record][-1] == 2


FAKE = """
import json, os, sys
rank = os.environ["RANK"]
with open(os.path.join(os.environ["RECORDS"], rank), "w") as file:
    json.dump({"argv": sys.argv[1:], "world": os.environ["WORLD_SIZE"]}, file)
"""


@pytest.fixture
def pretrain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script in the place of another software's, which records what it is given."""
    file = tmp_path / "pretrain_gpt.py"
    file.write_text(FAKE)
    (tmp_path / "records").mkdir()
    monkeypatch.setenv("RECORDS", str(tmp_path / "records"))
    monkeypatch.chdir(tmp_path)
    return file


JOB = [
    "--num-layers",
    "4",
    "--hidden-size",
    "256",
    "--num-attention-heads",
    "8",
    "--seq-length",
    "512",
    "--global-batch-size",
    "8",
]


@pytest.mark.ranks
def test_a_script_of_other_software_is_run_with_the_flags_of_the_plan(
    planner_command: Command, pretrain: Path, tmp_path: Path
) -> None:
    words = [*JOB, "--world-size", "2", "--device", "h100", "--engine", "megatron", "--script", str(pretrain)]
    code, out, _ = planner_command(
        "launch", *words, "--tp", "2", "--lr", "3e-4", "--script-args", "--mock-data --vocab-file 'a b'"
    )
    assert code == 0 and out.startswith("layout: tp=2")
    records = [json.loads((tmp_path / "records" / str(rank)).read_text()) for rank in range(2)]
    assert records[0] == records[1] and records[0]["world"] == "2"
    given = records[0]["argv"]
    assert given[given.index("--tensor-model-parallel-size") + 1] == "2"
    assert given[given.index("--lr") + 1] == "0.0003" and given[-3:] == ["--mock-data", "--vocab-file", "a b"]


def test_software_that_takes_a_file_is_given_one(
    planner_command: Command, pretrain: Path, tmp_path: Path
) -> None:
    words = [
        *JOB,
        "--world-size",
        "2",
        "--device",
        "h100",
        "--engine",
        "deepspeed",
        "--script",
        str(pretrain),
    ]
    code, out, err = planner_command("launch", *words, "--log-dir", "logs", "--lr", "3e-4", "--print-command")
    assert code == 0 and out.endswith("--deepspeed_config logs/deepspeed.json\n")
    assert "not passed on to" in err and "--lr" in err and not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--script", "none.py", "--engine", "megatron"), "--script none.py: no such file"),
        (("--script", "SCRIPT"), "--script runs other software than bundled; give --engine"),
        (
            ("--script", "SCRIPT", "--engine", "bloom"),
            "--engine bloom: scripts of it are not started from here",
        ),
        (("--script-args", "x"), "--script-args is for the script of --script"),
    ],
)
def test_scripts_that_cannot_be_run_are_one_line(
    planner_command: Command, pretrain: Path, arguments: tuple[str, ...], expected: str
) -> None:
    words = [str(pretrain) if word == "SCRIPT" else word for word in arguments]
    job = (*JOB, "--world-size", "2", "--device", "h100")
    code, out, err = planner_command("launch", *job, *words)
    assert (code, out) == (2, "") and expected in told(err) and len(told(err).splitlines()) == 1

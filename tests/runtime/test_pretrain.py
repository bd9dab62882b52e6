"""`runtime.pretrain` as PAI's guide types it: inside torchrun it trains, outside of it it plans."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import planner
from planner.options.flags import run
from planner.plan import Plan
from runtime import entry, pretrain
from runtime.parallel.ranks import Ranks
from runtime.world.membership import RANK_VARIABLES
from tests.support.models import MODELS

GUIDE = ("--task-type", "llmacc.megatron.GPT", "--max-global-batch-size", "16", "--train-iters", "5")


@pytest.mark.parametrize("launched", [False, True])
def test_flags_of_several_ranks_are_a_question_where_nobody_starts_ranks(
    launched: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (*RANK_VARIABLES, "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    if launched:
        # The flags contradict the one rank that a launcher has started.
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "1")
    words = [*GUIDE, "--world-size", "64", "--local-world-size", "8"]
    became: list[list[str]] = []

    def become(program: str, command: list[str]) -> None:
        became.append(command)
        raise SystemExit(0)

    trained: list[object] = []
    monkeypatch.setattr(os, "execv", become)
    monkeypatch.setattr(pretrain, "train", lambda job: trained.append(job) or 0)
    monkeypatch.setattr(sys, "argv", ["runtime.pretrain", *words])
    with pytest.raises(SystemExit):
        run(pretrain.app, "runtime.pretrain")
    assert len(trained) == launched
    assert became == ([] if launched else [entry.command("planner", "suggest", *words)])
    assert launched or "nothing is trained; the plan for these flags" in capsys.readouterr().err


COUNTED = """\
import os, sys
def hook(event, arguments):
    if event == "open" and str(arguments[0]).endswith("plan.json"):
        os.write(2, b"opens the plan\\n")
sys.addaudithook(hook)
from runtime import pretrain
pretrain.main()
"""


@pytest.mark.ranks
def test_the_first_rank_reads_a_plan_once(tmp_path: Path) -> None:
    spec = MODELS["gpt2"].model_copy(update={"vocab": 300})
    plan = planner.suggest(model=spec, world_size=1, device="cpu", global_batch_size=4)
    plan.save(tmp_path / "plan.json")
    words = ["--plan", str(tmp_path / "plan.json"), "--train-iters", "1", "--log-dir", str(tmp_path / "run")]
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", COUNTED, *words],
        env={**os.environ, **rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("opens the plan") == 1


def test_other_ranks_read_a_plan_where_they_might_use_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(Plan, "load", lambda path: read.append(path))
    job: Any = SimpleNamespace(run=SimpleNamespace(plan="plan.json"))
    for rank, devices in ((0, 0), (1, 0), (1, 1)):
        monkeypatch.setattr(pretrain, "local_device_count", lambda devices=devices: devices)
        pretrain.given_plan(job, Ranks(rank, rank, 2, 2))
        read.append(f"rank {rank}")
    assert read == ["plan.json", "rank 0", "rank 1", "plan.json", "rank 1"]

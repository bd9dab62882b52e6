"""`runtime.pretrain` as PAI's guide types it: inside torchrun it trains, outside of it it plans."""

from __future__ import annotations

import os
import sys

import pytest

from planner.options.flags import run
from runtime import entry, pretrain
from runtime.world.membership import RANK_VARIABLES

GUIDE = ("--task-type", "llmacc.megatron.GPT", "--max-global-batch-size", "16", "--train-iters", "5")


@pytest.mark.parametrize("launched", [False, True])
def test_flags_of_several_ranks_are_a_question_where_nobody_starts_ranks(
    launched: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (*RANK_VARIABLES, "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    if launched:
        # Of one rank that a launcher has started, the flags contradict it.
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

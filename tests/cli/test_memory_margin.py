"""`--memory-margin-gib` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

from planner import Plan
from tests.support.commands import Command

GIB = 2**30

JOB = (
    *("suggest", "--model", "llama-nano", "--world-size", "8", "--device", "a100-80g"),
    *("--global-batch-size", "16", "--top", "1"),
)


def test_the_margin_reaches_the_plan_and_its_file(planner_command: Command, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    code, out, _ = planner_command(*JOB, "--memory-margin-gib", "2.5", "--json", "--save", str(file))
    assert code == 0
    shown = json.loads(out)
    assert shown["cluster"]["memory_margin_bytes"] == 2.5 * GIB
    assert {stage["margin"] for stage in shown["plans"][0]["estimate"]["memory"]} == {2.5 * GIB}
    assert Plan.load(file).cluster.memory_margin_bytes == 2.5 * GIB


def test_the_report_says_what_memory_is_made_of(planner_command: Command) -> None:
    usual, told = (
        " ".join(planner_command(*JOB, "--verbose", *flags)[1].split())
        for flags in ((), ("--memory-margin-gib", "2"))
    )
    assert "tensors at the peak, the allocator's reserve, driver context and communicators" in usual
    assert "margin" not in usual
    assert "tensors at the peak, the margin given" in told
    assert "reserve" not in told


def test_zero_leaves_tensors_alone_and_less_is_refused(planner_command: Command) -> None:
    code, out, _ = planner_command(*JOB, "--memory-margin-gib", "0", "--json")
    assert code == 0
    stages = json.loads(out)["plans"][0]["estimate"]["memory"]
    extra = ("reserve", "context", "communicators", "margin")
    assert all(stage[part] == 0 for stage in stages for part in extra)
    code, _, err = planner_command(*JOB, "--memory-margin-gib", "-1")
    assert code == 2
    assert err == (
        "planner: error: --memory-margin-gib -1: expected a number of GiB of at least 0, such as 2\n"
    )


def test_a_plan_file_has_a_margin_of_its_own(planner_command: Command, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    assert planner_command(*JOB, "--device", "cpu", "--world-size", "1", "--save", str(file))[0] == 0
    code, _, err = planner_command(
        "launch", "--plan", str(file), "--memory-margin-gib", "1", "--print-command"
    )
    assert code == 2
    assert "--memory-margin-gib cannot change it" in err


def test_launch_hands_the_margin_to_the_ranks_that_plan(planner_command: Command) -> None:
    flags = ("--model", "llama-nano", "--device", "cpu", "--world-size", "1", "--global-batch-size", "2")
    code, out, _ = planner_command("launch", *flags, "--memory-margin-gib", "0.5", "--print-command")
    assert code == 0
    assert "--memory-margin-gib 0.5" in out

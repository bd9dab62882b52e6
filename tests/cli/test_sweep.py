"""`planner sweep`: what is measured, what is not measured again, and what a run that fails costs."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cli.sweep
from planner.plan import Plan
from runtime.job.measurement import Measurement
from runtime.launch.supervisor import JobStopped
from runtime.launch.trials import Trial
from runtime.launch.warm_ranks import WarmRanks
from tests.support.commands import Command

SMALL = ("--device", "cpu", "--world-size", "2", "--global-batch-size", "4", "--seq-length", "32", "--fp32")

Tries = list[Plan]


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tries]:
    """Replaces the runs: each measures at once, but for those that are told to fail or to be stopped."""
    monkeypatch.setattr(WarmRanks, "prepare", lambda self, ranks: None)

    def install(fails: int = -1, stops: int = -1) -> Tries:
        seen: Tries = []

        def run(plan: Plan, steps: int, *_: Any) -> Trial:
            seen.append(plan)
            if len(seen) - 1 == stops:
                raise JobStopped(signal.SIGTERM)
            if len(seen) - 1 == fails:
                return Trial(plan, None, "rank 1 was killed by SIGKILL")
            return Trial(plan, Measurement(0.5 / len(seen), 2**30))

        monkeypatch.setattr(cli.sweep, "try_plan", run)
        return seen

    return install


def test_layouts_and_models_are_measured_once(
    planner_command: Command, tmp_path: Path, tries: Callable[..., Tries]
) -> None:
    words = ["sweep", *SMALL, "--layout", "dp=2", "--layout", "tp=2", "--out", tmp_path / "results"]
    seen = tries()
    code, out, err = planner_command(*words, "--models", "gpt2-nano,llama-nano")
    assert (code, err) == (0, "")
    assert [(plan.model.name.split()[0], plan.layout.tensor_parallel) for plan in seen] == [
        *(("gpt2-nano", 1), ("gpt2-nano", 2), ("llama-nano", 1), ("llama-nano", 2)),
    ]
    # One table, the fastest of each model first.
    table = out[out.index("predicted s") :]
    assert table.index("0.25") < table.index("0.5") and "tokens/s" in table
    seen = tries()
    code, out, _ = planner_command(*words, "--models", "gpt2-nano,llama-nano,gpt2-small")
    assert code == 0 and out.count("measured before: ") == 4
    assert {plan.model.name.split()[0] for plan in seen} == {"gpt2-small"}
    # Other steps, or other flags of training, are other runs.
    seen = tries()
    assert planner_command(*words, "--models", "gpt2-nano", "--steps", "7")[0] == 0 and len(seen) == 2


def test_a_sweep_that_was_stopped_goes_on(
    planner_command: Command, tmp_path: Path, tries: Callable[..., Tries]
) -> None:
    words = ["sweep", *SMALL, "--model", "gpt2-nano", "--plans", "3", "--out", tmp_path / "results"]
    assert len(tries(stops=1)) == 0
    code, out, err = planner_command(*words)
    assert code == 143 and "stopped by SIGTERM; the same command goes on" in err and "predicted s" in out
    file = tmp_path / "results" / "sweep.jsonl"
    assert len(file.read_text().splitlines()) == 1
    file.write_text(file.read_text() + '{"key": "half a li')
    seen = tries()
    code, out, _ = planner_command(*words)
    assert code == 0 and out.count("measured before: ") == 1 and len(seen) == 2
    kept = [line for line in file.read_text().splitlines() if not line.startswith('{"key": "half')]
    assert len([json.loads(line) for line in kept]) == 3


def test_runs_that_fail_are_named_and_tried_again(
    planner_command: Command, tmp_path: Path, tries: Callable[..., Tries]
) -> None:
    words = ["sweep", *SMALL, "--model", "gpt2-nano", "--out", tmp_path / "results"]
    tries(fails=0)
    code, out, _ = planner_command(*words, "--layout", "dp=2", "--layout", "tp=3", "--layout", "tp=2")
    assert code == 0 and "as tp=3: tensor_parallel 3 does not divide" in out
    assert re.search(r" dp=2 .* recompute=none: rank 1 was killed by SIGKILL", out)
    seen = tries()
    assert planner_command(*words, "--layout", "dp=2", "--layout", "tp=2")[0] == 0 and len(seen) == 1
    code, _, err = planner_command(*words, "--layout", "tp=3")
    assert code == 2 and "no run of this sweep has measured anything" in err
    code, _, err = planner_command(*words, "--layout", "tp=2", "--plans", "2")
    assert code == 2 and "a layout has one plan; give either" in err

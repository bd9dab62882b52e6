"""Ends of commands when nobody reads, the disk is full, or Ctrl-C comes: in a line or without a word."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cli import generate
from cli.status import Status
from cli.tables import console
from planner import Plan
from runtime.generation import command
from runtime.generation.generate_options import GenerateOptions
from runtime.parallel.ranks import wait_for_ranks
from runtime.processes.pools import brief_pool
from tests.support import ROOT
from tests.support.commands import Command

SUGGEST = (
    *("suggest", "--model", "gpt2-small", "--world-size", "2", "--device", "h100"),
    *("--global-batch-size", "8"),
)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full to write to")
@pytest.mark.parametrize("words", [SUGGEST, (*SUGGEST, "--json")])
def test_a_full_disk_under_the_answer_is_one_line(
    planner_command: Command, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        code, _, err = planner_command(*words)
    assert code == 1
    assert err == "planner: error: standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize("words", [SUGGEST, (*SUGGEST, "--json")])
def test_a_reader_that_went_away_ends_a_command_as_it_does_any(
    planner_command: Command, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        code, _, err = planner_command(*words)
    assert (code, err) == (141, "")


def test_a_plan_is_saved_though_nobody_reads_the_answer(
    planner_command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        code, _, err = planner_command(*SUGGEST, "--save", plan)
    assert (code, err) == (141, f"planner: saved {plan}\n")
    assert Plan.load(plan).layout.world_size == 2


def test_no_columns_are_no_reason_to_print_nothing(
    planner_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    assert console().width > 20
    code, out, _ = planner_command(*SUGGEST)
    assert code == 0 and "memory" in out


@pytest.mark.parametrize("seed", ["-1", "4294967296", "99999999999999999999"])
def test_seeds_out_of_range_are_one_line(planner_command: Command, seed: str) -> None:
    launch = ("launch", "--model", "gpt2-nano", "--device", "cpu", "--global-batch-size", "4")
    code, _, err = planner_command(*launch, "--seed", seed)
    assert code == 2
    assert f"--seed {seed}: must be a whole number from 0 to 4294967295\n" in err


def test_a_negative_seed_of_draws_is_refused_before_anything_is_read(planner_command: Command) -> None:
    code, _, err = planner_command("generate", "--load", "nowhere", "--prompt", "x", "--seed", "-1")
    assert code == 2 and err.count("\n") == 1
    assert "--seed -1: must be a whole number from 0" in err


def test_ctrl_c_during_the_imports_ends_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "interrupted.py").write_text(
        "import os, signal\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    signal.pause()\n"
        "except BaseException:\n"
        "    print('caught')\n"
    )
    # A shell that runs the tests in the background has its processes ignore Ctrl-C.
    text = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from cli import main; main.COMMANDS['suggest'] = 'interrupted'; main.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", text, "suggest"],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def _blocked() -> bool:
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, set())


@pytest.mark.slow
def test_ctrl_c_leaves_workers_to_who_started_them() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, set())
    processes: list[Any] = []
    with pytest.raises(KeyboardInterrupt), brief_pool(1) as pool:
        assert pool.submit(_blocked).result()
        processes.extend(pool._processes.values())
        pool.submit(time.sleep, 1e6)
        raise KeyboardInterrupt
    assert signal.pthread_sigmask(signal.SIG_BLOCK, set()) == before
    # The pool's own thread may be about to note what it waited for.
    ends = time.monotonic() + 30
    while (codes := [process.exitcode for process in processes]) == [None] and time.monotonic() < ends:
        time.sleep(0.01)
    assert codes == [-signal.SIGTERM]


@pytest.mark.slow
def test_locks_of_workers_are_not_reported_as_lost() -> None:
    """tqdm, where it is installed, makes such a lock for PyTorch's progress bars."""
    lock = "import multiprocessing; multiprocessing.kept = multiprocessing.RLock()"
    text = (
        "from runtime.processes.pools import brief_pool\n"
        "with brief_pool(1) as pool:\n"
        f"    pool.submit(exec, {lock!r}).result()\n"
    )
    done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_generation_says_what_it_waits_for(planner_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(options: GenerateOptions, waiting: Status) -> None:
        waiting.tell("reading the model")
        waiting.clear()
        print("text")

    monkeypatch.setattr(command, "run", run)
    monkeypatch.setattr("cli.generate.check_model_folder", lambda folder, step: None)
    assert vars(generate)["Status"] is Status
    code, out, err = planner_command("generate", "--load", "x", "--prompt", "y")
    assert (code, out) == (0, "text\n")
    assert err == "planner: loading PyTorch\nplanner: reading the model\n"


def test_ranks_on_gpus_meet_on_the_one_that_is_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch without a device warns that it guesses: `barrier(): using the device under current context`."""
    given: list[Any] = []
    monkeypatch.setattr(dist, "barrier", lambda device_ids=None: given.append(device_ids))
    wait_for_ranks(torch.device("cuda", 3))
    wait_for_ranks(torch.device("cpu"))
    assert given == [[3], None]

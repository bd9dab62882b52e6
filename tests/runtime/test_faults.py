"""Hung and failing ranks, slow ones, and steps that must not change the weights."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from costmodels.errors import InputError
from runtime.faults import heartbeat
from runtime.faults.fault_options import FaultOptions
from runtime.faults.step_guard import FEWEST_NORMS, StepGuard, TrainingDiverged
from runtime.faults.stragglers import (
    FEWEST_SAMPLES,
    Sampler,
    Work,
    has_enough_samples,
    slowest_rank,
    straggler_line,
)
from runtime.faults.watchdog import Beat, hang_report
from runtime.logs import console
from runtime.logs.line_file import LineFile, keep_lines, read_lines
from runtime.settings.loss_scale import LossScale
from runtime.train.trainer import Trainer
from tests.support.layouts import parse_layout
from tests.support.models import MODELS
from tests.support.ranks import faults as work
from tests.support.worker_pool import WorkerPool


def test_a_rank_that_hangs_is_named_and_all_ranks_end(pool: WorkerPool) -> None:
    # A machine that stands still for 2 s and more is forgiven, and silence counts from half of the limit on.
    results = pool.run(work.hang_in_data, 3, 5.0)
    assert [codes[0] for codes, _ in results] == [1, 1, 1]
    [line] = "".join(printed for _, printed in results).splitlines()
    assert "hang: no progress for" in line and "--hang-timeout-seconds 5" in line
    assert "rank 1 on " in line and " in loading data of iteration 7 (" in line
    assert "rank 0 on" not in line and "rank 2 on" not in line


def test_what_one_rank_cannot_read_ends_all_with_one_line(pool: WorkerPool) -> None:
    results = pool.run(work.failure_of_one_rank, 3)
    assert [codes for codes, _ in results] == [[2], [2], [2]]
    [line] = "".join(printed for _, printed in results).splitlines()
    assert line.startswith("runtime.pretrain: error: rank 1 on ")
    assert line.endswith(": corpus.bin: cannot be read (Input/output error)")


def beat(rank: int, age: float, silent: float = 0.0, waits: bool = False, iteration: int = 5) -> Beat:
    words = {
        "age": age,
        "doing": f"forward of iteration {iteration}",
        "iteration": iteration,
        "waits": waits,
        "place": "model.py:1 in forward",
        "host": f"node{rank // 2}",
    }
    return Beat(rank, words, silent)


def test_who_is_blamed_for_a_hang() -> None:
    assert hang_report([beat(0, 59), beat(1, 3)], 60) == ""
    # Frozen, whatever the others do.
    line = hang_report([beat(0, 70, waits=True), beat(1, 2, silent=65), beat(2, 70)], 60)
    assert line.startswith("hang: no sign of life for 67 s: rank 1 on node0 in forward of iteration 5 (model")
    # The one that does not wait for another; who has just begun something may be behind by a little only.
    line = hang_report([beat(0, 70, waits=True), beat(1, 70), beat(2, 10)], 60)
    assert (
        line
        == "hang: no progress for 70 s: rank 1 on node0 in forward of iteration 5 (model.py:1 in forward)"
    )
    # All wait: those who are a step behind.
    line = hang_report([beat(0, 70, waits=True, iteration=6), beat(3, 70, waits=True)], 60)
    assert "ranks wait for each other" in line and "rank 3 on node1" in line and "rank 0" not in line
    assert hang_report([beat(rank, 70) for rank in range(9)], 60).endswith("; and 5 more")


def test_storage_may_take_longer_than_a_collective() -> None:
    def saving(age: float, silent: float = 0.0) -> Beat:
        other = beat(1, age, silent)
        return other._replace(words={**other.words, "doing": "saving a checkpoint of iteration 5"})

    assert hang_report([saving(800), saving(800)], 60) == ""
    assert "rank 1 on node0 in saving a checkpoint" in hang_report([saving(901)], 60)
    assert "no sign of life" in hang_report([saving(1, silent=61)], 60)


def test_time_that_the_process_did_not_run_is_no_hang() -> None:
    heartbeat.set_operation("loading data")
    since = heartbeat.activity().since
    heartbeat.leave_out(30.0)
    assert heartbeat.activity().since == since + 30.0
    assert heartbeat.activity().operation == "loading data"


def test_saying_what_a_rank_does_costs_nothing_to_speak_of() -> None:
    def seconds() -> float:
        started = time.process_time()  # The time of this process alone.
        for number in range(2_000):
            heartbeat.set_operation("forward", number)
        return time.process_time() - started

    # A step has a hundred of these at most; 20 microseconds would be 2 ms.
    assert min(seconds() for _ in range(5)) / 2_000 < 20e-6


def test_the_slowest_rank_is_compared_with_its_peers() -> None:
    def work(*seconds: float) -> list[Work]:
        return [Work(value, FEWEST_SAMPLES, 0) for value in seconds]

    assert slowest_rank(work(1.0, 1.1, 0.9, 2.5), [0, 0, 0, 0], 2.0) == (3, 2.5)
    assert slowest_rank(work(1.0, 1.1, 0.9, 1.9), [0, 0, 0, 0], 2.0) is None
    assert slowest_rank(work(1.0, 3.0, 1.0, 9.0, 4.0, 1.0), [0] * 6, 2.0) == (3, 9.0)
    # The second stage has three times as much to do on all of its ranks.
    assert slowest_rank(work(1.0, 1.0, 3.0, 3.1), [0, 0, 1, 1], 2.0) is None
    assert slowest_rank(work(1.0, 3.0), [0, 1], 2.0) == (1, 3.0)
    assert slowest_rank(work(0.0, 0.0), [0, 0], 2.0) is None
    assert slowest_rank(work(5.0), [0], 2.0) is None
    assert has_enough_samples(work(1.0, 1.0)) and not has_enough_samples(
        [*work(1.0), Work(1.0, FEWEST_SAMPLES - 1, 0)]
    )
    line = straggler_line(3, "node-7", Work(0.52, 200, 1), 2.26)
    assert line == (
        "straggler: rank 3 on node-7 works 0.52 s in each step, 2.3 times the median of the others, "
        "most of it in forward"
    )


def test_all_ranks_learn_which_one_is_slow(pool: WorkerPool) -> None:
    [line] = set(pool.run(work.slow_rank, 3))
    assert line.startswith("straggler: rank 2 on HOST works 0.5 s in each step, 5.0 times the median of")


def test_only_own_work_within_steps_is_sampled() -> None:
    sampler = Sampler()
    heartbeat.set_period("the run", 0)
    heartbeat.set_operation("saving a checkpoint")
    sampler.sample(1.0)
    heartbeat.set_period("iteration 1", 1, in_step=True)
    heartbeat.set_operation("loading data")
    sampler.sample(0.25)
    heartbeat.set_operation("backward", 2)
    sampler.sample(0.5)
    heartbeat.set_operation("all-reduce of loss and gradient norm")
    sampler.sample(4.0)
    heartbeat.set_operation("backward", 2)
    sampler.steps = 3
    assert sampler.work() == Work(0.25, 3, heartbeat.STEP_OPERATIONS.index("backward"))
    assert heartbeat.activity().describe() == "backward of microbatch 2 of iteration 1"
    sampler.restart()
    assert sampler.work() == Work(0.0, 0, 0.0)


@pytest.mark.parametrize(
    ("name", "text", "poison"),
    [
        ("gpt2", "dp=2,zero=3", math.nan),
        ("gpt2", "pp=2,optimizer=muon", math.inf),
        ("gpt2", "dp=2,zero=1,precision=fp16", math.inf),
        # Biases of its experts move with their load.
        ("deepseek", "dp=2,zero=1", math.nan),
    ],
)
def test_a_step_that_is_no_number_on_one_rank_is_skipped_on_all(
    pool: WorkerPool, name: str, text: str, poison: float
) -> None:
    spec = MODELS[name].model_copy(update={"layers": 2})
    results = pool.run(work.skipped_step, 2, spec, parse_layout(text, spec), poison)
    for result in results:
        assert result["skipped"] and result["untouched"]
        assert result["counts"] == (3, 2)
        # In fp16 a smaller loss scale may mend it, which is no fault of the run.
        assert bool(result["reason"]) == ("fp16" not in text)
        assert result["losses"][0] == result["losses"][1]
        assert result["in_a_row"] == 0


def test_steps_are_skipped_counted_and_then_the_run_stops() -> None:
    guard = StepGuard(FaultOptions(max_skipped_steps=3))
    assert guard.judge(2.0, 1.0) == ""
    for _ in range(2):
        assert guard.judge(math.nan, 1.0) == "loss nan, gradient norm 1"
        guard.stop_if_hopeless(9)
    assert guard.judge(2.0, 1.0) == "" and guard.in_a_row == 0
    for _ in range(3):
        assert guard.judge(2.0, math.inf) == "loss 2, gradient norm inf"
    with pytest.raises(
        TrainingDiverged, match="stopped at iteration 12: the last 3 steps were skipped"
    ) as stop:
        guard.stop_if_hopeless(12)
    assert "weights are those of iteration 9" in str(stop.value) and stop.value.exit_code == 4


def test_a_spike_is_held_against_the_median_of_good_steps() -> None:
    guard = StepGuard(FaultOptions(skip_grad_norm_above=10.0))
    for number in range(FEWEST_NORMS):
        assert guard.judge(2.0, 50.0 if number == 3 else 2.0) == ""
    assert guard.judge(2.0, 19.8) == ""
    assert guard.judge(2.0, 20.2) == "gradient norm 20.2, usually 2"
    assert guard.judge(2.0, math.nan) == "loss 2, gradient norm nan"
    # However many there are, spikes do not become usual.
    for _ in range(3 * FEWEST_NORMS):
        assert guard.judge(2.0, 20.2) == "gradient norm 20.2, usually 2"
    assert len(guard.norms) == FEWEST_NORMS + 1
    # A run that goes on from a checkpoint decides as this one.
    again = StepGuard(FaultOptions(skip_grad_norm_above=10.0))
    again.load(guard.state())
    assert again.state() == guard.state() and again.judge(2.0, 20.2) == "gradient norm 20.2, usually 2"
    with pytest.raises(InputError, match=r"step_guard is damaged: norms.0 -1"):
        again.load({"norms": [-1.0], "in_a_row": 0})


@pytest.mark.parametrize(
    ("value", "loss", "forgiven"),
    [(64.0, 2.0, True), (8.0, 2.0, False), (64.0, math.inf, False)],
    ids=["the scale can fall", "the least scale", "no finite loss"],
)
def test_overflows_are_no_fault_while_a_smaller_loss_scale_may_mend_them(
    value: float, loss: float, forgiven: bool
) -> None:
    guard = StepGuard(FaultOptions(max_skipped_steps=1))
    scale = LossScale(value, dynamic=True, minimum=8.0, hysteresis=1)
    trainer: Any = SimpleNamespace(guard=guard, loss_scale=scale)
    assert Trainer._is_skipped(trainer, torch.tensor(loss), torch.tensor(math.inf))
    assert scale.value == max(value / 2, 8.0)
    assert (guard.reason == "", guard.in_a_row) == (forgiven, int(not forgiven))
    assert not Trainer._is_skipped(trainer, torch.tensor(2.0), torch.tensor(1.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_skipped_steps": 0}, "--max-skipped-steps 0: must be at least 1"),
        ({"skip_grad_norm_above": 1.0}, "--skip-grad-norm-above 1.0: must be above 1, such as 10"),
        ({"straggler_factor": 0.5}, "--straggler-factor 0.5: must be above 1"),
        ({"hang_timeout_seconds": 600.0}, "must be 0 .never. or below the 600 s of --distributed-timeout"),
        ({"log_samples": True}, "--log-samples needs --log-dir"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        FaultOptions(**options).check(None, 10.0)  # type: ignore[arg-type]


def test_hangs_are_named_before_the_collectives_give_up() -> None:
    assert FaultOptions().hang_timeout(10.0) == 480.0
    assert FaultOptions(hang_timeout_seconds=0).hang_timeout(10.0) == 0.0
    FaultOptions(straggler_factor=0, hang_timeout_seconds=599.0).check(None, 10.0)


needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full to write to")


@needs_full
def test_a_full_disk_costs_lines_and_not_the_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = LineFile(Path("/dev/full"))
    file.write('{"iteration": 1}')
    file.write('{"iteration": 2}')
    assert capsys.readouterr().err == (
        "warning: /dev/full cannot be written (No space left on device); the run goes on without\n"
    )
    file.close()
    with Path("/dev/full").open("w") as stream:
        console.say("nobody reads this", stream)
        console.say("nor this", stream)
        monkeypatch.setattr(sys, "stdout", stream)
        stream.write("another")
        console.flush()


def test_a_line_that_does_not_fit_leaves_no_part_of_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    path = tmp_path / "lines"
    file = LineFile(path)
    file.write('{"iteration": 1}')
    write, room = os.write, [5]

    def scarce(descriptor: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        part, room[0] = data[: room[0]], 0
        return write(descriptor, part)

    monkeypatch.setattr(os, "write", scarce)
    file.write('{"iteration": 2}')
    monkeypatch.undo()
    file.write('{"iteration": 3}')
    file.close()
    assert [record["iteration"] for record in read_lines(path)] == [1, 3]
    assert path.read_text().count("\n") == 2
    assert capsys.readouterr().err.endswith("lines is written again; 1 lines are missing\n")
    keep_lines(path, 1)
    assert read_lines(path) == [{"iteration": 1}]

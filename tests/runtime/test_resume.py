"""A job that is killed goes on as if nothing had happened: the same losses, to the bit."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch

from runtime import checkpoint
from tests.support.jobs import (
    LAYOUT,
    TINY,
    losses,
    wait_until,
    write_corpus,
)
from tests.support.layouts import parse_layout
from tests.support.models import MODELS
from tests.support.ranks.checkpoints import save_over_a_partial
from tests.support.ranks.precision import copies_after_loading
from tests.support.running_jobs import forked, is_alive, under_torchrun
from tests.support.worker_pool import WorkerPool

ITERATIONS = 90
SAVE_INTERVAL = 8


def arguments(data: str, folder: Path) -> list[str]:
    return [
        *(*TINY, *LAYOUT, "--data-path", data, "--split", "90,10,0"),
        *("--train-iters", str(ITERATIONS), "--lr", "1e-2", "--lr-warmup-iters", "3"),
        *("--log-interval", "1", "--log-dir", str(folder), "--eval-interval", "20", "--eval-iters", "1"),
        *("--save", str(folder / "checkpoints"), "--save-interval", str(SAVE_INTERVAL)),
    ]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, data: str) -> Path:
    """Folder of a job that planned for itself and was left alone."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    job = forked(arguments(data, folder), 2, folder / "output")
    assert job.exit_code() == 0, job.output()
    return folder


@pytest.mark.ranks
def test_a_job_without_a_plan_plans_for_its_ranks_and_trains(uninterrupted: Path) -> None:
    output = (uninterrupted / "output").read_text()
    assert "training gpt2-nano (changed)" in output
    assert "on 2 x cpu as tp=1 pp=1 dp=2 zero=1" in output
    assert list(losses(uninterrupted)) == list(range(1, ITERATIONS + 1))
    validation = [
        float(x) for x in re.findall(r"validation loss at iteration \d+ \| lm loss value: (\S+)", output)
    ]
    assert len(validation) == 6
    # Words of five letters: ln 512 before training, near ln 5 (and a space in every five bytes) in the end.
    assert validation[-1] < 0.6 * validation[0]


@pytest.mark.ranks
def test_a_killed_job_resumes_with_the_same_losses_to_the_bit(
    uninterrupted: Path, data: str, tmp_path: Path
) -> None:
    expected = losses(uninterrupted)
    folder = tmp_path / "checkpoints"
    tracker = folder / checkpoint.TRACKER
    asynchronous = ("--async-save", "--keep-last", "2")
    first = under_torchrun([*arguments(data, tmp_path), *asynchronous], 2, tmp_path / "first")
    # Somewhere between two checkpoints.
    enough = 2 * SAVE_INTERVAL + 3
    wait_until(lambda: len(losses(tmp_path)) > enough or first.has_ended(), "steps after a checkpoint")
    assert not first.has_ended(), first.output()
    ranks = first.ranks()
    assert len(ranks) == 2
    # The ranks are in sessions of their own: nothing but their own watch ends them.
    os.killpg(first.launcher, signal.SIGKILL)
    assert first.exit_code() == -signal.SIGKILL
    wait_until(lambda: not any(map(is_alive, ranks)), "the ranks to end with torchrun")
    before = losses(tmp_path)
    saved = int(tracker.read_text())
    assert saved % SAVE_INTERVAL == 0 and SAVE_INTERVAL <= saved < ITERATIONS
    assert len(checkpoint.iterations(folder)) in (2, 3)
    assert before == {step: expected[step] for step in before}
    # The rest of a save that was killed.
    partial = folder / "iter_9999999.partial"
    partial.mkdir()
    (partial / "__0_0.distcp").write_bytes(b"half")

    resumed = forked([*arguments(data, tmp_path), "--load", folder], 2, tmp_path / "second")
    assert resumed.exit_code() == 0, resumed.output()
    assert f"resumed from {folder} at iteration {saved}\n" in resumed.output()
    # No launcher compares the run with its plan: the first rank does.
    assert resumed.output().count("predicted / measured") == 1
    assert losses(tmp_path) == expected
    assert not partial.exists()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    whole = [json.loads(line) for line in (uninterrupted / "metrics.jsonl").read_text().splitlines()]
    # Parts of a step are measured, and so is a rank that was slow on a busy machine: both differ.
    records, whole = ([r for r in some if not r.keys() & {"parts", "straggler"}] for some in (records, whole))
    for name in ("grad_norm", "learning_rate", "validation_loss"):
        assert [r.get(name) for r in records] == [r.get(name) for r in whole]


def test_a_checkpoint_that_is_half_written_is_ignored(pool: WorkerPool, tmp_path: Path) -> None:
    spec = MODELS["gpt2"]
    [saved] = pool.run(save_over_a_partial, 1, spec, parse_layout("gbs=4", spec), str(tmp_path))
    assert saved == {"before": None, "after": 0, "names": ["iter_0000000", checkpoint.TRACKER]}


def test_both_copies_of_a_tied_embedding_are_loaded_where_one_rank_holds_two(
    pool: WorkerPool, tmp_path: Path
) -> None:
    spec = MODELS["gpt2"]
    layout = parse_layout("pp=2,schedule=zbv", spec)
    first, last = pool.run(copies_after_loading, 2, spec, layout, str(tmp_path))
    assert not any(name.startswith(("head", "embedding")) for name in last)
    for kind in ("", ".exp_avg", ".exp_avg_sq"):
        copies = [first[f"{name}.weight{kind}"] for name in ("embedding.tokens", "head")]
        assert torch.equal(*copies)
        assert float(copies[0].mean()) == pytest.approx(2.0 if kind else 1.0, abs=0.01)

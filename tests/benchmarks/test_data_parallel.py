"""The data-parallel study: every way to share a batch trains the same, and the table adds up."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import data_parallel
from benchmarks.data_parallel import LIMIT, WARM_UP, batches_of, conclusions, relative_difference, rows_of
from benchmarks.data_parallel_methods import DDP, METHODS, ONE_DEVICE, SERVER, Curve, Job, train
from costmodels.catalogue import load_model
from costmodels.errors import InputError
from planner.options.flags import run
from tests.benchmarks.horovod_work import train_by_stand_in
from tests.support.worker_pool import WorkerPool

SPEC = load_model("gpt2-nano", layers=2, hidden=32, heads=2, seq=16)
STEPS = 5
SHARED = [name for name in METHODS if name != ONE_DEVICE]

Study = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def batches() -> list[np.ndarray]:
    random = np.random.RandomState(0)
    return [random.randint(0, 9, (4, SPEC.seq + 1)) for _ in range(STEPS)]  # A few words are soon learnt.


def job_of(precision: Any = "fp32", workers: int = 2) -> Job:
    return Job(SPEC, workers, 4, precision, on_cpu=True)


def losses_of(pool: WorkerPool, name: str, job: Job, batches: list[np.ndarray]) -> list[float]:
    processes = pool.run(train, 1 if METHODS[name].one_process else job.workers, name, job, batches)
    return list(np.mean([one.losses for one in processes], axis=0))


@pytest.fixture(scope="module")
def expected(pool: WorkerPool, batches: list[np.ndarray]) -> list[float]:
    return losses_of(pool, ONE_DEVICE, job_of(), batches)


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Study:
    """Runs the program in this process; returns exit code, standard output and standard error."""

    def command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["data_parallel", "--device", "cpu", *arguments])
        with pytest.raises(SystemExit) as stop:
            run(data_parallel.app, "benchmarks.data_parallel")
        assert isinstance(stop.value.code, int)
        return stop.value.code, *capsys.readouterr()

    return command


@pytest.mark.parametrize("name", SHARED)
def test_fp32_gives_the_losses_of_one_device(
    pool: WorkerPool, batches: list[np.ndarray], expected: list[float], name: str
) -> None:
    assert relative_difference([losses_of(pool, name, job_of(), batches)], expected) <= LIMIT


@pytest.mark.parametrize("name", [SERVER, DDP])
def test_four_workers_give_the_losses_of_one_device(
    pool: WorkerPool, batches: list[np.ndarray], expected: list[float], name: str
) -> None:
    losses = losses_of(pool, name, job_of(workers=4), batches)
    assert relative_difference([losses], expected) <= LIMIT


@pytest.mark.parametrize("name", METHODS)
def test_mixed_precision_is_on_and_trains_alike(
    pool: WorkerPool, batches: list[np.ndarray], expected: list[float], name: str
) -> None:
    difference = relative_difference([losses_of(pool, name, job_of("bf16"), batches)], expected)
    assert 1e-6 < difference < 1e-2  # Orders of summation alone make 1e-7.


def test_horovod_gives_the_losses_of_one_device(
    pool: WorkerPool, batches: list[np.ndarray], expected: list[float]
) -> None:
    processes = pool.run(train_by_stand_in, 2, job_of(), batches)
    losses = list(np.mean([one.losses for one in processes], axis=0))
    assert relative_difference([losses], expected) <= LIMIT


def curve(seconds: float, losses: list[float], peak: int = 300) -> Curve:
    return Curve(losses, [9.0] * WARM_UP + [seconds, 9.0, seconds], peak, 100)


def test_rows_take_the_quickest_round_and_the_fullest_process() -> None:
    job = job_of()
    rows = rows_of(
        {
            (ONE_DEVICE, job): [[curve(0.4, [2.0, 1.0])], [curve(0.2, [2.0, 1.0])]],
            (DDP, job): [[curve(0.1, [3.0, 1.0]), curve(0.1, [1.0, 1.5], peak=500)]],
        }
    )
    one, ddp = rows
    assert one["tokens_per_s"] == pytest.approx(4 * SPEC.seq / 0.2)
    assert (one["speed_up"], one["efficiency"], one["difference"]) == (1.0, 1.0, 0.0)
    assert (ddp["speed_up"], ddp["efficiency"]) == pytest.approx((2.0, 1.0))
    assert ddp["peak_memory_bytes"] == 500
    assert ddp["losses"] == [2.0, 1.25]
    assert ddp["difference"] == pytest.approx(0.25)


def table(wrong: float = 0.0) -> dict[tuple[str, Job], list[list[Curve]]]:
    """A server at half the speed of DDP in fp32, as fast in bf16, and of twice its memory."""
    fp32, bf16 = job_of(), job_of("bf16")
    return {
        (ONE_DEVICE, fp32): [[curve(0.4, [2.0, 1.0])]],
        (SERVER, fp32): [[curve(0.2, [2.0, 1.0], peak=500)]],
        (DDP, fp32): [[curve(0.1, [2.0, 1.0 + wrong])]],
        (ONE_DEVICE, bf16): [[curve(0.2, [2.0, 1.1])]],
        (SERVER, bf16): [[curve(0.1, [2.0, 1.1])]],
        (DDP, bf16): [[curve(0.1, [2.0, 1.1])]],
    }


def test_conclusions_are_ratios_of_the_rows() -> None:
    found = list(conclusions(rows_of(table()), "bf16").values())
    assert found[0] == pytest.approx({SERVER: 0.5})
    assert found[1] == pytest.approx({SERVER: 1.0})
    assert found[2] == pytest.approx({ONE_DEVICE: 2.0, SERVER: 2.0, DDP: 1.0})
    assert found[3] == pytest.approx({SERVER: 2.0})


@pytest.mark.parametrize(("wrong", "code"), [(0.0, 0), (5e-6, 0), (2e-5, 1), (float("nan"), 1)])
def test_the_program_fails_when_losses_differ_in_fp32(
    study: Study, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wrong: float, code: int
) -> None:
    monkeypatch.setattr(data_parallel, "measure", lambda *_: table(wrong))
    assert study("--text", text_file(tmp_path))[0] == code


def text_file(folder: Path) -> str:
    path = folder / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog " * 200)
    return str(path)


@pytest.mark.slow
def test_the_program_trains_and_reports(
    study: Study, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(data_parallel.MODELS, "tiny", SPEC)
    monkeypatch.setattr(data_parallel, "METHODS", {name: METHODS[name] for name in (ONE_DEVICE, SERVER, DDP)})
    monkeypatch.setattr(data_parallel, "has_horovod", lambda: False)
    code, out, _ = study(
        *("--steps", "1", "--rounds", "1", "--batch-size", "4", "--text", text_file(tmp_path), "--json")
    )
    report = json.loads(out)
    assert code == 0
    assert [(row["method"], row["precision"]) for row in report["rows"]] == [
        (name, precision) for precision in ("fp32", "bf16") for name in (ONE_DEVICE, SERVER, DDP)
    ]
    assert all(len(row["losses"]) == WARM_UP + 1 for row in report["rows"])
    assert all(row["peak_memory_bytes"] > row["idle_memory_bytes"] > 0 for row in report["rows"])
    assert report["horovod"] == "not installed"
    assert report["largest_fp32_difference"] <= LIMIT


def test_batches_are_stretches_of_the_text(tmp_path: Path) -> None:
    path = text_file(tmp_path)
    drawn = batches_of(SPEC, 4, 3, path)
    assert [batch.shape for batch in drawn] == [(4, SPEC.seq + 1)] * 3
    whole = Path(path).read_bytes()
    assert all(bytes(row.tolist()) in whole for batch in drawn for row in batch)
    assert len({row.tobytes() for batch in drawn for row in batch}) > 6


def test_a_short_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("x" * SPEC.seq)
    with pytest.raises(InputError, match="holds 16 tokens, a sample takes 17"):
        batches_of(SPEC, 4, 3, str(path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--workers", "1"), "1 workers share nothing"),
        (("--model-size", "huge"), "choose one of tiny, small"),
        (("--steps", "0"), "must be at least 1"),
        (("--batch-size", "3"), "a positive multiple of the 2 workers"),
        (("--mixed-precision", "fp8"), "choose one of bf16, fp16"),
        (("--mixed-precision", "fp16"), "needs GPUs"),
        (("--text", "/nonexistent/file"), "cannot be read as UTF-8"),
        (("--device", "tpu"), "give cpu, or leave it out"),
    ],
)
def test_bad_input_is_one_line(study: Study, arguments: tuple[str, ...], message: str) -> None:
    code, _, error = study(*arguments)
    assert code == 2
    assert message in error
    assert error.count("\n") == 1

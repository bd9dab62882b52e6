"""Reports of a run: throughput, Megatron-LM's log line, metrics.jsonl and TensorBoard."""

from __future__ import annotations

import json
import math
import re
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from costmodels import ModelSpec
from costmodels.catalogue import load_model
from costmodels.spec.model_flops import flops_per_sequence
from planner.inputs.cluster import resolve_cluster
from runtime.job import loop
from runtime.job.loop import Loop
from runtime.job.metrics import (
    Recorder,
    evaluation_line,
    log_line,
    loss_of_updates,
    peak_memory_bytes,
    throughput,
)
from runtime.logs.metrics_file import METRICS_FILE, MetricsReader, drop_metrics_after, read_metrics
from runtime.train.trainer import StepResult
from tests.support.layouts import layout_of
from tests.support.ranks.training import logged_peak
from tests.support.worker_pool import WorkerPool

KEYS = [
    "iteration",
    "loss",
    "learning_rate",
    "grad_norm",
    "step_time_s",
    "tokens_per_s",
    "tflops_per_device",
    "mfu",
    "peak_memory_bytes",
]

SPEC: ModelSpec = load_model("gpt2-124m")


def metrics_of(iteration: int, **changes: Any) -> dict[str, Any]:
    """Figures of one logged step as the training loop makes them."""
    return {
        "iteration": iteration,
        "loss": 10.34567,
        "learning_rate": 1.5e-5,
        "grad_norm": 3.12449,
        "step_time_s": 0.8123,
        "tokens_per_s": 1e4,
        "tflops_per_device": 401.24,
        "mfu": None,
        "peak_memory_bytes": 2**30,
        "nan_iterations": 0,
        "loss_scale": 1.0,
        "skipped_iterations": 0,
        **changes,
    }


def test_the_log_line_is_megatrons_to_the_character() -> None:
    line = log_line(metrics_of(10), 100, 640, 64, datetime(2025, 1, 1))
    assert line == (
        " [2025-01-01 00:00:00.000000] iteration       10/     100 | consumed samples:          640 |"
        " elapsed time per iteration (ms): 812.3 | throughput per GPU (TFLOP/s/GPU): 401.2 |"
        " learning rate: 1.500000E-05 | global batch size:    64 | lm loss: 1.034567E+01 |"
        " loss scale: 1.0 | grad norm: 3.124 | number of skipped iterations:   0 |"
        " number of nan iterations:   0 |"
    )
    scaled = log_line(metrics_of(10, loss_scale=2.0**32, skipped_iterations=2), 100, 640, 64, datetime.now())
    assert "| loss scale: 4294967296.0 | grad norm" in scaled
    assert "| number of skipped iterations:   2 |" in scaled


@pytest.mark.parametrize(
    ("iteration", "loss", "nans"), [(1, 0.001, 0), (99_999_999, 12.5, 3), (7, math.nan, 1), (7, math.inf, 1)]
)
def test_tools_that_read_megatrons_logs_read_ours(iteration: int, loss: float, nans: int) -> None:
    metrics = metrics_of(iteration, loss=loss, nan_iterations=nans)
    line = log_line(metrics, 10**8, iteration * 1536, 1536, datetime.now())
    found = re.search(r"iteration\s+(\d+)/\s*(\d+) \|", line)
    assert found and (int(found[1]), int(found[2])) == (iteration, 10**8)
    fields = dict(part.split(":", 1) for part in line.split(" | ")[1:])
    values = {name.strip(): float(value.strip(" |")) for name, value in fields.items()}
    assert values["consumed samples"] == iteration * 1536
    assert values["elapsed time per iteration (ms)"] == 812.3
    assert values["global batch size"] == 1536
    assert values["lm loss"] == pytest.approx(loss, nan_ok=True)
    assert values["number of nan iterations"] == nans
    assert re.match(r"^ \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\] iteration ", line)


def test_the_line_of_an_evaluation_is_megatrons() -> None:
    assert evaluation_line(10, math.log(100.0)) == (
        " validation loss at iteration 10 | lm loss value: 4.605170E+00 | lm loss PPL: 1.000000E+02 |"
    )
    # Megatron-LM caps the exponent at 20, so that an untrained model prints a number.
    assert f"lm loss PPL: {math.exp(20):.6E}" in evaluation_line(1, 1e6)


def test_throughput_counts_the_tokens_and_model_flops_of_a_step() -> None:
    layout = layout_of(SPEC, tensor_parallel=2, data_parallel=4, global_batch_size=32, precision="bf16")
    cluster = resolve_cluster("a100-80g", 8)
    figures = throughput(SPEC, layout, cluster, 32 / 0.5)
    assert figures["tokens_per_s"] == 32 * 1024 / 0.5
    per_device = flops_per_sequence(SPEC) * 32 / 8 / 0.5
    assert figures["tflops_per_device"] == pytest.approx(per_device / 1e12)
    assert figures["mfu"] == pytest.approx(per_device / 312e12)


def test_no_peak_no_utilisation() -> None:
    cluster = resolve_cluster("a100-80g", 1)
    unknown = cluster.device.model_copy(update={"peak_flops": {"bf16": 312e12}})
    layout = layout_of(SPEC, global_batch_size=4, precision="fp32")
    figures = throughput(SPEC, layout, cluster.model_copy(update={"device": unknown}), 8.0)
    assert figures["mfu"] is None
    assert figures["tflops_per_device"]


def test_the_peak_of_a_cpu_rank_is_that_of_its_process() -> None:
    before = peak_memory_bytes(torch.device("cpu"))
    block = torch.ones(64 * 2**20, dtype=torch.uint8)
    after = peak_memory_bytes(torch.device("cpu"))
    assert block.nbytes + 2**26 < after < 2**36
    assert after >= before


def records_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]


def test_metrics_hold_exactly_the_promised_keys(tmp_path: Path) -> None:
    recorder = Recorder(str(tmp_path), None, 0)
    recorder.evaluation(0, 6.5, 0)
    recorder.step(metrics_of(1), 8 * 1, 8)
    recorder.step(metrics_of(2, mfu=0.5), 8 * 2, 8)
    # Readable while the run goes on.
    initial, first, second = records_of(tmp_path)
    recorder.close()
    assert initial == {"iteration": 0, "validation_loss": 6.5}
    assert list(first) == list(second) == KEYS
    assert (first["mfu"], second["mfu"]) == (None, 0.5)
    assert read_metrics(tmp_path) == [initial, first, second]


def test_resuming_keeps_the_records_up_to_the_checkpoint_and_no_others(tmp_path: Path) -> None:
    recorder = Recorder(str(tmp_path), None, 0)
    for iteration in range(1, 6):
        recorder.step(metrics_of(iteration), 8 * iteration, 8)
    recorder.evaluation(5, 6.5, 40)
    recorder.close()
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"iteration": 6, "lo')  # Killed while it wrote.
    assert len(read_metrics(tmp_path)) == 6
    resumed = Recorder(str(tmp_path), None, 3)
    resumed.step(metrics_of(4, loss=1.0), 8 * 4, 8)
    resumed.close()
    assert [(r["iteration"], r["loss"]) for r in records_of(tmp_path)] == [
        (1, 10.34567),
        (2, 10.34567),
        (3, 10.34567),
        (4, 1.0),
    ]


def test_a_run_that_starts_over_keeps_nothing(tmp_path: Path) -> None:
    Recorder(str(tmp_path), None, 0).evaluation(0, 6.5, 0)
    assert drop_metrics_after(tmp_path, 0).read_text() == ""
    assert read_metrics(tmp_path / "none") == []
    assert list(tmp_path.iterdir()) == [tmp_path / METRICS_FILE]


def test_a_reader_follows_the_run_and_no_run_before_it(tmp_path: Path) -> None:
    earlier = Recorder(str(tmp_path), None, 0)
    for iteration in range(1, 4):
        earlier.step(metrics_of(iteration), 8 * iteration, 8)
    earlier.close()
    reader = MetricsReader(tmp_path)
    assert reader.new_records() == []
    recorder = Recorder(str(tmp_path), None, 0)
    assert reader.new_records() == []
    recorder.step(metrics_of(1), 8 * 1, 8)
    recorder.step(metrics_of(2), 8 * 2, 8)
    assert [record["iteration"] for record in reader.new_records()] == [1, 2]
    assert recorder.file is not None
    with reader.path.open("a", buffering=1) as half:
        half.write('{"iteration": 3')
        half.flush()
        assert reader.new_records() == []
        half.write("}\n")
    recorder.close()
    assert reader.new_records() == [{"iteration": 3}]
    assert MetricsReader(tmp_path / "none").new_records() == []


def test_event_files_that_cannot_be_written_end_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(str(tmp_path), str(tmp_path), 0)
    recorder.step(metrics_of(1), 8, 8)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recorder.board, "add_scalar", full)
    recorder.step(metrics_of(2), 16, 8)
    recorder.evaluation(2, 6.5, 16)
    recorder.close()
    assert [record["iteration"] for record in read_metrics(tmp_path)] == [1, 2, 2]
    assert capsys.readouterr().err == (
        "warning: TensorBoard's events cannot be written (No space left on device); the run goes on\n"
    )


@pytest.mark.oldest
def test_tensorboard_reads_the_events(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
        EventAccumulator,
    )

    recorder = Recorder(None, str(tmp_path), 0)
    recorder.evaluation(0, 6.5, 0)
    recorder.step(metrics_of(1), 8 * 1, 8)
    recorder.step(metrics_of(2, loss=4.0), 8 * 2, 8)
    recorder.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()

    def points(tag: str) -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in events.Scalars(tag)]

    assert points("lm loss") == [(1, pytest.approx(10.34567)), (2, 4.0)]
    assert points("lm loss vs samples") == [(8, pytest.approx(10.34567)), (16, 4.0)]
    assert points("lm loss validation") == [(0, 6.5)]
    assert points("learning-rate")[0] == (1, pytest.approx(1.5e-5))
    assert points("batch-size") == [(1, 8.0), (2, 8.0)]
    assert points("loss-scale") == [(1, 1.0), (2, 1.0)]
    assert {"grad-norm", "iteration-time", "throughput", "mem-max-allocated-bytes"} <= set(
        events.Tags()["scalars"]
    )


def test_a_resumed_run_takes_back_events_after_its_checkpoint_and_no_others(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # The checkpoint is that of step 2, and step 3 is lost.
    for resumed_at, steps in ((0, (1, 2, 3)), (2, ())):
        recorder = Recorder(None, str(tmp_path), resumed_at)
        for step in steps:
            recorder.step(metrics_of(step), 8 * step, 8)
        recorder.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("lm loss")] == [1, 2]


def test_a_logged_loss_is_that_of_the_steps_that_changed_the_weights() -> None:
    losses = torch.tensor([2.0, math.nan, 4.0])
    assert loss_of_updates(losses, [0, 2]) == 3.0
    assert math.isnan(loss_of_updates(losses, []))


def test_an_evaluation_goes_on_from_batch_to_batch() -> None:
    seen: list[list[int]] = []

    def loss_of(numbers: list[int], starts: None) -> float:
        seen.append(numbers)
        return float(len(seen))

    job: Any = SimpleNamespace(
        trainer=SimpleNamespace(iteration=0, rows=[0, 2], evaluate=loss_of),
        plan=SimpleNamespace(layout=SimpleNamespace(global_batch_size=4)),
        job=SimpleNamespace(output=SimpleNamespace(eval_iters=3)),
        read=lambda samples, numbers: (numbers, None),
    )
    job.positions = lambda first, rows: Loop.positions(job, first, rows)
    assert Loop.mean_loss(job, None) == 2.0  # type: ignore[arg-type]
    assert seen == [[0, 2], [4, 6], [8, 10]]


def test_the_peak_that_is_logged_is_that_of_the_fullest_rank(pool: WorkerPool) -> None:
    # More than fp32 tells apart.
    held = [2**36 + 1, 2**36 + 3, 2**36 + 2]
    assert pool.run(logged_peak, 3, held) == [2**36 + 3] * 3


def step_of(loss: float, norm: float, rate: float, skipped: bool, further: list[float]) -> StepResult:
    """A step as the trainer reports it."""
    return StepResult(
        torch.tensor(loss), torch.tensor(norm), rate, 2.0**rate, skipped, further=torch.tensor(further)
    )


def test_figures_of_a_log_line_are_of_the_steps_since_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "largest_of_ranks", lambda held, device: held + 7)
    monkeypatch.setattr(loop, "peak_memory_bytes", lambda device: 5000)
    told: list[tuple[dict[str, Any], int, int]] = []
    cluster = resolve_cluster("a100-80g", 8)
    layout = layout_of(SPEC, data_parallel=8, global_batch_size=8)
    run: Any = SimpleNamespace(
        trainer=SimpleNamespace(iteration=14, grid=SimpleNamespace(device=torch.device("cpu")), balance=None),
        plan=SimpleNamespace(
            model=SPEC, layout=layout, cluster=cluster, estimate=SimpleNamespace(step_time_s=0.5)
        ),
        results=[
            step_of(4.0, 9.0, 3.0, False, [1.0, 2.0]),
            step_of(math.inf, math.inf, 4.0, True, [math.inf, math.inf]),
            step_of(math.nan, math.nan, 4.0, True, [math.nan, math.nan]),
            step_of(3.0, 2.5, 4.0, False, [2.0, 4.0]),
            step_of(2.0, 1.5, 5.0, False, [3.0, 6.0]),
        ],
        profiled_s=[9.0],
        profiler_bytes=1000,
        slow_ranks=SimpleNamespace(line=str),
        consumed_samples=132,
        logged_samples=100,
        batch=9,
        figures=[],
        recorder=SimpleNamespace(step=lambda *arguments: told.append(arguments)),
        _tell_step=lambda metrics, sequences: None,
    )
    # Four steps of 2 s each, and a profiled one that the clock has left out.
    Loop.log(run, 8.0)
    [(metrics, consumed, batch)] = told
    assert (consumed, batch) == (132, 9)
    sequences_per_s = (132 - 100) / 5 / 2.0
    flops = flops_per_sequence(SPEC) * sequences_per_s / 8
    assert metrics == {
        "iteration": 14,
        "loss": 3.0,
        "learning_rate": 5.0,
        "grad_norm": 1.5,
        "step_time_s": 2.0,
        "predicted_step_time_s": 0.5,
        "tokens_per_s": pytest.approx(sequences_per_s * SPEC.seq),
        "tflops_per_device": pytest.approx(flops / 1e12),
        "mfu": pytest.approx(flops / cluster.device.peak_flops["fp32"]),
        "peak_memory_bytes": 4007,
        "nan_iterations": 2,
        "loss_scale": 32.0,
        "skipped_iterations": 2,
        "mtp_losses": [2.0, 4.0],
    }
    assert run.figures == [(2.0, 4007)]
    # The next line begins anew.
    assert (run.results, run.profiled_s, run.logged_samples) == ([], [], 132)


def test_a_test_at_the_end_is_of_its_own_samples(capsys: pytest.CaptureFixture[str]) -> None:
    kept: list[tuple[Any, ...]] = []
    run: Any = SimpleNamespace(
        datasets=SimpleNamespace(valid="valid", test="test"),
        mean_loss=lambda samples: {"valid": 3.0, "test": 5.0}[samples],
        trainer=SimpleNamespace(iteration=40),
        recorder=SimpleNamespace(evaluation=lambda *arguments: kept.append(arguments)),
        consumed_samples=320,
        evaluated_at=-1,
    )
    for _ in range(2):
        # Not twice at one iteration.
        Loop.evaluate(run)
    Loop.test(run)
    assert kept == [(40, 3.0, 320), (40, 5.0, 320, "test")]
    assert [line.split("|")[0].strip() for line in capsys.readouterr().out.splitlines()] == [
        "validation loss at iteration 40",
        "test loss at iteration 40",
    ]

"""Trainings that save, load, are asked to stop, or meet a full disk."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from costmodels import Layout, ModelSpec
from costmodels.errors import InputError
from planner.options.batch import BatchOptions
from planner.options.cluster import ClusterOptions
from planner.options.model import ModelOptions
from planner.options.parallel import ParallelOptions
from runtime import checkpoint, pretrain
from runtime.faults import exit_signals
from runtime.faults.exit_signals import Requests
from runtime.job.job import Job, RunOptions
from runtime.job.loop import Loop
from runtime.parallel.ranks import Ranks
from runtime.settings.training_options import DataOptions, OutputOptions, TrainingOptions
from runtime.train.trainer import Trainer
from tests.support.jobs import TIMEOUT_S
from tests.support.ranks.training import CPU, batch_of


def trained(spec: ModelSpec, layout: Layout, steps: int) -> Trainer:
    """A trainer after some steps."""
    trainer = Trainer(spec, layout, TrainingOptions(train_iters=100, lr=1e-2), CPU)
    train(trainer, spec, steps)
    return trainer


def train(trainer: Trainer, spec: ModelSpec, steps: int) -> list[float]:
    """Losses of some steps."""
    return [
        float(trainer.train_step(batch_of(spec, trainer.layout, trainer.iteration)[trainer.rows]).loss)
        for _ in range(steps)
    ]


def saved(spec: ModelSpec, layout: Layout, folder: str, iterations: list[int]) -> None:
    """Checkpoints of these iterations."""
    trainer = trained(spec, layout, 0)
    for iteration in iterations:
        train(trainer, spec, iteration - trainer.iteration)
        checkpoint.save(folder, trainer, spec, {"consumed_samples": 4 * iteration, "note": "mine"})


def refused_ids(spec: ModelSpec, layout: Layout) -> str:
    """The error of a batch with an id that the model does not have."""
    trainer = trained(spec, layout, 0)
    samples = batch_of(spec, layout, 0)[trainer.rows]
    samples[0, 1] = spec.vocab
    with pytest.raises(InputError) as refused:
        trainer.train_step(samples)
    return str(refused.value)


def loaded(spec: ModelSpec, layout: Layout, folder: str, iteration: int) -> dict[str, Any] | str:
    """The fields that a checkpoint was saved with, or the error that refuses it."""
    try:
        return checkpoint.load(folder, trained(spec, layout, 0), spec, iteration)
    except InputError as error:
        return str(error)


def snapshot(spec: ModelSpec, layout: Layout, folder: str) -> tuple[list[float], list[float], int, list[str]]:
    """Losses after an iteration, and those after loading what was written while they were computed.

    Also the bytes that this rank copied, and what was said.
    """
    trainer = trained(spec, layout, 2)
    goes_on = threading.Event()
    said: list[str] = []
    write_data = FileSystemWriter.write_data

    def late(*arguments: Any) -> Any:
        assert goes_on.wait(TIMEOUT_S)
        return write_data(*arguments)

    saver = checkpoint.Saver(folder, asynchronous=True, report=said.append)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSystemWriter, "write_data", late)
        saver.save(trainer, spec, {})
        losses = train(trainer, spec, 3)
        assert not said and checkpoint.latest_iteration(folder) is None
        goes_on.set()
        saver.close()
    second = trained(spec, layout, 0)
    checkpoint.load(folder, second, spec, 2)
    return losses, train(second, spec, 3), saver.copies.memory.nbytes, said


def kept(spec: ModelSpec, layout: Layout, folder: str, read: int | None) -> list[int]:
    """Iterations in a folder after six saves, the last two of which are kept; `read` is read meanwhile."""
    trainer = trained(spec, layout, 0)
    saver = checkpoint.Saver(folder, asynchronous=True, keep_last=2, report=lambda line: None)
    held: AbstractContextManager[None] = nullcontext()
    for iteration in range(6):
        trainer.iteration = trainer.updates = iteration
        saver.save(trainer, spec, {})
        saver.wait()
        if iteration == read:
            held = checkpoint.reader_lock(checkpoint.iteration_folder(folder, iteration))
            held.__enter__()
    found = checkpoint.iterations(folder)
    held.__exit__(None, None, None)
    return found


def full_disk(
    spec: ModelSpec, layout: Layout, folder: str, asynchronous: bool
) -> tuple[list[str], str, list[str], list[int]]:
    """Messages about saves at 1 to 5 when those at 2, 4 and 5 fail on the last rank, and the final error.

    Also the names in the folder after the second save, and the iterations that can be loaded in the end.
    """
    trainer = trained(spec, layout, 0)
    said: list[str] = []
    saver = checkpoint.Saver(folder, asynchronous=asynchronous, report=said.append)
    names: list[str] = []
    ended = ""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    for iteration in range(1, 6):
        trainer.iteration = trainer.updates = iteration
        if is_last:
            most = 4096 if iteration in (2, 4, 5) else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        try:
            saver.save(trainer, spec, {})
            saver.wait()
        except InputError as error:
            ended = str(error)
        if iteration == 2:
            dist.barrier()
            names = sorted(path.name for path in Path(folder).iterdir())
            dist.barrier()
    return said, ended, names, checkpoint.iterations(folder)


def last_save_fails(spec: ModelSpec, layout: Layout, folder: str) -> str:
    """The error of a run whose only save fails."""
    saver = checkpoint.Saver(folder, asynchronous=True, report=lambda line: None)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    saver.save(trained(spec, layout, 0), spec, {})
    try:
        saver.close()
    except InputError as error:
        return str(error)
    return ""


def requests() -> list[tuple[str, bool]]:
    """Requests on which two ranks agree after steps in which one rank, or its clock, makes a request."""
    rank = dist.get_rank()
    # Not when the process started from which this one is forked.
    exit_signals.START_TIME_S = time.monotonic()
    made = Requests(10.0, True, timedelta(minutes=1))
    found = []

    def step(ask: Callable[[], object], on: int) -> None:
        if rank == on:
            ask()
        request = made.after_step()
        found.append((request.name, request.stops))

    def both() -> None:
        for number in (signal.SIGUSR1, signal.SIGTERM):
            os.kill(os.getpid(), number)

    def after(minutes: float) -> None:
        exit_signals.START_TIME_S -= 60 * minutes

    before = signal.getsignal(signal.SIGTERM)
    with made.signal_handlers():
        step(lambda: None, 0)
        step(lambda: os.kill(os.getpid(), signal.SIGUSR1), 1)
        step(lambda: None, 0)
        step(both, 1)
        step(lambda: after(20), 1)
        step(lambda: after(20), 0)
    assert signal.getsignal(signal.SIGTERM) == before
    return found


def losses_of_other_padding(spec: ModelSpec, layouts: list[Layout], folder: str) -> list[list[float]]:
    """Next losses of a checkpoint under layouts of the same ranks, each of which saves it anew."""
    found = []
    for number, layout in enumerate(layouts):
        trainer = trained(spec, layout, 0 if number else 2)
        if number:
            checkpoint.load(str(Path(folder) / str(number - 1)), trainer, spec, 2)
        checkpoint.save(str(Path(folder) / str(number)), trainer, spec, {})
        found.append(train(trainer, spec, 2))
    return found


def weights_alone(spec: ModelSpec, layout: Layout, folder: str) -> tuple[float, float, int]:
    """Loss of a checkpoint's weights, that of a trainer that has read them alone, and its iteration."""
    first = trained(spec, layout, 2)
    checkpoint.save(folder, first, spec, {})
    second = trained(spec, layout, 0)
    checkpoint.load_weights_only(folder, second, spec, 2)
    batch = batch_of(spec, layout, 7)
    with torch.no_grad():
        losses = [trainer.evaluate(batch[trainer.rows]) for trainer in (first, second)]
    return losses[0], losses[1], second.iteration


def job(data: str, folder: str, asked: dict[int, tuple[int, signal.Signals]], output: dict[str, Any]) -> None:
    """Train by the loop of a real job that logs and saves into `folder`.

    Args:
        asked: by iteration, a rank and the signal that reaches it during that step.
        output: further options of loading and saving.
    """
    steps = Loop.step

    def step(loop: Loop) -> None:
        steps(loop)
        rank, number = asked.get(loop.trainer.iteration, (-1, signal.SIGTERM))
        if rank == dist.get_rank():
            os.kill(os.getpid(), number)

    described = Job(
        model=ModelOptions(
            model="gpt2-nano", num_layers=2, hidden_size=32, num_attention_heads=2, seq_length=16
        ),
        cluster=ClusterOptions(device="cpu"),
        batch=BatchOptions(global_batch_size=4),
        parallel=ParallelOptions(pin=["dp=2", "zero=1"], fp32=True),
        training=TrainingOptions(train_iters=12, lr=1e-2),
        data=DataOptions(data_path=[data], split="90,10,0"),
        output=OutputOptions(
            log_interval=1, eval_iters=0, log_dir=folder, save=f"{folder}/checkpoints", **output
        ),
        run=RunOptions(),
    )
    ranks = Ranks(dist.get_rank(), dist.get_rank(), dist.get_world_size(), dist.get_world_size())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "step", step)
        pretrain._run(described, ranks, CPU, None)


def save_over_a_partial(spec: ModelSpec, layout: Layout, folder: str) -> dict[str, object]:
    """Newest checkpoint before and after saving where an earlier save was killed, and what lies there."""
    partial = Path(folder) / "iter_0000000.partial"
    partial.mkdir()
    (partial / "left_over").write_text("")
    before = checkpoint.latest_iteration(folder)
    trainer = Trainer(spec, layout, TrainingOptions(), CPU)
    target = checkpoint.save(folder, trainer, spec, {"consumed_samples": 0})
    assert not (target / "left_over").exists()
    names = sorted(path.name for path in Path(folder).iterdir())
    return {"before": before, "after": checkpoint.latest_iteration(folder), "names": names}

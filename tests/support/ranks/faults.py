"""Ranks that hang, fail, lag or find a gradient that is no number."""

from __future__ import annotations

import contextlib
import io
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from costmodels import Layout, ModelSpec
from costmodels.errors import InputError
from runtime.faults import heartbeat, watchdog
from runtime.faults.fault_options import FaultOptions
from runtime.faults.heartbeat import set_operation
from runtime.faults.stragglers import FEWEST_SAMPLES
from runtime.faults.watchdog import Watchdog
from runtime.job.slow_ranks import SlowRanks
from runtime.parallel.local_tensors import local_part
from runtime.settings.training_options import TrainingOptions
from runtime.train.trainer import Trainer
from tests.support.jobs import TIMEOUT_S, wait_until
from tests.support.layouts import parse_layout
from tests.support.models import MODELS
from tests.support.ranks.training import CPU, batch_of


class Ended(Exception):
    """Stands for the end of the process."""


def _watched(
    rank: int, world_size: int, timeout_s: float, ended: threading.Event, codes: list[int]
) -> Watchdog:
    def end(code: int) -> None:
        codes.append(code)
        ended.set()
        if threading.current_thread() is threading.main_thread():
            raise Ended

    store = dist.distributed_c10d._get_default_store()
    return Watchdog(store, rank, world_size, timeout_s, end=end)


def hang_in_data(timeout_s: float) -> tuple[list[int], str]:
    """Rank 1 never comes out of loading data, and the others wait for it in an all-reduce.

    Returns the codes that the process would have ended with, and what it printed. The others must be seen to
    wait, and rank 1 not to.
    """
    rank, ended, codes = dist.get_rank(), threading.Event(), []  # type: ignore[var-annotated]
    printed = io.StringIO()
    # Clocks of hosts need not agree.
    clock = time.time
    time.time = lambda: clock() + 86400.0 * rank
    heartbeat.set_period("iteration 7", 7, in_step=True)
    with contextlib.redirect_stderr(printed), contextlib.ExitStack() as watched:
        # Watched from the moment at which all are where they stay: how long they took does not count.
        watchdog = _watched(rank, dist.get_world_size(), timeout_s, ended, codes)
        store = dist.distributed_c10d._get_default_store()

        def watch(operation: str, micro_batch: int | None = None) -> None:
            store.add("in place", 1)
            while store.add("in place", 0) < dist.get_world_size():
                time.sleep(0.01)
            set_operation(operation, micro_batch)
            watched.enter_context(watchdog)
            assert ended.wait(TIMEOUT_S)

        if rank == 1:
            watch("loading data")
            dist.all_reduce(torch.ones(1))
        else:
            looker = threading.Thread(target=lambda: _when_waiting(lambda: watch("backward", 3)))
            looker.start()
            dist.all_reduce(torch.ones(1))
            looker.join()
    dist.barrier()
    return codes, printed.getvalue()


def slow_rank() -> str:
    """The line about three ranks, of which the last has the most work of its own."""
    rank = dist.get_rank()
    spec = MODELS["gpt2"].model_copy(update={"layers": 1})
    layout = parse_layout("dp=3,gbs=6", spec)
    store = dist.distributed_c10d._get_default_store()
    watched = Watchdog(store, rank, dist.get_world_size(), 0.0, samples=True)
    trainer = Trainer(spec, layout, TrainingOptions(), CPU)
    slow_ranks = SlowRanks(watched, trainer, 2.0)
    assert watched.sampler is not None
    # Rank 0 has most to do in the first step, which warms up.
    watched.sampler.seconds["forward"] = 100.0 * (rank == 0)
    for _ in range(11):
        slow_ranks.count_step()
    watched.sampler.seconds["loading data"] = 1.0 + 4.0 * (rank == 2)
    watched.sampler.samples = FEWEST_SAMPLES - 1
    too_early = slow_ranks.line()
    watched.sampler.samples = FEWEST_SAMPLES
    line = slow_ranks.line()
    assert watched.sampler.samples == 0
    return too_early or line.replace(watched.host, "HOST")


def _when_waiting(act: Callable[[], None]) -> None:
    """Act once the main thread is seen to wait for other ranks."""
    wait_until(heartbeat.is_main_waiting, "the main thread to wait for the others")
    act()


def failure_of_one_rank() -> tuple[list[int], str]:
    """Rank 1 cannot read its data while the others train; the codes and what was printed."""
    rank, ended, codes = dist.get_rank(), threading.Event(), []  # type: ignore[var-annotated]
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), _watched(rank, dist.get_world_size(), 0.0, ended, codes):
        if rank == 1:
            with contextlib.suppress(Ended):
                watchdog.fail_alone(InputError("corpus.bin: cannot be read (Input/output error)"))
        assert ended.wait(TIMEOUT_S)
    dist.barrier()
    return codes[:1], printed.getvalue()


def skipped_step(spec: ModelSpec, layout: Layout, poison: float) -> dict[str, Any]:
    """Three steps, of which the gradient of the second is spoilt on the last rank alone."""
    options = TrainingOptions(train_iters=10, lr=1e-2, lr_decay_style="constant", initial_loss_scale=2.0**8)
    faults = FaultOptions(max_skipped_steps=2)
    trainer, other = (Trainer(spec, layout, options, CPU, faults) for _ in range(2))
    first, third = (batch_of(spec, layout, step)[trainer.rows] for step in (0, 2))
    trainer.train_step(first)
    before = _state(trainer)
    collect = trainer.optimizer.collect_gradients

    def spoilt() -> None:
        collect()
        if dist.get_rank() == dist.get_world_size() - 1:
            counted = next(o for o in trainer.optimizer.owned if o.counts and o.shard.grad is not None)
            assert counted.shard.grad is not None
            counted.shard.grad.view(-1)[0] = poison

    trainer.optimizer.collect_gradients = spoilt  # type: ignore[method-assign]
    skipped = trainer.train_step(batch_of(spec, layout, 1)[trainer.rows])
    reason = trainer.guard.reason if trainer.guard else None
    after = _state(trainer)
    trainer.optimizer.collect_gradients = collect  # type: ignore[method-assign]
    if trainer.loss_scale is not None and other.loss_scale is not None:
        other.loss_scale.value = trainer.loss_scale.value
    uninterrupted = float(trainer.train_step(third).loss)
    other.train_step(first)
    return {
        "skipped": skipped.skipped,
        "reason": reason,
        "untouched": all(torch.equal(before[name], after[name]) for name in before),
        "counts": (trainer.iteration, trainer.updates),
        "losses": (uninterrupted, float(other.train_step(third).loss)),
        "in_a_row": trainer.guard.in_a_row if trainer.guard else None,
    }


def _state(trainer: Trainer) -> dict[str, torch.Tensor]:
    tensors = {o.name: o.parameter.detach() for o in trainer.optimizer.owned}
    tensors |= trainer.optimizer.rule.states() | (trainer.balance.biases() if trainer.balance else {})
    return {name: local_part(tensor).clone() for name, tensor in tensors.items()}

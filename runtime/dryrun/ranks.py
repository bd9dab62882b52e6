"""Dry runs of several ranks of a job, beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial

from costmodels import Layout, ModelSpec
from runtime.dryrun.memory_trace import MemoryTrace
from runtime.dryrun.run import DeviceKind, trace
from runtime.processes.pools import pool_guard, spawn_context
from runtime.settings.options import TrainingOptions


def trace_ranks(
    spec: ModelSpec,
    layout: Layout,
    ranks: Sequence[int],
    *,
    compiled: bool,
    device: DeviceKind,
    options: TrainingOptions,
    processes: int,
) -> Iterator[MemoryTrace]:
    """The memory of each of `ranks`, in their order, traced by as many as `processes` at a time."""
    one = partial(trace, spec, layout, compiled=compiled, device=device, options=options)
    if min(processes, len(ranks)) == 1:
        for rank in ranks:
            yield one(rank=rank)
        return
    with (
        ProcessPoolExecutor(min(processes, len(ranks)), mp_context=spawn_context()) as pool,
        pool_guard(pool),
    ):
        try:
            for future in [pool.submit(one, rank=rank) for rank in ranks]:
                yield future.result()
        except BrokenProcessPool:
            raise RuntimeError("a process of the dry run died; it may have been out of memory") from None

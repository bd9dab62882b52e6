"""Dry runs of several ranks of a job: from the cache, or in parallel processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from multiprocessing.context import BaseContext

from costmodels import Layout, ModelSpec
from costmodels.catalogue.local_machine import available_cores, available_memory
from runtime.dryrun.alike import alike_ranks
from runtime.dryrun.kept_traces import keep_trace, kept_trace, trace_name
from runtime.dryrun.memory_trace import DeviceKind, MemoryTrace
from runtime.dryrun.quiet import collector_off
from runtime.processes.interrupts import exit_on_ctrl_c
from runtime.processes.pools import brief_pool
from runtime.processes.preloading import preloading
from runtime.settings.training_options import TrainingOptions

PROCESS_BYTES = 3 * 2**29
"""Bytes of host memory of a tracing process: PyTorch, its compiler, and their data of a model."""

SHARED = ("torch", "torch._inductor.compile_fx", "runtime.dryrun.run")
"""Modules that tracing processes share, loaded once."""

Tell = Callable[[str], None]
"""A function that reports the current work."""


def trace_ranks(
    spec: ModelSpec,
    layout: Layout,
    ranks: Sequence[int],
    *,
    compiled: bool,
    device: DeviceKind,
    options: TrainingOptions,
    tell: Tell = lambda _: None,
    early: BaseContext | None = None,
) -> list[MemoryTrace]:
    """The memory traces of `ranks`, in order.

    Args:
        early: a context of processes with PyTorch (`early_tracer`).
    """
    groups = alike_ranks(spec, layout, ranks)
    names = {rank: trace_name(spec, layout, rank, compiled, device, options) for rank in groups}
    found = {rank: kept_trace(name) for rank, name in names.items()}
    missing = [rank for rank, trace in found.items() if trace is None]
    if missing:
        job = partial(_trace, spec, layout, compiled=compiled, device=device, options=options)
        for rank, trace in _traced(job, missing, tell, early).items():
            keep_trace(names[rank], trace)
            found[rank] = trace
    every = {}
    per_stage = layout.world_size // layout.pipeline_parallel
    for rank, own in found.items():
        assert own is not None
        for other in groups[rank]:
            every[other] = replace(own, rank=other, pipeline_rank=other // per_stage)
    return [every[rank] for rank in ranks]


@contextmanager
def early_tracer() -> Iterator[BaseContext | None]:
    """A context of processes with PyTorch, loaded while this process searches; None if PyTorch, a free core
    or memory is missing."""
    has_room = available_cores() > 1 and available_memory() > 2 * PROCESS_BYTES
    if not has_room or find_spec("torch") is None:
        yield None
        return
    with preloading(SHARED) as context:
        yield context


def _load() -> None:
    with collector_off():
        import runtime.dryrun.run  # noqa: F401


def _traced(
    job: Callable[..., MemoryTrace], ranks: Sequence[int], tell: Tell, early: BaseContext | None
) -> dict[int, MemoryTrace]:
    """The dry runs of `ranks`, in as many processes as cores and memory allow."""
    room = int(available_memory() // PROCESS_BYTES)
    processes = max(1, min(available_cores(), room, len(ranks)))
    tell("loading PyTorch")
    found = {}
    if processes == 1 and early is None:
        with exit_on_ctrl_c():
            # Only here: it takes seconds, and what is kept should not wait for it.
            _load()
            for number, rank in enumerate(ranks, 1):
                tell(f"tracing {_of(number, len(ranks))}")
                found[rank] = job(rank=rank)
        return found
    with ExitStack() as stack:
        context = stack.enter_context(preloading(SHARED)) if early is None else early
        pool = stack.enter_context(brief_pool(processes, context))
        many = f"{len(ranks)} pipeline ranks, {processes} at a time"
        tell(f"tracing {'a rank' if len(ranks) == 1 else many}")
        running = {pool.submit(job, rank=rank): rank for rank in ranks}
        try:
            for future in as_completed(running):
                found[running[future]] = future.result()
                tell(f"traced {_of(len(found), len(ranks))}")
        except BrokenProcessPool:
            raise RuntimeError("a process of the dry run died; it may have been out of memory") from None
        return found


def _of(number: int, count: int) -> str:
    return "a rank" if count == 1 else f"pipeline rank {number} of {count}"


def _trace(
    spec: ModelSpec,
    layout: Layout,
    rank: int,
    *,
    compiled: bool,
    device: DeviceKind,
    options: TrainingOptions,
) -> MemoryTrace:
    with collector_off():
        from runtime.dryrun.run import trace

        return trace(spec, layout, rank=rank, compiled=compiled, device=device, options=options)

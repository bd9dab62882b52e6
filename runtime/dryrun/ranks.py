"""Dry runs of several ranks of a job: from the cache, or in parallel processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

from costmodels import Layout, ModelSpec
from costmodels.catalogue.local_machine import available_cores, available_memory
from runtime.dryrun.alike import alike_ranks
from runtime.dryrun.kept_traces import keep_trace, kept_trace, trace_name
from runtime.dryrun.memory_trace import DeviceKind, MemoryTrace
from runtime.dryrun.quiet import collector_off
from runtime.processes.pools import brief_pool
from runtime.settings.training_options import TrainingOptions

PROCESS_BYTES = 3 * 2**29
"""Bytes of host memory of a tracing process: PyTorch, its compiler, and their data of a model."""

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
    early: ProcessPoolExecutor | None = None,
) -> list[MemoryTrace]:
    """The memory traces of `ranks`, in order.

    Args:
        early: a process that has loaded or is loading PyTorch (`early_tracer`).
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
def early_tracer() -> Iterator[ProcessPoolExecutor | None]:
    """A process that loads PyTorch while this one searches; None if PyTorch, a free core or memory is
    missing.

    It ends with this context.
    """
    has_room = available_cores() > 1 and available_memory() > 2 * PROCESS_BYTES
    if not has_room or find_spec("torch") is None:
        yield None
        return
    with brief_pool(1) as pool:
        pool.submit(_load)
        yield pool


def _load() -> None:
    with collector_off():
        import runtime.dryrun.run  # noqa: F401


def _traced(
    job: Callable[..., MemoryTrace], ranks: Sequence[int], tell: Tell, early: ProcessPoolExecutor | None
) -> dict[int, MemoryTrace]:
    """The dry runs of `ranks`, in as many processes as cores and memory allow."""
    room = int(available_memory() // PROCESS_BYTES)
    processes = max(1, min(available_cores(), room, len(ranks)))
    tell("loading PyTorch")
    found = {}
    if processes == 1 and early is None:
        # Only here: it takes seconds, and what is kept should not wait for it.
        _load()
        for number, rank in enumerate(ranks, 1):
            tell(f"tracing {_of(number, len(ranks))}")
            found[rank] = job(rank=rank)
        return found
    with ExitStack() as stack:
        free = [] if early is None else [early]
        if more := processes - len(free):
            free += more * [stack.enter_context(brief_pool(more))]
        many = f"{len(ranks)} pipeline ranks, {processes} at a time"
        tell(f"tracing {'a rank' if len(ranks) == 1 else many}")
        left, running = list(ranks), dict[Future[MemoryTrace], tuple[int, ProcessPoolExecutor]]()
        try:
            while left or running:
                while left and free:
                    rank, pool = left.pop(0), free.pop(0)
                    running[pool.submit(job, rank=rank)] = rank, pool
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    rank, pool = running.pop(future)
                    found[rank] = future.result()
                    free.append(pool)
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

"""Distributed jobs on this machine that start in milliseconds.

Importing torch is slow, so one process does it once, and every rank of every job is a fork of it. Jobs share
no state, and do not affect later jobs.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from runtime.launch.fork_server import PRELOADED_MODULES

TIMEOUT_S = 600
"""Seconds after which a stuck collective is an error; other processes may use the cores for minutes."""

PRELOADED = [
    *PRELOADED_MODULES,
    "runtime.checkpoint",
    "runtime.job.initial_state",
    "runtime.launch.rank_pool",
    "runtime.parallel.pipeline",
    "runtime.parallel.ring_attention",
]
"""Modules that the forked process imports beforehand."""

FROZEN = "runtime.launch.frozen"
"""The module that the forked process imports last."""


def preloaded(*further: str) -> list[str]:
    """All modules that the forked process imports beforehand, with `further` ones, in order."""
    return [*PRELOADED, *further, FROZEN]


def forkserver(*further: str) -> ForkServerContext:
    """A context that starts processes with all modules for ranks, and `further` modules, imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preloaded(*further))
    return context


class RankPool:
    """Up to `size` ranks at a time, on cores or on this machine's accelerators."""

    def __init__(self, size: int, accelerated: bool = False) -> None:
        self.size = size
        self.accelerated = accelerated
        self.context = forkserver()

    def run(self, function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
        """Call `function(*arguments)` on `world_size` ranks; returns the results by rank.

        Raises `RuntimeError` with the first rank's traceback when one fails; the others are ended.
        """
        if world_size > self.size:
            raise ValueError(f"a pool of {self.size} processes cannot run {world_size} ranks")
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")
            ranks = []
            for rank in range(world_size):
                ours, theirs = self.context.Pipe()
                job = (theirs, function, rank, world_size, store, self.accelerated, arguments)
                process = self.context.Process(target=_work, args=job, daemon=True)
                process.start()
                theirs.close()
                ranks.append((process, ours))
            try:
                return _results([connection for _, connection in ranks])
            finally:
                for process, connection in ranks:
                    connection.close()
                    process.kill()
                    process.join()


def _results(connections: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(connections):
        pending = [one for rank, one in enumerate(connections) if rank not in results]
        ready = wait(pending, timeout=2 * TIMEOUT_S)
        if not ready:
            raise RuntimeError("no rank answered")
        for connection in ready:
            rank = next(number for number, one in enumerate(connections) if one is connection)
            try:
                ok, result = connections[rank].recv()
            except EOFError:
                ok, result = False, "the process died"
            if not ok:
                raise RuntimeError(f"rank {rank} of {len(connections)} failed:\n{result}")
            results[rank] = result
    return [results[rank] for rank in range(len(connections))]


def _work(
    connection: Connection,
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    store: str,
    accelerated: bool,
    arguments: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    from runtime.parallel.accelerator import accelerator_type, collective_backend
    from runtime.parallel.gloo import use_one_worker

    gc.freeze()  # As in `runtime.launch.frozen`, with what the function has imported.
    torch.set_num_threads(1)
    use_one_worker()
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {**place, "LOCAL_WORLD_SIZE": str(world_size)}
    try:
        kind = accelerator_type() if accelerated else None
        backend = "gloo" if kind is None else f"cpu:gloo,{kind}:{collective_backend(torch.device(kind))}"
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        result = function(*arguments)
        dist.barrier()
        connection.send((True, result))
    except BaseException:
        connection.send((False, traceback.format_exc()))
    # The parent ends the process: no rank goes away while another still talks to it.
    connection.poll(None)

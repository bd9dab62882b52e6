"""Processes that stay alive between distributed jobs: importing torch is the slow part."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

TIMEOUT_S = 120
"""Seconds after which a stuck collective is an error."""


class WorkerPool:
    """Up to `size` gloo ranks on this machine; each job gets a fresh process group."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.workers: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []

    def run(self, function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
        """Call `function(*arguments)` on `world_size` ranks; returns the results by rank.

        Raises `RuntimeError` with the first rank's traceback when one fails; the others are ended.
        """
        if world_size > self.size:
            raise ValueError(f"a pool of {self.size} processes cannot run {world_size} ranks")
        self._start()
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")
            for rank in range(world_size):
                self.workers[rank][1].send((function, rank, world_size, store, arguments))
            pending = {self.workers[rank][1]: rank for rank in range(world_size)}
            results: dict[int, Any] = {}
            while pending:
                for connection in wait(list(pending), timeout=5 * TIMEOUT_S) or [None]:
                    rank = pending.pop(connection) if isinstance(connection, Connection) else -1
                    try:
                        ok, result = connection.recv() if rank >= 0 else (False, "no rank answered")
                    except EOFError:
                        ok, result = False, f"rank {rank} died"
                    if not ok:
                        self.close()
                        raise RuntimeError(f"rank {rank} of {world_size} failed:\n{result}")
                    results[rank] = result
        return [results[rank] for rank in range(world_size)]

    def close(self) -> None:
        """End all processes."""
        for process, connection in self.workers:
            connection.close()
            process.kill()
        for process, _ in self.workers:
            process.join()
        self.workers = []

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        while len(self.workers) < self.size:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, ours))


def _serve(connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            function, rank, world_size, store, arguments = connection.recv()
        except EOFError:
            return
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        try:
            import datetime

            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=world_size,
                timeout=datetime.timedelta(seconds=TIMEOUT_S),
            )
            result = function(*arguments)
            dist.destroy_process_group()
            connection.send((True, result))
        except BaseException:
            connection.send((False, traceback.format_exc()))
            return

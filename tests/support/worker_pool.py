"""Ranks of tests: those of the runtime, with what tests need besides."""

from __future__ import annotations

from multiprocessing.context import ForkServerContext

from runtime.launch import rank_pool
from runtime.launch.rank_pool import PRELOADED, TIMEOUT_S, RankPool

__all__ = ["TIMEOUT_S", "WorkerPool", "forkserver"]

COMPILER = "torch._inductor.compile_fx"
"""Each of the many ranks that compile layers would take more than a second to import it."""


def forkserver() -> ForkServerContext:
    """The fork server of the runtime, which has imported the compiler besides."""
    context = rank_pool.forkserver()
    context.set_forkserver_preload([*PRELOADED, COMPILER])
    return context


class WorkerPool(RankPool):
    """Ranks that need not import the compiler."""

    def __init__(self, size: int, accelerated: bool = False) -> None:
        super().__init__(size, accelerated)
        self.context = forkserver()

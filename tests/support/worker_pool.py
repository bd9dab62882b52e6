"""Ranks of tests: those of the runtime, with what tests need besides."""

from __future__ import annotations

from multiprocessing.context import ForkServerContext
from pathlib import Path

from runtime.launch import rank_pool
from runtime.launch.rank_pool import TIMEOUT_S, RankPool

__all__ = ["PRELOADED", "TIMEOUT_S", "WorkerPool", "forkserver"]

COMPILER = ("torch._inductor.compile_fx", "tests.support.warm_compiler")
"""Each of the many ranks that compile layers would take two seconds to import it, and to begin with it."""

WORK = [f"tests.support.ranks.{path.stem}" for path in sorted(Path(__file__).parent.glob("ranks/[a-z]*.py"))]
"""Modules that ranks of tests run; each of thousands of ranks would take 0.1 s to import them."""


PRELOADED = rank_pool.preloaded(*COMPILER, *WORK)
"""Modules that the process imports beforehand of which ranks are forks."""


def forkserver() -> ForkServerContext:
    """The fork server of the runtime, which has imported the compiler and the work of tests besides."""
    return rank_pool.forkserver(*COMPILER, *WORK)


class WorkerPool(RankPool):
    """Ranks that need import neither the compiler nor the work of tests."""

    def __init__(self, size: int, accelerated: bool = False) -> None:
        super().__init__(size, accelerated)
        self.context = forkserver()

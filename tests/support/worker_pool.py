"""Ranks of tests: those of the runtime, with what tests need besides."""

from __future__ import annotations

from runtime.launch.rank_pool import TIMEOUT_S, RankPool, forkserver

__all__ = ["TIMEOUT_S", "WorkerPool", "forkserver"]

WorkerPool = RankPool

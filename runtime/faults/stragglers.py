"""Detection of slow ranks by each rank's own work, without its waiting for other ranks.

On all ranks, a step takes as long as on the slowest rank. So a thread samples many times a second whether the
training thread works or waits in a collective, and in which operation.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from runtime.faults import heartbeat

PERIOD_S = 0.02

FEWEST_SAMPLES = 100
"""Fewest samples of a rank for a comparison."""


class Work(NamedTuple):
    """Seconds of a rank's own work since the last comparison, and its number of samples."""

    own_s: float
    """Seconds of own work in each step."""
    samples: float
    operation: float
    """Index in `STEP_OPERATIONS` of the longest operation."""


class Sampler:
    """A sampler of this rank's training thread; another thread calls `sample`."""

    period_s = PERIOD_S

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.samples = 0
        self.steps = 0

    def sample(self, elapsed_s: float) -> None:
        """Take one sample; its operation counts for the `elapsed_s` seconds since the last sample."""
        now = heartbeat.activity()
        if now.in_step:
            self.samples += 1
            if not heartbeat.is_main_waiting():
                self.seconds[now.operation] += elapsed_s

    def work(self) -> Work:
        """This rank's figures since the last `restart`."""
        seconds = dict(self.seconds)
        if not seconds or not self.steps:
            return Work(0.0, self.samples, 0.0)
        most = max(seconds, key=lambda name: seconds[name])
        index = heartbeat.STEP_OPERATIONS.index(most) if most in heartbeat.STEP_OPERATIONS else 0
        return Work(sum(seconds.values()) / self.steps, self.samples, index)

    def restart(self) -> None:
        """Begin a new comparison."""
        self.seconds.clear()
        self.samples = self.steps = 0


def has_enough_samples(work: Sequence[Work]) -> bool:
    """Return whether there are enough samples; the answer is the same on all ranks."""
    return min(rank.samples for rank in work) >= FEWEST_SAMPLES


def slowest_rank(work: Sequence[Work], peers: Sequence[int], factor: float) -> tuple[int, float] | None:
    """The rank with the most own work relative to the median of its peers, if the ratio exceeds `factor`.

    Args:
        work: the work of each rank.
        peers: the pipeline rank of each. Stages may have different work, so ranks are compared within a
            pipeline rank where possible.
    """
    found: tuple[int, float] | None = None
    for rank, mine in enumerate(work):
        alike = [w.own_s for other, w in enumerate(work) if other != rank and peers[other] == peers[rank]]
        usual = statistics.median(alike or [w.own_s for other, w in enumerate(work) if other != rank] or [0])
        ratio = mine.own_s / usual if usual > 0 else 0.0
        if ratio > factor and (found is None or mine.own_s > work[found[0]].own_s):
            found = rank, ratio
    return found


def straggler_line(rank: int, host: str, work: Work, ratio: float) -> str:
    """The log line that names a slow rank."""
    operation = heartbeat.STEP_OPERATIONS[int(work.operation)]
    return (
        f"straggler: rank {rank} on {host} works {work.own_s:.3g} s in each step, {ratio:.1f} times the "
        f"median of the others, most of it in {operation}"
    )

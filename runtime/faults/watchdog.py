"""A watchdog that names hanging ranks, and ends all ranks of a job together when one cannot continue.

A thread of each rank publishes the rank's operation and its duration in the store of the process group. The
threads of the first and the last rank read all of these, so that a stuck rank 0 is detected too.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn, cast

from torch._C._distributed_c10d import PrefixStore, Store

from costmodels.errors import InputError
from planner.options.flags import one_line
from runtime.faults import heartbeat
from runtime.faults.error_file import report
from runtime.faults.stragglers import Sampler
from runtime.logs.console import flush, say

PREFIX = "watchdog"

LOOK_PERIOD_S = 1.0
"""Seconds between checks if the job has to end."""

LONGEST_BEAT_S, SHORTEST_BEAT_S = 10.0, 0.1
"""Bounds of the seconds between two heartbeats, which are a tenth of the time limit."""

BREAK_S = 2.0
"""Seconds by which a thread sleeps too long if the process was stopped; such time does not count as
hanging."""

FILE_WORK = ("saving a checkpoint", "loading a checkpoint", "opening the data")
"""Operations that wait for storage, which may be slow without hanging."""

PATIENCE = 15
"""Time limit of file work, as a multiple of that of other operations: two hours by default."""

MOST_NAMED = 4
"""Most ranks that one line names."""


class Beat(NamedTuple):
    """The last published state of a rank, and the seconds since then."""

    rank: int
    words: Mapping[str, Any]
    silent_s: float

    @property
    def stuck_s(self) -> float:
        """Seconds that the rank has been in the same operation."""
        return float(self.words["age"]) + self.silent_s

    def is_over(self, timeout_s: float) -> bool:
        """Return whether the rank hangs, or waits for a hanging rank."""
        patience = PATIENCE if str(self.words["doing"]).startswith(FILE_WORK) else 1
        return self.silent_s > timeout_s or self.stuck_s > patience * timeout_s

    def description(self) -> str:
        """A text with rank, host and operation."""
        return f"rank {self.rank} on {self.words['host']} in {self.words['doing']} ({self.words['place']})"


def hang_report(beats: list[Beat], timeout_s: float) -> str:
    """One line that names the hanging ranks; empty when none hangs.

    Ranks without a heartbeat are blamed first, then ranks that do not wait for others, then the ranks that
    are furthest behind.
    """
    if not any(beat.is_over(timeout_s) for beat in beats):
        return ""
    silent = [beat for beat in beats if beat.silent_s > timeout_s / 2]
    working = [beat for beat in beats if not beat.words["waits"] and beat.stuck_s > timeout_s / 2]
    behind = [beat for beat in beats if beat.words["iteration"] == min(b.words["iteration"] for b in beats)]
    blamed = silent or working or behind
    names = "; ".join(beat.description() for beat in blamed[:MOST_NAMED])
    more = f"; and {len(blamed) - MOST_NAMED} more" if len(blamed) > MOST_NAMED else ""
    seconds = max(beat.stuck_s for beat in blamed)
    how = "no sign of life" if silent else "no progress" if working else "ranks wait for each other"
    return f"hang: {how} for {seconds:.0f} s: {names}{more}"


class Watchdog:
    """The watchdog thread of one rank. Use it as a context manager around all communication with other
    ranks."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        hang_timeout_s: float,
        *,
        samples: bool = False,
        end: Callable[[int], None] | None = None,
    ) -> None:
        """Watch with a time limit; 0 for none.

        Args:
            samples: True to sample the rank's operations for `runtime.faults.stragglers`.
            end: called with the exit code instead of ending the process.
        """
        # A copy, as calls of the other wait under a lock. Any: the stubs of PyTorch lack some methods.
        self.store: Any = PrefixStore(PREFIX, cast(Any, store).clone())
        self.rank, self.world_size, self.timeout_s = rank, world_size, hang_timeout_s
        self.sampler = Sampler() if samples and world_size > 1 else None
        self.end = _end if end is None else end
        self.host = socket.gethostname()
        self.beats = 0
        self.beat_s = min(max(hang_timeout_s / 10, SHORTEST_BEAT_S), LONGEST_BEAT_S)
        self.watches = hang_timeout_s > 0 and rank in (0, world_size - 1)
        self.heard: dict[int, tuple[int, float]] = {}
        """Last beats by rank: the number of the beat, and the time at which it came."""
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        global _active
        _active = self
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        global _active
        _active = None
        self.stopped.set()
        self.thread.join(LOOK_PERIOD_S)

    def is_over(self) -> bool:
        """Return whether a rank has already reported the reason of the job's end."""
        try:
            return bool(self.store.check(["verdict"]))
        except RuntimeError:
            return False

    def first_to(self, what: str) -> bool:
        """Return whether this rank is the first to report `what`; without a store, rank 0 is."""
        try:
            return bool(self.store.add(what, 1) == 1)
        except RuntimeError:
            return self.rank == 0

    def fail(self, message: str, exit_code: int, restart: bool = False) -> None:
        """End all ranks with one line; the first call counts."""
        if self.first_to("claims"):
            report(message, exit_code, restart)
            say(f"runtime.pretrain: error: {message}", sys.stderr)
            with contextlib.suppress(RuntimeError):
                self.store.set("verdict", str(exit_code))
        self.end(exit_code)

    def _run(self) -> None:
        pause = min(self.sampler.period_s if self.sampler else LOOK_PERIOD_S, LOOK_PERIOD_S, self.beat_s)
        woke = time.monotonic()
        next_look = next_beat = woke
        while not self.stopped.wait(pause):
            now = time.monotonic()
            if now - woke > pause + BREAK_S:
                self._forgive(now - woke)
            elif self.sampler is not None:
                self.sampler.sample(now - woke)
            woke = now
            try:
                if now >= next_look:
                    next_look = now + LOOK_PERIOD_S
                    self._obey()
                if self.timeout_s and now >= next_beat:
                    next_beat = now + self.beat_s
                    self._beat(now)
                    if self.watches:
                        self._look(now)
            except RuntimeError:
                return  # The store went away with the rank that held it: the job ends without us.

    def _forgive(self, seconds: float) -> None:
        heartbeat.leave_out(seconds)
        self.heard = {rank: (number, when + seconds) for rank, (number, when) in self.heard.items()}

    def _obey(self) -> None:
        """End this process when a rank has reported a reason."""
        if self.store.check(["verdict"]):
            self.end(int(self.store.get("verdict")))

    def _beat(self, now: float) -> None:
        self.beats += 1
        current, frame = heartbeat.activity(), heartbeat.main_frame()
        words = {
            "beat": self.beats,
            "age": now - current.since,
            "doing": current.describe(),
            "iteration": current.iteration,
            "waits": heartbeat.is_main_waiting(),
            "place": heartbeat.frame_place(frame),
            "host": self.host,
        }
        self.store.set(str(self.rank), json.dumps(words))

    def _look(self, now: float) -> None:
        keys = [str(rank) for rank in range(self.world_size)]
        if not self.store.check(keys):
            return  # Not all ranks have come this far.
        extended = self.store.has_extended_api()
        values = self.store.multi_get(keys) if extended else [self.store.get(key) for key in keys]
        beats = []
        for rank, value in enumerate(values):
            words = json.loads(value)
            if self.heard.get(rank, (-1, 0.0))[0] != words["beat"]:
                self.heard[rank] = words["beat"], now
            silent = now - self.heard[rank][1]
            beats.append(Beat(rank, words, silent if silent > 2 * self.beat_s else 0.0))
        message = hang_report(beats, self.timeout_s)
        if message:
            self.fail(
                f"{message}; all ranks end (--hang-timeout-seconds {self.timeout_s:g})", 1, restart=True
            )


_active: Watchdog | None = None


def running_watchdog() -> Watchdog | None:
    """The running watchdog of this rank, if there is one."""
    return _active


def fail_alone(error: InputError) -> NoReturn:
    """End all ranks with a line from this rank, which cannot continue; raise `error` without a watchdog."""
    watchdog = _active
    if watchdog is not None:
        message = f"rank {watchdog.rank} on {watchdog.host}: {one_line(error)}"
        watchdog.fail(message if watchdog.world_size > 1 else one_line(error), error.exit_code)
    raise error


def _end(code: int) -> None:
    """End this process at once: its training thread may never return."""
    flush()
    os._exit(code)

"""Long calls that are spread over several processes where processors are free.

Answers are those of this process alone. A helper is a Python of its own that imports this package: unlike a
fork it is safe beside threads, and unlike the standard library's pools it does not run the caller's script
again. Where no helper can be started, as in a browser, this process makes all calls.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import subprocess

ResultT = TypeVar("ResultT")

LONG_S = 0.7
"""Least seconds of calls that are worth a helper; starting one takes half of that."""

MOST_HELPERS = 7
"""Most helpers; each needs the memory of a search."""

START = (
    "import sys, pickle; source = sys.stdin.buffer; sys.path[:] = pickle.load(source); "
    "from planner.processes import serve; serve()"
)
"""The program of a helper; it is isolated, so that no module comes from the folder in which it is started."""

Packed = bytes
"""A call in the form that a helper reads."""


def helpers_for(calls: int, seconds: float) -> int:
    """The number of helpers worth starting for so many calls, each of which takes about `seconds`."""
    if seconds < LONG_S:
        return 0
    affinity = getattr(os, "sched_getaffinity", None)
    processors = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(0, min(processors, calls, MOST_HELPERS + 1) - 1)


class Calls(Generic[ResultT]):
    """Calls in progress. Helpers start at once, from the last call backwards. This process starts from the
    first call when the results are asked for."""

    def __init__(self, calls: Sequence[partial[ResultT]], helpers: int) -> None:
        self._calls = calls
        self._left = deque(range(len(calls)))
        self._found: dict[int, ResultT] = {}
        self._helpers: list[Helper] = []
        packed = _packed(calls) if helpers else None
        self._threads = [] if packed is None else self._started(packed, helpers)

    def __enter__(self) -> Calls[ResultT]:
        return self

    def __exit__(self, *error: object) -> None:
        for helper in self._helpers:
            helper.end()
        for thread in self._threads:
            thread.join()

    def results(self) -> list[ResultT]:
        """The results, in the order of the calls; an error of a call is raised here."""
        while self._left:
            try:
                self._make(self._left.popleft())
            except IndexError:
                break  # A helper took the last one.
        for thread in self._threads:
            thread.join()
        for number in range(len(self._calls)):
            if number not in self._found:
                self._make(number)  # A call that failed in a helper says why here.
        return [self._found[number] for number in range(len(self._calls))]

    def _make(self, number: int) -> None:
        self._found[number] = self._calls[number]()

    def _started(self, packed: Sequence[Packed], helpers: int) -> list[Thread]:
        threads = []
        try:
            for _ in range(helpers):
                helper = Helper()
                self._helpers.append(helper)
                threads.append(Thread(target=self._ask, args=(helper, packed), daemon=True))
                threads[-1].start()
        except (ImportError, OSError, RuntimeError):
            pass  # No processes, or no threads, here.
        return threads

    def _ask(self, helper: Helper, packed: Sequence[Packed]) -> None:
        """Have a helper make calls until none is left, or it fails."""
        while self._left:
            try:
                number = self._left.pop()
                done, result = helper.made(packed[number])
            except (IndexError, OSError, EOFError, ValueError, pickle.UnpicklingError):
                return
            if done:
                self._found[number] = result


class Helper:
    """A process that makes calls."""

    def __init__(self) -> None:
        import subprocess

        if not sys.executable:
            raise OSError("no Python to start")
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-I", "-c", START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C goes to all processes of a terminal, and this one is to end the helpers.
            start_new_session=True,
        )
        self._is_told = False

    def made(self, packed: Packed) -> tuple[bool, Any]:
        """Send a call to the helper; return whether it succeeded, and its result."""
        target, source = self.process.stdin, self.process.stdout
        assert target is not None and source is not None
        if not self._is_told:
            pickle.dump(sys.path, target)
            self._is_told = True
        pickle.dump(packed, target)
        target.flush()
        found: tuple[bool, Any] = pickle.load(source)
        return found

    def end(self) -> None:
        """End the process at once."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with suppress(OSError):  # The unread rest of a call goes with the process.
                    stream.close()


def _packed(calls: Sequence[partial[Any]]) -> list[Packed] | None:
    """The calls in the form that helpers read; None where they hold an object of this process alone, such as
    a rule."""
    try:
        return [pickle.dumps(call, protocol=pickle.HIGHEST_PROTOCOL) for call in calls]
    except (pickle.PicklingError, AttributeError, TypeError):
        return None


def serve() -> None:
    """In a helper: make the calls that arrive on standard input, until the input ends.

    Answers go to the original standard output; prints of the calls go to standard error.
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    asked: SimpleQueue[Packed] = SimpleQueue()
    Thread(target=_receive, args=(asked,), daemon=True).start()
    while True:
        packed = asked.get()
        try:
            call: Callable[[], Any] = pickle.loads(packed)
            answer = pickle.dumps((True, call()), protocol=pickle.HIGHEST_PROTOCOL)
        except Exception:
            # The one that asks makes the call itself, and sees what goes wrong.
            answer = pickle.dumps((False, None))
        try:
            answers.write(answer)
            answers.flush()
        except BrokenPipeError:
            os._exit(0)  # The one that asked is gone, and so is whom an error could be told.


def _receive(asked: SimpleQueue[Packed]) -> None:
    """Read calls from the input. When the input ends, nobody waits for an answer, so the helper ends even
    within a call."""
    try:
        while True:
            asked.put(pickle.load(sys.stdin.buffer))
    except (EOFError, OSError, pickle.UnpicklingError):
        os._exit(0)

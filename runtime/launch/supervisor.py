"""Run torchrun on this machine and watch it: one process tree, started and ended together."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from runtime.faults.error_file import ERROR_FILE_VARIABLE, read_report
from runtime.launch.agent import END
from runtime.launch.warm_ranks import WarmRanks, threads_of
from runtime.logs.console import say
from runtime.logs.metrics_file import MetricsReader
from runtime.processes.children import children
from runtime.processes.start_variables import RESTARTS_VARIABLE, SUMMARY_VARIABLE
from runtime.processes.tether import tether

TORCHRUN_FOLDER = "PET_LOG_DIR"
"""Environment variable with torchrun's --log-dir, the folder with a subfolder for each attempt."""

TORCHRUN_DEFAULTS = frozenset(
    f"PET_{name}"
    for name in (
        *("NNODES", "NODE_RANK", "NPROC_PER_NODE", "N_PROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT"),
        *("RDZV_BACKEND", "RDZV_ENDPOINT", "RDZV_ID", "RDZV_CONF", "STANDALONE", "MAX_RESTARTS"),
    )
)
"""Environment variables with which a pod configures torchrun."""

STOP_TIMEOUT_S = 40.0
"""Seconds for torchrun to end its ranks; it gives them 30 s before it kills them."""

# torchrun reports a dead rank in its own log format, then with a traceback of itself, and `forked`
# in one line.
_AGENT_LINE = re.compile(
    r"^(?:[EWF]\d{4} \d\d:\d\d:\d\d\.\d+ .*torch/distributed/|runtime\.launch\.fork_server: )"
)


@dataclass(frozen=True)
class Outcome:
    """The end of a job: exit code and reason."""

    exit_code: int
    message: str
    """The reason of a failure, in one line; empty after success."""
    restart: bool = False
    """True if a restart may succeed: a rank was lost, and not its input refused."""
    stopped_by: signal.Signals | None = None
    """The signal on which the job saved and ended."""


class JobStopped(KeyboardInterrupt):
    """Error: a signal ended a job and all its ranks before it could save."""

    def __init__(self, number: signal.Signals = signal.SIGINT) -> None:
        super().__init__()
        self.number = number


def run_job(
    command: Sequence[str],
    ranks: int,
    log_dir: Path,
    on_line: Callable[[str], None],
    on_metrics: Callable[[dict[str, Any]], None],
    restarts: int = 0,
    saves: bool = False,
    warm: WarmRanks | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Outcome:
    """Run `command` to its end; Ctrl-C, SIGTERM and SIGHUP end it with all its ranks, and raise `JobStopped`.

    The job also ends when this process ends for any reason, and when `on_line` or `on_metrics` raises an
    error.

    Args:
        on_line: called with each line that the ranks print.
        on_metrics: called with each new record of metrics.jsonl.
        restarts: number of earlier restarts after failures.
        saves: True if the ranks save and end on SIGTERM. The first signal asks for that; a second one ends
            them at once.
        warm: forks CPU ranks instead of starting a `command` of `torchrun_command`.
        variables: further environment variables of the job.
    """
    error_file = log_dir / "error.json"
    error_file.unlink(missing_ok=True)
    # Not what a pod says to torchruns: they would take it for flags that are not given.
    kept = {name: value for name, value in os.environ.items() if name not in TORCHRUN_DEFAULTS}
    environment = {**kept, ERROR_FILE_VARIABLE: str(error_file), "PYTHONUNBUFFERED": "1"}
    environment |= {SUMMARY_VARIABLE: "launcher", **variables}
    environment[RESTARTS_VARIABLE] = str(restarts)
    environment.setdefault("OMP_NUM_THREADS", threads_of(ranks))
    # Ranks print through pipes; the folder holds nothing else, and torchrun never removes it.
    with tempfile.TemporaryDirectory(
        prefix="torchrun-", dir=log_dir, ignore_cleanup_errors=True
    ) as torchrun_folder:
        environment.setdefault(TORCHRUN_FOLDER, torchrun_folder)
        reader = MetricsReader(log_dir)  # Before the job starts: it may be quicker than this process.
        process = _start(command, environment) if warm is None else warm.start(ranks, command, environment)
        job = _Supervisor(process, saves, log_dir, reader, error_file, on_line, on_metrics)
        code = job.watch()
    if code == 0:
        return Outcome(0, "", stopped_by=job.stop_signal)
    stated = read_report(error_file)
    if stated is not None:
        restart = stated.restart and job.stop_signal is None
        return Outcome(stated.exit_code, stated.message, restart, job.stop_signal)
    if job.stop_signal is not None:
        raise JobStopped(job.stop_signal)  # Before there was anything to save.
    cause = f"{_cause(job.agent_lines, code)}; all ranks were stopped, logs are in {log_dir}"
    return Outcome(1, cause, restart=True)


def _start(command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        tether(list(command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
    )


class _Supervisor:
    """The supervisor of a job, which ends the job when this process is asked to end."""

    def __init__(
        self,
        process: subprocess.Popen[str],
        saves: bool,
        log_dir: Path,
        reader: MetricsReader,
        error_file: Path,
        on_line: Callable[[str], None],
        on_metrics: Callable[[dict[str, Any]], None],
    ) -> None:
        self.process, self.saves, self.log_dir = process, saves, log_dir
        self.reader, self.error_file = reader, error_file
        self.on_line, self.on_metrics = on_line, on_metrics
        self.stop_signal: signal.Signals | None = None
        """The last signal that asked for the end."""
        self.asked: list[int] = []
        """The ranks that ran when the signal came."""
        self.agent_lines: list[str] = []
        """Lines that torchrun printed about itself."""

    def watch(self) -> int:
        """The exit code of the job; an error raised meanwhile ends the job."""
        # A shell that starts this in the background made it ignore Ctrl-C; a signal must stop it anyway.
        previous = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        if (
            hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
        ):  # nohup ignores it.
            previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._stop)
        if hasattr(signal, "SIGUSR1"):
            # torchrun would die of it; one rank that takes note of it is enough for all.
            previous[signal.SIGUSR1] = signal.signal(
                signal.SIGUSR1, lambda *_: self._signal_first_rank(signal.SIGUSR1)
            )
        try:
            self._follow()
            return self.process.wait()
        except BaseException:
            _end(self.process)
            raise
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _stop(self, number: int, _: object) -> None:
        """Handle a signal: ask a job that can save to do so, once; else raise `JobStopped`."""
        before, self.stop_signal = self.stop_signal, signal.Signals(number)
        # One rank is enough for all. Not torchrun: it kills what has not saved after 30 s.
        if before is None and self.saves:
            self.asked = children(self.process.pid)
            if self._signal_first_rank(signal.SIGTERM):
                return
        if before is not None:
            for rank in children(self.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)
        raise JobStopped(self.stop_signal)

    def _signal_first_rank(self, number: signal.Signals) -> bool:
        """Send a signal to the first rank; returns False if it does not exist yet or has ended."""
        ranks = children(self.process.pid)
        if not ranks:
            return False
        try:
            os.kill(ranks[0], number)
        except ProcessLookupError:
            return False
        return True

    def _check_restart(self) -> None:
        """Raise `JobStopped` where torchrun has replaced ranks that were asked to end and could not save."""
        if self.asked and self.stop_signal is not None and set(children(self.process.pid)) - set(self.asked):
            raise JobStopped(self.stop_signal)

    def _follow(self) -> None:
        """Pass on output and metrics until both streams end."""
        lines: queue.Queue[tuple[str, str | None]] = queue.Queue()
        streams = {"out": self.process.stdout, "err": self.process.stderr}
        for name, stream in streams.items():
            assert stream is not None
            threading.Thread(target=_read, args=(name, stream, lines), daemon=True).start()
        open_streams = len(streams)
        said_stop = False
        with _Log(self.log_dir / "output.log") as log:
            while open_streams:
                if self.stop_signal is not None and not said_stop:
                    said_stop = True
                    how = "saving after the running step; a second signal does not wait"
                    self.on_line(f"planner: {self.stop_signal.name}: {how}")
                try:
                    name, line = lines.get(timeout=0.5)
                except queue.Empty:
                    continue
                finally:
                    self._check_restart()
                if line is None:
                    open_streams -= 1
                    continue
                log.write(line)
                if name == "err" and (self.agent_lines or _AGENT_LINE.match(line)):
                    self.agent_lines.append(line)
                elif name == "out" or not self.error_file.exists():
                    self.on_line(line.rstrip("\n"))
                for record in self.reader.new_records():
                    self.on_metrics(record)


class _Log:
    """The output of a job, written to a file as long as that is possible."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failed = False
        self.file: IO[bytes] | None = None

    def __enter__(self) -> _Log:
        return self

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            with contextlib.suppress(OSError):
                self.file.close()

    def write(self, line: str) -> None:
        """Append a line; a full disk is reported once and does not end the job."""
        try:
            if self.file is None:
                self.file = self.path.open("ab", buffering=0)
            self.file.write(line.encode(errors="replace"))
        except OSError as error:
            if not self.failed:
                say(f"planner: warning: {self.path} cannot be written ({error.strerror})", sys.stderr)
            self.failed = True


def _read(name: str, stream: IO[str], lines: queue.Queue[tuple[str, str | None]]) -> None:
    for line in stream:
        lines.put((name, line))
    lines.put((name, None))


def _end(process: subprocess.Popen[str]) -> None:
    """End torchrun, which ends its ranks; kill torchrun if it does not end, and remaining ranks."""
    if process.poll() is None:
        process.send_signal(END)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while not _has_ended(process) and time.monotonic() < deadline:
            time.sleep(0.01)
        # Not waited for yet, so that no other group can have its number.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _has_ended(process: subprocess.Popen[str]) -> bool:
    """Return whether a child has ended; the system keeps its number until it is waited for."""
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    try:
        return os.waitid(os.P_PID, process.pid, flags) is not None
    except ChildProcessError:
        return True


def _cause(agent_lines: Sequence[str], code: int) -> str:
    text = "".join(agent_lines)
    rank = re.search(r"local_rank: (\d+)", text)
    exit_code = re.search(r"exitcode: (-?\d+)", text)
    if rank is None or exit_code is None:
        return f"training failed with exit code {code}"
    number = int(exit_code[1])
    how = f"was killed by {signal.Signals(-number).name}" if number < 0 else f"exited with code {number}"
    return f"rank {rank[1]} {how}"

"""A lock that lets only one job at a time write into a folder; it ends with its process.

It is a system lock on the file `owner.json`, which names the owner. Some file systems have no locks, or only
locks within a machine (Lustre mounted with localflock, NFS with local_lock). So the owner also increments a
counter in the file every few seconds. A record of another machine with a growing counter counts as an owner.
If two jobs begin at the same time, the last one to write its record owns the folder, and the other job stops
at its next save.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from pydantic import BaseModel, ValidationError

from costmodels.errors import InputError
from costmodels.paths import resolved

if os.name == "posix":
    import fcntl

OWNER = "owner.json"
"""The lock file in a folder of jobs; it stays, and is empty when no job writes."""

RECORD_BYTES = 1024
"""Fixed length of the file, so that a record is replaced in one write."""

BEAT_S = 2.0
"""Seconds between two increments of the counter."""

WATCH_S = 7.0
"""Seconds for which the counter of another machine's record is watched."""

PATIENCE_S = 3.0
"""Seconds that a job waits for ending processes of another job."""

PATIENCE_OF_RESTART_S = 120.0
"""Seconds that a restarted job waits, as its own earlier processes may end late on other machines."""

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Record(BaseModel):
    """The record of the process that writes into a folder."""

    process: int
    host: str
    machine: str
    """The boot id of the machine."""
    since: str
    token: str
    """A random text that differs between owners."""
    beat: int = 0

    def describe(self) -> str:
        """The process in words, for a message."""
        return f"process {self.process} on host {self.host} since {self.since}"


class Owner:
    """This process's claim to a folder.

    Args:
        folder: an existing folder.
        named: its name in messages, such as `--save checkpoints`.
    """

    def __init__(self, folder: Path, named: str) -> None:
        self.path, self.named = folder / OWNER, named
        self.record = Record(
            process=os.getpid(),
            host=socket.gethostname(),
            machine=_machine(),
            since=f"{datetime.now():%Y-%m-%d %H:%M:%S}",
            token=uuid.uuid4().hex,
        )
        self.file: int | None = None
        self.ended = threading.Event()
        self.beats = threading.Thread(target=self._beat, name="owner", daemon=True)

    def acquire(self, patience_s: float = PATIENCE_S) -> None:
        """Own the folder, waiting `patience_s` for another process that is ending.

        Raises:
            InputError: another job writes there, or the folder cannot be written.
        """
        deadline = time.monotonic() + patience_s
        while True:
            try:
                who = self._taken_by()
            except OSError as error:
                raise InputError(f"{self.named}: cannot write there ({error.strerror})") from None
            if who is None:
                break
            if time.monotonic() >= deadline:
                raise InputError(
                    f"{self.named}: in use by {who}; wait until it has ended, or give another folder"
                )
            time.sleep(0.1)
        _owners[resolved(self.path)] = self
        self.beats.start()

    def release(self) -> None:
        """Let other processes write."""
        if self.file is None:
            return
        # A count that is on its way must not come over the record of who is next.
        self.ended.set()
        self.beats.join(PATIENCE_S)
        with contextlib.suppress(OSError):
            if _read(self.path, self.record.token) is not None:
                os.ftruncate(self.file, 0)
        self.close()

    def close(self) -> None:
        """Give up a folder that was deleted or renamed."""
        self.ended.set()
        _owners.pop(resolved(self.path), None)
        if self.file is not None:
            os.close(self.file)
            self.file = None

    def check(self) -> None:
        """Raise `InputError` when another job has taken the folder despite the lock."""
        with contextlib.suppress(OSError):
            now = _read(self.path)
            if now is not None and now.token != self.record.token:
                raise InputError(
                    f"{self.named}: in use by {now.describe()} too, which has taken it over; nothing more is "
                    "written there: give each job a folder of its own"
                )

    def _taken_by(self) -> str | None:
        """The process that has the folder, in words; None when this process has it now."""
        file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            locked = _lock(file)
            told = _read(self.path)
            if locked is False:
                return "another process" if told is None else told.describe()
            # On systems with locks, a record of this machine without a lock is of a process that has died.
            elsewhere = told is not None and not (locked and told.machine == self.record.machine)
            if told is not None and elsewhere and _counts_on(self.path, told):
                return told.describe()
            if os.fstat(file).st_ino != self.path.stat().st_ino:
                return "another process"  # One that was just ending: it has removed the file.
            self._write()
            self.file, file = file, -1
        finally:
            if file != -1:
                os.close(file)
        return None

    def _beat(self) -> None:
        """Increment the counter while the record belongs to this process."""
        while not self.ended.wait(BEAT_S):
            with contextlib.suppress(OSError):
                if _read(self.path, self.record.token) is None:
                    return
                self.record = self.record.model_copy(update={"beat": self.record.beat + 1})
                self._write()

    def _write(self) -> None:
        # Opened anew, as a shared file system shows to others what has been closed.
        with self.path.open("r+b") as file:
            file.write(self.record.model_dump_json().encode().ljust(RECORD_BYTES))


_owners: dict[Path, Owner] = {}
"""The owners in this process, by their files."""


@contextmanager
def ownership(folder: Path, named: str, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Own `folder` within this context; see `Owner`."""
    owner = Owner(folder, named)
    owner.acquire(patience_s)
    try:
        yield
    finally:
        owner.release()


def check_ownership(folder: Path) -> None:
    """Raise `InputError` when this process owned `folder`, but another one now does."""
    owner = _owners.get(resolved(folder / OWNER))
    if owner is not None:
        owner.check()


def _machine() -> str:
    with contextlib.suppress(OSError):
        return BOOT_ID.read_text().strip()
    return socket.gethostname()


def _lock(file: int) -> bool | None:
    """Lock a file until it is closed; returns False when another process has the lock, None where there are
    no locks."""
    if os.name != "posix":
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _read(path: Path, token: str | None = None) -> Record | None:
    """The record in a file, or None; with `token`, only a record of that token."""
    with path.open("rb") as file:
        text = file.read(RECORD_BYTES)
    try:
        record = Record.model_validate_json(text)
    except ValidationError:
        return None
    return record if token in (None, record.token) else None


def _counts_on(path: Path, told: Record) -> bool:
    """Return whether the counter in a file grows, so that its owner is alive."""
    end = time.monotonic() + WATCH_S
    while time.monotonic() < end:
        time.sleep(min(BEAT_S, WATCH_S) / 4)
        now = _read(path)
        if now != told:
            return now is not None
    return False

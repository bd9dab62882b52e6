"""Root without its privileges: what it may not read is then closed to it, as to an ordinary user."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable

PR_CAPBSET_DROP = 24
"""Option of prctl(2): a capability that no program which is executed gets."""

VERSION_3 = 0x20080522
"""Version of the structures of capset(2), with two words for each set."""


def is_ordinary() -> bool:
    """Return whether this process may do what its user may, and no more."""
    return os.geteuid() != 0


def drop_capabilities() -> None:
    """Give up all capabilities of root, for good and for what is executed; raises `OSError` where that fails.

    The user stays, and with it the files that an interpreter in the home of root needs.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    header, sets = (ctypes.c_uint32 * 2)(VERSION_3, 0), (ctypes.c_uint32 * 6)()
    if libc.capset(header, sets):
        raise OSError(ctypes.get_errno(), "capabilities cannot be dropped")


def as_ordinary_user(work: Callable[[], None]) -> int:
    """The exit code of a fork of this process that does `work` as an ordinary user: 0 unless it raises."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if not is_ordinary():
                drop_capabilities()
            work()
            code = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def can_be_ordinary() -> bool:
    """Return whether this process is an ordinary user's, or can have a child that is."""
    return is_ordinary() or (sys.platform == "linux" and as_ordinary_user(lambda: None) == 0)

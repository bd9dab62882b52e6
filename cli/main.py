"""The command `planner`."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys

from runtime.processes.interrupts import exit_on_ctrl_c

COMMANDS = {
    "suggest": "cli.suggest",
    "explain": "cli.explain",
    "check": "cli.check",
    "export": "cli.export",
    "convert-config": "cli.convert_config",
    "script": "cli.script",
    "ranktable": "cli.ranktable",
    "launch": "cli.launch",
    "calibrate": "cli.calibrate",
    "sweep": "cli.sweep",
    "timeline": "cli.timeline",
    "report": "cli.pages",
    "compare": "cli.pages",
    "web": "cli.web",
    "watch": "cli.watch",
    "dryrun": "cli.dryrun",
    "profile": "cli.profile",
    "mcp": "cli.mcp",
    "schema": "cli.schema",
    "models": "cli.catalogues",
    "devices": "cli.catalogues",
    "engines": "cli.catalogues",
    "data": "cli.data",
    "convert": "cli.convert",
    "generate": "cli.generate",
}
"""Modules of the commands."""

PLANNING = ("suggest", "explain", "check", "export", "timeline", "mcp")
"""Commands that start no ranks and load no PyTorch."""

OBJECTS = 100_000
"""Number of new objects after which the garbage collector runs during planning; Python's default is 700."""


def main() -> None:
    """Run the command line; wrong input ends in one line on stderr and exit code 2 (3: nothing fits)."""
    first = gc.isenabled() and not gc.get_freeze_count()
    if first:
        gc.disable()
    # No other installed package changes its records, and a search for plugins takes a while.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    plans = bool(sys.argv[1:]) and sys.argv[1] in PLANNING
    if plans:
        # No layout takes a product of large matrices; NumPy's BLAS would start a thread for each core.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        _keep_memory()
    try:
        with exit_on_ctrl_c():
            from cli.app import make_app
            from planner.options.flags import run

            app = make_app(COMMANDS, sys.argv[1:])
    finally:
        if first:
            # Objects of modules live until the end: searching them for garbage again and again takes a fifth
            # of a short command.
            gc.freeze()
            gc.enable()
            atexit.register(_let_go)
            if plans:
                # They make many small objects, few in circles, and most of them last to the end, when nobody
                # need look through them either.
                gc.set_threshold(OBJECTS)
                atexit.register(gc.freeze)
    run(app, "planner")


M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
"""Parameters of glibc's allocator (mallopt(3))."""


def _keep_memory() -> None:
    """Let the C library reuse the memory of freed arrays. Planning makes many arrays of 100 KiB to a few MiB.
    Otherwise the kernel would provide each of them anew, filled with zeros."""
    import ctypes  # NumPy loads it too.

    with contextlib.suppress(OSError, AttributeError, TypeError):  # Not every C library is glibc.
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, mib in ((M_MMAP_THRESHOLD, 32), (M_TRIM_THRESHOLD, 64), (M_TOP_PAD, 16)):
            mallopt(parameter, mib << 20)


def _let_go() -> None:
    """Let the interpreter free all modules; some extensions below PyTorch complain about objects that are
    never freed."""
    if "torch" in sys.modules:
        gc.unfreeze()

"""The command `planner`."""

from __future__ import annotations

import atexit
import gc
import sys

from cli.interrupts import exit_on_ctrl_c

COMMANDS = {
    "suggest": "cli.suggest",
    "explain": "cli.explain",
    "check": "cli.check",
    "export": "cli.export",
    "launch": "cli.launch",
    "timeline": "cli.timeline",
    "dryrun": "cli.dryrun",
    "tapes": "cli.tapes",
    "models": "cli.catalogues",
    "devices": "cli.catalogues",
    "engines": "cli.catalogues",
    "data": "cli.data",
    "convert": "cli.convert",
    "generate": "cli.generate",
}
"""Modules of the commands."""


def main() -> None:
    """Run the command line; wrong input ends in one line on stderr and exit code 2 (3: nothing fits)."""
    first = gc.isenabled() and not gc.get_freeze_count()
    if first:
        gc.disable()
    try:
        with exit_on_ctrl_c():
            from cli.app import make_app
            from planner.options.flags import run

            app = make_app(COMMANDS, sys.argv[1:])
    finally:
        if first:
            # What modules hold stays to the end: to look through it for garbage, again and again, takes a
            # fifth of a short command.
            gc.freeze()
            gc.enable()
            atexit.register(_let_go)
    run(app, "planner")


def _let_go() -> None:
    """Let the interpreter free all modules: some extensions below PyTorch complain of what is never freed."""
    if "torch" in sys.modules:
        gc.unfreeze()

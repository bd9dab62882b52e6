"""The command line of a torchrun rank, for modules other than `runtime.pretrain`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import typer

import planner.options.flags
from costmodels.errors import InputError
from planner.options.flags import flag_groups
from runtime.faults.error_file import report
from runtime.parallel.ranks import end_with_agent

Options = TypeVar("Options")


def run_rank_command(module: str, options: type[Options], work: Callable[[Options], None]) -> None:
    """Do `work` with the options of the command line; only the first rank prints its input errors."""
    is_first = os.environ.get("RANK", "0") == "0"
    app = typer.Typer(add_completion=False)

    def rank(options: Any) -> None:
        end_with_agent()
        try:
            work(options)
        except InputError as error:
            if is_first:
                report(planner.options.flags.one_line(error), error.exit_code)
            raise

    app.command(help=work.__doc__)(flag_groups(options=options)(rank))
    planner.options.flags.run(app, module, quiet=not is_first)

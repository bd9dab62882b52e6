"""`torchrun -m runtime.generation`: the ranks of `planner generate`."""

from __future__ import annotations

import os

import typer

import planner.options.flags
from costmodels.errors import InputError
from planner.options.flags import flag_groups
from runtime.faults.error_file import report
from runtime.generation.command import run_rank
from runtime.generation.options import GenerateOptions
from runtime.parallel.ranks import end_with_agent

IS_FIRST = os.environ.get("RANK", "0") == "0"

app = typer.Typer(add_completion=False)


@app.command()
@flag_groups(options=GenerateOptions)
def generate(options: GenerateOptions) -> None:
    """Continue prompts on the ranks that torchrun started."""
    end_with_agent()
    try:
        run_rank(options)
    except InputError as error:
        if IS_FIRST:
            report(planner.options.flags.one_line(error), error.exit_code)
        raise


if __name__ == "__main__":
    planner.options.flags.run(app, "runtime.generation", quiet=not IS_FIRST)

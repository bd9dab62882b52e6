"""`planner export`: write a plan as the flags or the file of another software."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from cli.written_plans import print_notes
from costmodels.files import write_whole
from planner.formats.nearest import check_expressible
from planner.formats.targets import TARGETS
from planner.formats.targets import export as exported
from planner.plan import Plan


def export(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="Plan file that --save wrote.")],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="NAME",
            help=f"Software: {', '.join(TARGETS)}.",
            autocompletion=lambda incomplete: [name for name in TARGETS if name.startswith(incomplete)],
        ),
    ],
    out: Annotated[
        str | None, typer.Option("--out", metavar="FILE", help="File to write; standard output unless given.")
    ] = None,
    nearest: Annotated[
        bool,
        typer.Option(
            "--nearest", help="Write the nearest job where the software does not support a part of the plan."
        ),
    ] = False,
) -> None:
    """Write a plan as the flags or the configuration file of other software.

    If the software does not support a part of the plan, nothing is written and the exit code is 5. With
    --nearest the nearest job is written, and its difference in time and memory is printed.
    """
    loaded = Plan.load(plan)
    found = exported(loaded, to=to)
    check_expressible(found, nearest)
    if out is None:
        print(found.text, end="")
    else:
        write_whole("export", out, found.text)
        print(f"planner: saved {out}", file=sys.stderr)
    print_notes(loaded, found)

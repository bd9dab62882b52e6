"""`planner export`: write a plan as the flags or the file of another software."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from costmodels.files import write_whole
from planner.formats.targets import TARGETS
from planner.formats.targets import export as exported


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
        str | None, typer.Option("--out", metavar="FILE", help="Write it here, not to standard output.")
    ] = None,
) -> None:
    """Write a plan as the flags or the configuration file of other software.

    What the software has no words for is named on standard error.
    """
    found = exported(plan, to=to)
    if out is None:
        print(found.text, end="")
    else:
        write_whole("export", out, found.text)
        print(f"planner: saved {out}", file=sys.stderr)
    for part in found.inexpressible:
        print(f"planner: not expressible in {to}: {part}", file=sys.stderr)
    for note in found.notes:
        print(f"planner: note: {note}", file=sys.stderr)

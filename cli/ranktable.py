"""`planner ranktable`: Ascend's RANK_TABLE_FILE, merged and checked."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from costmodels.errors import InputError
from costmodels.files import write_whole
from planner.options.command import HELP, add
from planner.plan import Plan
from planner.scripts.rank_table import merge_rank_tables, rank_table_problems, read_rank_table

app = typer.Typer(
    no_args_is_help=True, context_settings=HELP, help="Merge and check Ascend's RANK_TABLE_FILE."
)


def merge(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="A table of each server, in order.")],
    out: Annotated[
        str | None, typer.Option("--out", metavar="FILE", help="File to write; standard output unless given.")
    ] = None,
) -> None:
    """Join the tables of several servers into one; ranks are numbered consecutively in the order of the
    files."""
    merged = merge_rank_tables([read_rank_table(path) for path in files])
    if out is None:
        print(merged.text(), end="")
        return
    write_whole("rank table", out, merged.text())
    servers, ranks = len(merged.server_list), len(merged.devices)
    print(f"planner: saved {out}: {servers} servers, ranks 0 to {ranks - 1}", file=sys.stderr)


def check(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A table of ranks.")],
    plan: Annotated[
        str | None, typer.Option("--plan", metavar="FILE", help="Plan whose ranks the table must list.")
    ] = None,
) -> None:
    """Check a table of ranks: counts, ranks, addresses and devices."""
    world_size = None if plan is None else Plan.load(plan).layout.world_size
    table = read_rank_table(file)
    problems = list(rank_table_problems(table, world_size))
    if problems:
        raise InputError(f"{file}: {'; '.join(problems)}")
    print(f"{file}: {len(table.server_list)} servers, {len(table.devices)} devices, ranks in order")


add(app, merge)
add(app, check)

"""`planner report` and `planner compare`: a page about a plan or a run, and a page that compares two of
them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.tables import console, table
from cli.waiting import waiting
from costmodels.errors import InputError
from costmodels.paths import is_file, is_folder
from costmodels.spec.record import GIB, in_seconds
from planner.explanation.comparison import Comparison
from planner.plan import Plan
from runtime.logs.metrics_file import read_metrics

PLAN_FILE = "plan.json"
"""The file of the plan, which `planner launch` writes beside the metrics of a run."""


def report(
    source: Annotated[
        str, typer.Argument(metavar="PLAN", help="Plan file that --save wrote, or the --log-dir of a run.")
    ],
    out: Annotated[
        str,
        typer.Option("-o", "--out", metavar="FILE", help="HTML page to write; it needs no network."),
    ] = "report.html",
    figures: Annotated[
        str | None,
        typer.Option("--figures", metavar="DIR", help="Folder for each figure as SVG and PNG."),
    ] = None,
) -> None:
    """Write a page about a plan, or about a run of it: ranking, time, memory, pipeline, ranges, devices."""
    from planner.report.contents import gather  # Few commands draw.
    from planner.report.page import write_figures, write_page

    with waiting("searching, and drawing the page"):
        contents = gather(*_loaded(source))
        write_page(contents, out)
    print(f"planner: saved {out}", file=sys.stderr)
    if figures is not None:
        with waiting("rendering the figures"):
            written = write_figures(contents, figures)
        print(f"planner: saved {len(written)} images in {figures}", file=sys.stderr)


def compare(
    first: Annotated[str, typer.Argument(metavar="A", help="Plan file, or the --log-dir of a run.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Plan file, or the --log-dir of a run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON with every term.")] = False,
) -> None:
    """Show two plans or runs side by side: their differences, costs and measurements."""
    from planner.explanation.comparison import compare as compared
    from planner.explanation.side_by_side import differing_fields, measured_steps

    (one, one_records), (other, other_records) = _loaded(first), _loaded(second)
    if one.model != other.model:
        raise InputError(
            f"{first} is a plan of {one.model.name}, {second} of {other.model.name}: their steps do "
            "different work"
        )
    found = compared(one, other)
    fields = differing_fields(one, other)
    measured = measured_steps(one_records), measured_steps(other_records)
    if as_json:
        print(json.dumps(_json(found, fields, measured), indent=2))
        return
    _print(found, fields, measured, (first, second))


def _loaded(source: str) -> tuple[Plan, list[dict[str, Any]]]:
    """The plan in a file or in the folder of a run, and the records of the run; `InputError` where there is
    neither."""
    folder = Path(source)
    if not is_folder(folder):
        return Plan.load(folder), []
    if not is_file(folder / PLAN_FILE):
        raise InputError(f"{source}: a folder without {PLAN_FILE}; name a plan, or the --log-dir of a run")
    return Plan.load(folder / PLAN_FILE), read_metrics(folder)


Fields = dict[str, tuple[str, str]]
Measured = tuple[float | None, float | None]


def _json(found: Comparison, fields: Fields, measured: Measured) -> dict[str, object]:
    return {
        "differences": {name: list(values) for name, values in fields.items()},
        "throughput_ratio": found.throughput,
        "distinguishable": found.distinguishable,
        "time_s": {term.name: [term.first, term.second] for term in found.time},
        "memory_bytes": {term.name: [term.first, term.second] for term in found.memory},
        "measured_step_time_s": list(measured),
    }


def _print(found: Comparison, fields: Fields, measured: Measured, names: tuple[str, str]) -> None:
    screen = console()
    one, other = found.first.estimate, found.second.estimate
    rows = [[name, *values] for name, values in fields.items()] or [["layout", "the same", "the same"]]
    screen.print(table(["what differs", *names], rows, left=["what differs"]))
    peaks = [f"{each.peak_memory_bytes / GIB:.2f} GiB" for each in (one, other)]
    costs = [["step", in_seconds(one.step_time_s), in_seconds(other.step_time_s), ""]]
    shortest = 1e-6 * one.step_time_s
    for term in found.time:
        if max(term.first, term.second) < shortest:
            continue
        values = (in_seconds(seconds) for seconds in (term.first, term.second))
        sign = "-" if term.difference < 0 else "+"
        costs.append([f"  {term.name}", *values, f"{sign}{in_seconds(abs(term.difference))}"])
    costs.append(["fullest device", *peaks, ""])
    for term in found.memory:
        values = (f"{size / GIB:.2f} GiB" for size in (term.first, term.second))
        costs.append([f"  {term.name}", *values, f"{term.difference / GIB:+.2f} GiB"])
    if any(measured):
        costs.append(["measured step", *("-" if each is None else in_seconds(each) for each in measured), ""])
    heading = "normalised to one step of A"
    screen.print(table([heading, "A", "B", "B - A"], costs, left=[heading]))
    ratio = found.throughput
    who, much = ("A", ratio) if ratio >= 1 else ("B", 1 / ratio)
    sure = "" if found.distinguishable else ", within the estimate's error"
    screen.print(f"{who} has {100 * (much - 1):.1f} % more tokens a second{sure}")

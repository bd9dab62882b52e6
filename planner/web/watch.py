"""The page of running jobs: figures and a table, refreshed every few seconds."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from planner.report.parts import TITLES, section
from planner.report.run_figures import (
    RUN_COLUMNS,
    LoggedRun,
    loss,
    peaks,
    run_row,
    speed,
    steps,
    stragglers,
)
from planner.web.server import HEADERS, application, own_asset

FIGURES = {"loss": loss, "measured": steps, "speed": speed, "peaks": peaks}
"""Figures of runs, by the names of their places."""


def runs_now(runs: Sequence[LoggedRun]) -> dict[str, Any]:
    """The contents of a page on runs, as a JSON record: a table, lines on slow ranks, and figures."""
    heads = "".join(f'<th scope="col">{name}</th>' for name in RUN_COLUMNS)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in run_row(run)) + "</tr>" for run in runs
    )
    table = f'<table class="measured"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
    slow = "".join(f"<li>{html.escape(line)}</li>" for line in stragglers(runs))
    drawn = {name: draw(runs) for name, draw in FIGURES.items()}
    return {
        "table": f'<div class="scroll">{table}</div>' + (f'<ul class="error">{slow}</ul>' if slow else ""),
        "figures": {name: figure.to_json() for name, figure in drawn.items() if figure is not None},
    }


def watch_app(host: str, read: Callable[[], Sequence[LoggedRun]]) -> Starlette:
    """The application that shows the runs that `read` returns."""

    async def runs(request: Request) -> Response:
        found = await run_in_threadpool(lambda: runs_now(read()))
        return JSONResponse(found, headers=HEADERS)

    places = "".join(section(name, TITLES[name][1]) for name in FIGURES)
    page = own_asset("watch.html").replace("$places", places)
    return application(host, page, {"watch.js": own_asset("watch.js")}, [Route("/runs", runs)])

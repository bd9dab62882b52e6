"""`planner watch`: show running jobs in the terminal or on a page, from their metrics.jsonl."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.web import HOST, check_port
from costmodels.errors import InputError
from costmodels.paths import is_file, is_folder
from planner.report.run_figures import RUN_COLUMNS, LoggedRun, run_row, stragglers
from runtime.logs.metrics_file import METRICS_FILE, FollowedMetrics

if TYPE_CHECKING:
    from rich.console import RenderableType

MOST_EVERY_S = 3600.0

BARS = "▁▂▃▄▅▆▇█"

LONGEST_TREND = 32
"""Most characters of the trend of a metric."""


def watch(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="The --log-dir of runs.")],
    serve: Annotated[bool, typer.Option("--serve", help="Show the runs on a page in the browser.")] = False,
    port: Annotated[
        int, typer.Option("--port", help="With --serve: number of the port; 0 for a free one.")
    ] = 8001,
    host: Annotated[str, typer.Option("--host", help="With --serve: address to listen at.")] = HOST,
    every: Annotated[float, typer.Option("--every", help="Seconds between two updates.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show the state of the runs once, and end.")] = False,
) -> None:
    """Watch runs while they train: loss, step, tokens/s, memory, predicted against measured, stragglers."""
    check_port(port)
    if not 0.1 <= every <= MOST_EVERY_S:
        raise InputError(f"--every {every:g}: expected seconds from 0.1 to {MOST_EVERY_S:g}")
    followed = {name: FollowedMetrics(folder) for name, folder in _folders(runs).items()}

    def now() -> list[LoggedRun]:
        return [LoggedRun(name, one.update()) for name, one in followed.items()]

    if serve:
        _serve(now, host, port)
        return
    from cli.tables import console

    screen = console()
    if once or not screen.is_terminal:
        screen.print(_shown(now()))
        return
    from rich.live import Live

    with Live(_shown(now()), console=screen, auto_refresh=False, transient=False) as live:
        while True:
            time.sleep(every)
            live.update(_shown(now()), refresh=True)


def _folders(runs: list[str]) -> dict[str, Path]:
    """The folders of runs by short names; raises `InputError` for a folder without a run."""
    found: dict[str, Path] = {}
    for given in runs:
        path = Path(given)
        if path.name == METRICS_FILE and is_file(path):
            path = path.parent
        if not is_folder(path):
            raise InputError(f"{given}: no such folder; name the --log-dir of a run")
        name = path.resolve().name
        found[str(path) if name in found else name] = path
    return found


def _serve(now: Callable[[], Sequence[LoggedRun]], host: str, port: int) -> None:
    from planner.web.server import LOOPBACK, address, listening, make_server
    from planner.web.watch import watch_app

    opened = listening(host, port)
    print(f"planner: {address(opened)} (Ctrl-C ends it)", file=sys.stderr, flush=True)
    if host not in LOOPBACK:
        print("planner: every machine that reaches this one can look", file=sys.stderr, flush=True)
    make_server(watch_app(host, now)).run(sockets=[opened])


def _shown(runs: list[LoggedRun]) -> RenderableType:
    """A table with a row for each run: the trends of loss and step time, and slow ranks."""
    from rich.console import Group
    from rich.text import Text

    from cli.tables import table

    rows = [[*run_row(run), _trend(run.line("loss")[1]), _trend(run.line("step_time_s")[1])] for run in runs]
    lines = [Text(f"straggler, {line}" if "straggler" not in line else line) for line in stragglers(runs)]
    waits = [Text(f"{run.name}: no step is logged yet") for run in runs if not run.line("loss")[0]]
    return Group(table([*RUN_COLUMNS, "loss so far", "steps so far"], rows, left=["run"]), *waits, *lines)


def _trend(values: list[float]) -> str:
    """The trend of a metric in a few characters, each for the mean of a part of the values."""
    if len(values) < 2:
        return ""
    each = -(-len(values) // LONGEST_TREND)
    means = [sum(part) / len(part) for part in (values[at : at + each] for at in range(0, len(values), each))]
    low, high = min(means), max(means)
    return "".join(BARS[round((len(BARS) - 1) * (mean - low) / (high - low or 1))] for mean in means)

"""Errors of predictions for every layout on this machine, before and after calibration.

python -m benchmarks.loop [--world-size N]... [--model NAME]... [--pin PIN] [--folder FOLDER]
    [--sample N] [--limit SECONDS] [--json]

Small models, a dense one, one with experts and one with long sequences, are trained for a few steps. Every
layout that fits on that many CPU ranks is trained, each on ranks of its own. `planner calibrate` measures the
same models with another batch, so that no compared layout was used for calibration. Measurements are kept in
a folder and not repeated. `--limit` ends a call after this many seconds, for machines that are undisturbed
only for a while. `--sample` draws some layouts of each model where all would take hours.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
import yaml

from benchmarks.calibration.rank_correlation import kendall_tau, regret
from benchmarks.loop_measure import MODELS, Measured, Question, measure_all, read_kept
from costmodels import Device, Layout
from costmodels.catalogue import load_device, load_engine
from costmodels.catalogue.measured_devices import read_devices
from costmodels.errors import InputError
from costmodels.pricing import Prices, price
from costmodels.spec.table import LayoutTable
from planner.inputs.cluster import resolve_cluster
from planner.inputs.engine import DEFAULT_ENGINE
from planner.options.flags import run
from runtime import entry

KEPT, DEVICES = "measured.jsonl", "device.json"
"""Files of the folder."""

FIRST = 3
"""Number of first plans that are measured in addition to random layouts."""

CALIBRATION_S = 130
"""Seconds of a calibration, including its start."""


class Errors(NamedTuple):
    """Errors of predictions, in per cent except tau."""

    rows: int
    median_ape: float
    kendall_tau: float
    regret: float
    in_range: float
    """Share of the rows whose time is within the predicted range."""
    memory_ape: float
    """Median error of the peak."""


def prices_of(question: Question, device: Device, layouts: Sequence[Layout]) -> Prices:
    """Predicted prices of layouts on a device."""
    cluster = resolve_cluster(device, question.world_size, question.world_size)
    prices = price(question.spec, cluster, load_engine(DEFAULT_ENGINE), LayoutTable.of(layouts))
    return prices.simulate(np.flatnonzero(~prices.simulated))


def errors(rows: Sequence[Measured], device: Device) -> Errors:
    """The errors of predictions for one question's layouts on a device."""
    prices = prices_of(rows[0].question, device, [row.layout for row in rows])
    seconds = np.array([row.step_time_s for row in rows])
    peaks = np.array([float(row.peak_memory_bytes) for row in rows])
    predicted, missed = prices.step_time_s, np.log(seconds / prices.step_time_s)
    tau = kendall_tau(-seconds, -predicted)
    return Errors(
        len(rows),
        100 * float(np.median(np.abs(predicted / seconds - 1))),
        0.0 if tau is None else tau,
        100 * regret(1 / seconds, (1 / predicted).round(9)),
        100 * float(np.mean(np.abs(missed) <= prices.spread)),
        100 * float(np.median(np.abs(prices.peak_memory_bytes / peaks - 1))),
    )


def drawn(question: Question, count: int, devices: Sequence[Device]) -> list[Layout]:
    """Random layouts, and the first plans of each device, whose regret is measured."""
    every, found = question.layouts(None), question.layouts(count)
    for device in devices:
        fastest = np.argsort(prices_of(question, device, every).step_time_s, kind="stable")[:FIRST]
        found += [every[place] for place in fastest.tolist()]
    return list(dict.fromkeys(found))


def overall(found: Sequence[Errors]) -> dict[str, float]:
    """Means over questions."""
    return {
        name: round(float(np.mean([getattr(one, name) for one in found])), 3)
        for name in Errors._fields
        if name != "rows"
    }


def calibrate(file: Path, models: Sequence[str], size: int, folder: Path) -> None:
    """Calibrate this machine for models and a number of ranks into a file."""
    words = []
    for name in models:
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(MODELS[name].model_dump(mode="json", exclude_defaults=True)))
        words += ["--model", str(path)]
    words += ["--world-size", str(size), "--save", str(file)]
    command = entry.command("planner", "calibrate", *words)
    subprocess.run(command, check=True, stdout=sys.stderr)


def known_devices(question: Question, devices: Path) -> dict[str, Device]:
    """A rank's share of this machine, by the catalogue and by calibration."""
    return {
        "uncalibrated": load_device("cpu", question.world_size),
        "calibrated": read_devices(devices).device(question.world_size),
    }


def answer(rows: Sequence[Measured], devices: Path) -> dict[str, Any]:
    """The figures of all questions of the rows."""
    questions = list(dict.fromkeys(row.question for row in rows))
    result: dict[str, Any] = {"questions": []}
    totals: dict[str, list[Errors]] = {"uncalibrated": [], "calibrated": []}
    for question in questions:
        own = [row for row in rows if row.question == question]
        known = known_devices(question, devices)
        figures = {name: errors(own, device) for name, device in known.items()}
        for name, found in figures.items():
            totals[name].append(found)
        told = {name: {k: round(v, 3) for k, v in found._asdict().items()} for name, found in figures.items()}
        result["questions"].append({**question._asdict(), **told})
    return {name: overall(found) for name, found in totals.items()} | result


def show(found: dict[str, Any]) -> None:
    """Print the figures for people."""
    columns = [name for name in Errors._fields if name != "rows"]
    print(f"{'':34}{'rows':>5}" + "".join(f"{name:>13}" for name in columns))
    for question in found["questions"]:
        for when in ("uncalibrated", "calibrated"):
            one = question[when]
            name = f"{question['model']}, {question['world_size']} ranks, {when}"
            print(f"{name:34}{one['rows']:5}" + "".join(f"{one[column]:13.2f}" for column in columns))
    for when in ("uncalibrated", "calibrated"):
        print(f"{'mean, ' + when:39}" + "".join(f"{found[when][column]:13.2f}" for column in columns))


app = typer.Typer(add_completion=False)


@app.command()
def loop(
    world_size: Annotated[list[int], typer.Option(help="Ranks; 2 and 4 unless given.")] = [2, 4],  # noqa: B006
    model: Annotated[list[str], typer.Option(help=f"Of {', '.join(MODELS)}; all unless given.")] = [],  # noqa: B006
    pin: Annotated[str, typer.Option(help="A degree that all layouts share, such as recompute=none.")] = "",
    folder: Annotated[str, typer.Option(help="Where measurements are kept, for a later call.")] = "",
    limit: Annotated[float, typer.Option(help="Seconds after which to stop measuring.")] = 1e9,
    sample: Annotated[
        int, typer.Option(help="Layouts of each question, drawn at random, and its first plans; all if 0.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure every layout of small models, and compare predictions before and after calibration."""
    for name in model:
        if name not in MODELS:
            raise InputError(f"--model {name}: expected {', '.join(MODELS)}")
    for size in world_size:
        if size < 2:
            raise InputError(f"--world-size {size}: at least 2")
    models = model or list(MODELS)
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(folder or scratch)
        place.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        for size in world_size:
            known = read_devices(place / DEVICES).devices if (place / DEVICES).exists() else {}
            if size not in known:
                if time.monotonic() - started + CALIBRATION_S > limit:
                    print("not calibrated yet: call again", file=sys.stderr)
                    raise typer.Exit(1)
                calibrate(place / DEVICES, models, size, place)
        questions = [Question(name, size, size, pin) for size in world_size for name in models]
        left = limit - (time.monotonic() - started)
        wanted = {
            question: drawn(question, sample, [*known_devices(question, place / DEVICES).values()])
            if sample
            else question.layouts(None)
            for question in questions
        }
        done = measure_all(wanted, place / KEPT, left)
        rows = [row for row in read_kept(place / KEPT) if row.layout in wanted.get(row.question, ())]
        if not done:
            print(f"{len(rows)} layouts measured, more are left: call again", file=sys.stderr)
            raise typer.Exit(1)
        found = answer(rows, place / DEVICES)
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        show(found)


if __name__ == "__main__":
    run(app, "benchmarks.loop")

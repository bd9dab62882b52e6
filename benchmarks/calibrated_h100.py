"""Step times of the bundled runtime on an H100, calibrated from its kernels and ten of its rows.

python -m benchmarks.calibrated_h100 --rows bundled_h100.csv --kernels micro_h100_kernels.csv
    [--draws N] [--json]

Simulates `planner calibrate` on that machine. Kernel times of the file replace those that calibration would
measure, and ten rows replace its training steps. The other rows are priced with the result. The initial
constants were fitted without any row of the file. The ten rows are drawn at random, `--draws` times.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from benchmarks.accuracy import read_all
from benchmarks.calibration.left_out_sources import fits_without, loader
from benchmarks.calibration.measurements import Measurement
from benchmarks.calibration.predictions import settled_measurements
from benchmarks.calibration.time_fit import time_fit_plans
from costmodels import Device
from costmodels.calibration.machine_fit import batches_of, fitted_device, prices
from costmodels.calibration.machine_measurements import AttentionTime, Measurements, ProductTime, StepTime
from costmodels.errors import InputError
from costmodels.spec.engine import Engine
from costmodels.spec.table import Floats
from planner.options.flags import run

SEEN = 10
"""Number of rows to which calibration is fitted."""

LAUNCH_S = 25e-6
"""Seconds of a launch within each kernel time in the file: calls were timed one by one (README.md beside the
measurements)."""

GEMMS = ("gemm_nt", "gemm_nn_dgrad", "gemm_tn_wgrad")
"""A linear layer's product and its two gradients: [m, k] by [k, n], of which each names its own m, n, k."""


class Errors(NamedTuple):
    """Errors of some rows, in per cent."""

    median: float
    mean: float
    worst: float


def kernel_measurements(path: Path, plain: Device, engine: Engine) -> Measurements:
    """Read a file of kernel times as measurements of calibration; host times are missing in it."""
    try:
        with path.open(encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if row["dtype"] in ("bfloat16", "")]
        by_op: dict[str, list[Mapping[str, str]]] = {}
        for row in rows:
            by_op.setdefault(row["op"], []).append(row)
        update = by_op["fused_adamw fp32"][0]
        return Measurements(
            ranks=1,
            precision="bf16",
            products=tuple(_products(by_op)),
            attention=tuple(_attention(by_op)),
            copy_bytes_per_s=1e9 * max(float(row["tflops_or_gbs"]) for row in by_op["copy"]),
            host_bytes_per_s=1e9 * float(by_op["h2d pinned"][0]["tflops_or_gbs"]),
            layer_host_s=engine.for_device(plain).host.layer_overhead,
            update_s=float(update["seconds"]) / int(update["m"]),
        )
    except OSError as error:
        raise InputError(f"--kernels {path}: {error.strerror}") from None
    except (KeyError, ValueError) as error:
        raise InputError(f"--kernels {path}: no table of kernel times ({error})") from None


def _products(by_op: Mapping[str, Sequence[Mapping[str, str]]]) -> list[ProductTime]:
    seconds: dict[tuple[int, int, int], dict[str, float]] = {}
    for op in GEMMS:
        for row in by_op[op]:
            m, n, k = (int(row[name]) for name in "mnk")
            # The gradients' products have the layer's sizes in other places.
            shape = {"gemm_nt": (m, k, n), "gemm_nn_dgrad": (m, n, k), "gemm_tn_wgrad": (k, n, m)}[op]
            seconds.setdefault(shape, {})[op] = _kernel_s(row)
    return [
        ProductTime(m=m, k=k, n=n, forward_s=found[GEMMS[0]], backward_s=found[GEMMS[1]] + found[GEMMS[2]])
        for (m, k, n), found in seconds.items()
        if len(found) == len(GEMMS)
    ]


def _attention(by_op: Mapping[str, Sequence[Mapping[str, str]]]) -> list[AttentionTime]:
    names = ("m", "n", "k", "extra")
    forward = {tuple(row[name] for name in names): _kernel_s(row) for row in by_op["sdpa_fwd_causal"]}
    found = []
    for row in by_op["sdpa_bwd_causal"]:
        width = re.match(r"d=(\d+)", row["extra"])
        if width is None:
            raise ValueError(f"extra={row['extra']!r} names no head size")
        found.append(
            AttentionTime(
                batch=int(row["m"]),
                heads=int(row["n"]),
                seq=int(row["k"]),
                head_dim=int(width[1]),
                forward_s=forward[tuple(row[name] for name in names)],
                backward_s=_kernel_s(row),
            )
        )
    return found


def _kernel_s(row: Mapping[str, str]) -> float:
    seconds = float(row["seconds"])
    return max(seconds - LAUNCH_S, seconds / 5)


def errors(device: Device, engine: Engine, steps: Sequence[StepTime]) -> Errors:
    """Errors of a device's constants against measured steps, in per cent."""
    missed: Floats = np.concatenate(
        [
            prices(batch, device, engine, ranks=1).step_time_s / batch.seconds - 1
            for batch in batches_of(steps)
        ]
    )
    apart = 100 * np.abs(missed)
    return Errors(float(np.median(apart)), float(apart.mean()), float(apart.max()))


def engine_of(measured: Sequence[Measurement], file: Path) -> Engine:
    """The engine with the settings under which the rows of a file were measured; `InputError` if rows differ.

    The load of experts is even for all rows, as one device holds all experts.
    """
    first, *others = [row.engine.with_constants({"experts.load": 1.0}) for row in measured]
    if any(one != first for one in others):
        raise InputError(f"--rows {file}: expected one engine in all rows")
    return first


def calibrated_h100(
    rows: Annotated[Path, typer.Option(help="CSV file of measured steps of the runtime.")],
    kernels: Annotated[Path, typer.Option(help="CSV file of kernel times of the same device.")],
    draws: Annotated[int, typer.Option(min=1, help="How often rows to calibrate with are drawn.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Calibrate from kernels and ten rows, and price the others."""
    seen = settled_measurements(read_all([str(rows)])[0])
    sources = {row.source for row in seen}
    if len(sources) != 1 or len(seen) <= SEEN:
        raise InputError(f"--rows {rows}: expected more than {SEEN} steps of one source")
    load = loader(fits_without(time_fit_plans(), seen, *sources))
    unseen = settled_measurements(read_all([str(rows)], load=load)[0])
    engine, plain = engine_of(unseen, rows), unseen[0].cluster.device
    steps = [
        StepTime(model=row.model, layout=row.layouts[0], seconds=row.step_time_s)
        for row in unseen
        if row.step_time_s is not None
    ]
    measured = kernel_measurements(kernels, plain, engine)
    before, found = errors(plain, engine, steps), []
    draw = np.random.default_rng(0)
    for number in range(draws):
        order = draw.permutation(len(steps))
        told = tuple(steps[row] for row in order[:SEEN])
        device = fitted_device(plain, engine, measured.model_copy(update={"steps": told}))
        found.append(errors(device, engine, [steps[row] for row in order[SEEN:]]))
        if not as_json:
            left = len(steps) - SEEN
            print(f"draw {number + 1}: the other {left} rows, in per cent: {_text(found[-1])}", flush=True)
    if as_json:
        answer: dict[str, Any] = {"before": before._asdict(), "draws": [one._asdict() for one in found]}
        print(json.dumps(answer, indent=2))
        return
    print(f"all {len(steps)} rows before: {_text(before)}")
    middle = Errors(*(float(np.median(column)) for column in zip(*found, strict=True)))
    print(f"middle of {draws} draws: {_text(middle)}; largest median {max(one.median for one in found):.1f}")


def _text(found: Errors) -> str:
    return f"median {found.median:.1f}, mean {found.mean:.1f}, worst {found.worst:.1f}"


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(calibrated_h100)
    run(app, "benchmarks.calibrated_h100")

"""The result of a calibration: a device file, and its differences from the catalogue's device and in
plans."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from costmodels import Device, ModelSpec
from costmodels.calibration.machine_fit import fitted_device
from costmodels.calibration.machine_measurements import Measurements
from costmodels.catalogue import load_device, load_engine
from costmodels.catalogue.measured_devices import Machine, MeasuredDevices, own_file, read_devices
from costmodels.errors import InputError
from costmodels.paths import expanded
from costmodels.pytorch import full_version
from costmodels.spec.engine import Engine
from costmodels.spec.record import in_seconds
from planner.api import search
from planner.inputs.engine import DEFAULT_ENGINE
from planner.version import version

SHOWN = (
    ("gemm.efficiency", "share of peak that GEMMs reach"),
    ("attention.efficiency", "share of peak that attention reaches"),
    ("elementwise.passes", "traffic of element-wise work, in passes"),
    ("host.layer_overhead", "host seconds of a layer's pass"),
    ("host.step", "host seconds of a step besides"),
    ("network.collective_latency", "seconds of a collective besides its hops"),
)
"""Constants that are shown to the user."""

DISTURBED = 0.1
"""Share of the cores used by other processes from which on measurements count as disturbed."""


def keep(path: Path, ranks: int, device: Device, models: Sequence[ModelSpec]) -> MeasuredDevices:
    """Add `device`, for a number of ranks, to the file of this machine."""
    before: dict[int, Device] = {}
    names = [spec.name for spec in models]
    try:
        known = read_devices(path, here=True)
        before = dict(known.devices)
        names = [*known.models, *names]
    except InputError:
        pass  # There is none, or one that this one replaces.
    found = MeasuredDevices(
        machine=Machine.here(),
        date=datetime.now().strftime("%Y-%m-%d"),
        software={
            "PyTorch": full_version(),
            "Python": platform.python_version(),
            "planner": version() or "source tree",
        },
        models=tuple(dict.fromkeys(names)),
        devices={**before, ranks: device},
    )
    found.save(path)
    return found


def plain_device(on_cpu: bool, ranks: int) -> Device:
    """The catalogue's device of this machine; for a CPU, one rank's share."""
    if on_cpu:
        return load_device("cpu", ranks=ranks)
    from runtime.job.devices import catalogue_device

    return catalogue_device()


def finish(found: Measurements, plain: Device, specs: Sequence[ModelSpec], save: str | None) -> Iterator[str]:
    """Fit the measurements and write the result; returns lines on the changes.

    Args:
        save: the file to write; this machine's own file if None.
    """
    engine = load_engine(DEFAULT_ENGINE)
    fitted = fitted_device(plain, engine, found).model_copy(update={"source": source_line(found)})
    path = expanded(save) if save else own_file(plain.name)
    keep(path, found.ranks, fitted, specs)
    yield from change_lines(plain, fitted, engine, found)
    if found.nodes == 1:
        for spec in specs:
            yield from plan_lines(spec, plain, fitted, engine, found.ranks)
    yield f"wrote {path}"


def source_line(found: Measurements) -> str:
    """Source of a device's values, for its field `source`."""
    host, date = Machine.here().host, datetime.now().strftime("%Y-%m-%d")
    return f"measured on {host} on {date} with {found.ranks} ranks, PyTorch {full_version()}"


def change_lines(plain: Device, device: Device, engine: Engine, found: Measurements) -> Iterator[str]:
    """Lines with a measured value and the catalogue's value."""
    before, after = engine.for_device(plain), engine.for_device(device)
    rows: list[tuple[str, float, float]] = [
        (
            "peak TFLOP/s of a rank",
            plain.peak_flops[found.precision] / 1e12,
            device.peak_flops[found.precision] / 1e12,
        ),
        ("memory GB/s of a rank", plain.memory_bandwidth / 1e9, device.memory_bandwidth / 1e9),
        ("link GB/s", plain.intra_node.bandwidth / 1e9, device.intra_node.bandwidth / 1e9),
    ]
    for name, words in SHOWN:
        group, _, field = name.partition(".")
        old, new = (float(getattr(getattr(one, group), field)) for one in (before, after))
        rows.append((words, old, new))
    width = max(len(words) for words, *_ in rows)
    yield f"{'':{width}}  catalogue   measured"
    for words, old, new in rows:
        yield f"{words:{width}}  {old:9.4g}  {new:9.4g}"
    if found.others > DISTURBED:
        yield f"others took {found.others:.0%} of the cores meanwhile: calibrate when nobody else does"


def plan_lines(spec: ModelSpec, plain: Device, device: Device, engine: Engine, ranks: int) -> Iterator[str]:
    """Lines with the best plan of a model by the catalogue and by the measurements."""
    best = []
    for one in (plain, device):
        result = search(
            spec,
            world_size=ranks,
            local_world_size=ranks,
            device=one,
            engine=engine,
            global_batch_size=8 * ranks,
        )
        best.append(result.best)
    old, new = best
    if old is None or new is None:
        return
    for words, plan in (("catalogue", old), ("measured", new)):
        layout, seconds = plan.layout.describe(), in_seconds(plan.estimate.step_time_s)
        yield f"{spec.name}, {8 * ranks} sequences on {ranks} ranks, {words}: {layout}, {seconds} a step"
    same = "stays the same" if old.layout == new.layout else "changes"
    yield f"the plan {same}"

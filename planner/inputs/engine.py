"""The engine that executes a layout, and its number format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from costmodels.catalogue import engine_names, load_engine
from costmodels.errors import InputError
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Cluster, Device, Precision

DEFAULT_ENGINE = "bundled"


def resolve_engine(engine: Engine | str | None, device: Device | None = None) -> Engine:
    """The engine of an `Engine`, a name or a file; if None, the first engine that runs on `device`."""
    if engine is None:
        engine = DEFAULT_ENGINE if device is None else next(engines_on(device), DEFAULT_ENGINE)
    return engine if isinstance(engine, Engine) else load_engine(engine)


def engines_on(device: Device) -> Iterator[str]:
    """Names of the catalogue's engines that have run on `device`, the bundled engine first if it has."""
    return (name for name in engine_names() if device.kind in load_engine(name).runs.devices)


def check_runs_on(engine: Engine, cluster: Cluster) -> None:
    """Raise `InputError` where `engine` does not run on the devices of `cluster`."""
    for device in {part.device.name: part.device for part in cluster.parts or (cluster,)}.values():
        runs = engine.runs
        if device.kind not in (*runs.devices, *runs.untried_devices, *runs.priced_devices):
            others = ", ".join(engines_on(device))
            one = f", or give one of {others}" if others else ""
            raise InputError(f"engine {engine.name} does not run on {device.name}; leave it out{one}")


def resolve_precision(precision: str | None, device: Device, engine: Engine) -> Precision:
    """The number format of GEMMs: the device's default unless given."""
    wanted = precision or device.default_precision
    able = [kind for kind in get_args(Precision) if kind in device.peak_flops and kind in engine.memory]
    for kind in get_args(Precision):
        if kind == wanted and kind in able:
            return kind  # type: ignore[no-any-return]
    choices = ", ".join(able) or "no precision"
    others = [name for name in engines_on(device) if wanted in load_engine(name).memory]
    hint = f"; engines that do: {', '.join(others)}" if others and wanted in device.peak_flops else ""
    raise InputError(f"precision {wanted}: {device.name} with engine {engine.name} trains in {choices}{hint}")

"""`planner models`, `planner devices`, `planner engines`: the contents of the catalogues."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from typing import Any

from cli.tables import console, parameter_count, table
from costmodels.catalogue import (
    device_names,
    device_template,
    engine_names,
    load_device,
    load_engine,
    load_model,
    model_names,
)
from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.spec.hardware import Device
from costmodels.spec.model import ModelSpec
from costmodels.spec.record import GIB
from costmodels.spec.untrained import untrained_parts
from planner.options.flags import flag, flag_groups

WIDE_COLUMNS = 150
"""Columns of a terminal from which sources are shown too."""


@dataclass(frozen=True)
class Output:
    """The format in which a catalogue is printed."""

    json: bool = flag(False, "Print JSON with all fields and sources.")


@flag_groups(output=Output)
def models(output: Output) -> None:
    """List the models of the catalogue."""
    specs = [load_model(name) for name in model_names()]
    if output.json:
        more = [{"parameters": spec.parameters, "untrained": untrained_parts(spec)} for spec in specs]
        _print_json([spec.model_dump() | own for spec, own in zip(specs, more, strict=True)])
        return
    rows = [
        [
            spec.name,
            parameter_count(spec.parameters),
            parameter_count(spec.active_parameters) if spec.experts else "",
            *(str(size) for size in (spec.layers, spec.hidden, spec.ffn, spec.heads, spec.kv_heads)),
            *(str(size) for size in (spec.vocab, spec.seq)),
            spec.source,
        ]
        for spec in specs
    ]
    columns = [
        "model",
        "parameters",
        "active",
        "layers",
        "hidden",
        "ffn",
        "heads",
        "kv",
        "vocab",
        "seq",
        "source",
    ]
    _print_table(columns, rows, narrow=("active", "ffn", "vocab"))
    for line in chain.from_iterable(map(_besides, specs)):
        console().print(line, soft_wrap=True)


def _besides(spec: ModelSpec) -> Iterator[str]:
    """Lines on the MTP modules of a model, and on its parts that are priced but not trained."""
    if spec.mtp_layers:
        count = f"{spec.mtp_layers} module" + "s" * (spec.mtp_layers > 1)
        yield f"{spec.name}: {count} for multi-token prediction besides, with --mtp-num-layers"
    if missing := untrained_parts(spec):
        yield f"{spec.name}: priced, not trained here, for {', '.join(missing)}"


@dataclass(frozen=True)
class DevicesOutput(Output):
    """The format in which devices are printed."""

    template: bool = flag(False, "Print a YAML file to fill in, for a device that is not in the catalogue.")


@flag_groups(output=DevicesOutput)
def devices(output: DevicesOutput) -> None:
    """List the devices of the catalogue."""
    if output.template and output.json:
        raise InputError("--template prints YAML to fill in, and --json what the catalogue holds; give one")
    if output.template:
        print(device_template(), end="")
        return
    found = [load_device(name) for name in device_names()]
    if output.json:
        _print_json([device.model_dump() for device in found])
        return
    columns = [
        "device",
        "vendor",
        "TFLOP/s",
        "GiB",
        "GB/s",
        "link GB/s",
        "network GB/s",
        "per node",
        "island",
        "source",
    ]
    _print_table(columns, [_device_row(device) for device in found], narrow=("vendor", "island"))


@flag_groups(output=Output)
def engines(output: Output) -> None:
    """List the training engines of the catalogue."""
    found = [load_engine(name) for name in engine_names()]
    if output.json:
        _print_json([engine.model_dump() for engine in found])
        return
    rows = [[engine.name, ", ".join(engine.memory), engine.source] for engine in found]
    console().print(table(["engine", "precisions", "source"], rows, left=("engine", "precisions", "source")))


def _device_row(device: Device) -> list[str]:
    precision = device.default_precision
    return [
        device.name,
        device.vendor,
        f"{device.peak_flops[precision] / 1e12:.4g} {precision}",
        f"{device.memory_bytes / GIB:.1f}",
        *(f"{rate / 1e9:.5g}" for rate in (device.memory_bandwidth, device.intra_node.bandwidth)),
        f"{device.inter_node.bandwidth / 1e9:.4g}",
        str(device.devices_per_node),
        str(device.island or device.devices_per_node),
        device.source,
    ]


def _print_json(records: list[dict[str, Any]]) -> None:
    print(json.dumps(records, indent=2))


def _print_table(columns: list[str], rows: list[list[str]], narrow: tuple[str, ...]) -> None:
    """Print a table without sources; in an 80-column terminal also without the columns named in `narrow`."""
    screen = console()
    hidden = {"source"} if screen.width < WIDE_COLUMNS else set()
    if screen.width < 100:
        hidden |= set(narrow)
    kept = [index for index, column in enumerate(columns) if column not in hidden]
    shown = [columns[index] for index in kept]
    screen.print(
        table(shown, [[row[index] for index in kept] for row in rows], left=("model", "device", "source"))
    )

"""Devices that `planner calibrate` measured on one machine: the file, its place, and its contents.

The file is JSON, so a truncated file is recognised by its missing end. It has a device for each measured
number of ranks, as ranks of a CPU share cores and memory.
"""

import json
import platform
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from costmodels.catalogue.local_machine import available_cores, processor_name
from costmodels.catalogue.yaml_files import build
from costmodels.errors import InputError
from costmodels.files import MIB, read_text, write_whole
from costmodels.paths import expanded, home_of
from costmodels.spec.hardware import Device
from costmodels.spec.record import Count, Name, Record

LARGEST_FILE = 4 * MIB

RATES = (1e6, 1e18)
"""Plausible FLOP/s and bytes per second of a device: from a toy to far above any real device."""

LONGEST_CALL = 10.0
"""Most plausible seconds of a collective of a few bytes."""


class Machine(Record):
    """The properties that identify a machine."""

    host: Name
    processor: Name
    cores: Count
    """CPU cores that a process may use."""

    @classmethod
    def here(cls) -> "Machine":
        """This machine."""
        return cls(host=platform.node(), processor=processor_name(), cores=available_cores())


class MeasuredDevices(Record):
    """The devices of one machine, with the engines' constants that were measured on them."""

    version: Literal[1] = 1
    """The version of this file format."""
    machine: Machine
    date: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d")]
    software: dict[str, Name]
    """Versions by the name of the software, PyTorch's and this package's among them."""
    models: tuple[Name, ...] = ()
    """Models whose shapes were measured."""
    devices: Annotated[dict[Annotated[int, Field(ge=1)], Device], Field(min_length=1)]
    """The measured devices by the number of ranks that share the machine."""

    @model_validator(mode="after")
    def _check(self) -> "MeasuredDevices":
        for ranks, device in self.devices.items():
            for what, rate in (
                *((f"peak_flops {name}", rate) for name, rate in device.peak_flops.items()),
                ("memory_bandwidth", device.memory_bandwidth),
                ("host_bandwidth", device.host_bandwidth),
                *((f"{row.collective} of {row.devices}", row.bus_bandwidth) for row in device.collectives),
            ):
                if not RATES[0] <= rate <= RATES[1]:
                    raise ValueError(
                        f"{what} of {ranks} ranks is {rate:g} a second, which no device has; calibrate again"
                    )
            slow = [row for row in device.collectives if row.latency > LONGEST_CALL]
            if slow:
                raise ValueError(
                    f"{slow[0].collective} among {slow[0].devices} has a latency of {slow[0].latency:g} s; "
                    "calibrate again"
                )
        return self

    def device(self, ranks: int) -> Device:
        """The device for a number of ranks, from the nearest measured number.

        A share of a CPU is scaled by the ratio of the numbers; other devices are whole.
        """
        if ranks < 1:
            raise InputError(f"ranks is {ranks}: a machine is shared by at least one rank")
        nearest = min(self.devices, key=lambda known: (max(known / ranks, ranks / known), -known))
        found = self.devices[nearest]
        if found.kind != "cpu" or nearest == ranks:
            return found
        share = nearest / ranks
        shared = ("memory_bytes", "memory_bandwidth", "host_bandwidth", "host_memory_bandwidth")
        return found.model_copy(
            update={
                "peak_flops": {name: flops * share for name, flops in found.peak_flops.items()},
                **{name: getattr(found, name) * share for name in shared},
                "sharers": max(1.0, ranks / self.machine.cores),
                "devices_per_node": max(found.devices_per_node, ranks),
            }
        )

    def save(self, path: Path) -> None:
        """Write the file; raises `InputError` where that fails."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"device file {path}: cannot be written: {error.strerror}") from None
        write_whole("device file", path, self.model_dump_json(indent=1, exclude_defaults=True) + "\n")


def folder() -> Path:
    """The folder with the measured devices of the user's machines."""
    return home_of("XDG_CONFIG_HOME", ".config") / "planner" / "devices"


def own_file(device: str) -> Path:
    """The path of the file for this machine's device of a catalogue name; the file may not exist."""
    name = re.sub(r"[^\w.-]", "_", f"{platform.node()}-{device}")
    return folder() / f"{name}.json"


def is_device_file(name: str) -> bool:
    """Return whether a user's device is the name of a file of measured devices (JSON)."""
    return name.lower().endswith(".json")


def read_devices(path: str | Path, here: bool = False) -> MeasuredDevices:
    """The devices of a file.

    Args:
        here: True if the file must be of this machine.

    Raises:
        InputError: the file cannot be read, is truncated, has impossible values, or is of another machine.
    """
    where = f"device file {str(path)!r}"
    try:
        content = json.loads(read_text(expanded(path), LARGEST_FILE))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"cannot read {where}: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}"
        ) from None
    except (ValueError, RecursionError) as error:
        line = f" at line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise InputError(
            f"{where} is cut short or no JSON{line}; planner calibrate writes it again"
        ) from None
    if not isinstance(content, dict) or "devices" not in content:
        raise InputError(f"{where} is none of planner calibrate; give a device's fields as YAML")
    if content.get("version", 1) != 1:
        raise InputError(f"{where} has version {content['version']!r}, this planner reads 1; calibrate again")
    found = build(MeasuredDevices, content, where)
    if here:
        _check_machine(found, where)
    return found


def _check_machine(found: MeasuredDevices, where: str) -> None:
    own = Machine.here()
    for name in Machine.model_fields:
        theirs, ours = getattr(found.machine, name), getattr(own, name)
        if theirs != ours:
            raise InputError(
                f"{where} was measured on another machine ({name} {theirs}, here {ours}); run planner "
                "calibrate here, or planner calibrate --forget"
            )

"""The device that a caller names, with this machine's measured constants if there are any."""

from __future__ import annotations

from costmodels.cache_files import say_once
from costmodels.catalogue import HOST, load_device, load_engine
from costmodels.catalogue.measured_devices import is_device_file, own_file, read_devices
from costmodels.errors import InputError
from costmodels.paths import exists
from costmodels.spec.hardware import Device
from planner.inputs.engine import DEFAULT_ENGINE


def resolve_device(name: str, ranks: int = 1) -> Device:
    """The device of a name or file; measurements of `planner calibrate` on this machine come first.

    Args:
        ranks: ranks that share the machine, where the device is its CPU.

    Raises:
        InputError: the name is unknown, or a file of measurements is damaged.
    """
    if is_device_file(name):
        return _measured(name, ranks, here=False)
    plain = load_device(name, ranks)
    path = own_file(plain.name)
    try:
        is_measured = exists(path)
    except InputError as error:
        # A home of somebody else, as under `sudo -u`: nothing was measured for who asks.
        say_once(f"{error}: measurements by planner calibrate there are not used")
        return plain
    return _measured(str(path), ranks, here=True) if is_measured else plain


def _measured(path: str, ranks: int, here: bool) -> Device:
    device = read_devices(path, here).device(ranks)
    load_engine(DEFAULT_ENGINE).for_device(device)  # Refuses constants that make no sense.
    return device


def is_cpu(name: str | None) -> bool:
    """Return whether a caller names this machine's CPU, or a file with a measured CPU."""
    if name is None or not is_device_file(name):
        return name == HOST
    return any(device.kind == "cpu" for device in read_devices(name).devices.values())


def measured_notes(device: Device) -> list[str]:
    """A note for the list of assumptions that the device has measured constants."""
    return [f"{device.name} is {device.source}"] if device.constants else []

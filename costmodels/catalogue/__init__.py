"""Published models, devices and engines by name; each value of the YAML files names its source.

Instead of a name, the path of a user's YAML file with the fields of one model, device or engine is accepted,
so a new one needs no code.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from costmodels.catalogue.local_machine import host_device
from costmodels.catalogue.yaml_files import (
    FOLDER,
    build,
    catalogue_file,
    is_file_name,
    unknown_name,
    user_fields,
)
from costmodels.errors import InputError
from costmodels.spec.engine import Engine, constant_fields, constant_names, merge_fields, without_constants
from costmodels.spec.flat_constants import in_groups
from costmodels.spec.hardware import Device
from costmodels.spec.model import ModelSpec

__all__ = [
    "Fits",
    "calibrated_fits",
    "device_names",
    "device_template",
    "engine_names",
    "load_device",
    "load_engine",
    "load_model",
    "model_names",
]

HOST = "cpu"
"""Name of the one device that is not in the catalogue: this machine."""

SHAPELESS = {"name", "seq", "source", "published_parameters"}
"""Model fields that do not affect the parameter count."""


@cache
def _families() -> tuple[str, ...]:
    return tuple(sorted(file.stem for file in (FOLDER / "models").glob("*.yaml")))


def _family_of(name: str) -> dict[str, Any]:
    # A model lives in the file whose name is the longest beginning of its own, so that one file is
    # parsed for one model.
    stems = [family for family in _families() if name.startswith(family)]
    return catalogue_file(f"models/{max(stems, key=len)}.yaml") if stems else {"models": {}}


def _find(entries: dict[str, dict[str, Any]], name: str) -> tuple[str, dict[str, Any]] | None:
    """The proper name and the fields of the entry whose name or alias is `name`."""
    if name in entries:
        return name, entries[name]
    for proper, fields in entries.items():
        if name in fields.get("aliases", ()):
            return proper, fields
    return None


def model_names() -> list[str]:
    """Names of the catalogue's models, without aliases, grouped by family, smallest first."""
    return [name for family in _families() for name in catalogue_file(f"models/{family}.yaml")["models"]]


def load_model(name: str, **overrides: Any) -> ModelSpec:
    """The model of a catalogue name, an alias or a YAML file, with some fields replaced.

    A model with a changed shape has no published parameter count. Raises `InputError` for an unknown name, an
    unreadable file or a wrong value.
    """
    if is_file_name(name):
        fields = user_fields(name, "model")
        return build(ModelSpec, {**fields, **overrides}, f"model file {name!r}")
    wanted = name.strip().lower()
    family = _family_of(wanted)
    found = _find(family["models"], wanted)
    if found is None:
        known = [alias for entry in model_names() for alias in (entry, *_aliases_of_model(entry))]
        raise unknown_name(
            "model", name, known, "`planner models` lists all; a YAML file of fields works too"
        )
    proper, entry = found
    fields = {**family.get("defaults", {}), **entry, "name": proper}
    fields.pop("aliases", None)
    if overrides.keys() - SHAPELESS:
        fields.pop("published_parameters", None)
    return build(ModelSpec, {**fields, **overrides}, f"model {proper}")


def _aliases_of_model(name: str) -> list[str]:
    return list(_family_of(name)["models"][name].get("aliases", ()))


def device_names() -> list[str]:
    """Names of the catalogue's devices, without aliases; `cpu` is this machine."""
    return [*catalogue_file("devices.yaml")["devices"], HOST]


def device_template() -> str:
    """A YAML file of a device for a user to fill in."""
    return (FOLDER / "device_template.yaml").read_text(encoding="utf-8")


def load_device(name: str, ranks: int = 1) -> Device:
    """The device of a catalogue name, an alias or a YAML file.

    `cpu` is one rank's share when `ranks` processes divide this machine; other devices are whole and ignore
    `ranks`. Raises `InputError` for an unknown name, an unreadable file or a wrong value.
    """
    if is_file_name(name):
        return build(Device, user_fields(name, "device"), f"device file {name!r}")
    wanted = name.strip().lower()
    if wanted == HOST:
        if ranks < 1:
            raise InputError(f"ranks is {ranks}: device cpu is shared by at least one rank")
        return host_device(ranks)
    entries = catalogue_file("devices.yaml")["devices"]
    found = _find(entries, wanted)
    if found is None:
        known = [alias for entry, fields in entries.items() for alias in (entry, *fields.get("aliases", ()))]
        raise unknown_name(
            "device",
            name,
            [*known, HOST],
            "`planner devices` lists all; or fill in `planner devices --template`",
        )
    proper, entry = found
    fields = {key: value for key, value in entry.items() if key != "aliases"}
    return build(Device, {**fields, "name": proper}, f"device {proper}")


def engine_names() -> list[str]:
    """Names of the catalogue's engines."""
    return list(catalogue_file("engines.yaml")["engines"])


Fits = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Fitted constants and ranges by engine and architecture, in the form of calibrated.yaml."""


def load_engine(name: str, fits: Fits | None = None) -> Engine:
    """The engine of a catalogue name or a YAML file; raises `InputError` for an unknown one or a wrong value.

    Args:
        fits: fits that replace calibrated.yaml.
    """
    return _engine_of_file(name) if is_file_name(name) else _catalogued_engine(name, fits)


def calibrated_fits() -> Fits:
    """The contents of calibrated.yaml."""
    found: Fits = catalogue_file("calibrated.yaml")["engines"]
    return found


def _catalogued_engine(name: str, fits: Fits | None = None) -> Engine:
    """An engine of the catalogue.

    Its constants for a device come from engines.yaml and from fits to measured step times (calibrated.yaml).
    For memory, fits to measured peaks (calibrated_memory.yaml) come first.
    """
    entries = catalogue_file("engines.yaml")["engines"]
    wanted = name.strip().lower()
    if wanted not in entries:
        listing = f"the engines are {', '.join(entries)}; a YAML file of fields works too"
        raise unknown_name("engine", name, entries, listing)
    entry = _engine_fields(wanted)
    known = calibrated_fits() if fits is None else fits
    keys = {**entry.get("devices", {}), **known.get(wanted, {})}
    devices = {key: _constants(wanted, key, known) for key in keys}
    memory = catalogue_file("calibrated_memory.yaml")["engines"].get(wanted, {"constants": {}})["constants"]
    fields = merge_fields(entry, constant_fields(memory)) | {"devices": devices, "name": wanted}
    return build(Engine, fields, f"engine {wanted}")


def _engine_fields(name: str) -> dict[str, Any]:
    """The fields of an engine in engines.yaml, with those of the engine named in its field `like`."""
    fields = dict(catalogue_file("engines.yaml")["engines"][name])
    alike = fields.pop("like", None)
    return fields if alike is None else merge_fields(_engine_fields(alike), fields)


def _engine_of_file(path: str) -> Engine:
    """The engine of a user's file: all fields, or only the differences from the engine named in `like`.

    Fields outside of `devices` hold on every device.
    """
    origin = f"engine file {path!r}"
    changes = in_groups(user_fields(path, "engine"))
    if changes["name"] in engine_names():
        raise InputError(
            f"{origin}: engine {changes['name']} is in the catalogue; say `name:` with another name"
        )
    alike = changes.pop("like", None)
    fields: dict[str, Any] = {}
    if alike is not None:
        fields = _catalogued_engine(str(alike)).model_dump(exclude_unset=True)
        fields["source"] = f"like {alike}"
        named = constant_names(changes)
        fields["devices"] = {key: without_constants(own, named) for key, own in fields["devices"].items()}
    fields = _merged(fields, changes)
    engine = build(Engine, fields, origin)
    for key, own in engine.devices.items():
        build(Engine, _merged({**fields, "devices": {}}, own), f"{origin}, devices {key}")
    return engine


def _merged(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`fields` with `changes`; mappings in both are merged recursively."""
    deeper = {
        key: _merged(fields[key], value)
        for key, value in changes.items()
        if isinstance(value, dict) and isinstance(fields.get(key), dict)
    }
    return {**fields, **changes, **deeper}


def _constants(engine: str, key: str, fits: Fits) -> dict[str, Any]:
    """An engine's constants for an architecture or a kind of device.

    Values of engines.yaml come first, then fitted values, then those of the engine and architecture named in
    `like`.
    """
    own = dict(_engine_fields(engine).get("devices", {}).get(key, {}))
    fit = fits.get(engine, {}).get(key)
    fitted = {} if fit is None else constant_fields(fit["constants"]) | {"spread": fit["spread"]}
    alike = own.pop("like", None)
    if alike is not None:
        origin, architecture = alike.split("/")
        fitted = merge_fields(_constants(origin, architecture, fits), fitted)
    return merge_fields(fitted, own)

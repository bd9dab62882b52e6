"""The device and the cluster of a row of measurements."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import ValidationError

from benchmarks.calibration.published_cells import Unusable, count, number
from benchmarks.calibration.published_networks import card_bandwidth, job_collectives, node_collectives
from costmodels.catalogue import load_device
from costmodels.catalogue.yaml_files import catalogue_file, is_file_name, parse
from costmodels.errors import InputError
from costmodels.spec.hardware import Cluster, Device

WITHOUT_MEANING = {"nvidia", "amd", "huawei", "intel", "instinct", "tesla", "dgx", "hgx", "gpu", "atlas"}
"""Words of device names that catalogue names leave out."""

OTHER_MEMORY = 0.08
"""Relative difference from which on the memory in a device's name replaces the memory in the catalogue."""


def published_device(cell: str, known: Mapping[str, Any]) -> Device:
    """The device that a cell names.

    The text may be a name of `known` (measurements.yaml, `gpus`), a name or alias of the catalogue in about
    any spelling, or the path of a YAML file. It may also be fields in braces: `{like: h100, memory_bandwidth:
    2.4e+12}`.

    Raises:
        Unusable: the catalogue has no such device.
    """
    named = known.get(cell, cell)
    if not isinstance(named, str):
        return _changed(named)
    if named.startswith("{"):
        return _changed(_inline(named))
    if is_file_name(named):
        return _loaded(named)
    if not named:
        raise Unusable("gpu not published")
    return _by_spelling(named)


def _inline(text: str) -> Mapping[str, Any]:
    try:
        return parse(text, "gpu")
    except InputError:
        raise Unusable("gpu is not valid YAML") from None


@cache
def _loaded(name: str) -> Device:
    try:
        return load_device(name)
    except InputError:
        raise Unusable("gpu unknown") from None


def _changed(fields: Mapping[str, Any]) -> Device:
    alike = fields.get("like")
    changes = {field: value for field, value in fields.items() if field not in ("name", "like")}
    try:
        if alike is None:
            return Device.model_validate(fields)
        return Device.model_validate(_by_spelling(str(alike)).model_dump() | changes)
    except ValidationError as error:
        first = error.errors()[0]
        raise Unusable(f"gpu: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _spellings(words: list[str]) -> Iterator[str]:
    """Possible device names made of the given words, the most specific first."""
    for end in range(len(words), 0, -1):
        yield "-".join(words[:end])
        yield "".join(words[:end])


@cache
def _names() -> dict[str, str]:
    """Catalogue names by themselves and by their aliases."""
    entries = catalogue_file("devices.yaml")["devices"]
    return {
        alias.lower(): name
        for name, fields in entries.items()
        for alias in (name, *map(str, fields.get("aliases", ())))
    }


def _by_spelling(text: str) -> Device:
    plain = re.sub(r"\(.*?\)|\b\d+\s*x\s*(?=[a-z])|[?]", " ", text.lower())
    words = [word for word in re.split(r"[^a-z0-9.]+", plain) if word and word not in WITHOUT_MEANING]
    sizes = [float(match[1]) for word in words if (match := re.fullmatch(r"(\d{2,4})gi?b?", word))]
    # The form of the board and the kind of its memory tell no devices apart that the rest leaves alike.
    shorter = [
        word for word in words if not re.fullmatch(r"sxm\d?|oam|hbm\w*|\d+w|nvl\d*|\d{2,4}gi?b?", word)
    ]
    name = next(
        (names for each in (*_spellings(words), *_spellings(shorter)) if (names := _names().get(each))), None
    )
    if name is None:
        raise Unusable("gpu unknown")
    device = _loaded(name)
    # Sizes are told in GB and in GiB; what lies between both is the device's own.
    own = device.memory_bytes
    if sizes and not sizes[0] * 1e9 / (1 + OTHER_MEMORY) < own < sizes[0] * 1e9 * (1 + OTHER_MEMORY):
        device = device.model_copy(update={"memory_bytes": sizes[0] * 2.0**30})
    return device


def published_cluster(row: Mapping[str, str], source: Mapping[str, Any], known: Mapping[str, Any]) -> Cluster:
    """The devices and links of a row; those of a usual server if the row does not give them."""
    device = published_device(row.get("gpu", ""), known)
    world = count(row, "gpus")
    per_node = count(row, "gpus_per_node", device.devices_per_node)
    values: dict[str, Any] = {
        "device": device,
        "world_size": world,
        "devices_per_node": min(world, per_node),
        "memory_bytes": device.memory_bytes,
        "island": source.get("island", {}).get(row["gpu"]),
    }
    in_notes = {"inter_node": card_bandwidth(row.get("notes", ""))}
    for link in ("inter_node", "intra_node"):
        said = number(row, f"{link}_bandwidth") or in_notes.get(link) or source.get(f"{link}_bandwidth")
        if said is not None:
            usual = getattr(device, link)
            values[link] = usual.model_copy(update={"bandwidth": float(said)})
    try:
        cluster = Cluster(**values)
    except ValidationError:
        raise Unusable("gpus is no multiple of gpus_per_node") from None
    if "network" in source:
        seen = job_collectives(row.get("notes", ""), source["network"], world, cluster.nodes)
    else:
        seen = node_collectives(source.get("bus_bandwidth", {}))
    return cluster.model_copy(update={"measured": seen})

"""Manifests held against the structure that Kubernetes publishes for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

SCHEMAS = Path(__file__).with_name("schemas")

TYPES: dict[str, Any] = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}


def schema(name: str) -> dict[str, Any]:
    """The structure of one kind of manifest."""
    return yaml.safe_load((SCHEMAS / f"{name}.yaml").read_text())


def faults(value: Any, rules: dict[str, Any], where: str = "") -> Iterator[str]:
    """Faults of a manifest: fields that are unknown, missing, or of another type."""
    kind = rules.get("type")
    if kind is not None and not isinstance(value, TYPES[kind]):
        yield f"{where}: {value!r} is no {kind}"
        return
    if rules.get("x-kubernetes-int-or-string") and not isinstance(value, (int, str)):
        yield f"{where}: {value!r} is neither a number nor a text"
    if "enum" in rules and value not in rules["enum"]:
        yield f"{where}: {value!r} is none of {rules['enum']}"
    if isinstance(value, dict) and "properties" in rules:
        known = rules["properties"]
        yield from (f"{where}: unknown field {name}" for name in value if name not in known)
        yield from (f"{where}: no field {name}" for name in rules.get("required", []) if name not in value)
        for name in value.keys() & known.keys():
            yield from faults(value[name], known[name], f"{where}.{name}")
    elif isinstance(value, dict) and "additionalProperties" in rules:
        for name, item in value.items():
            yield from faults(item, rules["additionalProperties"], f"{where}.{name}")
    if isinstance(value, list) and "items" in rules:
        for at, item in enumerate(value):
            yield from faults(item, rules["items"], f"{where}[{at}]")

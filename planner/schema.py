"""JSON schemas of the records of an answer, whose fields have a description and a unit.

Descriptions are the docstrings of the fields. Python does not keep them, so they are read from the source.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import typing
from functools import cache
from typing import Any

from pydantic import BaseModel, TypeAdapter

from costmodels.errors import InputError
from costmodels.spec.estimate import Estimate, StageMemory, StepTime
from costmodels.spec.layout import Layout
from costmodels.spelling import or_nearest
from planner.plan import Plan
from planner.ranking.result import SearchResult

RECORDS: dict[str, type] = {
    "Plan": Plan,
    "Layout": Layout,
    "Estimate": Estimate,
    "SearchResult": SearchResult,
}
"""The records that have a schema, by name."""

UNITS = (
    ("_per_s_per_device", "per second and device"),
    ("_per_s", "per second"),
    ("_s", "seconds"),
    ("_bytes", "bytes"),
    ("_gib", "GiB"),
    ("tflops_per_device", "TFLOP/s"),
    ("mfu", "share, 0 to 1"),
)
"""Units by the end of the name of a field."""

OF_RECORD = {StepTime: "seconds", StageMemory: "bytes"}
"""Units of all numbers of a record."""

PLAIN = (int, float, str, bool, tuple, list, dict)
"""Python types that JSON can hold."""


def schema(name: str) -> dict[str, Any]:
    """The JSON schema of a record by name; raises `InputError` for a name that has none."""
    if name not in RECORDS:
        raise InputError(f"schema {name}: expected {', '.join(RECORDS)}{or_nearest(name, RECORDS)}")
    record = RECORDS[name]
    made = _of_model(record) if issubclass(record, BaseModel) else _of_class(record)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": name} | made


def _of_model(record: type[BaseModel]) -> dict[str, Any]:
    made = record.model_json_schema()
    known = {one.__name__: one for one in _records_below(record)}
    for name, about in (*made.get("$defs", {}).items(), (record.__name__, made)):
        if name in known:
            _describe(about, known[name])
    return made


def _of_class(record: type) -> dict[str, Any]:
    """The schema of a class: its fields and properties that JSON can hold."""
    described = descriptions(record)
    properties: dict[str, Any] = {}
    for name, hint in _public(record):
        if name in described:
            properties[name] = (
                _value_schema(hint) | {"description": described[name]} | _unit(record, name, hint)
            )
    return {"type": "object", "description": _first(record), "properties": properties}


def _public(record: type) -> list[tuple[str, Any]]:
    """Fields and properties of a class with their JSON types, by name."""
    hints = {field.name: str(field.type) for field in dataclasses.fields(record)}
    for name, member in vars(record).items():
        got = getattr(member, "fget", None) or getattr(member, "func", None)
        if got is not None:
            hints[name] = str(got.__annotations__.get("return", ""))
    kinds = {"int": int, "float": float, "bool": bool, "dict[str, int]": dict[str, int]}
    kinds |= {"tuple[str, ...]": tuple[str, ...], "Plan | None": Plan | None}  # type: ignore[dict-item]
    return [(name, kinds[hint]) for name, hint in hints.items() if not name.startswith("_") and hint in kinds]


def _value_schema(hint: Any) -> dict[str, Any]:
    if Plan in typing.get_args(hint):
        return {"anyOf": [{"title": "Plan", "type": "object"}, {"type": "null"}]}
    return TypeAdapter(hint).json_schema()


def _describe(about: dict[str, Any], record: type[BaseModel]) -> None:
    """Add descriptions and units to the properties of a record's schema."""
    about["description"] = _first(record)
    described = descriptions(record)
    for name, field in about.get("properties", {}).items():
        if name in described:
            field["description"] = described[name]
        field.update(_unit(record, name, record.model_fields[name].annotation))


def _unit(record: type, name: str, hint: Any) -> dict[str, str]:
    """The unit of a number; empty for anything else."""
    kinds = {hint, *typing.get_args(hint)}
    if not kinds & {int, float} or bool in kinds:
        return {}
    usual = "count" if int in kinds else "number"
    by_name = next((unit for end, unit in UNITS if name.endswith(end)), usual)
    return {"unit": next((unit for one, unit in OF_RECORD.items() if one is record), by_name)}


def _first(record: type) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((inspect.getdoc(record) or "").split("\n\n")[0].split())


@cache
def descriptions(record: type) -> dict[str, str]:
    """Descriptions of the fields and properties of a class, by name, from their docstrings."""
    found: dict[str, str] = {}
    for one in reversed(record.__mro__):
        if one.__module__.partition(".")[0] not in ("costmodels", "planner"):
            continue
        [made] = ast.parse(textwrap.dedent(inspect.getsource(one))).body
        assert isinstance(made, ast.ClassDef)
        for statement, after in zip(made.body, [*made.body[1:], None], strict=True):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                text = _string(after)
                if text is not None:
                    found[statement.target.id] = text
            elif isinstance(statement, ast.FunctionDef) and (text := ast.get_docstring(statement)):
                found[statement.name] = " ".join(text.split("\n\n")[0].split())
    return found


def _string(statement: ast.stmt | None) -> str | None:
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
        return None
    value = statement.value.value
    return " ".join(value.split()) if isinstance(value, str) else None


def _records_below(record: type[BaseModel]) -> list[type[BaseModel]]:
    """A record and all records that its fields hold."""
    found: list[type[BaseModel]] = []
    left: list[Any] = [record]
    while left:
        one = left.pop()
        if isinstance(one, type) and issubclass(one, BaseModel):
            if one not in found:
                found.append(one)
                left += [field.annotation for field in one.model_fields.values()]
        else:
            left += typing.get_args(one)
    return found

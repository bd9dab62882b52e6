"""YAML files of the catalogue and of the user, read into validated records."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from costmodels.errors import InputError

FOLDER = Path(__file__).parent

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The parser of libyaml is ten times faster, but not every PyYAML is built with it."""

RecordT = TypeVar("RecordT", bound=BaseModel)


def parse(text: str, origin: str) -> dict[str, Any]:
    """The mapping that a YAML text holds. `InputError` names `origin` and the line of the fault."""
    try:
        content = yaml.load(text, LOADER)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        reason = getattr(error, "problem", None) or "it cannot be parsed"
        raise InputError(f"{origin} is not valid YAML{place}: {reason}") from None
    except (ValueError, RecursionError, OverflowError) as error:
        # Dates and numbers that Python does not hold; mappings whose keys are mappings are YAML errors.
        wrong = "it is nested too deeply" if isinstance(error, RecursionError) else "a value is out of range"
        raise InputError(f"{origin} cannot be read: {wrong}") from None
    if not isinstance(content, dict):
        raise InputError(f"{origin} must hold a mapping of fields (`name: value` lines)")
    return content


@cache
def packaged(path: str) -> dict[str, Any]:
    """The content of a file of this package. Shared by all callers: not to be changed."""
    return parse((FOLDER / path).read_text(encoding="utf-8"), path)


def is_file_name(name: str) -> bool:
    """Whether a user means a YAML file rather than a catalogue name."""
    return name.lower().endswith((".yaml", ".yml"))


def user_fields(path: str, kind: str) -> dict[str, Any]:
    """The fields in a user's file of one `kind` (model, device); its name is the file's unless stated."""
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InputError(f"cannot read {kind} file {path!r}: {reason}") from None
    return {"name": file.stem, **parse(text, f"{kind} file {path!r}")}


def build(record: type[RecordT], fields: Mapping[str, Any], origin: str) -> RecordT:
    """A validated record. `InputError` names `origin`, the first wrong field and what is right."""
    try:
        return record.model_validate(dict(fields))
    except ValidationError as error:
        item = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in item["loc"])
        if item["type"] == "missing":
            reason = f"field {field} is missing"
        elif item["type"] == "extra_forbidden":
            near = get_close_matches(field, record.model_fields, n=1)
            known = f"did you mean {near[0]}?" if near else f"known are {', '.join(record.model_fields)}"
            reason = f"unknown field {field}; {known}"
        else:
            message = item["msg"].removeprefix("Value error, ")
            reason = f"{field} is {reprlib.repr(item['input'])}: {message}" if field else message
        raise InputError(re.sub(r"\s+", " ", f"{origin}: {reason}")) from None


def unknown(kind: str, name: str, names: Iterable[str], listing: str) -> InputError:
    """The error for a name that is not in the catalogue: nearest names, and how to list all."""
    near = get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return InputError(f"unknown {kind} {name!r}: {hint}{listing}")

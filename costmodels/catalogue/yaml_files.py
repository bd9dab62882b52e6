"""YAML files of the catalogue and of the user, read into validated records."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from costmodels.catalogue.parsed_files import parsed_file
from costmodels.errors import InputError
from costmodels.files import MIB, read_text
from costmodels.paths import expanded
from costmodels.spelling import near_names, nearest

FOLDER = Path(__file__).parent

LARGEST_YAML = MIB
"""Most bytes of a user's model, device or engine file."""

RecordT = TypeVar("RecordT", bound=BaseModel)


def yaml_loader() -> Any:
    """The parser of libyaml if PyYAML was built with it; it is ten times as fast as PyYAML's own."""
    import yaml

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def parse(text: str, origin: str) -> dict[str, Any]:
    """The mapping in a YAML text. Raises `InputError` with `origin` and the line of the fault."""
    import yaml  # Most questions find what they need parsed.

    try:
        content = yaml.load(text, yaml_loader())
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
def catalogue_file(path: str) -> dict[str, Any]:
    """The content of a file of this package. All callers share it, so it must not be changed."""
    return parsed_file(FOLDER / path, parse)


def is_file_name(name: str) -> bool:
    """True if a user's word is a YAML file name rather than a catalogue name."""
    return name.lower().endswith((".yaml", ".yml"))


def user_fields(path: str, kind: str) -> dict[str, Any]:
    """The fields in a user's file of one `kind` (model, ...); its name is the file's name unless given."""
    file = expanded(path)
    try:
        text = read_text(file, LARGEST_YAML)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InputError(f"cannot read {kind} file {path!r}: {reason}") from None
    return {"name": file.stem, **parse(text, f"{kind} file {path!r}")}


MOST_WRONG = 3
"""Most fields with wrong values that one message names; all missing fields are named."""


def build(record: type[RecordT], fields: Mapping[str, Any], origin: str) -> RecordT:
    """A validated record. Raises `InputError` with `origin`, all missing fields, wrong fields and valid
    values."""
    try:
        return record.model_validate(dict(fields))
    except ValidationError as error:
        missing, wrong = [], []
        for item in error.errors(include_url=False):
            field = ".".join(str(part) for part in item["loc"])
            if item["type"] == "missing" or (field and item["input"] is None):
                missing.append(field)
            else:
                wrong.append(_wrong(record, field, item))
        reasons = [
            f"field{'s' * (len(missing) > 1)} {_and(missing)} {'are' if missing[1:] else 'is'} missing"
        ][: len(missing)]
        text = "; ".join([*reasons, *wrong[:MOST_WRONG]])
        raise InputError(re.sub(r"\s+", " ", f"{origin}: {text}")) from None


def _wrong(record: type[BaseModel], field: str, item: Mapping[str, Any]) -> str:
    """A text on a wrong field, from pydantic's error."""
    if item["type"] == "extra_forbidden":
        *groups, name = item["loc"]
        fields = record.model_fields
        for group in groups:
            fields = getattr(fields[group].annotation, "model_fields", {}) if group in fields else {}
        known = nearest(str(name), fields) or (f"known are {', '.join(fields)}" if fields else "")
        return f"unknown field {field}" + (f"; {known}" if known else "")
    message = str(item["msg"]).removeprefix("Value error, ")
    return f"{field} is {reprlib.repr(item['input'])}: {message}" if field else message


def _and(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def unknown_name(kind: str, name: str, names: Iterable[str], listing: str) -> InputError:
    """The error for a name that is not in the catalogue, with the nearest names and the command that lists
    all."""
    near = near_names(name, names, count=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return InputError(f"unknown {kind} {name!r}: {hint}{listing}")

"""The fields of a question: the flags of `planner suggest` by field name."""

from __future__ import annotations

import dataclasses
import typing
from functools import cache
from typing import Any, Literal, get_args

from costmodels.dataclass import dataclass
from costmodels.spec.hardware import Precision
from planner.options.flags import flag_names, sections_of
from planner.service.answers import Question

Kind = Literal["string", "integer", "number", "boolean", "array"]

KINDS: dict[type, Kind] = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
"""The JSON type of each Python type; arrays hold strings."""

CONFIG, PRECISION = "config", "precision"
"""Fields without a flag: a pasted config.json, and the number format in one word."""

PRECISIONS: tuple[str, ...] = get_args(Precision)


@dataclass(frozen=True)
class Field:
    """A field of a question."""

    name: str
    kind: Kind
    help: str
    """The meaning of the field, with its unit."""
    group: str
    """The group of flags of a `Question` that holds the field."""
    section: str
    """Heading of the help under which its flag stands."""
    spellings: tuple[str, ...] = ()
    """The flags that give the field."""
    values: tuple[str, ...] = ()
    """Known values; other values may be valid too."""
    degree: str | None = None
    """The degree of freedom that the field fixes."""

    def schema(self) -> dict[str, Any]:
        """The field as a JSON schema."""
        of_items = {"items": {"type": "string"}} if self.kind == "array" else {}
        return {"type": self.kind, "description": self.help, **of_items}


@cache
def fields() -> dict[str, Field]:
    """All fields of a question by name, in the order of the help, without hidden flags."""
    found = {
        CONFIG: Field(
            CONFIG,
            "string",
            "Text of a Hugging Face config.json, in the place of a catalogue name; `model` then names it.",
            "model",
            "Model",
        ),
        PRECISION: Field(
            PRECISION,
            "string",
            f"Number format of GEMMs: {', '.join(PRECISIONS)}; the device's usual one unless given.",
            "parallel",
            "Precision",
            values=PRECISIONS,
        ),
    }
    groups = typing.get_type_hints(Question)
    for name, group in groups.items():
        hints, sections = typing.get_type_hints(group), sections_of(group)
        for field in dataclasses.fields(group):
            about = field.metadata
            if about.get("hidden"):
                continue
            found[field.name] = Field(
                field.name,
                _kind(hints[field.name]),
                about["help"],
                name,
                sections.get(field.name, ""),
                flag_names(field),
                tuple(about["values"]()) if about.get("values") else (),
                about.get("degree"),
            )
    return found


def _kind(hint: Any) -> Kind:
    kinds = [typing.get_origin(one) or one for one in (hint, *get_args(hint))]
    return next(KINDS[one] for one in kinds if one in KINDS)


@cache
def spelled() -> dict[str, str]:
    """Names of fields by all their spellings, such as `tp` for `tensor_model_parallel_size`."""
    words = {
        word.lstrip("-").replace("-", "_"): field.name
        for field in fields().values()
        for flag in field.spellings
        for word in flag.split("/")
    }
    return words | {name: name for name in fields()}


def question_schema() -> dict[str, Any]:
    """The JSON schema of a question."""
    return {
        "type": "object",
        "properties": {name: field.schema() for name, field in fields().items()},
        "required": ["world_size"],
        "additionalProperties": False,
    }

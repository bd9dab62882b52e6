"""A `Layout` from the degrees and the devices of a configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from costmodels.dataclass import dataclass
from costmodels.errors import on_one_line
from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from planner.formats.facts.reading import Problems


@dataclass(frozen=True)
class Places:
    """The names of degrees in a file, and the line of each."""

    names: Mapping[str, str]
    """Flags or keys by their field of `Layout` or `ModelSpec`."""
    lines: Mapping[str, int]
    """Lines of the given flags or keys."""

    def of(self, field: str) -> tuple[str, int | None]:
        """The flag or key of a field, and its line."""
        name = self.names.get(field, "")
        return name, self.lines.get(name)

    def blamed(self, message: str) -> tuple[str, int | None]:
        """The given flag or key whose field a message names first; empty where there is none."""
        places = [
            (match.start(), -len(field), name)
            for field, name in self.names.items()
            if name in self.lines and (match := re.search(rf"\b{field}\b", message))
        ]
        if not places:
            return "", None
        name = min(places)[2]
        return name, self.lines[name]


def degrees_of_world(
    degrees: dict[str, Any], world: int, places: Places, problems: Problems
) -> dict[str, Any] | None:
    """`degrees` with the `data_parallel` that follows from `world` devices; None, and a problem, where that
    is not a whole number.

    A given `data_parallel` must agree with it.
    """
    parts = {name: int(degrees.get(name, 1)) for name in _SHARDING}
    shards = parts["tensor_parallel"] * parts["pipeline_parallel"] * parts["context_parallel"]
    said = degrees.get("data_parallel")
    product = " x ".join(
        f"{name.removesuffix('_parallel')} {size}" for name, size in parts.items() if size > 1
    )
    if said is not None and said * shards != world:
        text = f"data {said} x {product or 1} = {said * shards} devices, not the {world} of the job"
        problems.add("illegal", text, *places.of("data_parallel"))
        return None
    if world % shards:
        blamed = max(parts, key=lambda name: parts[name])
        text = f"{world} devices are not a multiple of {product} = {shards}"
        problems.add("illegal", text, *places.of(blamed))
        return None
    return {**degrees, "data_parallel": world // shards}


_SHARDING = ("tensor_parallel", "pipeline_parallel", "context_parallel")


def even_stages(
    model: ModelSpec, degrees: dict[str, Any], places: Places, problems: Problems
) -> tuple[int, ...] | None:
    """Layers of equal stages; None, and a problem, where stages cannot be equal."""
    stages = int(degrees.get("pipeline_parallel", 1)) * int(degrees.get("virtual_pipeline_parallel", 1))
    if stages > model.layers:
        text = f"{stages} stages are more than the {model.layers} layers"
        problems.add("illegal", text, *places.of("pipeline_parallel"))
        return None
    if model.layers % stages:
        text = f"{model.layers} layers do not split evenly over {stages} pipeline stages"
        problems.add("illegal", text, *places.of("pipeline_parallel"))
        return None
    return (model.layers // stages,) * stages


def build_layout(degrees: Mapping[str, Any], places: Places, problems: Problems) -> Layout | None:
    """The layout with all `degrees`; None, and a problem, where they contradict each other."""
    fields = dict(degrees)
    replicas = int(fields["data_parallel"]) * int(fields.get("context_parallel", 1))
    if replicas == 1:
        fields |= {"zero_stage": 0}
        fields.pop("zero_replicas", None)
    if int(fields.get("context_parallel", 1)) == 1:
        fields.pop("context_parallel_form", None)
    if int(fields.get("tensor_parallel", 1)) == 1:
        fields["sequence_parallel"] = False
    try:
        return Layout.model_validate(fields)
    except ValidationError as error:
        message = on_one_line(error)
        problems.add("illegal", message, *places.blamed(message))
        return None

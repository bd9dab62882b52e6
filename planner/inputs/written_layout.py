"""A whole layout from its text; degrees that are not named have the values that the notation omits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from costmodels.errors import InputError, on_one_line
from costmodels.spec.layout import Layout, even_split
from costmodels.spec.model import ModelSpec
from planner.inputs.batch import MOST_SEQUENCES
from planner.inputs.choice import Choice
from planner.inputs.cluster import MOST_DEVICES
from planner.inputs.layout_notation import micro_batches_in
from planner.inputs.numbers import whole_number
from planner.inputs.pins import Pins, parse_pins


def written_fields(
    text: str, model: ModelSpec, world_size: int | None, global_batch_size: int | None
) -> dict[str, Any]:
    """The fields of a layout that a text such as `tp=4+sp pp=2 dp=8 mbs=1 x 4` describes.

    If `dp` is not named, the other degrees' remaining devices are replicas. Raises `InputError` where the
    text is no layout, and where neither it nor `global_batch_size` gives the sequences of a step.
    """
    fields: dict[str, Any] = dict(_degrees(text))
    for name, value in fields.items():
        if isinstance(value, Choice):
            raise InputError(f"layout {text}: expected one value of {name}, not ranges or lists")
    chunks, pipeline = fields.get("virtual_pipeline_parallel", 1), fields.get("pipeline_parallel", 1)
    if "data_parallel" not in fields:
        fields["data_parallel"] = _replicas(text, fields, world_size)
    fields.setdefault("schedule", "interleaved" if chunks > 1 else "1f1b")
    fields.setdefault("layers_per_stage", even_split(model.layers, pipeline * chunks))
    if fields.get("recompute") == "selective":
        fields.setdefault("recompute_modules", ("core_attention",))
    count = micro_batches_in(text)
    size = fields.get("global_batch_size")
    if global_batch_size is not None:
        given = whole_number("global_batch_size", global_batch_size, MOST_SEQUENCES)
        if size not in (None, given):
            raise InputError(f"layout {text}: its global_batch_size contradicts global_batch_size {given}")
        size = given
    if size is None:
        if count is None:
            raise InputError(
                f"layout {text}: say how many sequences a step has, by global_batch_size or as in mbs=1 x 8"
            )
        size = count * fields.get("micro_batch_size", 1) * fields["data_parallel"]
    return {**fields, "global_batch_size": size}


def written_batch(text: str, world_size: int | None) -> int | None:
    """The sequences of a step of a text that names its microbatches; None where it leaves them open.

    `world_size` decides the data parallelism that the text does not name. Raises `InputError` where the text
    is no layout, and where its other degrees do not divide the devices.
    """
    count, fields = micro_batches_in(text), dict(_degrees(text))
    if count is None or any(isinstance(value, Choice) for value in fields.values()):
        return None
    if "data_parallel" not in fields:
        fields["data_parallel"] = _replicas(text, fields, world_size)
    return count * int(str(fields["micro_batch_size"])) * int(str(fields["data_parallel"]))


def _degrees(text: str) -> Pins:
    """The degrees that a text names."""
    try:
        return parse_pins(text)
    except InputError as error:
        raise InputError(f"layout: {str(error).removeprefix('pin ')}") from None


def _replicas(text: str, fields: Mapping[str, Any], world_size: int | None) -> int:
    """The data parallelism of a layout that does not name it: the devices over the product of the other
    degrees."""
    others: int = math.prod(fields.get(f"{kind}_parallel", 1) for kind in ("tensor", "pipeline", "context"))
    if world_size is None:
        raise InputError(f"layout {text}: its other degrees take {others} devices: give world_size or dp")
    devices = whole_number("world_size", world_size, MOST_DEVICES)
    if devices % others:
        raise InputError(
            f"layout {text}: its other degrees take {others} devices: no divisor of world_size {devices}"
        )
    return devices // others


UNNAMED: dict[str, Any] = {
    "tensor_parallel": 1,
    "pipeline_parallel": 1,
    "sequence_parallel": False,
    "virtual_pipeline_parallel": 1,
    "context_parallel": 1,
    "expert_parallel": 1,
    "expert_tensor_parallel": 1,
    "zero_replicas": 1,
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "offload_activations": False,
    "offload_optimizer": False,
    "optimizer": "adam",
    "gradient_reduction": "fp32",
    "expert_halves": False,
    "cuda_graphs": False,
}
"""Values of degrees that a written layout does not name."""


def whole_layout_pins(text: str) -> list[str]:
    """Pins of the degrees that the text of a whole layout leaves out, because they have their usual
    values."""
    named = _degrees(text)
    chunks = named.get("virtual_pipeline_parallel", 1)
    usual = UNNAMED | {"schedule": "1f1b" if chunks == 1 else "interleaved"}
    if named.get("recompute") == "selective":
        usual["recompute_modules"] = "core_attention"
    if "recompute" not in named:
        # The layers that recompute are chosen then, too.
        del usual["recompute_method"], usual["recompute_num_layers"]
    return [f"{name}={value}" for name, value in usual.items() if name not in named]


def layout_of_fields(text: str, fields: dict[str, Any]) -> Layout:
    """The layout with the given fields; raises `InputError`, in one line with the text, where they are not a
    layout."""
    try:
        return Layout.model_validate(fields)
    except ValidationError as error:
        raise InputError(f"layout {text}: {on_one_line(error)}") from None

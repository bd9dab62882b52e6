"""A whole layout from its text: degrees that are not named are as in a layout that names them neither."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from costmodels.errors import InputError, on_one_line
from costmodels.spec.layout import Layout, even_split
from costmodels.spec.model import ModelSpec
from planner.inputs.layout_notation import micro_batches_in
from planner.inputs.pins import parse_pins


def written_fields(
    text: str, model: ModelSpec, world_size: int | None, global_batch_size: int | None
) -> dict[str, Any]:
    """The fields of a layout that a text such as `tp=4+sp pp=2 dp=8 mbs=1 x 4` describes.

    Devices that the other degrees leave are replicas where `dp` is not named. Raises `InputError` where the
    text is no layout, and where neither it nor `global_batch_size` says how many sequences a step has.
    """
    try:
        fields: dict[str, Any] = dict(parse_pins(text))
    except InputError as error:
        raise InputError(f"layout: {str(error).removeprefix('pin ')}") from None
    tensor, pipeline, context = (
        fields.get(f"{kind}_parallel", 1) for kind in ("tensor", "pipeline", "context")
    )
    chunks = fields.get("virtual_pipeline_parallel", 1)
    if not all(isinstance(each, int) for each in (tensor, pipeline, context, chunks)):
        raise InputError(f"layout {text}: expected one value of each degree, not ranges or lists")
    if "data_parallel" not in fields:
        others = tensor * pipeline * context
        if world_size is None or world_size % others:
            devices = (
                "give world_size or dp" if world_size is None else f"no divisor of world_size {world_size}"
            )
            raise InputError(f"layout {text}: its other degrees take {others} devices: {devices}")
        fields["data_parallel"] = world_size // others
    fields.setdefault("schedule", "interleaved" if chunks > 1 else "1f1b")
    fields.setdefault("layers_per_stage", even_split(model.layers, pipeline * chunks))
    if fields.get("recompute") == "selective":
        fields.setdefault("recompute_modules", ("core_attention",))
    count = micro_batches_in(text)
    size = global_batch_size or fields.get("global_batch_size")
    if size is None:
        if count is None:
            raise InputError(
                f"layout {text}: say how many sequences a step has, by global_batch_size or as in mbs=1 x 8"
            )
        size = count * fields.get("micro_batch_size", 1) * fields["data_parallel"]
    return {**fields, "global_batch_size": size}


UNNAMED: dict[str, Any] = {
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
"""What a layout has that does not say so where it is printed."""


def whole_layout_pins(text: str) -> list[str]:
    """Pins of the degrees that the text of a whole layout leaves out, because they are as usual."""
    named = parse_pins(text)
    chunks = named.get("virtual_pipeline_parallel", 1)
    usual = UNNAMED | {"schedule": "1f1b" if chunks == 1 else "interleaved"}
    if named.get("recompute") == "selective":
        usual["recompute_modules"] = "core_attention"
    return [f"{name}={value}" for name, value in usual.items() if name not in named]


def layout_of_fields(text: str, fields: dict[str, Any]) -> Layout:
    """The layout of some fields; `InputError` in one line, which says the text, where they make none."""
    try:
        return Layout.model_validate(fields)
    except ValidationError as error:
        raise InputError(f"layout {text}: {on_one_line(error)}") from None

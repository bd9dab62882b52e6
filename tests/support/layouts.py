"""Layouts from text or from the fields that matter."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from costmodels import SHORT_NAMES, Layout, ModelSpec, even_split
from costmodels.errors import InputError
from costmodels.spec.layout import V_SCHEDULES
from costmodels.spec.table import LayoutTable

COUNTS = (
    "tensor_parallel",
    "pipeline_parallel",
    "virtual_pipeline_parallel",
    "context_parallel",
    "expert_parallel",
    "expert_tensor_parallel",
    "data_parallel",
    "micro_batch_size",
)

LISTS = ("layers_per_stage", "recompute_modules")
"""Fields whose values are separated by semicolons."""

NAMES = [*SHORT_NAMES, *(name for name in Layout.model_fields if name not in SHORT_NAMES.values())]
"""Names that a layout's text may contain."""

GLOBAL_BATCH_SIZE = 8


def parse_layout(text: str, spec: ModelSpec) -> Layout:
    """A layout from `tp=2,pp=2`-style text; what is not said is 1, 0 or the even split.

    A schedule of several chunks means two pipeline ranks of two chunks. The batch is the least from 8
    sequences on that the schedule runs, unless other numbers are given. Data-parallel ranks are as many as
    the experts need besides the others.
    """
    fields = _fields(text)
    fields.setdefault("layers_per_stage", even_split(spec.layers, _stages(fields)))
    return Layout.model_validate(fields)


def deep_enough(text: str, spec: ModelSpec) -> ModelSpec:
    """`spec`, with a layer for each stage of the layout that `text` describes."""
    return spec.model_copy(update={"layers": max(spec.layers, _stages(_fields(text)))})


def layout_of(spec: ModelSpec, **fields: Any) -> Layout:
    """A layout of `spec`; layers are split evenly, and the batch is 8 unless given."""
    stages = fields.get("pipeline_parallel", 1) * fields.get("virtual_pipeline_parallel", 1)
    fields.setdefault("layers_per_stage", even_split(spec.layers, stages))
    fields.setdefault("global_batch_size", 8)
    fields.setdefault("precision", "fp32")
    return Layout(**fields)


def layouts_of(table: LayoutTable) -> list[Layout]:
    """Every row of a table, written out at once: rows of a grid one by one take five times as long."""
    whole = table.take(np.arange(len(table)))
    return [whole.layout(row) for row in range(len(whole))]


def _fields(text: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"precision": "fp32"}
    for item in filter(None, text.split(",")):
        name, _, value = item.partition("=")
        name = SHORT_NAMES.get(name, name)
        if name not in Layout.model_fields or not value:
            raise InputError(f"--layout {text}: {item!r} is not name=value with a name of {', '.join(NAMES)}")
        if name in COUNTS and not (value.isdigit() and int(value)):
            raise InputError(f"--layout {text}: {item!r} is not a whole number of at least 1")
        fields[name] = value.split(";") if name in LISTS else int(value) if value.isdigit() else value
    if fields.get("schedule", "1f1b") != "1f1b":
        fields.setdefault("virtual_pipeline_parallel", 2)
    chunks = fields.get("virtual_pipeline_parallel", 1)
    if chunks != 1:
        fields.setdefault("pipeline_parallel", 2)
    fields.setdefault("schedule", "interleaved" if chunks > 1 else "1f1b")
    holders = fields.get("expert_parallel", 1) * fields.get("expert_tensor_parallel", 1)
    group = fields.get("tensor_parallel", 1) * fields.get("context_parallel", 1)
    fields.setdefault("data_parallel", holders // math.gcd(holders, group))
    fields.setdefault("global_batch_size", _least_batch(fields))
    return fields


def _stages(fields: dict[str, Any]) -> int:
    stages: int = fields.get("pipeline_parallel", 1) * fields.get("virtual_pipeline_parallel", 1)
    return stages


def _least_batch(fields: dict[str, Any]) -> int:
    """Sequences of one step: a microbatch for each rank and stage that needs one, and at least 8."""
    of_ranks: int = fields.get("micro_batch_size", 1) * fields.get("data_parallel", 1)
    ranks = fields.get("pipeline_parallel", 1)
    once = of_ranks * (ranks if fields["schedule"].startswith("interleaved") else 1)
    least = of_ranks * (2 * ranks if fields["schedule"] in V_SCHEDULES else ranks)
    batch: int = -(-max(least, GLOBAL_BATCH_SIZE) // once) * once
    return batch

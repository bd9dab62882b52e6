"""Layouts for tests, by the fields that matter."""

from __future__ import annotations

from typing import Any

from costmodels import Layout, ModelSpec, even_split

DENSE = ("gpt2", "llama")
"""Models of `benchmarks.parity` without experts."""

KINDS = (*DENSE, "deepseek")
"""One more, with every part that the others have."""


def layout_of(spec: ModelSpec, **fields: Any) -> Layout:
    """A layout of `spec`; layers are split evenly, and the batch is 8 unless given."""
    stages = fields.get("pipeline_parallel", 1) * fields.get("virtual_pipeline_parallel", 1)
    fields.setdefault("layers_per_stage", even_split(spec.layers, stages))
    fields.setdefault("global_batch_size", 8)
    fields.setdefault("precision", "fp32")
    return Layout(**fields)

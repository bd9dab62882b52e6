"""Mixed layouts, drawn from the planner's own space so that together they pair up what can be combined."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from costmodels import Layout, ModelSpec
from planner.inputs.batch import Batch
from planner.inputs.pins import parse_pins
from planner.space.grid import build
from planner.space.kind_rules import KIND_RULES

KINDS = (
    "tensor_parallel",
    "sequence_parallel",
    "pipeline_parallel",
    "context_parallel",
    "context_parallel_form",
    "expert_parallel",
    "expert_tensor_parallel",
    "data_parallel",
    "zero_stage",
    "schedule",
    "recompute",
    "micro_batch_size",
)
"""What a layout is told apart by."""

PLAIN = (1, 0, False, "none", "1f1b")
"""Values that stand for a kind of parallelism being absent."""


def features(layout: Layout) -> frozenset[tuple[str, object]]:
    """Kinds of parallelism that a layout uses, with their values."""
    values = {kind: getattr(layout, kind) for kind in KINDS}
    if layout.context_parallel == 1:
        del values["context_parallel_form"]
    return frozenset((kind, value) for kind, value in values.items() if value not in PLAIN)


def mixed_layouts(spec: ModelSpec, world_size: int, batch: int, count: int, seed: int = 0) -> list[Layout]:
    """`count` fp32 layouts of `world_size` ranks, each chosen for the pairs of features that it adds."""
    table = build(spec, world_size, Batch(batch), "fp32", parse_pins(None), KIND_RULES).table
    rows = np.random.RandomState(seed).permutation(len(table))[:4000]
    pool = [
        (layout, set(combinations(sorted(features(layout), key=str), 2)))
        for layout in map(table.layout, rows.tolist())
    ]
    chosen = []
    for _ in range(count):
        layout, pairs = max(pool, key=lambda candidate: len(candidate[1]))
        chosen.append(layout)
        pool = [(other, others - pairs) for other, others in pool]
    return chosen

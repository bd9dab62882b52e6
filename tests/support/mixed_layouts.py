"""Mixed layouts, drawn from the planner's own space so that together they pair up what can be combined."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from costmodels import Layout, ModelSpec
from costmodels.spec.table import LayoutTable, value_of
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
"""Fields that tell layouts apart."""

PLAIN = (1, 0, False, "none", "1f1b")
"""Values that stand for a kind of parallelism being absent."""


def features(table: LayoutTable) -> list[frozenset[tuple[str, object]]]:
    """Kinds of parallelism that each layout of a table uses, with their values."""
    columns = [[value_of(kind, code) for code in getattr(table, kind).tolist()] for kind in KINDS]
    return [
        frozenset(
            (kind, value)
            for kind, value in zip(KINDS, row, strict=True)
            if value not in PLAIN and (kind != "context_parallel_form" or ranks > 1)
        )
        for ranks, row in zip(table.context_parallel.tolist(), zip(*columns, strict=True), strict=True)
    ]


def mixed_layouts(spec: ModelSpec, world_size: int, batch: int, count: int, seed: int = 0) -> list[Layout]:
    """`count` fp32 layouts of `world_size` ranks, each chosen for the pairs of features that it adds."""
    table = build(spec, world_size, Batch(batch), "fp32", parse_pins(None), KIND_RULES).table
    rows = np.random.RandomState(seed).permutation(len(table))[:4000]
    # The first of layouts that nothing here tells apart stands for all.
    firsts: dict[frozenset[tuple[str, object]], int] = {}
    for row, kinds in zip(rows.tolist(), features(table.take(rows)), strict=True):
        firsts.setdefault(kinds, row)
    pool = [(row, set(combinations(sorted(kinds, key=str), 2))) for kinds, row in firsts.items()]
    chosen = []
    for _ in range(count):
        row, pairs = max(pool, key=lambda candidate: len(candidate[1]))
        chosen.append(table.layout(row))
        pool = [(other, others - pairs) for other, others in pool]
    return chosen

"""Layouts that tell most of what the layouts of a model do differently, and models small enough to run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from costmodels import Device, Layout, ModelSpec
from costmodels.spec.table import LayoutTable
from planner.api import search
from planner.inputs.engine import DEFAULT_ENGINE
from planner.ranking.result import SearchResult
from runtime.parallel.ranks import Ranks

LAYERS = 4
"""Layers that a model is cut to: constants are of one layer."""

LONGEST_STEP_S = 0.25
"""Predicted seconds of a step up to which a model is run as it is."""

SHORTEST = 128
"""Tokens of a sequence, at least."""


def cut_to_size(spec: ModelSpec, device: Device, ranks: Ranks) -> ModelSpec:
    """The model with few layers, and sequences so short that a step takes no longer than it may."""
    if len(spec.mlp_pattern) or len(spec.attention_pattern) > 1:
        keep = spec.layers  # What differs by layer keeps its order.
    else:
        keep = min(spec.layers, max(LAYERS, spec.dense_layers + 1))
    small = spec.model_copy(update={"layers": keep, "published_parameters": 0})
    while small.seq > SHORTEST:
        best = small_problem(small, device, ranks).best
        if best is None or best.estimate.step_time_s <= LONGEST_STEP_S:
            break
        small = small.model_copy(update={"seq": small.seq // 2})
    return small


def small_problem(spec: ModelSpec, device: Device, ranks: Ranks) -> SearchResult:
    """All layouts of a batch of two sequences for each rank, without recomputation."""
    return search(
        spec,
        world_size=ranks.world_size,
        local_world_size=ranks.local_world_size,
        device=device,
        engine=DEFAULT_ENGINE,
        global_batch_size=2 * ranks.world_size,
        pin=["recompute=none"],
    )


def telling_layouts(table: LayoutTable) -> Iterator[Layout]:
    """Layouts of a table, those first that have most in them which none before them has."""
    layouts = [table.layout(row) for row in range(len(table))]
    signs = [frozenset(_signs(layout)) for layout in layouts]
    seen: set[object] = set()
    left = set(range(len(layouts)))
    several = False
    while left:
        # Of as many new signs the simplest layout, with one micro batch and with several in turns.
        best = max(
            left,
            key=lambda row: (
                len(signs[row] - seen),
                (layouts[row].micro_batches > 1) == several,
                -len(signs[row]),
                -row,
            ),
        )
        if not signs[best] - seen:
            return
        seen |= signs[best]
        several = layouts[best].micro_batches == 1
        left.remove(best)
        yield layouts[best]


def in_turns(models: Sequence[tuple[ModelSpec, LayoutTable]]) -> Iterator[tuple[ModelSpec, Layout]]:
    """The telling layouts of several models, the most telling of each first."""
    queues = [telling_layouts(table) for _, table in models]
    for turn in zip_longest(*queues):
        yield from ((spec, one) for (spec, _), one in zip(models, turn, strict=True) if one is not None)


def _signs(layout: Layout) -> Iterator[object]:
    """What a layout does that costs something of its own, alone and with several micro batches."""
    several = layout.micro_batches > 1
    ways: list[object] = []
    if layout.tensor_parallel > 1:
        ways.append(("tp", layout.tensor_parallel, layout.sequence_parallel))
    if layout.context_parallel > 1:
        ways.append(("cp", layout.context_parallel, layout.context_parallel_form))
    if layout.pipeline_parallel > 1:
        ways.append(("pp", layout.pipeline_parallel, layout.schedule))
    if layout.expert_parallel > 1:
        ways.append(("ep", layout.expert_parallel))
    if layout.expert_tensor_parallel > 1:
        ways.append(("etp", layout.expert_tensor_parallel))
    replicas = layout.data_parallel * layout.context_parallel
    if replicas > 1:
        # Stages 1 and 2 do the same where there is one micro batch, and nearly so with more.
        ways.append(("zero", replicas, (0, 1, 1, 3)[layout.zero_stage]))
    if layout.data_parallel > 1:
        ways.append(("dp", layout.data_parallel, min(layout.zero_stage, 1)))
    yield from ((way, several) for way in ways)

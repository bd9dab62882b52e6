"""Choice of the layouts to measure, which differ most from each other, and of models small enough to run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from costmodels import Device, Layout, ModelSpec
from costmodels.spec.table import LayoutTable
from planner.api import search
from planner.inputs.engine import DEFAULT_ENGINE
from planner.ranking.result import SearchResult
from runtime.parallel.ranks import Ranks

LAYERS = 4
"""Number of layers to which a model is cut, as constants are for one layer."""

LONGEST_STEP_S = 0.25
"""Largest predicted seconds of a step with which a model is run without cuts."""

SHORTEST = 128
"""Fewest tokens of a sequence."""


def cut_to_size(spec: ModelSpec, device: Device, ranks: Ranks) -> ModelSpec:
    """The model with few layers, and with sequences short enough for the time limit of a step."""
    if len(spec.mlp_pattern) or len(spec.attention_pattern) > 1:
        keep = spec.layers  # Layers that differ keep their order.
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


def in_turns(models: Sequence[tuple[ModelSpec, LayoutTable]]) -> Iterator[tuple[ModelSpec, Layout]]:
    """Layouts of several models by turns; first those with the most features that no earlier layout has.

    Features already measured with another model come later, as models share constants and the time may end
    first.
    """
    left = [_Left(spec, table) for spec, table in models]
    told: set[object] = set()
    while left:
        new = [one for one in left if one.has_more_than(told)] or left
        for one in new:
            layout, signs = one.take(told)
            told |= signs
            yield one.spec, layout
        left = [one for one in left if one.has_more_than(set())]


class _Left:
    """The layouts of one model that were not measured, and features of the layouts that were."""

    def __init__(self, spec: ModelSpec, table: LayoutTable) -> None:
        self.spec = spec
        self.layouts = [table.layout(row) for row in range(len(table))]
        self.signs = {row: frozenset(_signs(layout)) for row, layout in enumerate(self.layouts)}
        self.seen: set[object] = set()
        self.several = False

    def has_more_than(self, told: set[object]) -> bool:
        """Return whether some layout has a feature that is neither in `told` nor was measured with this
        model."""
        return any(signs - self.seen - told for signs in self.signs.values())

    def take(self, told: set[object]) -> tuple[Layout, frozenset[object]]:
        """The layout with the most features that are not in `told`, and then with the most that were not
        measured with this model.

        Among equals the simplest comes first, alternately with one and with several microbatches.
        """
        best = max(
            self.signs,
            key=lambda row: (
                len(self.signs[row] - self.seen - told),
                len(self.signs[row] - self.seen),
                (self.layouts[row].micro_batches > 1) == self.several,
                -len(self.signs[row]),
                -row,
            ),
        )
        signs = self.signs.pop(best)
        self.seen |= signs
        self.several = self.layouts[best].micro_batches == 1
        return self.layouts[best], signs


def _signs(layout: Layout) -> Iterator[object]:
    """Features of a layout that affect its cost, each also in combination with several microbatches."""
    several = layout.micro_batches > 1
    features: list[object] = []
    if layout.tensor_parallel > 1:
        features.append(("tp", layout.tensor_parallel, layout.sequence_parallel))
    if layout.context_parallel > 1:
        features.append(("cp", layout.context_parallel, layout.context_parallel_form))
    if layout.pipeline_parallel > 1:
        features.append(("pp", layout.pipeline_parallel, layout.schedule))
    if layout.expert_parallel > 1:
        # Tokens travel from the ranks of another degree each time, which hides or adds to the costs of that.
        features.append(("ep", layout.expert_parallel, layout.tensor_parallel, layout.context_parallel))
    if layout.expert_tensor_parallel > 1:
        features.append(("etp", layout.expert_tensor_parallel))
    replicas = layout.data_parallel * layout.context_parallel
    if replicas > 1:
        # Stages 1 and 2 do the same where there is one microbatch, and nearly so with more.
        features.append(("zero", replicas, (0, 1, 1, 3)[layout.zero_stage]))
    if layout.data_parallel > 1:
        features.append(("dp", layout.data_parallel, min(layout.zero_stage, 1)))
    yield from ((feature, several) for feature in features)

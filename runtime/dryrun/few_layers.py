"""Models with few layers whose dry runs give that of the whole model."""

from __future__ import annotations

from collections import Counter
from math import lcm
from typing import NamedTuple

from costmodels import Layout, ModelSpec

LEAST = 4
"""Layers of a run that are kept besides a period, as the first and last ones have other neighbours."""

Run = tuple[bool, bool]
"""Consecutive equal layers of a stage: True or False for leading dense layers, and for layers with
recomputation."""


class FewLayers(NamedTuple):
    """A model with few layers, and models with one more period in one of its runs."""

    few: tuple[ModelSpec, Layout]
    more: list[tuple[ModelSpec, Layout, int]]
    """Models with one more period in a run, and the number of periods missing from that run in `few`."""


def few_layers(spec: ModelSpec, layout: Layout, pipeline_rank: int) -> FewLayers | None:
    """Models that give the memory of `pipeline_rank`; None where they would have as many layers as `spec`."""
    period = period_of(spec, layout)
    stages = [runs(spec, layout, stage) for stage in layout.stages_of(pipeline_rank)]
    left_out: dict[Run, int] = {}
    for run in dict.fromkeys(run for stage in stages for run in stage):
        shortest = min(stage[run] for stage in stages if run in stage)
        periods = (shortest - LEAST) // period
        if periods > 1:
            left_out[run] = periods
    here = sum(map(Counter.total, stages))
    few = sum(period * left_out[run] for stage in stages for run in stage if run in left_out)
    if not left_out or (1 + len(left_out)) * (here - few) >= here:
        return None
    more = [
        (*without(spec, layout, pipeline_rank, {**left_out, run: periods - 1}), periods)
        for run, periods in left_out.items()
    ]
    return FewLayers(without(spec, layout, pipeline_rank, left_out), more)


def period_of(spec: ModelSpec, layout: Layout) -> int:
    """Number of layers after which the kinds of layers, and their places in recomputed units, repeat."""
    unit = 1
    if layout.recompute == "full" and layout.recompute_method == "uniform":
        unit = layout.recompute_num_layers
    return lcm(len(spec.attention_pattern), max(1, len(spec.mlp_pattern)), unit)


def runs(spec: ModelSpec, layout: Layout, stage: int) -> Counter[Run]:
    """The layers of a stage by their run."""
    again = layout.recompute_num_layers if layout.recompute_method == "block" else None
    return Counter(
        (layer < spec.dense_layers, layout.recompute != "none" and (again is None or place < again))
        for place, layer in enumerate(layout.layer_range(stage))
    )


def without(
    spec: ModelSpec, layout: Layout, pipeline_rank: int, left_out: dict[Run, int]
) -> tuple[ModelSpec, Layout]:
    """The model and the layout with a number of periods removed from each run of a pipeline rank's stages."""
    period, per_stage = period_of(spec, layout), list(layout.layers_per_stage)
    dense, again = spec.dense_layers, layout.recompute_num_layers
    for stage in layout.stages_of(pipeline_rank):
        for run in runs(spec, layout, stage):
            layers = period * left_out.get(run, 0)
            per_stage[stage] -= layers
            dense -= layers if run[0] else 0
    if layout.recompute_method == "block":
        again -= period * sum(periods for (_, is_again), periods in left_out.items() if is_again)
    return (
        spec.model_copy(update={"layers": sum(per_stage), "dense_layers": dense}),
        layout.model_copy(update={"layers_per_stage": tuple(per_stage), "recompute_num_layers": again}),
    )

"""Groups of ranks with the same memory over time; only one rank of each group is traced."""

from __future__ import annotations

from collections.abc import Sequence

from costmodels import Layout, ModelSpec
from costmodels.spec.schedules import orders
from runtime.dryrun.steady import enough_micro_batches


def alike_ranks(spec: ModelSpec, layout: Layout, ranks: Sequence[int]) -> dict[int, list[int]]:
    """Ranks by the first rank with the same memory: their stages have the same layers in the same order.

    Ranks within one stage differ, as the first one has the largest shards.
    """
    per_stage = layout.world_size // layout.pipeline_parallel
    groups: dict[tuple[object, ...], list[int]] = {}
    for rank in ranks:
        stage, place = divmod(rank, per_stage)
        groups.setdefault((place, *_work(spec, layout, stage)), []).append(rank)
    return {ranks[0]: ranks for ranks in groups.values()}


def _work(spec: ModelSpec, layout: Layout, stage: int) -> tuple[object, ...]:
    """A key for the work of a pipeline rank, equal for ranks with the same work.

    A rank with several stages waits for other ranks, so it equals no other rank.
    """
    if layout.virtual_pipeline_parallel > 1 or stage in (0, layout.pipeline_parallel - 1):
        return (stage,)
    layers = tuple(spec.layer_kind(layer) for layer in layout.layer_range(stage))
    count = enough_micro_batches(layout, stage)
    order = orders(layout.schedule, layout.pipeline_parallel, 1, count)[stage]
    return layers, count, tuple(order.kind.tolist())

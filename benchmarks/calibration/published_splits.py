"""Splits of layers over pipeline stages by the engines of published measurements."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.calibration.published_cells import Unusable
from costmodels.spec.layout import even_split
from costmodels.spec.model import ModelSpec


def even_stages(model: ModelSpec, stages: int) -> tuple[int, ...]:
    """Equal stages; embedding and head count as a layer each where that makes the stages even (Megatron-LM's
    `--account-for-embedding-in-pipeline-split` and `--account-for-loss-in-pipeline-split`)."""
    layers = model.layers
    each = (layers + 2) // stages
    if layers % stages and (layers + 2) % stages == 0 and stages > 1:
        return (each - 1, *[each] * (stages - 2), each - 1)
    if stages > layers:
        raise Unusable("more stages than layers")
    return even_split(layers, stages)


def stages_by_cost(model: ModelSpec, stages: int) -> tuple[int, ...]:
    """nanotron's split: blocks in their order, with a new stage when the cost of a stage reaches its share of
    the total.

    A layer costs its weights, the head its own, the embedding nothing (`get_block_compute_costs` of
    nanotron's llama). Stages may have no layer, and the last one may lack the head. In that case the last
    stage and the stage with the head are exchanged here, which does not change the step time.
    """
    layer, head = model.hidden * (4 * model.q_size + 3 * model.ffn), model.vocab * model.hidden
    whole, total, stage = layer * model.layers + head, 0, 0
    counts = [0] * stages
    for _ in range(model.layers):
        counts[stage] += 1
        total += layer
        if stage < stages - 1 and total * stages >= whole * (stage + 1):
            stage += 1
    counts[stage], counts[-1] = counts[-1], counts[stage]
    return tuple(counts)


def balanced_stages(model: ModelSpec, stages: int) -> tuple[int, ...]:
    """The split whose largest stage holds the fewest parameters, embedding and head included."""
    layer, ends = model.dense_layer_parameters, model.vocab * model.hidden
    whole = layer * model.layers + 2 * ends
    borders = [0]
    for stage in range(1, stages):
        # An end may weigh more than a stage's share.
        borders.append(min(max(round((whole * stage / stages - ends) / layer), 0), model.layers))
    return tuple(np.diff([*borders, model.layers]).tolist())


SPLITS: dict[str, Callable[[ModelSpec, int], tuple[int, ...]]] = {
    "even": even_stages,
    "by_cost": stages_by_cost,
    "balanced": balanced_stages,
}
"""Splits by the name under which `measurements.yaml` gives them to a source."""

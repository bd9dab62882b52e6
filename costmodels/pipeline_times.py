"""The pipeline of a few layouts, simulated: what replaces the closed forms for plans that are shown."""

from __future__ import annotations

import numpy as np

from costmodels.kind_prices import Rows, boundary_seconds
from costmodels.layers.shapes import shapes_of
from costmodels.memory.unit_sizes import parameters, sizes_of
from costmodels.ranks.pipeline import FIELDS, Ranks, stages_as_ranks
from costmodels.ranks.sites import BOTH, kinds_of_ranks, on_sites, ranks_of_stages
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Cluster
from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import SCHEDULES, Bools, Floats, LayoutTable
from costmodels.time.bubble import message_seconds
from costmodels.time.data_parallel import accumulation_seconds
from costmodels.time.simulation import StageSeconds, pipeline_seconds
from costmodels.time.unit_times import on_ranks, units_of


def stage_seconds(
    model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable
) -> list[StageSeconds]:
    """Seconds of one micro batch on each stage of each row, adding up its gradients included.

    Args:
        engine: with its constants for the device; where nodes are of two kinds, with those for all devices.

    Raises:
        InputError: the device or the engine does not know the precision of the table.
    """
    every = [stages_as_ranks(model, table, row) for row in range(len(table))]
    lengths = [len(stages.count) for stages in every]
    filled = np.zeros((len(FIELDS), len(table), max(lengths, default=1)))
    for row, stages in enumerate(every):
        for column, name in zip(filled, FIELDS, strict=True):
            column[row, : lengths[row]] = getattr(stages, name)
    stages = Ranks(**dict(zip(FIELDS, filled, strict=True)))
    if cluster.parts:
        return _of_kinds(model, cluster, engine, table, stages, lengths)
    shapes, shape = shapes_of(table)
    units = units_of(model, cluster, engine, shapes)
    adding, _ = accumulation_seconds(engine, cluster.device, table, model.experts > 0)
    shared, experts = parameters(sizes_of(model, engine, shapes, shape), stages)
    total, backward, weights = (
        on_ranks(units, stages, shape, part) for part in ("total", "backward", "weights")
    )
    added = (shared + experts) * adding[:, None]
    sends = message_seconds(model, cluster, engine, table)
    return [
        StageSeconds(
            forward=(total - backward)[row, :length],
            inputs=(backward - weights)[row, :length],
            weights=(weights + added)[row, :length],
            send=np.full(length - 1, sends[row]),
            waits=engine.waits_for_messages,
        )
        for row, length in enumerate(lengths)
    ]


def rank_seconds(model: ModelSpec, cluster: Cluster, engine: Engine, layout: Layout) -> Floats:
    """Seconds that each pipeline rank computes for one micro batch, [pp].

    Args:
        engine: as `costmodels.pricing.price` takes it.
    """
    own = engine if cluster.parts else engine.for_device(cluster.device)
    [seconds] = stage_seconds(model, cluster, own, LayoutTable.of([layout]))
    stages = seconds.forward + seconds.inputs + seconds.weights
    ranks = range(layout.pipeline_parallel)
    return np.array([stages[list(layout.stages_of(rank))].sum() for rank in ranks])


def _of_kinds(
    model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable, stages: Ranks, lengths: list[int]
) -> list[StageSeconds]:
    """`stage_seconds` on nodes of two kinds; `stages` are [n, stages], of which rows have `lengths`."""
    kind = np.zeros(stages.count.shape, dtype=np.int64)
    for row, length in enumerate(lengths):
        kinds = kinds_of_ranks(cluster, int(table.pipeline_parallel[row]))[ranks_of_stages(table, row)]
        kind[row, :length], kind[row, length:] = kinds, kinds[-1]
    rows = Rows(model, cluster, engine, table, stages, kind)
    total, backward, weights = (rows.seconds(part) for part in ("total", "backward", "weights"))
    between = boundary_seconds(model, cluster, engine, table)[:, None]

    def message(code: int) -> Floats:
        site = rows.sites[code]
        return message_seconds(model, site.cluster, site.engine, table)[:, None]

    within = on_sites(rows.site, message)
    same = (kind[:, 1:] == kind[:, :-1]) & (kind[:, 1:] != BOTH)
    sends = np.where(same, within[:, 1:], between)
    return [
        StageSeconds(
            forward=(total - backward)[row, :length],
            inputs=(backward - weights)[row, :length],
            weights=weights[row, :length],
            send=sends[row, : length - 1],
            waits=any(site.engine.waits_for_messages for site in rows.sites),
        )
        for row, length in enumerate(lengths)
    ]


def pipeline_parts(
    model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable
) -> tuple[Floats, Floats, Bools]:
    """Bubble and sends of each row in seconds, [n], as the simulated schedule has them.

    The bubble is what the pipeline takes longer than its slowest rank computes where messages take no
    time; sends are what it takes longer where they do. Both are zero with one pipeline rank.

    The last array tells which rows were simulated: schedules that PyTorch refuses, and those that are too
    long (`costmodels.time.simulation.MOST_PASSES`), are not.
    """
    bubble, sends, found = np.zeros(len(table)), np.zeros(len(table)), np.ones(len(table), dtype=bool)
    piped = np.flatnonzero(table.pipeline_parallel > 1)
    if not len(piped):
        return bubble, sends, found
    several = table.take(piped)
    for row, seconds in zip(piped, stage_seconds(model, cluster, engine, several), strict=True):
        pipeline, chunks = int(table.pipeline_parallel[row]), int(table.virtual_pipeline_parallel[row])
        problem = (SCHEDULES[int(table.schedule[row])], pipeline, chunks, int(table.micro_batches[row]))
        alone = pipeline_seconds(*problem, seconds.without_sends())
        whole = pipeline_seconds(*problem, seconds)
        if alone is None or whole is None:
            found[row] = False
            continue
        bubble[row] = alone - problem[3] * seconds.slowest_rank(problem[0], pipeline)
        sends[row] = whole - alone
    # Rounding errors of sums in another order are no time.
    return np.maximum(bubble, 0.0), np.maximum(sends, 0.0), found

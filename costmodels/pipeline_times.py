"""The simulated pipelines of a few layouts; they replace the closed forms for plans that are shown."""

from __future__ import annotations

import numpy as np

from costmodels.rank_costs import RankCosts
from costmodels.ranks.rank_layers import FIELDS, Ranks, stage_ranks
from costmodels.ranks.sites import MIXED, rank_kinds, site_values, stage_places
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Cluster
from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import SCHEDULES, Bools, Floats, LayoutTable
from costmodels.step_times import boundary_seconds
from costmodels.time.bubble import message_seconds, shared_bubble
from costmodels.time.simulation import StageSeconds, pipeline_seconds


def stage_seconds(
    model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable
) -> list[StageSeconds]:
    """Seconds of one microbatch on each stage of each row, including gradient accumulation.

    Args:
        engine: its constants; `Engine.for_device` is applied here.

    Raises:
        InputError: the device or the engine does not know the precision of the table.
    """
    every = [stage_ranks(model, table, row) for row in range(len(table))]
    lengths = [len(stages.count) for stages in every]
    filled = np.zeros((len(FIELDS), len(table), max(lengths, default=1)))
    kind = np.zeros(filled.shape[1:], dtype=np.int64)
    for row, (stages, length) in enumerate(zip(every, lengths, strict=True)):
        for column, name in zip(filled, FIELDS, strict=True):
            column[row, :length] = getattr(stages, name)
        kinds = rank_kinds(cluster, int(table.pipeline_parallel[row]))[stage_places(table, row)]
        kind[row, :length], kind[row, length:] = kinds, kinds[-1]
    ranks = Ranks(**dict(zip(FIELDS, filled, strict=True)))
    costs = RankCosts(model, cluster, engine, table, ranks, kind)
    stage = costs.at()
    total, backward, weights = (stage.part(name) for name in ("total", "backward", "weights"))
    added = stage.summation
    sends = _send_seconds(costs)
    return [
        StageSeconds(
            forward=(total - backward)[row, :length],
            inputs=(backward - weights)[row, :length],
            weights=(weights + added)[row, :length],
            send=sends[row, : length - 1],
            waits=any(site.engine.network.waits_for_messages for site in costs.sites),
        )
        for row, length in enumerate(lengths)
    ]


def _send_seconds(costs: RankCosts) -> Floats:
    """Seconds of a message across each boundary between stages, [n, stages - 1]."""
    kind, table = costs.kind, costs.table

    def message(code: int) -> Floats:
        site = costs.sites[code]
        return message_seconds(costs.model, site.cluster, site.engine, table)[:, None]

    within = np.broadcast_to(site_values(costs.site, costs.codes, message), kind.shape)
    between = boundary_seconds(costs.model, costs.cluster, costs.engine, table)[:, None]
    same = (kind[:, 1:] == kind[:, :-1]) & (kind[:, 1:] != MIXED)
    return np.where(same, within[:, 1:], between)


def rank_seconds(model: ModelSpec, cluster: Cluster, engine: Engine, layout: Layout) -> Floats:
    """Seconds that each pipeline rank computes for one microbatch, [pp].

    Args:
        engine: the engine, as for `costmodels.pricing.price`.
    """
    [seconds] = stage_seconds(model, cluster, engine, LayoutTable.of([layout]))
    stages = seconds.forward + seconds.inputs + seconds.weights
    ranks = range(layout.pipeline_parallel)
    return np.array([stages[list(layout.stages_of(rank))].sum() for rank in ranks])


def bubble_and_send_seconds(
    model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable
) -> tuple[Floats, Floats, Bools]:
    """Seconds of bubble and sends of each row, [n], from the simulated schedule.

    The bubble is the pipeline's time without message time, minus the computation of its slowest rank. Sends
    are the time that messages add. Both are zero with one pipeline rank. The last array marks the simulated
    rows. Schedules that PyTorch refuses, and those that are too long
    (`costmodels.time.simulation.MOST_PASSES`), are not simulated.
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
        busy = problem[3] * seconds.slowest_rank(problem[0], pipeline)
        bubble[row] = shared_bubble(np.array(alone - busy), busy, cluster.device.sharers)
        sends[row] = whole - alone
    # Rounding errors of sums in another order are no time.
    return np.maximum(bubble, 0.0), np.maximum(sends, 0.0), found

"""Seconds of one optimizer step of many layouts, part by part, with pipelines in closed form."""

from __future__ import annotations

from functools import reduce

import numpy as np

from costmodels.layers.operators import padded_vocabulary
from costmodels.memory.states import reduction_element_bytes
from costmodels.memory.unit_sizes import end_parameters
from costmodels.network.collectives import all_reduce, group
from costmodels.rank_costs import RankCosts
from costmodels.ranks.reductions import row_maximum
from costmodels.ranks.sites import Site, border_sites, sites
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Cluster
from costmodels.spec.layout import SPLIT_BACKWARD, V_SCHEDULES
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import Bools, Floats, Ints, LayoutTable
from costmodels.time.bubble import (
    bubble_seconds,
    message_seconds,
    message_wait_seconds,
    send_seconds,
    shared_bubble,
    split_bubble_seconds,
    uneven_bubble_seconds,
)
from costmodels.time.data_parallel import (
    copy_seconds,
    exchange_seconds,
    optimizer_seconds,
    orthogonal_seconds,
    weight_cast_seconds,
)
from costmodels.time.passes import PARTS


def step_seconds(costs: RankCosts) -> dict[str, Floats]:
    """Seconds of each part of `StepTime`, [n] each."""
    table, every = costs.table, np.arange(len(costs.table))
    rank_seconds = costs.at().total
    slowest = rank_seconds.argmax(axis=1)
    slow = costs.at((every, slowest))
    micro_batches = table.micro_batches
    time = {part: micro_batches * slow.part(part) for part in PARTS}
    backward = slow.backward
    forward = rank_seconds[every, slowest] - backward
    bubble, spare, weights = _bubbles(costs, rank_seconds, slowest)
    message = boundary_seconds(costs.model, costs.cluster, costs.engine, table)
    waits = any(site.engine.network.waits_for_messages for site in costs.sites)
    waiting = message_wait_seconds(table, rank_seconds, costs.ranks, message, waits)
    busy = micro_batches * rank_seconds[every, slowest]
    time["bubble"] = shared_bubble(bubble, busy, costs.cluster.device.sharers)
    sends = send_seconds(table, message, waiting, spare, forward, backward, weights, waits)
    shapes, shape = costs.shapes
    vocabulary = padded_vocabulary(costs.model, shapes)[shape]
    time["pipeline_parallel"] = sends + tied_seconds(
        costs.model, costs.cluster, costs.engine, table, vocabulary
    )
    once, time["data_parallel"], time["optimizer"] = _after_backward(
        costs, slow.ranks.layers, forward, backward
    )
    time["accumulation"] = np.maximum(micro_batches * slow.summation + once, 0.0)
    return time


def boundary_seconds(model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable) -> Floats:
    """Seconds of one message between stages, [n]; with two kinds of nodes, from one kind to the other."""
    both = border_sites(sites(cluster, engine))
    return reduce(np.maximum, [message_seconds(model, one.cluster, one.engine, table) for one in both])


def tied_seconds(
    model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable, vocabulary: Floats
) -> Floats:
    """Seconds to sum the gradients of both copies of an embedding, on the first and the last stage, [n]. It
    is a tied embedding, or one that MTP modules read.

    Args:
        vocabulary: `padded_vocabulary` of each row.
    """

    is_shared = (model.tied and model.lora is None) or model.mtp is not None

    def seconds(site: Site) -> Floats:
        apart = table.tensor_parallel * table.context_parallel * table.data_parallel
        apart = apart * np.maximum(table.pipeline_parallel - 1, 1)
        pair = group(site.cluster, site.engine, np.minimum(table.pipeline_parallel, 2), apart)
        count = vocabulary * model.hidden / table.tensor_parallel
        # In a V both are on the first rank.
        apart_from_another = ~table.runs(*V_SCHEDULES) * is_shared
        return apart_from_another * all_reduce(pair, count * reduction_element_bytes(site.engine, table))

    return reduce(np.maximum, [seconds(site) for site in border_sites(sites(cluster, engine))])


def _after_backward(
    costs: RankCosts, layers: Floats, forward: Floats, backward: Floats
) -> tuple[Floats, Floats, Floats]:
    """Seconds after backward, [n] each: gradient copies once a step, data-parallel communication, and the
    optimizer.

    The seconds are those of the site with the longest sum; the other sites wait for it.

    Args:
        layers: layers of the slowest rank, [n].
        forward, backward: seconds of a microbatch on that rank, [n], which can hide communication.
    """
    found = np.full((3, len(costs.table)), -np.inf)
    shared, experts = costs.parameters
    frozen = () if costs.model.lora is None else costs.frozen
    for code in costs.codes:
        site, table = costs.sites[code], costs.table
        counts = shared, experts, shared - end_parameters(costs.sizes[code], costs.ranks), *frozen
        some: Ints | slice = slice(None)
        if len(costs.codes) > 1:
            here: Bools = costs.site == code
            some = np.flatnonzero(here.any(axis=1))
            if not len(some):
                continue
            table = table.take(some)
            counts = tuple(np.where(here, count, 0.0)[some] for count in counts)
        most, most_experts, inner, *still = (row_maximum(count) for count in counts)
        device = site.cluster.device
        window = layers[some], forward[some], backward[some]
        unchanged = (still[0], still[1]) if still else None
        exchange = exchange_seconds(
            site.cluster, site.engine, table, most, most_experts, *window, frozen=unchanged, inner=inner
        )
        update = optimizer_seconds(site.engine, device, table, most, most_experts)
        update += orthogonal_seconds(costs.model, site.cluster, site.engine, table, inner, most_experts)
        update += site.engine.host.step
        if costs.model.lora is None:
            update += inner * weight_cast_seconds(site.engine, device, table)
        adding = costs.accumulation[code]
        copies = (most + most_experts) * adding.once[some] + inner * adding.linear_once[some]
        if unchanged is not None:
            copies = copies + sum(unchanged) * copy_seconds(site.engine, device, table)
        own = np.stack([copies, exchange, update])
        longer = own.sum(axis=0) > found[:, some].sum(axis=0)
        found[:, some] = np.where(longer, own, found[:, some])
    return found[0], found[1], found[2]


def _bubbles(costs: RankCosts, rank_seconds: Floats, slowest: Ints) -> tuple[Floats, Floats, Floats]:
    """The closed-form bubble of each row, its spare seconds, and the weight-gradient seconds of its slowest
    rank, [n]. The last two are zero where backward is one pass.
    """
    table, ranks = costs.table, costs.ranks
    chunks = table.virtual_pipeline_parallel
    bubble = bubble_seconds(rank_seconds, ranks.count, chunks.astype(np.float64), slowest)
    spare, weights_of_slowest = np.zeros(len(table)), np.zeros(len(table))
    uneven = (chunks == 1) & (table.pipeline_parallel > 1) & (ranks.last[np.arange(len(table)), slowest] == 0)
    if uneven.any():
        some, own = costs.at(uneven), rank_seconds[uneven]
        ahead = np.take_along_axis(own - some.backward, slowest[uneven][:, None], axis=1)
        # Entries are in the order of their first ranks. Equal ones of one kind of node may lie apart: there
        # large stages come first, as `even_split` has them.
        place = (
            np.broadcast_to(np.arange(own.shape[1]), own.shape) if costs.cluster.parts else -some.ranks.layers
        )
        bubble[uneven] = uneven_bubble_seconds(own, ahead[:, 0], some.ranks, place, slowest[uneven])
    if (apart := table.runs(*SPLIT_BACKWARD)).any():
        split = costs.at(apart)
        weights = split.part("weights")
        inputs = split.part("backward") - weights
        weights += split.summation
        ahead = rank_seconds[apart] - inputs - weights
        bubble[apart], spare[apart] = split_bubble_seconds(
            table.take(apart), ahead, inputs, weights, ranks.count[apart]
        )
        weights_of_slowest[apart] = np.take_along_axis(weights, slowest[apart][:, None], axis=1)[:, 0]
    return bubble, spare, weights_of_slowest

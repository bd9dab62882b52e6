"""The price of layouts: seconds of one step and bytes of the fullest device, for all rows at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from costmodels.kind_prices import Rows, price_rows, rows_of_all_ranks
from costmodels.layers.operators import padded_vocabulary
from costmodels.layers.shapes import shapes_of
from costmodels.memory.peak import stage_memory
from costmodels.memory.states import reduced_bytes
from costmodels.memory.unit_sizes import end_parameters, parameters, sizes_of, unit_sizes
from costmodels.network.collectives import all_reduce, group
from costmodels.pipeline_times import pipeline_parts
from costmodels.ranks.pipeline import Ranks, all_ranks, deciding_ranks, ranks_entry
from costmodels.ranks.reductions import highest, on_rank, total
from costmodels.ranks.sites import BOTH, check_precision, sites
from costmodels.spec.blocks import in_blocks
from costmodels.spec.engine import Engine
from costmodels.spec.estimate import Estimate, StageMemory, StepTime
from costmodels.spec.hardware import Cluster
from costmodels.spec.layout import SPLIT_BACKWARD, V_SCHEDULES, Layout
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import Bools, Floats, Ints, LayoutTable
from costmodels.time.bubble import (
    bubble_seconds,
    held_seconds,
    message_seconds,
    send_seconds,
    split_bubble_seconds,
    uneven_bubble_seconds,
)
from costmodels.time.compute import PARTS, Passes, peak_flops
from costmodels.time.data_parallel import (
    accumulation_seconds,
    exchange_seconds,
    optimizer_seconds,
    orthogonal_seconds,
)
from costmodels.time.layer_table import known_share
from costmodels.time.uncertainty import spread
from costmodels.time.unit_times import on_ranks, units_of


@dataclass(frozen=True)
class Prices:
    """What each row of a table costs. Arrays of shape [n]."""

    time: Mapping[str, Floats]
    """Seconds of each part of `StepTime`."""
    memory: Mapping[str, Floats]
    """Bytes of each part of `StageMemory` on the fullest pipeline rank."""
    simulated: Bools
    """Rows whose pipeline was simulated; closed forms say what the others take."""
    model: ModelSpec
    cluster: Cluster
    engine: Engine
    """The engine with its constants for the device; on nodes of two kinds, with those for all devices."""
    table: LayoutTable

    def __len__(self) -> int:
        return len(self.table)

    @cached_property
    def step_time_s(self) -> Floats:
        """Seconds of one optimizer step."""
        return sum(self.time.values(), np.zeros(len(self)))

    @property
    def spread(self) -> Floats:
        """Half the width of the 80 % range of the step time, as a natural logarithm."""
        if self.cluster.parts:
            kinds = [replace(self, engine=site.engine) for site in sites(self.cluster, self.engine)[:BOTH]]
            return np.maximum(*(one._spread() for one in kinds))
        return self._spread()

    def _spread(self) -> Floats:
        known = known_share(self.model, self.engine, self.table)
        return spread(self.cluster, self.engine, self.time, self.step_time_s, known, self.model.hidden)

    @cached_property
    def peak_memory_bytes(self) -> Floats:
        """Bytes of the fullest device."""
        return sum(self.memory.values(), np.zeros(len(self)))

    @cached_property
    def tokens_per_s(self) -> Floats:
        """Tokens of all devices together."""
        return self.table.global_batch_size * self.model.seq / self.step_time_s

    @property
    def tokens_per_s_per_device(self) -> Floats:
        """Tokens of one device."""
        return self.tokens_per_s / self._devices

    @property
    def tflops_per_device(self) -> Floats:
        """Model TFLOP/s by `ModelSpec.flops_per_sequence`."""
        sequences = self.table.global_batch_size * self.model.flops_per_sequence()
        return sequences / self.step_time_s / self._devices / 1e12

    @property
    def mfu(self) -> Floats:
        """Model FLOPs over the peak of the table's precision, 0 to 1."""
        return self.tflops_per_device * 1e12 / peak_flops(self.cluster.device, self.table.precision)

    @property
    def _devices(self) -> Ints:
        return self.table.tensor_parallel * self.table.pipeline_parallel * self.table.replicas

    def take(self, rows: Ints | Bools) -> Prices:
        """The rows that an index or mask array selects."""
        return replace(
            self,
            time={part: seconds[rows] for part, seconds in self.time.items()},
            memory={part: held[rows] for part, held in self.memory.items()},
            simulated=self.simulated[rows],
            table=self.table.take(rows),
        )

    def simulate(self, rows: Ints) -> Prices:
        """The same, with the bubble and the sends of `rows` as their simulated pipelines have them."""
        table = self.table.take(rows)
        bubble, sends, found = pipeline_parts(self.model, self.cluster, self.engine, table)
        sends += _tied_seconds(
            self.model, self.cluster, self.engine, table, padded_vocabulary(self.model, table)
        )
        time, simulated = dict(self.time), self.simulated.copy()
        for part, seconds in (("bubble", bubble), ("pipeline_parallel", sends)):
            time[part] = time[part].copy()
            time[part][rows[found]] = seconds[found]
        simulated[rows] = found
        return replace(self, time=time, simulated=simulated)

    def estimate(self, row: int, memory: Mapping[str, Floats] | None = None) -> Estimate:
        """One row as an `Estimate`, its pipeline simulated, with the memory of every pipeline rank.

        Args:
            memory: bytes of its pipeline ranks, [1, pp] each or such that they broadcast to it, where those
                of closed forms are not wanted.
        """
        one = self.take(np.array([row]))
        if not one.simulated[0]:
            one = one.simulate(np.array([0]))
        held = self._memory(one.table) if memory is None else dict(memory)
        ranks = 1, int(one.table.pipeline_parallel[0])
        of_ranks = zip(*(np.broadcast_to(each, ranks)[0].tolist() for each in held.values()), strict=True)
        stages = tuple(StageMemory(**dict(zip(held, each, strict=True))) for each in of_ranks)
        most = one.peak_memory_bytes[0] if memory is None else max(stage.total for stage in stages)
        return Estimate(
            step_time_s=one.step_time_s[0],
            step_time_low_s=one.step_time_s[0] * np.exp(-one.spread[0]),
            step_time_high_s=one.step_time_s[0] * np.exp(one.spread[0]),
            time=StepTime(**{part: float(seconds[0]) for part, seconds in one.time.items()}),
            memory=stages,
            peak_memory_bytes=most,
            tokens_per_s=one.tokens_per_s[0],
            tokens_per_s_per_device=one.tokens_per_s_per_device[0],
            tflops_per_device=one.tflops_per_device[0],
            mfu=one.mfu[0],
        )

    def _memory(self, table: LayoutTable) -> dict[str, Floats]:
        """Bytes of every pipeline rank of a table of one row, which broadcast to [1, pp]."""
        if self.cluster.parts:
            rows = rows_of_all_ranks(self.model, self.cluster, self.engine, table, 0)
            every = [rows.memory(np.array([rank])) for rank in range(rows.kind.shape[1])]
            return {name: np.stack([held[name] for held in every], axis=1) for name in every[0]}
        ranks = all_ranks(*ranks_entry(self.model, table, 0)).each(lambda held: held[None, :])
        sizes = unit_sizes(self.model, self.engine, table)
        return stage_memory(self.cluster, self.engine, table, sizes, ranks)


def _tied_seconds(
    model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable, vocabulary: Floats
) -> Floats:
    """Seconds to sum the gradients of both copies of a tied embedding, on the first and the last stage."""
    if cluster.parts:
        both = sites(cluster, engine)[BOTH:]
        return np.maximum(*(_tied_seconds(model, one.cluster, one.engine, table, vocabulary) for one in both))
    apart = table.tensor_parallel * table.context_parallel * table.data_parallel
    apart = apart * np.maximum(table.pipeline_parallel - 1, 1)
    pair = group(cluster, engine, np.minimum(table.pipeline_parallel, 2), apart)
    count = vocabulary * model.hidden / table.tensor_parallel
    # In a V both are on the first rank.
    apart_from_another = ~table.runs(*V_SCHEDULES) * model.tied
    return apart_from_another * all_reduce(pair, count * reduced_bytes(engine, table))


def peak_memory(
    model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable, rows: Ints | None = None
) -> Floats:
    """Bytes of the fullest device of each row, as `price` has them, in a fraction of its time.

    Args:
        rows: those that are asked for; all unless given.

    Raises:
        InputError: the engine does not know the precision of the table.
    """
    own = engine.for_device(cluster.device)

    def peak(block: LayoutTable) -> Floats:
        if cluster.parts:
            held = Rows.of(model, cluster, engine, block).bytes
        else:
            sizes, ranks = sizes_of(model, own, *shapes_of(block)), deciding_ranks(model, block)
            held = total(stage_memory(cluster, own, block, sizes, ranks))
        return highest(held)

    return np.concatenate([*in_blocks(peak, table, rows)])


def _price_block(
    model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable
) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Parts of the time and of the peak memory of each row."""
    if cluster.parts:
        time, memory = price_rows(Rows.of(model, cluster, engine, table))
        vocabulary = padded_vocabulary(model, table)
        time["pipeline_parallel"] += _tied_seconds(model, cluster, engine, table, vocabulary)
        return time, memory
    shapes, shape = shapes_of(table)
    units = units_of(model, cluster, engine, shapes)
    sizes, ranks = sizes_of(model, engine, shapes, shape), deciding_ranks(model, table)

    held_shared, held_experts = parameters(sizes, ranks)
    adding, once = accumulation_seconds(engine, cluster.device, table, model.experts > 0)
    # Each micro batch adds its gradients to those of the ones before it.
    added = (held_shared + held_experts) * adding[:, None]
    rank_seconds = on_ranks(units, ranks, shape, "total") + added
    slowest = rank_seconds.argmax(axis=1)[:, None]
    rows = np.arange(len(table))
    slow = ranks.each(lambda held: held[rows, slowest[:, 0]])
    micro_batches = table.micro_batches
    time = {part: micro_batches * on_ranks(units, slow, shape, part) for part in PARTS}
    slow_added = added[rows, slowest[:, 0]]
    backward = on_ranks(units, slow, shape, "backward") + slow_added
    forward = rank_seconds[rows, slowest[:, 0]] - backward
    shared, experts = highest(held_shared), highest(held_experts)
    time["accumulation"] = np.maximum(micro_batches * slow_added + (shared + experts) * once, 0.0)
    bubble, spare, weights = _bubbles(units, table, ranks, shape, rank_seconds, added, slowest[:, 0])
    message = message_seconds(model, cluster, engine, table)
    waiting = held_seconds(table, rank_seconds, ranks, message, engine.waits_for_messages)
    time["bubble"] = bubble
    time["pipeline_parallel"] = send_seconds(
        table, message, waiting, spare, forward, backward, weights, engine.waits_for_messages
    )
    time["pipeline_parallel"] += _tied_seconds(
        model, cluster, engine, table, padded_vocabulary(model, shapes)[shape]
    )
    time["data_parallel"] = exchange_seconds(
        cluster, engine, table, shared, experts, slow.layers, forward, backward
    )
    time["optimizer"] = optimizer_seconds(engine, cluster.device, table, shared, experts)
    layers = highest(held_shared - end_parameters(sizes, ranks))
    time["optimizer"] += orthogonal_seconds(model, cluster, engine, table, layers, experts)

    held = stage_memory(cluster, engine, table, sizes, ranks)
    memory = on_rank(held, total(held).argmax(axis=1)) | {"absent": np.zeros(len(table))}
    return {part: time[part] for part in StepTime.model_fields}, memory


def _bubbles(
    units: dict[str, Passes],
    table: LayoutTable,
    ranks: Ranks,
    shape: Ints,
    rank_seconds: Floats,
    added: Floats,
    slowest: Ints,
) -> tuple[Floats, Floats, Floats]:
    """In closed form, the bubble of each row, its spare seconds, and the gradients of weights of its slowest
    rank, [n]. The last two are zero where backward is one pass.
    """
    chunks = table.virtual_pipeline_parallel
    bubble = bubble_seconds(rank_seconds, ranks.count, chunks.astype(np.float64), slowest)
    spare, weights_of_slowest = np.zeros(len(table)), np.zeros(len(table))
    uneven = (chunks == 1) & (table.pipeline_parallel > 1) & (ranks.last[np.arange(len(table)), slowest] == 0)
    if uneven.any():
        some = ranks.each(lambda held: held[uneven])
        backward = on_ranks(units, some, shape[uneven], "backward") + added[uneven]
        own = rank_seconds[uneven]
        ahead = np.take_along_axis(own - backward, slowest[uneven][:, None], axis=1)[:, 0]
        bubble[uneven] = uneven_bubble_seconds(own, ahead, some, slowest[uneven])
    if (apart := table.runs(*SPLIT_BACKWARD)).any():
        some = ranks.each(lambda held: held[apart])
        weights = on_ranks(units, some, shape[apart], "weights")
        inputs = on_ranks(units, some, shape[apart], "backward") - weights
        weights += added[apart]
        ahead = rank_seconds[apart] - inputs - weights
        bubble[apart], spare[apart] = split_bubble_seconds(
            table.take(apart), ahead, inputs, weights, some.count
        )
        weights_of_slowest[apart] = np.take_along_axis(weights, slowest[apart][:, None], axis=1)[:, 0]
    return bubble, spare, weights_of_slowest


def price(model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable) -> Prices:
    """What each row of `table` costs, its pipeline by closed forms (`Prices.simulate` replaces them).

    Args:
        engine: its constants; `Engine.for_device` is applied here.
        table: legal layouts of `cluster.world_size` devices; legality is not checked.

    Raises:
        InputError: the device or the engine does not know the precision of the table.
    """
    peak_flops(cluster.device, table.precision)
    if cluster.parts:
        check_precision(cluster, engine, table.precision)
    else:
        engine = engine.for_device(cluster.device)
        engine.memory_policy(table.precision)
    time, memory = (
        {part: np.empty(len(table)) for part in kind.model_fields} for kind in (StepTime, StageMemory)
    )
    start = 0
    for seconds, held in in_blocks(partial(_price_block, model, cluster, engine), table):
        end = start + len(seconds["compute"])
        for whole, parts in ((time, seconds), (memory, held)):
            for part, column in whole.items():
                column[start:end] = parts[part]
        start = end
    return Prices(
        time=time,
        memory=memory,
        # Without pipeline parallelism there is nothing to simulate.
        simulated=table.pipeline_parallel == 1,
        model=model,
        cluster=cluster,
        engine=engine,
        table=table,
    )


def estimate(
    model: ModelSpec,
    cluster: Cluster,
    engine: Engine,
    layout: Layout,
    memory: Mapping[str, Floats] | None = None,
) -> Estimate:
    """What one layout costs, its pipeline simulated; `memory` as `Prices.estimate` takes it.

    Raises `InputError` as `price` does.
    """
    return price(model, cluster, engine, LayoutTable.of([layout])).estimate(0, memory)

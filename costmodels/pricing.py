"""The price of layouts: seconds of one step and bytes of the fullest device, for all rows at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

import numpy as np

from costmodels.compute import PARTS, Passes, passes, peak_flops
from costmodels.data_parallel import (
    accumulation_seconds,
    exchange_seconds,
    optimizer_seconds,
    orthogonal_seconds,
)
from costmodels.engine import Engine
from costmodels.estimate import Estimate, StageMemory, StepTime
from costmodels.hardware import Cluster
from costmodels.layout import SPLIT_BACKWARD, V_SCHEDULES, Layout
from costmodels.memory import (
    UnitSizes,
    end_parameters,
    memory_policy,
    parameters,
    reduced_bytes,
    stage_memory,
    unit_sizes,
)
from costmodels.model_spec import ModelSpec
from costmodels.network import all_reduce, group
from costmodels.operators import (
    embedding,
    head,
    layer,
    padded_vocabulary,
)
from costmodels.pipeline import (
    NONE,
    Ranks,
    all_ranks,
    bubble_seconds,
    deciding_ranks,
    ranks_entry,
    send_seconds,
    split_bubble_seconds,
)
from costmodels.table import Floats, Ints, LayoutTable, distinct

BLOCK = 16384
"""Rows priced at a time, so that intermediate arrays stay small however long the table."""


@dataclass(frozen=True)
class Prices:
    """What each row of a table costs. Arrays of shape [n]."""

    time: Mapping[str, Floats]
    """Seconds of each part of `StepTime`."""
    step_time_s: Floats
    memory: Mapping[str, Floats]
    """Bytes of each part of `StageMemory` on the fullest pipeline rank."""
    peak_memory_bytes: Floats
    tokens_per_s: Floats
    tokens_per_s_per_device: Floats
    tflops_per_device: Floats
    mfu: Floats
    model: ModelSpec
    cluster: Cluster
    engine: Engine
    """The engine with its constants for the device."""
    table: LayoutTable

    def __len__(self) -> int:
        return len(self.step_time_s)

    def estimate(self, row: int) -> Estimate:
        """One row as an `Estimate`, with the memory of every pipeline rank."""
        one = self.table.take(np.array([row]))
        every = all_ranks(*ranks_entry(self.model, one, 0))
        ranks = every.each(lambda held: held[None, :])
        sizes = unit_sizes(self.model, self.engine, one)
        memory = stage_memory(self.cluster, self.engine, one, sizes, ranks)
        return Estimate(
            step_time_s=self.step_time_s[row],
            time=StepTime(**{part: float(seconds[row]) for part, seconds in self.time.items()}),
            memory=tuple(
                StageMemory(**{part: float(held[0, rank]) for part, held in memory.items()})
                for rank in range(len(every.count))
            ),
            peak_memory_bytes=self.peak_memory_bytes[row],
            tokens_per_s=self.tokens_per_s[row],
            tokens_per_s_per_device=self.tokens_per_s_per_device[row],
            tflops_per_device=self.tflops_per_device[row],
            mfu=self.mfu[row],
        )


def _shapes(table: LayoutTable) -> tuple[LayoutTable, Ints]:
    """The few rows that differ in the shape of their operators, and which of them each row is like."""
    first, code = distinct(
        [
            table.tensor_parallel,
            table.sequence_parallel,
            table.context_parallel,
            table.context_parallel_form,
            table.expert_parallel,
            table.expert_tensor_parallel,
            table.micro_batch_size,
            table.recompute,
            table.recompute_modules,
            table.recompute_num_layers,
            table.recompute_method,
            table.offload_activations,
            table.pipeline_parallel > 1,
            table.runs(*SPLIT_BACKWARD),
        ]
    )
    return table.take(first), code


def _units(model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable) -> dict[str, Passes]:
    """Passes of what a pipeline rank holds, by the field of `Ranks` that counts it."""
    tp, cp, ep = table.tensor_parallel, table.context_parallel, table.expert_parallel
    etp = table.expert_tensor_parallel
    sizes_and_strides = {"tp": (tp, 1), "cp": (cp, tp), "etp": (etp, 1), "ep": (ep, etp)}
    groups = {
        name: group(cluster, engine.network_efficiency, size, np.asarray(stride))
        for name, (size, stride) in sizes_and_strides.items()
    }
    device = cluster.device
    ends = {"first": embedding(model, table), "last": head(model, padded_vocabulary(model, table), table)}
    layers = {"dense": layer(model, engine, table, moe=False)}
    if model.experts:
        layers["moe"] = layer(model, engine, table, moe=True)
    units = {held: passes(work, device, engine, table, groups, repeats=True) for held, work in layers.items()}
    if table.recompute_method.any():
        none = np.zeros_like(table.recompute)
        plain = replace(table, recompute=none, recompute_modules=none)
        for held, work in layers.items():
            units[f"{held}_plain"] = passes(work, device, engine, plain, groups, repeats=True)
    for held, work in ends.items():
        units[held] = passes(work, device, engine, table, groups, repeats=False, wide=True)
    return units


def _on_ranks(units: dict[str, Passes], ranks: Ranks, row: Ints, part: str) -> Floats:
    """Seconds of `part` for one micro batch on each rank; `row` says which row of `units` is meant."""
    total = np.zeros_like(ranks.dense)
    for held, unit in units.items():
        count, seconds = getattr(ranks, held), getattr(unit, part)
        if count is not NONE and seconds.any():
            total += count * seconds[row].reshape(-1, *(1,) * (total.ndim - 1))
    return total


def _tied_seconds(
    model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable, vocabulary: Floats
) -> Floats:
    """Seconds to sum the gradients of both copies of a tied embedding, on the first and the last stage."""
    apart = table.tensor_parallel * table.context_parallel * table.data_parallel
    apart = apart * np.maximum(table.pipeline_parallel - 1, 1)
    pair = group(cluster, engine.network_efficiency, np.minimum(table.pipeline_parallel, 2), apart)
    count = vocabulary * model.hidden / table.tensor_parallel
    # In a V both are on the first rank.
    apart_from_another = ~table.runs(*V_SCHEDULES) * model.tied
    return apart_from_another * all_reduce(pair, count * reduced_bytes(engine, table))


def _blocks(table: LayoutTable) -> Iterator[LayoutTable]:
    for start in range(0, max(len(table), 1), BLOCK):
        yield table.take(np.arange(start, min(start + BLOCK, len(table))))


def _sizes(model: ModelSpec, engine: Engine, shapes: LayoutTable, shape: Ints) -> UnitSizes:
    every = unit_sizes(model, engine, shapes)
    return UnitSizes(**{field.name: getattr(every, field.name)[shape] for field in fields(UnitSizes)})


def peak_memory(model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable) -> Floats:
    """Bytes of the fullest device of each row, as `price` has them, in a fraction of its time.

    Raises:
        InputError: the engine does not know the precision of the table.
    """
    engine = engine.for_device(cluster.device)

    def peak(block: LayoutTable) -> Floats:
        sizes, ranks = _sizes(model, engine, *_shapes(block)), deciding_ranks(model, block)
        held = stage_memory(cluster, engine, block, sizes, ranks)
        most: Floats = sum(held.values(), np.zeros(())).max(axis=1)
        return most

    return np.concatenate([peak(block) for block in _blocks(table)])


def _price_block(
    model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable
) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Parts of the time and of the peak memory of each row."""
    shapes, shape = _shapes(table)
    units = _units(model, cluster, engine, shapes)
    sizes, ranks = _sizes(model, engine, shapes, shape), deciding_ranks(model, table)

    held_shared, held_experts = parameters(sizes, ranks)
    adding, once = accumulation_seconds(engine, cluster.device, table, model.experts > 0)
    # Each micro batch adds its gradients to those of the ones before it.
    added = (held_shared + held_experts) * adding[:, None]
    rank_seconds = _on_ranks(units, ranks, shape, "total") + added
    slowest = rank_seconds.argmax(axis=1)[:, None]
    rows = np.arange(len(table))
    slow = ranks.each(lambda held: held[rows, slowest[:, 0]])
    micro_batches = table.micro_batches
    time = {part: micro_batches * _on_ranks(units, slow, shape, part) for part in PARTS}
    slow_added = added[rows, slowest[:, 0]]
    backward = _on_ranks(units, slow, shape, "backward") + slow_added
    forward = rank_seconds[rows, slowest[:, 0]] - backward
    shared, experts = held_shared.max(axis=1), held_experts.max(axis=1)
    time["accumulation"] = np.maximum(micro_batches * slow_added + (shared + experts) * once, 0.0)
    time["pipeline_parallel"] = send_seconds(model, cluster, engine.network_efficiency, table)
    time["pipeline_parallel"] += _tied_seconds(
        model, cluster, engine, table, padded_vocabulary(model, shapes)[shape]
    )
    time["bubble"] = bubble_seconds(
        rank_seconds, ranks.count, table.virtual_pipeline_parallel.astype(np.float64), slowest[:, 0]
    )
    if (apart := table.runs(*SPLIT_BACKWARD)).any():
        some = ranks.each(lambda held: held[apart])
        weights = _on_ranks(units, some, shape[apart], "weights")
        inputs = _on_ranks(units, some, shape[apart], "backward") - weights
        weights += added[apart]
        ahead = rank_seconds[apart] - inputs - weights
        time["bubble"][apart] = split_bubble_seconds(table.take(apart), ahead, inputs, weights, some.count)
    time["data_parallel"] = exchange_seconds(
        cluster, engine, table, shared, experts, slow.layers, forward, backward
    )
    time["optimizer"] = optimizer_seconds(engine, cluster.device, table, shared, experts)
    layers = (held_shared - end_parameters(sizes, ranks)).max(axis=1)
    time["optimizer"] += orthogonal_seconds(model, cluster, engine, table, layers, experts)

    held = stage_memory(cluster, engine, table, sizes, ranks)
    fullest = sum(held.values(), np.zeros(())).argmax(axis=1)
    memory = {part: held[part][rows, fullest] for part in held}
    return {part: time[part] for part in StepTime.model_fields}, memory


def price(model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable) -> Prices:
    """What each row of `table` costs.

    Args:
        engine: its constants; `Engine.for_device` is applied here.
        table: legal layouts of `cluster.world_size` devices; legality is not checked.

    Raises:
        InputError: the device or the engine does not know the precision of the table.
    """
    engine = engine.for_device(cluster.device)
    peak = peak_flops(cluster.device, table.precision)
    memory_policy(engine, table.precision)
    blocks = [_price_block(model, cluster, engine, block) for block in _blocks(table)]
    time = {part: np.concatenate([block[0][part] for block in blocks]) for part in StepTime.model_fields}
    memory = {part: np.concatenate([block[1][part] for block in blocks]) for part in StageMemory.model_fields}
    step_time = sum(time.values(), np.zeros(len(table)))
    devices = table.tensor_parallel * table.pipeline_parallel * table.context_parallel * table.data_parallel
    tokens_per_s = table.global_batch_size * model.seq / step_time
    flops = table.global_batch_size * model.flops_per_sequence() / step_time / devices
    return Prices(
        time=time,
        step_time_s=step_time,
        memory=memory,
        peak_memory_bytes=sum(memory.values(), np.zeros(len(table))),
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_device=tokens_per_s / devices,
        tflops_per_device=flops / 1e12,
        mfu=flops / peak,
        model=model,
        cluster=cluster,
        engine=engine,
        table=table,
    )


def estimate(model: ModelSpec, cluster: Cluster, engine: Engine, layout: Layout) -> Estimate:
    """What one layout costs; raises `InputError` as `price` does."""
    return price(model, cluster, engine, LayoutTable.of([layout])).estimate(0)

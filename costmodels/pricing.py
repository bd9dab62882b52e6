"""The price of layouts: seconds of one step and bytes of the fullest device, for all rows at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial, reduce

import numpy as np

from costmodels.dataclass import dataclass
from costmodels.layers.operators import padded_vocabulary
from costmodels.pipeline_times import bubble_and_send_seconds
from costmodels.rank_costs import RankCosts
from costmodels.ranks.reductions import row_maximum
from costmodels.ranks.sites import MIXED, check_precision, sites
from costmodels.spec.engine import Engine
from costmodels.spec.estimate import Estimate, StageMemory, StepTime
from costmodels.spec.hardware import Cluster
from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from costmodels.spec.model_flops import flops_per_sequence
from costmodels.spec.row_blocks import block_results
from costmodels.spec.table import Bools, Floats, Ints, LayoutTable
from costmodels.step_times import step_seconds, tied_seconds
from costmodels.time.gemms import peak_flops
from costmodels.time.measured_layers import measurement_share
from costmodels.time.uncertainty import spread


@dataclass(frozen=True)
class Prices:
    """Seconds and bytes of each row of a table. Arrays of shape [n]."""

    time: Mapping[str, Floats]
    """Seconds of each part of `StepTime`."""
    memory: Mapping[str, Floats]
    """Bytes of each part of `StageMemory` on the fullest pipeline rank."""
    simulated: Bools
    """Rows whose pipeline was simulated; the others have closed forms."""
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
        kinds = sites(self.cluster, self.engine)[:MIXED]
        return reduce(np.maximum, [self._spread(site.engine) for site in kinds])

    def _spread(self, engine: Engine) -> Floats:
        known = measurement_share(self.model, engine, self.table)
        model = self.model
        experts = model.experts > 0
        return spread(self.cluster, engine, self.time, self.step_time_s, known, model.hidden, experts)

    @cached_property
    def peak_memory_bytes(self) -> Floats:
        """Bytes of the fullest device."""
        return sum(self.memory.values(), np.zeros(len(self)))

    @cached_property
    def tokens_per_s(self) -> Floats:
        """Tokens per second of all devices together."""
        return self.table.global_batch_size * self.model.seq / self.step_time_s

    @property
    def tokens_per_s_per_device(self) -> Floats:
        """Tokens per second of one device."""
        return self.tokens_per_s / self._devices

    @property
    def tflops_per_device(self) -> Floats:
        """Model TFLOP/s by `costmodels.spec.model_flops.flops_per_sequence`."""
        sequences = self.table.global_batch_size * flops_per_sequence(self.model)
        return sequences / self.step_time_s / self._devices / 1e12

    @property
    def mfu(self) -> Floats:
        """Model FLOPs over the peak of the table's precision, 0 to 1."""
        return self.tflops_per_device * 1e12 / peak_flops(self.cluster.device, self.table.precision)

    @property
    def _devices(self) -> Ints:
        return self.table.tensor_parallel * self.table.pipeline_parallel * self.table.replicas

    def take(self, rows: Ints | Bools | slice) -> Prices:
        """The rows that an index or mask array selects, or those of a slice."""
        return replace(
            self,
            time={part: seconds[rows] for part, seconds in self.time.items()},
            memory={part: held[rows] for part, held in self.memory.items()},
            simulated=self.simulated[rows],
            table=self.table.take(rows),
        )

    def simulate(self, rows: Ints) -> Prices:
        """The prices with bubble and sends of `rows` from simulated pipelines."""
        table = self.table.take(rows)
        bubble, sends, found = bubble_and_send_seconds(self.model, self.cluster, self.engine, table)
        vocabulary = padded_vocabulary(self.model, table)
        sends += tied_seconds(self.model, self.cluster, self.engine, table, vocabulary)
        time, simulated = dict(self.time), self.simulated.copy()
        for part, seconds in (("bubble", bubble), ("pipeline_parallel", sends)):
            time[part] = time[part].copy()
            time[part][rows[found]] = seconds[found]
        simulated[rows] = found
        return replace(self, time=time, simulated=simulated)

    def estimate(self, row: int) -> Estimate:
        """One row as an `Estimate`, with a simulated pipeline and the memory of every pipeline rank."""
        one = self.take(np.array([row]))
        if not one.simulated[0]:
            one = one.simulate(np.array([0]))
        held = RankCosts.of_all(self.model, self.cluster, self.engine, one.table, 0).memory
        ranks = 1, int(one.table.pipeline_parallel[0])
        wider = np.exp(self.engine.memory_spread)
        of_ranks = zip(*(np.broadcast_to(each, ranks)[0].tolist() for each in held.values()), strict=True)
        stages = tuple(StageMemory(**dict(zip(held, each, strict=True))) for each in of_ranks)
        return Estimate(
            step_time_s=one.step_time_s[0],
            step_time_low_s=one.step_time_s[0] * np.exp(-one.spread[0]),
            step_time_high_s=one.step_time_s[0] * np.exp(one.spread[0]),
            time=StepTime(**{part: float(seconds[0]) for part, seconds in one.time.items()}),
            memory=stages,
            peak_memory_bytes=one.peak_memory_bytes[0],
            peak_memory_low_bytes=(one.peak_memory_bytes[0] - 2 * one.memory["doubt"][0]) / wider,
            peak_memory_high_bytes=one.peak_memory_bytes[0] * wider if wider > 1 else 0.0,
            tokens_per_s=one.tokens_per_s[0],
            tokens_per_s_per_device=one.tokens_per_s_per_device[0],
            tflops_per_device=one.tflops_per_device[0],
            mfu=one.mfu[0],
        )


def peak_memory(
    model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable, rows: Ints | None = None
) -> Floats:
    """Bytes of the fullest device of each row; the same as from `price`, in a fraction of the time.

    Args:
        rows: the wanted rows; all unless given.

    Raises:
        InputError: the engine does not know the precision of the table.
    """
    if not cluster.parts:
        engine = engine.for_device(cluster.device)

    def peak(block: LayoutTable) -> Floats:
        return row_maximum(RankCosts.of(model, cluster, engine, block).bytes)

    return np.concatenate([*block_results(peak, table, rows)])


def step_time(
    model: ModelSpec,
    cluster: Cluster,
    engine: Engine,
    table: LayoutTable,
    rows: Ints | None = None,
    without: Callable[[LayoutTable], Bools] | None = None,
) -> Floats:
    """Seconds of one step of each row, as `price` has them, in about half of its time.

    Args:
        rows: rows to price; all unless given.
        without: a function that returns the mask of rows whose data-parallel exchange is left out.
    """
    if not cluster.parts:
        engine = engine.for_device(cluster.device)

    def seconds(block: LayoutTable) -> Floats:
        parts = step_seconds(RankCosts.of(model, cluster, engine, block))
        if without is not None:
            parts["data_parallel"] = np.where(without(block), 0.0, parts["data_parallel"])
        return sum((parts[part] for part in StepTime.model_fields), np.zeros(len(block)))

    return np.concatenate([*block_results(seconds, table, rows)])


def _price_block(
    model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable
) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Parts of the step time and of the peak memory of each row."""
    costs = RankCosts.of(model, cluster, engine, table)
    return step_seconds(costs), costs.memory_of(costs.bytes.argmax(axis=1))


def price(model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable) -> Prices:
    """Prices of each row of `table`, with pipelines by closed forms (`Prices.simulate` replaces these).

    Args:
        engine: its constants; `Engine.for_device` is applied here.
        table: legal layouts of `cluster.world_size` devices; legality is not checked.

    Raises:
        InputError: the device or the engine does not know the precision of the table.
    """
    peak_flops(cluster.device, table.precision)
    if not cluster.parts:
        engine = engine.for_device(cluster.device)
    check_precision(cluster, engine, table.precision)
    time, memory = (
        {part: np.empty(len(table)) for part in kind.model_fields} for kind in (StepTime, StageMemory)
    )
    start = 0
    for seconds, held in block_results(partial(_price_block, model, cluster, engine), table):
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


def estimate(model: ModelSpec, cluster: Cluster, engine: Engine, layout: Layout) -> Estimate:
    """The estimate of one layout, with a simulated pipeline.

    Raises `InputError` as `price` does.
    """
    return price(model, cluster, engine, LayoutTable.of([layout])).estimate(0)

"""Fit of the widths of `costmodels.order` to pairs of measured steps.

A pair has the same source, model, engine, devices and batch, and two layouts that are published in full.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from benchmarks.calibration.measurements import Measurement
from benchmarks.calibration.priors import scipy_optimize
from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.order import KINDS, OrderWidths, chance_of, differences, widths_of
from costmodels.pricing import price
from costmodels.spec.table import Bools, Floats, LayoutTable, shared_fields

POWER = 0.5
"""A source of n pairs weighs as n to this power: the pairs of one sweep share their runs."""

START, LEAST, MOST = -6.0, -14.0, 2.0
"""Logarithms of squares of widths: where the fit starts, and its limits."""

BELIEF = 5e-4
"""Weight of the prior belief that widths equal their start, which decides if no pair has information."""

ROUND = 3
"""Decimals of the constants."""


@dataclass(frozen=True)
class Pairs:
    """Pairs of measured steps; the second step of each is predicted to be at least as long as the first.
    Arrays of [n]."""

    source: tuple[str, ...]
    """The source of measurements that each pair is from."""
    differ: Floats
    """`costmodels.order.differences`, [kinds, n]."""
    spread: Floats
    """Half the width of the narrower range of the two estimates."""
    predicted: Floats
    """Natural logarithm of the second's predicted step time over the first's, 0 at least."""
    measured: Floats
    """Natural logarithm of the second's measured step time over the first's."""

    def __len__(self) -> int:
        return len(self.source)

    def take(self, rows: Bools) -> Pairs:
        """The pairs that a mask selects."""
        source = tuple(np.array(self.source)[rows].tolist())
        arrays = (self.spread[rows], self.predicted[rows], self.measured[rows])
        return Pairs(source, self.differ[:, rows], *arrays)

    @property
    def right(self) -> Bools:
        """Pairs that were measured in the order in which they are predicted."""
        result: Bools = self.measured > 0
        return result

    def chance(self, known: OrderWidths) -> Floats:
        """The chance that the second is the faster one."""
        return chance_of(self.predicted / widths_of(self.differ, self.spread, known))


def joined(parts: Sequence[Pairs]) -> Pairs:
    """All pairs of several."""
    arrays = (np.concatenate([getattr(each, name) for each in parts]) for name in _ARRAYS)
    sources = tuple(source for each in parts for source in each.source)
    return Pairs(sources, np.concatenate([each.differ for each in parts], axis=1), *arrays)


_ARRAYS = ("spread", "predicted", "measured")


def pairs_of(measurements: Iterable[Measurement]) -> Pairs | None:
    """The pairs among measurements whose layouts are known; None where there are none."""
    alike: defaultdict[tuple[object, ...], list[Measurement]] = defaultdict(list)
    for row in measurements:
        if row.step_time_s is not None and row.certain:
            layout = row.layouts[0]
            # Links that were measured for each run differ; the devices do not.
            where = row.cluster.device.name, row.cluster.world_size, row.cluster.devices_per_node
            job = row.model.model_dump_json(), row.engine.model_dump_json(), layout.global_batch_size
            alike[row.source, where, job, shared_fields(layout)].append(row)
    found = [each for rows in alike.values() if len(rows) > 1 for each in _pairs(rows)]
    return joined(found) if found else None


def _pairs(rows: Sequence[Measurement]) -> Iterator[Pairs]:
    """The pairs of one job: each row with every later row."""
    usable, logs, spreads = [], [], []
    for row in rows:
        table = LayoutTable.of([row.layouts[0]])
        try:
            prices = price(row.model, row.cluster, row.engine, table).simulate(np.array([0]))
        except InputError:
            continue  # A number format that the device does not know.
        usable.append(row)
        logs.append(float(np.log(prices.step_time_s[0])))
        spreads.append(float(prices.spread[0]))
    if not usable:
        return
    every = LayoutTable.of([row.layouts[0] for row in usable])
    predicted, spread = np.array(logs), np.array(spreads)
    measured = np.log([row.step_time_s or np.nan for row in usable])
    for place in range(len(usable) - 1):
        others = slice(place + 1, None)
        apart = predicted[others] - predicted[place]
        sign = np.where(apart < 0, -1.0, 1.0)
        differ = differences(every.take(slice(place, place + 1)), every.take(others))
        pairs = Pairs(
            source=(rows[0].source,) * len(apart),
            differ=differ,
            spread=np.minimum(spread[others], spread[place]),
            predicted=np.abs(apart),
            measured=sign * (measured[others] - measured[place]),
        )
        # The same layout twice says how much runs differ, and nothing of the order.
        yield pairs.take(differ[1:].sum(axis=0) > 0)


def fitted_widths(pairs: Pairs, told_apart: float) -> OrderWidths:
    """The widths with the largest likelihood of the order of all pairs.

    Raises:
        InputError: scipy is not installed.
    """
    names, counts = np.unique(pairs.source, return_counts=True)
    number = dict(zip(names.tolist(), counts.tolist(), strict=True))
    weight = np.array([number[source] ** (POWER - 1.0) for source in pairs.source])
    weight /= weight.sum()

    def widths(values: Floats) -> OrderWidths:
        logs = np.exp(values[:-1] / 2).tolist()
        return OrderWidths(dict(zip(KINDS, logs, strict=True)), float(values[-1]), told_apart)

    def loss(values: Floats) -> float:
        wrong = np.clip(pairs.chance(widths(values)), 1e-6, 1.0 - 1e-6)
        likely = np.log(np.where(pairs.right, 1.0 - wrong, wrong))
        return float(BELIEF * np.square(values[:-1] - START).sum() - (weight * likely).sum())

    start = np.append(np.full(len(KINDS), START), 0.5)
    limits = [(LEAST, MOST)] * len(KINDS) + [(0.0, 1.5)]
    found = widths(scipy_optimize().minimize(loss, start, method="L-BFGS-B", bounds=limits).x)
    rounded = {kind: round(width, ROUND) for kind, width in found.widths.items()}
    return OrderWidths(rounded, round(found.range_power, ROUND), told_apart)


def unseen_chances(pairs: Pairs, told_apart: float) -> Floats:
    """The chance of each pair, by widths fitted without its source, [n]."""
    result = np.zeros(len(pairs))
    sources = np.array(pairs.source)
    for source in sorted(set(pairs.source)):
        own = sources == source
        result[own] = pairs.take(own).chance(fitted_widths(pairs.take(~own), told_apart))
    return result

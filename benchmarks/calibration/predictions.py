"""Predictions of the cost model for published measurements.

A row whose layout is published is priced as `planner suggest` prices the plans that it shows: its pipeline is
simulated. One with blanks may have had several layouts: it is priced at the geometric mean of those that fit
into memory, and its range is as much wider as they differ. Only layouts with the least recomputation count,
as users do not recompute activations for which there is room. With ZeRO 3, only layouts with the largest
microbatch that fits count, because each microbatch gathers all parameters anew.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Protocol

import numpy as np

from benchmarks.calibration.measurements import Measurement
from benchmarks.calibration.memory_peaks import (
    MEMORY_KINDS,
    of_measured_ranks,
    predicted_peaks,
    published_peak,
)
from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.pricing import Prices, peak_memory, price
from costmodels.ranks.rank_layers import ranks_of_table
from costmodels.spec.engine import Engine
from costmodels.spec.layout import Layout
from costmodels.spec.table import Bools, Floats, Ints, LayoutTable, shared_fields

TimeFactors = Mapping[tuple[str, str], float]
"""Factors of step times by the names of engine and device."""

NORMAL_80 = 1.28
"""Half the width of a normal distribution's 80 % range, in standard deviations."""


FEW = 4
"""Most layouts of a row whose pipelines are simulated; for more, closed forms give the mean as well."""


class Peaks(Protocol):
    """Peaks of the model for measurements. Arrays of shape [n]."""

    @property
    def allocated_bytes(self) -> Floats:
        """Peak of the training job's tensors on the measured rank; NaN if no rank was measured."""

    @property
    def reserved_bytes(self) -> Floats:
        """Peak of tensors and of memory that the allocator holds and cannot use."""

    @property
    def device_bytes(self) -> Floats:
        """Peak that also includes driver context and communicators; it must be within a device's memory."""

    @property
    def step_bytes(self) -> Floats:
        """Peak of the tensors after the end of backward."""


@dataclass(frozen=True)
class MemoryPredictions:
    """Peaks of the model for measurements. Arrays of shape [n]."""

    fits: Bools
    """The peak of the fullest device is within the memory of the devices."""
    allocated_bytes: Floats
    reserved_bytes: Floats
    device_bytes: Floats
    step_bytes: Floats


@dataclass(frozen=True)
class Predictions:
    """Predictions of the model for measurements. Arrays of shape [n]."""

    step_time_s: Floats
    """Predicted seconds of a step; NaN if the row cannot be priced."""
    spread: Floats
    """Half the width of the 80 % range as a natural logarithm (`costmodels.time.uncertainty`)."""
    blanks: Floats
    """Part of `spread` that comes from blanks, as several layouts are possible; it is combined with the rest
    as root-sum-square."""
    fits: Bools
    """The peak of the fullest device is within the memory of the devices."""
    allocated_bytes: Floats
    """Peak of the training job's tensors on the measured rank; NaN if no rank was measured."""
    reserved_bytes: Floats
    """Peak of tensors and of memory that the allocator holds and cannot use."""
    device_bytes: Floats
    """Peak that also includes driver context and communicators; it must be within a device's memory."""
    step_bytes: Floats
    """Peak of the tensors after the end of backward."""
    refused: Mapping[int, str] = field(default_factory=dict)
    """Reasons why rows cannot be priced, by their index."""


@dataclass(frozen=True)
class _Candidate:
    """A layout that a row may have had, and the engine that may have run it."""

    row: int
    engine: Engine
    layout: Layout


def predict(measurements: Sequence[Measurement], scale: TimeFactors | None = None) -> Predictions:
    """Price measurements, candidates of the same model, cluster and engine at once.

    Args:
        scale: factors of the step times of an engine on a device; 1 where none is given.
    """
    candidates = _candidates(measurements)
    owner = np.array([candidate.row for candidate in candidates], dtype=np.int64)
    logs, width = (np.full(len(candidates), np.nan) for _ in range(2))
    held = {kind: np.full(len(candidates), np.nan) for kind in MEMORY_KINDS}
    over = np.full(len(candidates), np.inf)
    refused: dict[int, str] = {}
    for places in _groups(measurements, candidates):
        alike = [candidates[place] for place in places]
        rows = [measurements[candidate.row] for candidate in alike]
        try:
            prices = _prices(rows, alike)
        except InputError as error:
            refused |= dict.fromkeys((candidate.row for candidate in alike), str(error))
            continue
        factor = (scale or {}).get((prices.engine.name, prices.cluster.device.name), 1.0)
        logs[places] = np.log(prices.step_time_s * factor)
        width[places] = prices.spread
        over[places] = prices.peak_memory_bytes / prices.cluster.memory_bytes
        if any(published_peak(row, kind) for row in rows for kind in MEMORY_KINDS):
            for kind, predicted in _peaks(prices, rows).items():
                held[kind][places] = predicted
    fits = np.zeros(len(measurements), dtype=bool)
    np.logical_or.at(fits, owner, over <= 1)
    weight = _weights(candidates, owner, over, len(measurements))
    mean = _weighted(owner, weight, logs, len(measurements))
    apart = _weighted(owner, weight, np.square(logs - mean[owner]), len(measurements))
    blanks = NORMAL_80 * np.sqrt(apart)
    range_ = _weighted(owner, weight, width, len(measurements))
    return Predictions(
        step_time_s=np.exp(mean),
        spread=np.hypot(range_, blanks),
        blanks=blanks,
        fits=fits,
        refused=refused,
        **{f"{kind}_bytes": _weighted(owner, weight, values, len(fits)) for kind, values in held.items()},
    )


def predict_memory(measurements: Sequence[Measurement]) -> MemoryPredictions:
    """The peaks of measurements, as `predict` has them, in a fraction of its time.

    Raises:
        InputError: an engine does not train in the number format of a row.
    """
    candidates = _candidates(measurements)
    owner = np.array([candidate.row for candidate in candidates], dtype=np.int64)
    held = {kind: np.full(len(candidates), np.nan) for kind in MEMORY_KINDS}
    over = np.full(len(candidates), np.inf)
    for places in _groups(measurements, candidates):
        alike = [candidates[place] for place in places]
        rows = [measurements[candidate.row] for candidate in alike]
        table = LayoutTable.of([candidate.layout for candidate in alike])
        model, cluster = rows[0].model, rows[0].cluster
        over[places] = peak_memory(model, cluster, alike[0].engine, table) / cluster.memory_bytes
        engine = alike[0].engine.for_device(cluster.device)
        for kind, peaks in predicted_peaks(
            model, cluster, engine, table, ranks_of_table(model, table)
        ).items():
            held[kind][places] = of_measured_ranks(peaks, rows, table)
    fits = np.zeros(len(measurements), dtype=bool)
    np.logical_or.at(fits, owner, over <= 1)
    weight = _weights(candidates, owner, over, len(measurements))
    return MemoryPredictions(
        fits=fits,
        **{f"{kind}_bytes": _weighted(owner, weight, values, len(fits)) for kind, values in held.items()},
    )


def settled_measurements(measurements: Sequence[Measurement]) -> list[Measurement]:
    """The measurements; those for which memory allows only one layout and engine have only these."""
    open_rows = [row for row, measurement in enumerate(measurements) if not measurement.certain]
    some = [measurements[row] for row in open_rows]
    candidates = _candidates(some)
    owner = np.array([candidate.row for candidate in candidates], dtype=np.int64)
    over = np.full(len(candidates), np.inf)
    for places in _groups(some, candidates):
        first = some[candidates[places[0]].row]
        table = LayoutTable.of([candidates[place].layout for place in places])
        try:
            peaks = peak_memory(first.model, first.cluster, candidates[places[0]].engine, table)
        except InputError:
            continue
        over[places] = peaks / first.cluster.memory_bytes
    weight = _weights(candidates, owner, over, len(some))
    result = list(measurements)
    for place in np.flatnonzero(weight == 1):
        candidate = candidates[place]
        row = open_rows[candidate.row]
        result[row] = replace(
            result[row], engine=candidate.engine, other_engines=(), layouts=(candidate.layout,)
        )
    return result


def _candidates(measurements: Sequence[Measurement]) -> list[_Candidate]:
    return [
        _Candidate(row, engine, layout)
        for row, measurement in enumerate(measurements)
        for engine in (measurement.engine, *measurement.other_engines)
        for layout in measurement.layouts
    ]


GREY = 1.1
"""Largest predicted peak, relative to the memory of a device, of a layout that may have run: predicted peaks
are this uncertain."""

RECOMPUTE_ORDER = ("none", "selective", "full")
"""Kinds of recomputation, the least first."""


def _needless(candidates: Sequence[_Candidate], over: Floats) -> Bools:
    """Mask of candidates that recompute although another candidate of their row fits with less recomputation,
    [n].

    With ZeRO 3 only candidates with the same microbatch are compared, as recomputation may allow a larger
    one.
    """
    alike: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
    for place, each in enumerate(candidates):
        sharded = each.layout.zero_stage == 3
        alike[each.row, id(each.engine), each.layout.micro_batch_size if sharded else 0].append(place)
    result = np.zeros(len(candidates), dtype=bool)
    for places in alike.values():
        order = [RECOMPUTE_ORDER.index(candidates[place].layout.recompute) for place in places]
        fitting = [rank for rank, place in zip(order, places, strict=True) if over[place] <= 1]
        for rank, place in zip(order, places, strict=True):
            result[place] = bool(fitting) and rank > min(fitting)
    return result


def _too_small(candidates: Sequence[_Candidate], over: Floats) -> Bools:
    """Mask of ZeRO 3 candidates for which another one of their row fits with a larger microbatch and as much
    recomputation, [n]."""
    largest: defaultdict[tuple[int, str], int] = defaultdict(int)
    for each, size in zip(candidates, over, strict=True):
        if size <= 1:
            key = each.row, each.layout.recompute
            largest[key] = max(largest[key], each.layout.micro_batch_size)
    return np.array(
        [
            each.layout.zero_stage == 3
            and each.layout.micro_batch_size < largest[each.row, each.layout.recompute]
            for each in candidates
        ],
        dtype=bool,
    )


def _weights(candidates: Sequence[_Candidate], owner: Ints, over: Floats, count: int) -> Floats:
    """Weights of candidates, which add up to one for each row: equal among those that fit and are likely.

    If none fits, only the smallest one counts.

    Args:
        over: their peaks over the memory of their devices, [n].
    """
    over = over / GREY
    over = np.where(_needless(candidates, over), np.inf, over)
    over = np.where(_too_small(candidates, over), np.inf, over)
    least = np.full(count, np.inf)
    np.minimum.at(least, owner, over)
    chosen = ((over <= 1) | (over <= least[owner])).astype(np.float64)
    result: Floats = chosen / np.maximum(_sums(owner, chosen, count), 1.0)[owner]
    return result


def _weighted(owner: Ints, weight: Floats, values: Floats, count: int) -> Floats:
    """Weighted means of candidates; NaN if a candidate with weight is NaN."""
    return _sums(owner, np.where(weight > 0, weight * values, 0.0), count)


def _sums(owner: Ints, values: Floats, count: int) -> Floats:
    return np.bincount(owner, values, minlength=count).astype(np.float64)


def _groups(measurements: Sequence[Measurement], candidates: Sequence[_Candidate]) -> list[list[int]]:
    """Places of the candidates that one table of layouts can hold."""
    texts: dict[int, str] = {}

    def text(record: object) -> str:
        # The same objects recur in all rows of a file.
        if id(record) not in texts:
            texts[id(record)] = record.model_dump_json()  # type: ignore[attr-defined]
        return texts[id(record)]

    groups: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for place, candidate in enumerate(candidates):
        row, layout = measurements[candidate.row], candidate.layout
        records = text(row.model), text(row.cluster), text(candidate.engine)
        key = (*records, *map(str, shared_fields(layout)))
        groups[key].append(place)
    return list(groups.values())


def _prices(rows: Sequence[Measurement], alike: Sequence[_Candidate]) -> Prices:
    """The prices of candidates. Pipelines are simulated for rows that ran and have few candidates."""
    table = LayoutTable.of([candidate.layout for candidate in alike])
    prices = price(rows[0].model, rows[0].cluster, alike[0].engine, table)
    ran = np.array([row.step_time_s is not None and len(row.layouts) <= FEW for row in rows])
    return prices.simulate(np.flatnonzero(ran & ~prices.simulated))


def _peaks(prices: Prices, rows: Sequence[Measurement]) -> dict[str, Floats]:
    """Bytes of each of `MEMORY_KINDS`, [n], on the pipeline ranks that `rows` are about."""
    ranks = ranks_of_table(prices.model, prices.table)
    every_kind = predicted_peaks(prices.model, prices.cluster, prices.engine, prices.table, ranks)
    return {kind: of_measured_ranks(bytes_, rows, prices.table) for kind, bytes_ in every_kind.items()}

"""Memory of sources that no constant has seen: what is left out, and the ranges that follow."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.calibration.left_out_memory import (
    LEAST_SPREAD,
    UnseenMemory,
    loader_with,
    memory_spreads,
    memory_without,
    unseen_memory,
)
from benchmarks.calibration.measurements import Measurement
from benchmarks.calibration.memory_fit import memory_fit_plans
from benchmarks.calibration.memory_peaks import of_measured_ranks
from benchmarks.calibration.predictions import MemoryPredictions, predict_memory
from benchmarks.calibration.unseen_spread import FEW
from costmodels import Engine, price
from costmodels.spec.table import LayoutTable

Make = Callable[..., Measurement]


def test_a_source_is_priced_by_constants_that_have_not_seen_it() -> None:
    plans = {plan.engine: plan for plan in memory_fit_plans()}
    found = memory_without(list(plans.values()), [], "hf_ultrascale")
    start = plans["nanotron"].constants["allocator.fragmentation"].start
    assert found == {"nanotron": {"allocator.fragmentation": start}}
    assert loader_with(found)("nanotron").allocator.fragmentation == start
    assert memory_without(list(plans.values()), [], "elsewhere") == {}
    assert loader_with({})("nanotron").allocator.fragmentation != start


def test_peaks_are_those_of_the_fullest_device_that_prices_have(measurement: Make, engine: Engine) -> None:
    row = measurement(device_bytes=1e9)
    prices = price(row.model, row.cluster, row.engine, LayoutTable.of(row.layouts))
    found = predict_memory([row])
    assert found.device_bytes[0] == pytest.approx(prices.peak_memory_bytes[0])
    assert found.fits[0] == (prices.peak_memory_bytes[0] <= row.cluster.memory_bytes)
    small = measurement(cluster=row.cluster.model_copy(update={"memory_bytes": 1e9}), oom=True)
    scored = unseen_memory("here", [row, small])
    assert (scored.memory.n, scored.oom.n, scored.oom.precision_fits) == (1, 1, 1.0)


def test_a_row_may_tell_of_the_first_or_the_last_rank(measurement: Make) -> None:
    rows = [measurement(), measurement(first_rank_only=True), measurement(last_rank_only=True)]
    layout = rows[0].layouts[0]
    short = layout.model_copy(update={"pipeline_parallel": 2})
    table = LayoutTable.of([short.model_copy(update={"pipeline_parallel": 3}), short, short])
    peaks = np.array([[1.0, 3.0, 2.0], [1.0, 3.0, 0.0], [4.0, 3.0, 0.0]])
    assert of_measured_ranks(peaks, rows, table).tolist() == [3, 1, 3]


def test_the_range_of_an_engine_holds_four_of_five_recipes(measurement: Make) -> None:
    def spread(*ratios: float) -> float:
        rows = [
            measurement(
                allocated_bytes=1.0, model=measurement().model.model_copy(update={"name": str(number)})
            )
            for number in range(len(ratios))
        ]
        found = np.array(ratios)
        predictions = MemoryPredictions(found > 0, found, found, found, found)
        one = unseen_memory("here", rows)
        return memory_spreads([UnseenMemory(one.memory, one.oom, rows, predictions)])["megatron"]

    off = np.exp(np.linspace(0.01, 0.5, 100))
    assert spread(*off) == pytest.approx(0.42, abs=0.01)
    assert spread(*(1 / off)) == pytest.approx(0.42, abs=0.01)
    assert spread(1.0, 1.0) == pytest.approx(LEAST_SPREAD + FEW / 2)

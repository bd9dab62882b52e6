"""Errors by source: rankings, regret, memory and ranges on cases that can be counted by hand."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.calibration.predictions import Predictions, predict
from benchmarks.calibration.rank_correlation import kendall_tau, rank_sweeps, regret
from benchmarks.calibration.scores import (
    FIT_SHARE,
    FITTED_SOURCES,
    is_fit_row,
    score,
    time_factors,
)
from costmodels import price
from costmodels.spec.table import LayoutTable
from costmodels.time.uncertainty import spread


def predicted(
    seconds,
    spread=0.1,
    fits=True,
    allocated=np.nan,
    reserved=np.nan,
    device=np.nan,
    step=np.nan,
    refused=(),
):
    """Predictions of as many rows as there are seconds."""
    seconds = np.array(seconds, dtype=float)
    full = lambda value: np.broadcast_to(value, seconds.shape).copy()  # noqa: E731
    return Predictions(
        seconds, full(spread), full(0.0), full(fits).astype(bool),
        full(allocated), full(reserved), full(device),
        full(step), dict(refused),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("first", "second", "tau"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 40], 1.0),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
        ([1, 2, 3, 4], [1, 2, 4, 3], 4 / 6),  # one pair of six in the other order
        ([1, 2, 3], [1, 1, 2], 2 / np.sqrt(3 * 2)),  # tau-b: one tie in the second ranking
        ([1, 1, 1], [1, 2, 3], None),
    ],
)
def test_kendall_tau_of_known_orders(first, second, tau):
    found = kendall_tau(np.array(first, dtype=float), np.array(second, dtype=float))
    assert found == (None if tau is None else pytest.approx(tau))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=12))
def test_kendall_tau_is_symmetric_and_within_one(pairs):
    first, second = np.array(pairs, dtype=float).T
    tau = kendall_tau(first, second)
    assert tau == kendall_tau(second, first)
    assert tau is None or (abs(tau) <= 1 + 1e-12 and kendall_tau(first, -second) == pytest.approx(-tau))


def test_regret_is_what_the_top_pick_loses():
    measured = np.array([80.0, 100.0, 50.0])
    assert regret(measured, np.array([3.0, 2.0, 1.0])) == pytest.approx(0.2)
    assert regret(measured, np.array([1.0, 2.0, 1.0])) == 0
    # The first and the last tie at the top: either may be picked.
    assert regret(measured, np.array([3.0, 2.0, 3.0])) == pytest.approx(0.35)


def test_sweeps_of_two_rows_and_rows_without_a_sweep_are_not_ranked():
    speeds = np.array([1.0, 2.0, 3.0, 1.0, 2.0, 5.0, 6.0, 7.0])
    names = ["three", "three", "three", "two", "two", "", "", ""]
    assert rank_sweeps(names, speeds, speeds) == ([1.0], [0.0])
    # Equal up to rounding errors is equal: nothing ranks these.
    same = np.array([1.0, 1 + 1e-15, 1 - 1e-15])
    assert rank_sweeps(["three"] * 3, np.array([1.0, 2.0, 3.0]), same) == ([], [pytest.approx(1 / 3)])


def test_errors_are_percent_of_the_measured_step(measurement):
    rows = [measurement(step_time_s=seconds) for seconds in (1.0, 2.0, 4.0, 8.0)]
    here = score(rows, predicted([1.1, 1.0, 4.0, 16.0]))["here"]
    assert (here.n, here.skipped) == (4, {})
    assert here.median_ape == pytest.approx(30)
    assert here.mean_ape == pytest.approx(40)
    assert here.p90_ape == pytest.approx(85)  # between 50 and 100, at 0.7 of the way
    assert (here.kendall_tau, here.regret) == (None, None)


def test_sweeps_are_ranked_by_throughput_for_each_device(measurement, gpt, cluster, layout):
    twice = {"cluster": cluster(16), "layouts": (layout(gpt, dp=16, m=2),)}
    rows = [
        measurement(sweep="s", step_time_s=1.0),
        measurement(sweep="s", step_time_s=1.25, **twice),  # twice the work on twice the devices
        measurement(sweep="s", step_time_s=2.0),
    ]
    # By throughput of the whole job the second row would be best.
    here = score(rows, predicted([1.2, 1.1, 2.0]))["here"]
    assert here.regret == pytest.approx(20)
    assert here.kendall_tau == pytest.approx(1 / 3)


def test_a_range_covers_what_lies_within_its_factor(measurement):
    rows = [measurement(step_time_s=seconds) for seconds in (1.0, 1.09, 0.91, 1.2, 0.8)]
    here = score(rows, predicted([1.0] * 5, spread=0.1))["here"]
    assert here.coverage_80 == pytest.approx(60)


def test_oom_confusion_counts_what_is_said_to_fit(measurement):
    out = {"oom": True, "step_time_s": None}
    rows = [measurement() for _ in range(4)] + [measurement(**out) for _ in range(3)]
    fits = [True, True, True, False, True, False, False]
    here = score(rows, predicted([1.0] * 7, fits=fits))["here"]
    assert here.n == 4
    assert here.oom.n == 3
    assert here.oom.precision_fits == pytest.approx(3 / 4)
    assert here.oom.recall_fits == pytest.approx(3 / 4)
    # Nothing is said to fit, nothing ran: no shares.
    none = score(rows[4:], predicted([1.0] * 3, fits=False))["here"].oom
    assert (none.n, none.precision_fits, none.recall_fits) == (3, None, None)
    assert score(rows[:4], predicted([1.0] * 4))["here"].oom.n == 0


def test_memory_is_compared_with_what_was_measured(measurement):
    rows = [
        measurement(allocated_bytes=100.0, reserved_bytes=1.0),
        measurement(reserved_bytes=100.0),
        measurement(),
    ]
    here = score(rows, predicted([1.0] * 3, allocated=110.0, reserved=130.0))["here"].memory
    assert (here.n, here.median_ape) == (2, pytest.approx(20))
    assert here.p90_ape == pytest.approx(28)


def test_rows_that_tell_of_memory_alone_count_in_memory_and_out_of_memory_alone(measurement, engine):
    wide, ran = engine("megatron", memory_spread=0.15), {"allocated_bytes": 100.0}
    rows = [
        measurement(engine=wide, step_time_s=None, **ran),
        measurement(engine=engine("nemo", memory_spread=0.05), step_time_s=None, device_bytes=100.0),
        measurement(oom=True, step_time_s=None),
    ]
    here = score(rows, predicted([1.0] * 3, fits=[True, True, False], allocated=110.0, device=110.0))["here"]
    assert (here.n, here.memory.n, here.oom.n) == (0, 2, 1)
    assert (here.oom.precision_fits, here.oom.recall_fits) == (1.0, 1.0)
    assert here.memory.bias == here.memory.mean_ape == pytest.approx(10)
    # A tenth lies in a range of 15 percent, and not in one of 5.
    assert here.memory.coverage_80 == 50
    assert {name: one.coverage_80 for name, one in here.memory.engines.items()} == {
        "megatron, allocated": 100,
        "nemo, device": 0,
    }


def test_skipped_rows_are_counted_by_source_and_reason(measurement):
    skipped = Counter({("there", "gpus not published"): 2, ("here", "row_status failed"): 1})
    rows = [measurement(), measurement(), measurement()]
    found = score(rows, predicted([1.0, np.nan, 1.0], refused={1: "no such precision"}), skipped)
    assert list(found) == ["here", "there"]
    assert found["here"].n == 2
    assert found["here"].skipped == {"no such precision": 1, "row_status failed": 1}
    assert (found["there"].n, found["there"].median_ape) == (0, None)
    assert found["there"].skipped == {"gpus not published": 2}


def test_predictions_are_the_prices_of_the_rows(measurement, gpt, llama, cluster, engine, layout):
    rows = [
        measurement(),
        measurement(model=llama, cluster=cluster(64), layouts=(layout(llama, tp=8, pp=4, dp=2, m=8),)),
        measurement(layouts=(layout(gpt, tp=2, dp=4, m=2),)),
    ]
    found = predict(rows)
    for row, one in enumerate(rows):
        prices = price(one.model, one.cluster, one.engine, LayoutTable.of(one.layouts))
        prices = prices.simulate(np.flatnonzero(~prices.simulated))
        assert found.step_time_s[row] == pytest.approx(prices.step_time_s[0], rel=1e-12)
        width = spread(one.cluster, prices.engine, prices.time, prices.step_time_s)
        assert found.spread[row] == pytest.approx(width[0])
        assert found.fits[row] == (prices.peak_memory_bytes[0] <= one.cluster.memory_bytes)


def test_a_row_that_the_engine_cannot_run_is_refused_and_the_others_are_priced(measurement, gpt, layout):
    odd = measurement(layouts=(layout(gpt, dp=8, m=2, precision="fp8"),))
    found = predict([measurement(), odd, measurement()])
    assert list(found.refused) == [1]
    assert "fp8" in found.refused[1]
    assert np.isfinite(found.step_time_s[[0, 2]]).all()


def test_of_several_recomputations_the_least_that_fits_is_priced(measurement, llama, cluster, layout):
    big = cluster(64)
    choices = tuple(layout(llama, tp=8, pp=2, dp=4, m=4, recompute=kind) for kind in ("none", "full"))
    prices = price(llama, big, measurement().engine, LayoutTable.of(choices))
    peaks = prices.peak_memory_bytes
    assert prices.step_time_s[0] < prices.step_time_s[1]
    assert peaks[0] > peaks[1]

    def chosen(memory):
        cut = big.model_copy(update={"memory_bytes": memory})
        return predict([measurement(model=llama, cluster=cut, layouts=choices)])

    alone = [predict([measurement(model=llama, cluster=big, layouts=(one,))]).step_time_s for one in choices]
    # The smallest, where none fits.
    for memory, expected, fits in ((peaks[0], 0, True), (peaks[1], 1, True), (peaks[1] / 2, 1, False)):
        found = chosen(memory)
        assert (found.step_time_s, found.fits) == (pytest.approx(alone[expected]), fits)


def test_allocated_and_reserved_leave_out_what_pytorch_does_not_count(measurement, llama, cluster, layout):
    one = measurement(
        model=llama, cluster=cluster(64), layouts=(layout(llama, tp=8, pp=4, dp=2, m=8),), allocated_bytes=1.0
    )
    found = predict([one, replace(one, first_rank_only=True)])
    estimate = price(one.model, one.cluster, one.engine, LayoutTable.of(one.layouts)).estimate(0)
    tensors = [stage.total - stage.overhead for stage in estimate.memory]
    assert found.allocated_bytes == pytest.approx([max(tensors), tensors[0]])
    fragments = [
        one.engine.allocator.fragmentation * (held.activations + held.logits) for held in estimate.memory
    ]
    reserved = [own + lost for own, lost in zip(tensors, fragments, strict=True)]
    assert found.reserved_bytes == pytest.approx([max(reserved), reserved[0]])
    assert found.reserved_bytes[0] < estimate.peak_memory_bytes - one.cluster.device.context_bytes


def test_a_scalar_multiplies_the_step_times_of_its_engine_and_device_alone(measurement, engine):
    rows = [measurement(), measurement(engine=engine("fsdp"))]
    plain = predict(rows)
    scaled = predict(rows, {("megatron", "a100-80gb"): 2.0, ("fsdp", "h100"): 3.0})
    assert scaled.step_time_s == pytest.approx(plain.step_time_s * [2, 1])
    np.testing.assert_array_equal(scaled.spread, plain.spread)
    np.testing.assert_array_equal(scaled.fits, plain.fits)


def test_scalars_are_geometric_medians(measurement, engine):
    rows = [measurement(step_time_s=seconds) for seconds in (2.0, 8.0)]
    rows.append(measurement(engine=engine("fsdp"), step_time_s=3.0))
    rows.append(measurement(oom=True, step_time_s=None))
    found = time_factors(rows, predicted([1.0, 1.0, 2.0, 1.0]))
    assert found == {
        ("fsdp", "a100-80gb"): pytest.approx(1.5),
        ("megatron", "a100-80gb"): pytest.approx(4.0),
    }
    # Fitted once more on top of itself, nothing is left to fit.
    again = time_factors(rows, predict(rows, time_factors(rows, predict(rows))))
    assert list(again.values()) == pytest.approx([1.0, 1.0])


def test_the_fit_sees_its_share_of_its_sources_wherever_the_rows_stand(measurement):
    one = measurement(source=FITTED_SOURCES[0])
    jobs = [one.model.model_copy(update={"name": f"model {number}"}) for number in range(1000)]
    rows = [replace(one, model=job, line=line) for line, job in enumerate(jobs)]
    seen = [is_fit_row(row) for row in rows]
    assert np.mean(seen) == pytest.approx(FIT_SHARE, abs=0.05)
    # Neither its place nor where it was published moves a job to the other side.
    assert [is_fit_row(replace(row, line=7, sweep="other", reference="again")) for row in rows] == seen
    assert not any(is_fit_row(replace(row, source="somewhere")) for row in rows)


def test_rows_of_one_reference_are_split_by_their_jobs(measurement, gpt, cluster, layout):
    jobs = [
        measurement(source=FITTED_SOURCES[0], layouts=(layout(gpt, dp=8, m=m, mbs=mbs),))
        for m in range(1, 11)
        for mbs in (1, 2, 4)
    ]
    assert 0 < sum(is_fit_row(job) for job in jobs) < len(jobs)

"""Fits: known constants come back, outliers and silent rows bend nothing, ranges cover their share."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.calibration.measurements import Measurement
from benchmarks.calibration.priors import Prior
from benchmarks.calibration.scores import FITTED_SOURCES
from benchmarks.calibration.time_fit import (
    TimeFitPlan,
    fit_times,
    is_row_of,
    log_errors,
    time_fit_plans,
)
from costmodels import Cluster, price
from costmodels.catalogue import engine_names, load_engine
from costmodels.errors import InputError
from costmodels.spec.table import LayoutTable

TRUE = {"gemm.efficiency": 0.62, "elementwise.loss_bytes": 60.0}

PLAN = TimeFitPlan(
    engine="megatron",
    architecture="ampere",
    sources=("here",),
    tolerance=0.02,
    constants={
        "gemm.efficiency": Prior(start=0.8, within=2.0, limits=(0.3, 1.0)),
        "elementwise.loss_bytes": Prior(start=24, within=5.0, limits=(4, 250)),
    },
)


@pytest.fixture
def rows(gpt, cluster, engine, layout, a100):
    """Makes measurements of an engine with the constants of `TRUE`, some of them wrong by a factor."""

    def make(wrong: dict[int, float], noise: float = 0.0) -> list[Measurement]:
        base = engine("megatron", devices={})
        real = base.with_constants(TRUE)
        splits = [
            {"tp": tp, "dp": 8 // tp, "mbs": mbs, "m": m}
            for tp in (1, 2, 4)
            for mbs in (1, 2, 4)
            for m in (1, 4, 16)
        ]
        layouts = [layout(gpt, **split) for split in splits]
        machine: Cluster = cluster(8)
        seconds = price(gpt, machine, real, LayoutTable.of(layouts)).step_time_s
        seconds = seconds * np.exp(noise * np.random.default_rng(1).standard_normal(len(seconds)))
        return [
            Measurement(
                source="here",
                sweep="",
                reference="table 1",
                line=line,
                model=gpt,
                cluster=machine,
                engine=base,
                layouts=(one,),
                step_time_s=float(seconds[line] * wrong.get(line, 1.0)),
                oom=False,
                allocated_bytes=None,
                reserved_bytes=None,
                first_rank_only=False,
            )
            for line, one in enumerate(layouts)
        ]

    return make


@pytest.mark.parametrize("wrong", [{}, {3: 4.0, 11: 3.0}], ids=["clean", "two rows that nothing explains"])
def test_a_fit_finds_the_constants_that_made_the_rows(rows, wrong):
    found = fit_times(PLAN, rows(wrong))
    assert found.constants["gemm.efficiency"] == pytest.approx(TRUE["gemm.efficiency"], rel=0.02)
    assert found.constants["elementwise.loss_bytes"] == pytest.approx(TRUE["elementwise.loss_bytes"], rel=0.1)
    assert np.median(np.abs(log_errors(found, rows({})))) < 0.01


def test_a_constant_that_no_row_speaks_of_stays_where_it_was(rows):
    silent = {"start": 0.4, "within": 0.3, "limits": (0.1, 1.0)}
    plan = TimeFitPlan(
        **{**PLAN.model_dump(), "constants": {**PLAN.constants, "gemm.fp8_efficiency": silent}}
    )
    assert fit_times(plan, rows({})).constants["gemm.fp8_efficiency"] == pytest.approx(0.4, rel=1e-3)


def test_a_fit_of_too_few_rows_is_refused(rows):
    with pytest.raises(
        InputError, match=r"^fit of megatron on ampere: 1 rows for 2 constants; give more rows$"
    ):
        fit_times(PLAN, rows({})[:1])


def test_only_measured_rows_of_the_engine_and_architecture_belong_to_a_fit(rows):

    row = rows({})[0]
    assert is_row_of(row, PLAN)
    assert not is_row_of(replace(row, source="there"), PLAN)
    assert not is_row_of(replace(row, step_time_s=None), PLAN)
    assert not is_row_of(row, PLAN.model_copy(update={"architecture": "hopper"}))
    assert not is_row_of(row, PLAN.model_copy(update={"engine": "nemo"}))


def test_fits_name_engines_constants_and_sources_that_exist():
    for plan in time_fit_plans():
        assert plan.engine in engine_names()
        starts = {name: prior.start for name, prior in plan.constants.items()}
        assert load_engine(plan.engine).with_constants(starts).name == plan.engine
        assert set(plan.sources) <= set(FITTED_SOURCES)
        for prior in plan.constants.values():
            assert prior.limits[0] <= prior.start <= prior.limits[1]


def test_an_architecture_may_be_like_another_one():
    nemo = load_engine("nemo")
    hopper, blackwell = nemo.devices["hopper"], nemo.devices["blackwell"]
    assert blackwell["overlap"] == hopper["overlap"]
    assert blackwell["gemm"]["efficiency"] != hopper["gemm"]["efficiency"]


@pytest.mark.slow
def test_cross_validation_prices_each_row_by_the_fit_without_it(rows, monkeypatch):
    from benchmarks import calibrate

    found = rows({})
    monkeypatch.setattr(calibrate, "is_fit_row", lambda row: row.line % 2 == 0)
    result = calibrate.cross_validate([PLAN], found)
    assert result["here"]["n"] == len(found)
    assert result["here"]["mean_ape"] < 1.0
    # One wrong row spoils no other half than its own, and is never mended by itself.
    spoiled = calibrate.cross_validate([PLAN], rows({0: 3.0}))["here"]
    assert spoiled["mean_ape"] > 100 * (1 - 1 / 3) / len(found) * 0.9

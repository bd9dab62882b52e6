"""Layers by their shape, as measured steps tell them, and what a source knows besides its columns."""

import math
from dataclasses import replace

import pytest

from benchmarks.calibration.layer_factors import DOUBT, fit_layers
from benchmarks.calibration.measurements import measurement_of, source_notes
from benchmarks.calibration.time_fit import TimeFit, log_errors, time_fit_plans
from costmodels.spec.engine import MeasuredLayer
from tests.benchmarks.calibration.test_measurements import ROW


def vtrain(source="vtrain_single", **cells):
    usual = {"source_id": source, "model_name": "GPT-L12", "gpu": "A100", "gpus": "8", "hidden": "1024"}
    one = {
        "tp": "8",
        "pp": "1",
        "vpp": "",
        "dp": "1",
        "kv_heads": "",
        "seq": "1024",
        "recompute": "full",
        "sp": "",
    }
    return measurement_of({**ROW, **usual, **one, "precision": "", "flash": "", "zero_stage": "", **cells})


@pytest.fixture
def nothing():
    """A fit without constants: those of the catalogue, layers as the formulas say."""
    plan = next(plan for plan in time_fit_plans() if plan.engine == "megatron-deepspeed")
    return TimeFit(plan, {}, 0)


def test_layers_that_took_longer_are_found(nothing):
    rows = [vtrain(mbs=mbs, gbs=gbs) for mbs in "24" for gbs in ("8", "16", "32", "64")]
    slow = nothing.with_layers((MeasuredLayer(hidden=1024, tensor_parallel=8, tokens=2048, factor=1.3),))
    true = [replace(row, step_time_s=1.0) for row in rows]
    seconds = [math.exp(over) for over in log_errors(slow, true)]
    found = fit_layers(nothing, [replace(row, step_time_s=s) for row, s in zip(rows, seconds, strict=True)])
    two, four = sorted(found, key=lambda layer: layer.tokens)
    believed = 4 / (4 + DOUBT)
    assert (two.tokens, two.rows) == (2048, 4)
    assert two.factor == pytest.approx(1.3**believed, rel=0.01)
    assert 1.0 < four.factor < 1.3  # it lies an octave away from the shape that is slow
    assert abs(log_errors(nothing.with_layers(found), true) - [math.log(s) for s in seconds]).max() < 0.05


def test_what_layers_cannot_explain_is_left_alone(nothing):
    rows = [replace(vtrain(gbs=gbs), step_time_s=60.0) for gbs in ("8", "16")]
    assert fit_layers(nothing, rows) == ()


def test_a_source_may_correct_its_columns():
    assert source_notes()["sources"]["vtrain_single"]["instead"] == {"recompute": "none"}
    assert vtrain().layouts[0].recompute == "none"
    assert vtrain("vtrain_multi").layouts[0].recompute == "full"


def test_only_a_vocabulary_that_is_not_padded_slows_the_head_of_one_device():
    # Both sources are of one engine, whose own runs pad it.
    alone, padded = vtrain().engine, vtrain("vtrain_multi").engine
    assert alone.gemm.whole_head_efficiency < 0.6
    assert padded.gemm.whole_head_efficiency == 1.0
    assert alone.name == padded.name


def test_a_source_may_have_measured_its_nodes():
    measured = vtrain().cluster.measured
    assert [(row.devices, row.nodes) for row in measured] == [(2, 1), (4, 1), (8, 1)]
    assert [row.bus_bandwidth for row in measured] == sorted(row.bus_bandwidth for row in measured)

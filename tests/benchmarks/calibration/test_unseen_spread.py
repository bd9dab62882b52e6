"""Ranges by the errors on unseen sources: of whom they are, how rows weigh, and what tells causes apart."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.calibration.left_out_sources import UnseenSource
from benchmarks.calibration.predictions import predict
from benchmarks.calibration.scores import score
from benchmarks.calibration.unseen_spread import (
    COVERAGE,
    STARTS,
    UNSEEN,
    UNSEEN_EXPERTS,
    held_left_out,
    spreads,
    weighted_quantile,
)
from costmodels import price
from costmodels.spec.engine import Spread
from costmodels.spec.table import LayoutTable
from costmodels.time.uncertainty import spread

DRAWS = np.random.default_rng(7)


def off(*rows, source="here"):
    """A source whose rows, each with its error as a logarithm, took as much longer than their prices."""
    own = [each for each, _ in rows]
    priced = predict(own).step_time_s
    measured = [
        replace(each, source=source, step_time_s=float(price * np.exp(-error)))
        for (each, error), price in zip(rows, priced, strict=True)
    ]
    predictions = predict(measured)
    return UnseenSource(score(measured, predictions)[source], measured, predictions)


def inside(found, *sources):
    """Share of the rows of sources that the range by the fields `found` holds."""
    held = []
    for one in sources:
        for each, error in zip(one.rows, one.errors, strict=True):
            fields = found[each.engine.name, each.cluster.device.architecture]
            prices = price(each.model, each.cluster, each.engine, LayoutTable.of([each.layouts[0]]))
            engine = prices.engine.model_copy(update={"spread": Spread(**fields)})
            width = spread(
                each.cluster,
                engine,
                prices.time,
                prices.step_time_s,
                hidden=each.model.hidden,
                experts=each.model.experts > 0,
            )
            held.append(abs(error) <= width[0])
    return np.mean(held)


def test_a_quantile_lies_between_two_values():
    values = np.array([0.4, 0.1, 0.3, 0.2])
    # Each of four stands in the middle of its quarter: .625 is the third, .875 the fourth.
    assert weighted_quantile(values, np.ones(4), 0.625) == pytest.approx(0.3)
    assert weighted_quantile(values, np.ones(4), 0.75) == pytest.approx(0.35)
    assert weighted_quantile(values, np.ones(4), 0.95) == 0.4
    assert weighted_quantile(values, 7 * np.ones(4), 0.75) == pytest.approx(0.35)
    # A value that weighs next to nothing moves nothing.
    heavy = np.array([1.0, 1.0, 1.0, 1.0, 1e-9])
    assert weighted_quantile(np.append(values, 9.0), heavy, 0.75) == pytest.approx(0.35)


def test_sources_are_held_to_the_ranges_that_others_set(measurement):
    near = off(*((measurement(line=line), 0.1) for line in range(4)), source="near")
    far = off(*((measurement(line=line), 0.9) for line in range(4)), source="far")
    held = held_left_out({"near": near, "far": far})
    assert held == {"near": 100.0, "far": 0.0}
    assert inside(spreads([far]), near) == 1 and inside(spreads([near]), far) == 0
    # Nobody else has run the engine there.
    alone = off((measurement(), UNSEEN["base"] - 0.1), (measurement(line=2), UNSEEN["base"] + 0.2))
    assert held_left_out({"alone": alone}) == {"alone": 50.0}


def test_few_recipes_are_as_uncertain_as_those_of_other_engines(measurement, gpt, engine):
    """Ten models on another engine were off by .3: one that was right is no proof of better."""
    models = [gpt.model_copy(update={"name": f"model {number}"}) for number in range(40)]
    other = engine("nemo")
    wrong = off(*((measurement(model=model, engine=other), 0.3) for model in models[:10]), source="there")
    few, many = (
        spreads([off(*((measurement(model=model), 0.02) for model in models[:count])), wrong])
        for count in (1, 40)
    )
    assert few["megatron", "ampere"]["base"] > 0.25
    assert many["megatron", "ampere"]["base"] < 0.1
    # Nothing becomes narrower by the rows of others.
    assert few["nemo", "ampere"]["base"] > 0.25


def test_what_nobody_ran_is_as_wide_as_plans_for_it():
    """Links, the host and the bubble of an engine without errors take the widths of `Spread` itself."""
    assert {name: UNSEEN[name] for name in ("network", "launch", "bubble")} == {
        name: getattr(Spread(), name) for name in ("network", "launch", "bubble")
    }


def test_four_rows_leave_the_farthest_one_outside(measurement):
    source = off(*((measurement(line=line), error) for line, error in enumerate((0.1, -0.2, 0.25, -0.3))))
    assert inside(spreads([source]), source) == 0.75


@pytest.mark.slow
def test_many_rows_are_held_as_often_as_said(measurement):
    source = off(*((measurement(line=line), error) for line, error in enumerate(DRAWS.normal(0, 0.1, 200))))
    found = spreads([source])
    assert inside(found, source) == pytest.approx(COVERAGE, abs=0.01)


def test_a_recipe_counts_once_however_often_it_ran(measurement, gpt):
    """Forty runs of one model that are wrong together, against ten models."""
    models = [gpt.model_copy(update={"name": f"model {number}"}) for number in range(10)]
    several = [
        (measurement(model=model), error)
        for model, error in zip(models, np.linspace(0.01, 0.1, 10), strict=True)
    ]
    same = off(*((measurement(line=line), 0.7 + 0.001 * line) for line in range(40)), source="there")
    alone, both = (
        spreads(found)["megatron", "ampere"]["base"] for found in ([off(*several)], [off(*several), same])
    )
    assert alone < both < 0.2
    other = [(measurement(model=model), 0.7) for model in models]
    assert spreads([off(*several), off(*other, source="there")])["megatron", "ampere"]["base"] > 0.6


@pytest.mark.slow
def test_what_waits_for_the_host_tells_the_width_of_that(measurement, engine):
    """Errors that grow with the share that waits for the host are laid to it, not to the whole step."""
    slow = engine("megatron", host_layer_overhead=3e-2)
    usual = [(measurement(line=line), error) for line, error in enumerate(DRAWS.normal(0, 0.03, 60))]
    waits = [
        (measurement(line=line, engine=slow), error) for line, error in enumerate(DRAWS.normal(0, 0.3, 60))
    ]
    both = off(*usual, *waits)
    found = spreads([both])["megatron", "ampere"]
    assert found["base"] < 0.08
    assert found["launch"] > 0.3
    assert spreads([off(*usual)])["megatron", "ampere"]["launch"] == pytest.approx(STARTS["launch"])


def test_fields_that_no_row_speaks_of_are_left_to_the_engine(measurement, mixture, layout):
    dense = spreads([off((measurement(), 0.1), (measurement(), 0.05))])["megatron", "ampere"]
    assert dense["experts"] == UNSEEN_EXPERTS
    assert not {"network", "bubble"} & dense.keys()
    experts = measurement(model=mixture, layouts=(layout(mixture, dp=8, m=2),))
    assert "base" not in spreads([off((experts, 0.1), (experts, 0.05))])["megatron", "ampere"]


def test_rows_of_what_an_engine_does_not_plan_say_nothing(measurement, gpt, layout):
    usual = [(measurement(line=line), 0.05) for line in range(5)]
    sharded = [(measurement(layouts=(layout(gpt, dp=8, m=2, zero=3),)), 1.0) for _ in range(5)]
    assert spreads([off(*usual, *sharded)]) == spreads([off(*usual)])
    assert spreads([off(*sharded)]) == {}

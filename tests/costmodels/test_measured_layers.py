"""Corrections of layers by their shape."""

import pytest
from pydantic import ValidationError

from costmodels.pricing import price
from costmodels.spec.engine import Engine, MeasuredLayer
from costmodels.spec.table import LayoutTable
from costmodels.time.measured_layers import layer_factor, measurement_share


def seen(gpt, factor=1.3, rows=20, **other):
    shape = {"hidden": gpt.hidden, "tensor_parallel": 1, "tokens": gpt.seq, **other}
    return MeasuredLayer(factor=factor, rows=rows, **shape)


def test_a_measured_shape_takes_its_factor_and_others_less_the_farther_they_are(gpt, engine, layout):
    table = LayoutTable.of([layout(gpt, mbs=mbs, m=4) for mbs in (1, 2, 4)])
    known = engine("megatron", measured_layers=(seen(gpt),))
    factors = layer_factor(gpt, known, table)
    assert factors[0] == pytest.approx(1.3)
    assert 1.3 > factors[1] > factors[2] > 1.0
    wider = gpt.model_copy(update={"hidden": 2 * gpt.hidden})
    assert layer_factor(wider, known, table) == pytest.approx(1.0)
    shares = measurement_share(gpt, known, table)
    assert shares[0] > 0.95 and shares[0] > shares[1] > shares[2] > 0
    assert measurement_share(wider, known, table) == pytest.approx(0.0, abs=1e-6)


def test_the_nearest_shape_decides(gpt, engine, layout):
    table = LayoutTable.of([layout(gpt, mbs=mbs, m=4) for mbs in (1, 4)])
    both = (seen(gpt), seen(gpt, 0.8, tokens=4 * gpt.seq))
    assert layer_factor(gpt, engine("megatron", measured_layers=both), table) == pytest.approx([1.3, 0.8])


def test_layers_alone_take_the_factor(gpt, engine, layout, cluster):
    table = LayoutTable.of([layout(gpt, m=4)])
    plain = price(gpt, cluster(1), engine("megatron"), table)
    slower = price(gpt, cluster(1), engine("megatron", measured_layers=(seen(gpt, 2.0),)), table)
    assert slower.time["attention"] == pytest.approx(2 * plain.time["attention"])
    assert plain.time["compute"] < slower.time["compute"] < 2 * plain.time["compute"]  # the head's stays
    assert slower.time["optimizer"] == pytest.approx(plain.time["optimizer"])
    assert slower.spread < plain.spread


def test_one_step_says_little_of_a_layer(gpt, engine, layout):
    table = LayoutTable.of([layout(gpt, m=4)])
    shares = [
        measurement_share(gpt, engine("megatron", measured_layers=(seen(gpt, rows=n),)), table)
        for n in (1, 30)
    ]
    assert shares[0] < 0.3 and shares[1] > 0.95
    assert not measurement_share(gpt, engine("megatron"), table).any()


def test_a_shape_without_layers_is_refused(engine):
    values = {**engine("megatron").model_dump(), "measured_layers": [{"hidden": 0, "factor": 1.0}]}
    with pytest.raises(ValidationError, match="hidden"):
        Engine.model_validate(values)

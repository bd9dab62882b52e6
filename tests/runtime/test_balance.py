"""Losses that even out the load of experts, their biases, and the load that is reported."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from costmodels import ModelSpec, Router
from tests.support.gradients import check_gradients
from tests.support.layouts import parse_layout
from tests.support.models import MODELS
from tests.support.ranks import experts as work
from tests.support.ranks.parity import ROUTING
from tests.support.worker_pool import WorkerPool


def short(name: str, **changes: Any) -> ModelSpec:
    """Two layers of a model."""
    return MODELS[name].model_copy(update={"layers": 2, **changes})


SIGMOID = short("mixtral", router=Router(score="sigmoid", normalised=False))
STRONG = {"moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.1}
"""Coefficients whose part of the gradient is far above rounding."""

OBJECTIVES: tuple[tuple[ModelSpec, str, dict[str, Any]], ...] = (
    (short("mixtral"), "gbs=4,mbs=2", {"moe_router_load_balancing_type": "aux_loss"}),
    (short("mixtral"), "gbs=4,mbs=2", {"moe_router_load_balancing_type": "seq_aux_loss"}),
    (SIGMOID, "gbs=4,mbs=4", {"moe_router_load_balancing_type": "aux_loss"}),
    (SIGMOID, "gbs=2", {"moe_aux_loss_coeff": 0.0}),
    (short("deepseek"), "gbs=4,mbs=2", {}),
    (short("qwen"), "gbs=2", {"moe_z_loss_coeff": 0.0}),
)


@pytest.mark.parametrize(("spec", "text", "options"), OBJECTIVES)
def test_gradients_are_those_of_the_objective(
    pool: WorkerPool, spec: ModelSpec, text: str, options: dict[str, Any]
) -> None:
    given = {**STRONG, **options}
    [found] = pool.run(work.objective, 1, spec, parse_layout(text, spec), given)
    assert found.gradients.keys() == found.expected.keys()
    check_gradients(spec, found.gradients, found.expected)
    load = found.load
    for one, other in zip(load.shares.values(), found.shares, strict=True):
        assert one == pytest.approx(other)
    assert load.dropped is None
    for coefficient, value, expected in (
        ("moe_aux_loss_coeff", load.balancing_loss, found.balancing_loss),
        ("moe_z_loss_coeff", load.z_loss, found.z_loss),
    ):
        assert value == (pytest.approx(expected, rel=1e-5) if given[coefficient] else None)


def test_without_balancing_the_objective_is_the_token_loss(pool: WorkerPool) -> None:
    spec = short("mixtral")
    off = {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.0}
    zero = {**ROUTING, "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 0.0}
    layout = parse_layout("gbs=2", spec)
    one, other = (pool.run(work.trained, 1, spec, layout, 2, options)[0] for options in (off, zero))
    assert one.losses == other.losses
    assert (one.load.balancing_loss, one.load.z_loss) == (None, None)


@pytest.mark.parametrize(
    "text",
    ["dp=2", "tp=2", "tp=2,sp=1", "cp=2", "pp=2", "ep=2,cp=2,cp_form=all_to_all", "recompute=full"],
)
def test_every_pair_is_counted_once(pool: WorkerPool, text: str) -> None:
    spec = short("deepseek", layers=3)
    layout = parse_layout("gbs=4," + text, spec)
    pairs = 4 * spec.seq * spec.top_k
    expected = [0, 0, 0, 0, pairs, pairs]
    assert pool.run(work.counted, layout.world_size, spec, layout) == [expected] * layout.world_size


def test_repeated_layers_of_a_split_backward_are_counted_once(pool: WorkerPool) -> None:
    spec = MODELS["mixtral"]
    layout = parse_layout("gbs=8,ep=2,pp=2,schedule=zbv,recompute=full", spec)
    pairs = 8 * spec.seq * spec.top_k
    assert pool.run(work.counted, 4, spec, layout)[0] == [0] * 4 + [pairs] * 4


@pytest.mark.parametrize("text", ["gbs=4", "gbs=4,tp=2,ep=2", "gbs=4,cp=2", "gbs=4,dp=2,zero=3"])
def test_biases_follow_the_load(pool: WorkerPool, text: str) -> None:
    spec = short("deepseek")
    layout = parse_layout(text, spec)
    name = "layers.1.mlp.router.expert_bias"
    for loads, biases in pool.run(work.bias_steps, layout.world_size, spec, layout):
        expected = torch.zeros(spec.experts)
        for step, (load, bias) in enumerate(zip(loads, biases, strict=True)):
            [shares] = load.shares.values()
            if step != 1:
                expected += 0.25 * (1 - torch.tensor(shares)).sign()
            assert bias.keys() == {name}
            assert torch.equal(bias[name], expected)
        assert expected.any()


def test_biases_follow_the_load_of_their_step_however_rarely_it_is_reported(pool: WorkerPool) -> None:
    spec = short("deepseek")
    layout = parse_layout("gbs=4", spec)
    often, rarely = (pool.run(work.bias_steps, 1, spec, layout, 4, reports)[0] for reports in (True, False))
    for one, other in zip(often[1], rarely[1], strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    means = torch.tensor([list(load.shares.values()) for load in often[0]]).mean(0)
    assert torch.allclose(means, torch.tensor(list(rarely[0][0].shares.values())))


@pytest.mark.parametrize(("experts", "share"), [([9.0, 9.0, 0.0, 0.0], 2.0), ([9.0, 0.0, 0.0, 0.0], 4.0)])
def test_what_a_limited_capacity_drops_is_reported(
    pool: WorkerPool, experts: list[float], share: float
) -> None:
    """All tokens choose the same experts, which have room for a share of them only."""
    top_k = round(4 / share)
    router = Router(score="sigmoid", expert_bias=True, capacity_factor=1.0)
    spec = short("mixtral", top_k=top_k, router=router)
    off = {"moe_router_bias_update_rate": 0.0}
    # Recomputation in backward drops nothing more.
    for text in ("gbs=2", "gbs=2,cp=2", "gbs=2,recompute=full"):
        layout = parse_layout(text, spec)
        load = pool.run(work.trained, layout.world_size, spec, layout, 2, off, experts)[0].load
        assert load.dropped == pytest.approx(1 - 1 / share)
        assert list(load.shares.values()) == [[share if bias else 0.0 for bias in experts]] * 2

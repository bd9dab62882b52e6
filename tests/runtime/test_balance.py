"""Losses that even out the load of experts, their biases, and the load that is reported."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from costmodels import ModelSpec, MultiTokenPrediction, Router
from runtime.model.experts import Router as Chooser
from runtime.settings.training_options import TrainingOptions
from runtime.train.balance import Balance
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


def watched(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[Balance, dict[int, Chooser], Any]:
    """A watch over routers of random weights, and the loss that it takes its numbers from."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    routers = {
        layer: Chooser(spec) for layer in range(spec.layers) if spec.layer_kind(layer).mlp == "experts"
    }
    if spec.mtp_depths:
        routers |= {spec.layers + depth: Chooser(spec) for depth in range(spec.mtp_depths)}
    for layer, router in routers.items():
        torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(layer))
    loss = SimpleNamespace(scale=1.0, tokens=1.0)
    executor: Any = SimpleNamespace(stages=[SimpleNamespace(routers=routers)], loss=loss)
    grid: Any = SimpleNamespace(device=torch.device("cpu"), sequence_group=None)
    return Balance(executor, spec, grid, TrainingOptions(**{**STRONG, **options})), routers, loss


@pytest.mark.parametrize("by", ["aux_loss", "seq_aux_loss", "none"])
@pytest.mark.parametrize("router", [Router(), Router(score="sigmoid", expert_bias=True)])
def test_routers_learn_the_objective_at_the_scale_of_the_step(
    by: str, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Microbatches of two sequences; the loss is scaled by another factor in each step."""
    spec = short("mixtral", router=router, top_k=2)
    balance, routers, loss = watched(spec, monkeypatch, moe_router_load_balancing_type=by)
    draw = torch.Generator().manual_seed(3)
    if router.expert_bias:
        routers[0].expert_bias = torch.tensor([3.0, 0, 0, -3.0])
    counts, aux_sum, z_sum = torch.zeros(2, spec.experts), 0.0, 0.0
    for scale, tokens in ((8.0, 4 * spec.seq), (2.0, 6 * spec.seq)):
        loss.scale, loss.tokens = scale, tokens
        balance.begin_step()
        for layer, one in routers.items():
            x = torch.randn(2, spec.seq, spec.hidden, generator=draw)
            weights, chosen = one(x)
            counts[layer] += torch.bincount(chosen.flatten(), minlength=spec.experts)
            [found] = torch.autograd.grad(weights.sum(), one.weight, retain_graph=True)
            logits = x @ one.weight.T
            scores = logits.sigmoid() if router.score == "sigmoid" else logits.softmax(-1)
            taken = scores.gather(-1, chosen)
            plain = taken / taken.sum(-1, keepdim=True) if router.normalised else taken
            shares = scores / scores.sum(-1, keepdim=True)
            by_score = scores.topk(2, -1).indices
            units = [slice(0, 2)] if by == "aux_loss" else [slice(0, 1), slice(1, 2)]
            aux = torch.zeros(())
            for unit in units:
                size = by_score[unit].numel() / 2
                for expert in range(spec.experts):
                    often = (by_score[unit] == expert).sum() / (2 * size)
                    aux = aux + size * spec.experts * often * shares[unit][..., expert].mean() / tokens
            z = logits.exp().sum(-1).log().square().sum() / tokens
            objective = (0.0 if by == "none" else 0.5) * aux + 0.1 * z
            [expected] = torch.autograd.grad(plain.sum() + scale * objective, one.weight)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(weights, plain)
            aux_sum, z_sum = aux_sum + aux.item(), z_sum + z.item()
            # An evaluation counts nothing, and its weights are the same.
            with torch.no_grad():
                assert torch.equal(one(x)[0], weights)
        balance.end_step(updated=False)
    load = balance.report()
    assert torch.tensor(list(load.shares.values())).allclose(
        counts / counts.sum(1, keepdim=True) * spec.experts
    )
    # Means over two steps of two layers.
    assert load.balancing_loss == (None if by == "none" else pytest.approx(aux_sum / 4, rel=1e-5))
    assert load.z_loss == pytest.approx(z_sum / 4, rel=1e-5)
    assert load.dropped is None
    again = balance.report()
    assert set(map(tuple, again.shares.values())) == {(0.0,) * spec.experts}
    assert not again.z_loss and not again.balancing_loss


def test_each_coefficient_alone_trains_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    for options, trains in (
        ({"moe_aux_loss_coeff": 0.0}, True),
        ({"moe_z_loss_coeff": 0.0}, True),
        ({"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 0.0}, False),
    ):
        balance, routers, _ = watched(short("mixtral"), monkeypatch, **options)
        weights, _ = routers[0](torch.ones(1, 4, 64))
        # Weights of one token sum up to one: the objective alone moves the router.
        [found] = torch.autograd.grad(weights.sum(), routers[0].weight)
        assert bool(found.abs().max() > 1e-4) == trains
        assert not balance.moves_biases


def test_biases_move_by_the_load_of_the_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer by its own, MTP's modules with names of theirs; a skipped step moves none."""
    spec = short("deepseek", layers=3, mtp=MultiTokenPrediction(depths=1))
    balance, routers, _ = watched(spec, monkeypatch, moe_router_bias_update_rate=0.25)
    assert list(routers) == [1, 2, 3]
    names = ["layers.1", "layers.2", "mtp.0.block"]
    assert list(balance.biases()) == [f"{name}.mlp.router.expert_bias" for name in names]
    expected = {layer: torch.zeros(spec.experts) for layer in routers}
    total = torch.zeros(3, spec.experts)
    draw = torch.Generator().manual_seed(1)
    for updated in (True, False, True):
        for place, (layer, router) in enumerate(routers.items()):
            _, chosen = router(torch.randn(1, spec.seq, spec.hidden, generator=draw))
            load = torch.bincount(chosen.flatten(), minlength=spec.experts).double()
            total[place] += load
            if updated:
                expected[layer] += 0.25 * (load.mean() - load).sign().float()
        balance.end_step(updated)
        for bias, other in zip(balance.biases().values(), expected.values(), strict=True):
            assert torch.equal(bias, other)
    shares = torch.tensor(list(balance.report().shares.values()))
    torch.testing.assert_close(shares, total / total.sum(1, keepdim=True) * spec.experts)
    still, _, _ = watched(spec, monkeypatch, moe_router_bias_update_rate=0.0)
    assert not still.moves_biases and balance.moves_biases


def test_dropped_pairs_are_a_share_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    router = Router(score="sigmoid", expert_bias=True, capacity_factor=1.0)
    balance, routers, _ = watched(short("mixtral", top_k=1, router=router), monkeypatch)
    for one, favoured in zip(routers.values(), (True, False), strict=True):
        # All tokens choose one expert, which has room for a quarter, or each its own.
        one.expert_bias = torch.tensor([9.0, 0, 0, 0]) if favoured else one.expert_bias
        x = torch.zeros(1, 8, 64)
        x[0, torch.arange(8), torch.arange(8) % 4] = 9.0
        one.weight.data = torch.eye(4, 64)
        one(x)
    balance.end_step(updated=True)
    assert balance.report().dropped == pytest.approx(6 / 16)

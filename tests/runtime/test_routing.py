"""Sorting tokens by expert, grouped products and capacity, against slow and obvious computations."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from costmodels import ModelSpec
from costmodels import Router as Routing
from runtime.model.experts import MixtureOfExperts, Router
from runtime.model.routing import (
    LocalDispatch,
    _UsedOnly,
    assign,
    capacity,
    capacity_mask,
    combine,
    grouped_linear,
    permute,
    spread,
    takes_grouped,
    wide_product,
)
from tests.support.models import MODELS

pytestmark = pytest.mark.oldest

WIDTHS = st.sampled_from([3, 4, 6, 16])
"""Widths of rows: some are no multiples of 16 bytes, which grouped GEMMs need."""


@st.composite
def choices(draw: Any) -> tuple[Tensor, int]:
    """Experts [T, k] of each token, those that are dropped among them, and how many experts there are."""
    experts = draw(st.integers(1, 6))
    tokens, top_k = draw(st.integers(0, 9)), draw(st.integers(1, experts))
    used = draw(st.integers(top_k, experts))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    ranks = torch.rand(tokens, used, generator=random).argsort(1)[:, :top_k]
    share = draw(st.sampled_from([0.0, 0.3, 1.0]))
    dropped = torch.rand(tokens, top_k, generator=random) < share
    return ranks.masked_fill(dropped, experts), experts


def leaf(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=random).to(dtype).requires_grad_()


def assert_same_gradients(found: Tensor, expected: Tensor, leaves: list[Tensor], seed: int) -> None:
    """The results are the same, and so are the gradients of `leaves`, for a random gradient of the result."""
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    gradient = leaf(*found.shape, seed=seed).detach()
    pairs = zip(
        torch.autograd.grad(found, leaves, gradient),
        torch.autograd.grad(expected, leaves, gradient, materialize_grads=True),
        strict=True,
    )
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@given(choices(), WIDTHS, WIDTHS, st.booleans())
@settings(max_examples=80, deadline=None)
def test_sorted_rows_compute_what_every_token_would(
    choice: tuple[Tensor, int], width: int, inner: int, biased: bool
) -> None:
    chosen, experts = choice
    tokens, top_k = chosen.shape
    x, weights = leaf(tokens, width, seed=1), leaf(tokens, top_k, seed=2)
    matrix = leaf(experts, inner, width, seed=3)
    bias = leaf(experts, inner, seed=4) if biased else None
    dispatch = LocalDispatch(experts, drops=True)
    sent = dispatch.send(x, weights, chosen)
    rows, counts = dispatch.receive(sent)
    assert counts.tolist() == [int((chosen == expert).sum()) for expert in range(experts)]
    sizes = None if takes_grouped(rows.dtype, rows.device, width, inner) else counts.tolist()
    found = dispatch.give_back(sent, grouped_linear(rows, matrix, counts, bias, sizes))
    expected = x.new_zeros(tokens, inner)
    for expert in range(experts):
        taken = F.linear(x, matrix[expert], None if bias is None else bias[expert])
        expected = expected + (weights * (chosen == expert)).sum(1, keepdim=True) * taken
    leaves = [x, weights, matrix, *([] if bias is None else [bias])]
    assert_same_gradients(found, expected, leaves, seed=5)


@given(choices())
@settings(max_examples=50, deadline=None)
def test_pairs_are_sorted_by_expert_and_stay_in_order(choice: tuple[Tensor, int]) -> None:
    chosen, experts = choice
    assignment = assign(chosen, experts)
    pairs = [(int(expert), number) for number, expert in enumerate(chosen.flatten())]
    assert assignment.order.tolist() == [number for _, number in sorted(pairs)]
    kept = assignment.without_dropped(int(assignment.counts.sum()))
    assert kept.order.tolist() == [number for expert, number in sorted(pairs) if expert < experts]


@pytest.mark.parametrize("counts", [[8, 0, 8, 0], [0, 3, 0, 13]])
def test_grouped_products_and_a_loop_agree_also_for_experts_without_rows(counts: list[int]) -> None:
    x, weight, bias = leaf(16, 8, seed=1), leaf(4, 12, 8, seed=2), leaf(4, 12, seed=3)
    numbers = torch.tensor(counts)
    found = grouped_linear(x, weight, numbers, bias)
    assert_same_gradients(found, grouped_linear(x, weight, numbers, bias, counts), [x, weight, bias], seed=4)
    used = _UsedOnly.apply(weight, numbers)  # type: ignore[no-untyped-call]
    [gradient] = torch.autograd.grad(used, weight, torch.ones_like(weight))
    assert gradient.amax((1, 2)).tolist() == [float(count > 0) for count in counts]


def test_permute_and_spread_undo_each_other() -> None:
    x, order = leaf(5, 3, seed=1), torch.tensor([4, 0, 3, 1, 2])
    rows = permute(x, order, 1)
    assert torch.equal(rows, x[order])
    assert torch.equal(spread(rows, order, 5), x)
    assert torch.equal(spread(rows[:2], order[:2], 6)[[1, 2, 3, 5]], torch.zeros(4, 3))


def test_a_tokens_rows_are_added_up_in_the_order_of_its_choices() -> None:
    """Whatever the order of the experts: the sum of floats must not depend on it."""
    x = leaf(2, 4, seed=1)
    gradient = torch.tensor([1e8, 1.0, -1e8, 2.0, 3.0, 5.0])
    orders = torch.tensor([0, 1, 2, 3, 4, 5]), torch.tensor([5, 2, 1, 4, 0, 3])
    for order, whole in product(orders, (False, True)):
        places = order.argsort() if whole else None
        rows = permute(x, order, 3, places)
        [found] = torch.autograd.grad(rows, x, gradient[order].unsqueeze(1).expand(-1, 4))
        assert torch.equal(found[:, 0], gradient.view(2, 3).sum(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
def test_rows_are_combined_where_they_are_as_those_that_are_spread_first(
    dtype: torch.dtype, compiled: bool
) -> None:
    """Results and gradients are bitwise those of rows that are spread first, which dropped pairs need."""
    found = []
    assignment = assign(torch.tensor([[0, 3, 1], [2, 1, 0], [3, 2, 1], [1, 3, 2], [3, 1, 0], [1, 0, 3]]), 4)
    for way in (assignment, assignment._replace(places=None)):
        rows, weights = leaf(18, 8, seed=1, dtype=dtype), leaf(6, 3, seed=2)
        is_compiled = compiled and way is assignment
        add_up = torch.compile(combine, backend="aot_eager") if is_compiled else combine
        result = add_up(rows, weights, way)
        result.backward(leaf(6, 8, seed=3, dtype=dtype).detach())
        found.append((result.detach(), rows.grad, weights.grad))
    for one, other in zip(*found, strict=True):
        assert one is not None and other is not None and one.dtype == other.dtype
        if compiled:
            # Compiled code adds up in fp32 what bmm rounds.
            torch.testing.assert_close(one, other, rtol=1e-6 if dtype == torch.float32 else 2**-7, atol=1e-6)
        else:
            assert torch.equal(one, other)


def test_half_precision_rows_are_combined_in_their_format() -> None:
    rows, weights = leaf(4, 8, seed=1, dtype=torch.bfloat16), leaf(2, 2, seed=2)
    result = combine(rows, weights, assign(torch.tensor([[0, 1], [0, 1]]), 2))
    assert result.dtype == torch.bfloat16
    result.sum().backward()  # type: ignore[no-untyped-call]
    assert weights.grad is not None
    assert weights.grad.dtype == torch.float32
    assert rows.grad is not None
    assert rows.grad.dtype == torch.bfloat16


def test_experts_without_rows_get_a_gradient_of_zeros() -> None:
    x, weight, bias = leaf(0, 4, seed=1), leaf(3, 8, 4, seed=2), leaf(3, 8, seed=3)
    result = grouped_linear(x, weight, torch.zeros(3, dtype=torch.int64), bias)
    assert result.shape == (0, 8)
    gradients = torch.autograd.grad(result, [x, weight, bias], torch.empty(0, 8))
    for leaf_, gradient in zip((x, weight, bias), gradients, strict=True):
        assert torch.equal(gradient, torch.zeros_like(leaf_))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_routers_product_is_made_in_fp32(dtype: torch.dtype) -> None:
    x, weight = leaf(2, 5, 12, seed=1, dtype=dtype), leaf(7, 12, seed=2, dtype=dtype)
    wide_x, wide_weight = (one.detach().float().requires_grad_() for one in (x, weight))
    found, expected = wide_product(x, weight), F.linear(wide_x, wide_weight)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    gradient = leaf(2, 5, 7, seed=3).detach()
    found.backward(gradient)  # type: ignore[no-untyped-call]
    expected.backward(gradient)  # type: ignore[no-untyped-call]
    for one, wide in ((x, wide_x), (weight, wide_weight)):
        assert one.grad is not None
        assert one.grad.dtype == dtype
        torch.testing.assert_close(one.grad, wide.grad.to(dtype))


def kept_slowly(weights: Tensor, chosen: Tensor, experts: int, limit: int) -> Tensor:
    """The rule of `capacity_mask`, pair by pair."""
    kept = torch.zeros_like(weights, dtype=torch.bool)
    for row in range(len(weights)):
        for expert in range(experts):
            pairs = [
                (-float(weights[row, t, c]), t, c) for t, c in (chosen[row] == expert).nonzero().tolist()
            ]
            for _, token, choice in sorted(pairs)[:limit]:
                kept[row, token, choice] = True
    return kept


@st.composite
def weighted_choices(draw: Any) -> tuple[Tensor, Tensor, int]:
    """Weights and choices [B, S, k] with many equal weights, and the number of experts."""
    experts = draw(st.integers(1, 5))
    top_k = draw(st.integers(1, experts))
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 8)))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    chosen = torch.rand(*shape, experts, generator=random).argsort(-1)[..., :top_k]
    levels = draw(st.sampled_from([1, 3, 1000]))
    weights = torch.randint(0, levels, (*shape, top_k), generator=random) / levels
    return weights, chosen, experts


@given(weighted_choices(), st.integers(0, 9))
@settings(max_examples=120, deadline=None)
def test_experts_take_in_the_largest_weights_of_each_sequence(
    case: tuple[Tensor, Tensor, int], limit: int
) -> None:
    weights, chosen, experts = case
    found = capacity_mask(weights, chosen, experts, limit)
    assert torch.equal(found, kept_slowly(weights, chosen, experts, limit))


@pytest.mark.parametrize(
    ("seq", "top_k", "experts", "factor", "rows"),
    [(32, 2, 4, 1.0, 16), (32, 2, 4, 1.25, 20), (32, 3, 8, 0.5, 6), (10, 1, 4, 1.0, 3), (7, 2, 7, 0.1, 1)],
)
def test_capacity_is_a_share_of_a_sequences_pairs(
    seq: int, top_k: int, experts: int, factor: float, rows: int
) -> None:
    assert capacity(seq, top_k, experts, factor) == rows


def spec_with(**routing: Any) -> ModelSpec:
    return MODELS["qwen"].model_copy(update={"router": Routing(**routing)})


def routed(spec: ModelSpec, x: Tensor, bias: Tensor | None = None) -> tuple[Router, Tensor, Tensor]:
    """A router with random weights, and what it makes of `x`."""
    router = Router(spec)
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(1))
    if bias is not None:
        router.expert_bias = bias
    return router, *router(x)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalised", [True, False])
def test_dropped_pairs_weigh_nothing_and_others_what_they_did(score: str, normalised: bool) -> None:
    x = leaf(2, 16, 64, seed=7)
    _, free, chosen = routed(spec_with(score=score, normalised=normalised), x)
    limited = spec_with(score=score, normalised=normalised, capacity_factor=0.5)
    _, weights, kept = routed(limited, x)
    limit = math.ceil(16 * 3 / 8 * 0.5)
    inside = kept_slowly(free.detach(), chosen, 8, limit)
    assert 0 < inside.sum() < inside.numel()
    assert torch.equal(weights, free.masked_fill(~inside, 0.0))
    assert torch.equal(kept, chosen.masked_fill(~inside, 8))


def test_a_large_capacity_drops_nothing() -> None:
    x = leaf(2, 16, 64, seed=7)
    free, roomy = MixtureOfExperts(spec_with()), MixtureOfExperts(spec_with(capacity_factor=8.0))
    for parameter in free.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(parameter.numel()))
    roomy.load_state_dict(free.state_dict())
    assert torch.equal(free(x), roomy(x))


@pytest.mark.parametrize("offset", [0.0, -2.0])
def test_tokens_use_experts_of_the_best_groups_only(offset: float) -> None:
    """Whatever the sign of scores and biases together."""
    x, bias = leaf(2, 16, 64, seed=7), offset + torch.linspace(0.3, -0.3, 8)
    for kind, best in (("max", 1), ("top2", 2)):
        spec = spec_with(score="sigmoid", groups=4, top_groups=2, group_score=kind, expert_bias=True)
        router, _, chosen = routed(spec, x, bias)
        scores = router.logits(x).detach().sigmoid() + bias
        for token, experts in zip(scores.flatten(0, 1), chosen.flatten(0, 1), strict=True):
            groups = (
                token.view(4, 2).sort(1, descending=True).values[:, :best].sum(1).argsort(descending=True)
            )
            open_ones = [e for e in range(8) if e // 2 in groups[:2].tolist()]
            best_open = token[open_ones].topk(3).indices.tolist()
            assert {int(e) for e in experts} == {open_ones[place] for place in best_open}


def test_an_experts_bias_changes_who_is_chosen_and_not_its_weight() -> None:
    x = leaf(2, 16, 64, seed=7)
    bias = torch.tensor([10.0, 0, 0, 0, 0, 0, 0, -10.0])
    spec = spec_with(score="sigmoid", normalised=True, expert_bias=True)
    router, weights, chosen = routed(spec, x, bias)
    assert (chosen == 0).any(-1).all()
    assert not (chosen == 7).any()
    scores = router.logits(x).sigmoid().gather(-1, chosen)
    torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True))
    weights.square().sum().backward()  # type: ignore[no-untyped-call]
    assert router.expert_bias is not None
    assert router.expert_bias.grad is None
    assert router.weight.grad is not None
    assert router.weight.grad.any()


def test_logits_choose_where_scores_have_underflown() -> None:
    """Logits choose experts that share the weights among the chosen; scores and biases choose all others."""
    logits = torch.tensor([-200.0, -150.0, -120.0, 0.0])
    x = torch.ones(1, 1, 1)
    for routing, chosen in (
        (Routing(normalised=True), [3, 2, 1]),
        (Routing(normalised=False), None),
        (Routing(normalised=True, expert_bias=True), [3, 0, 1]),
    ):
        spec = MODELS["qwen"].model_copy(update={"router": routing, "experts": 4, "top_k": 3, "hidden": 1})
        router = Router(spec)
        router.weight.data = logits.unsqueeze(1)
        if router.expert_bias is not None:
            router.expert_bias = torch.tensor([0.2, 0.1, 0.0, 0.0])
        seen: list[Tensor] = []
        choose = router.choose

        def noting(scores: Tensor, seen: list[Tensor] = seen, choose: Any = choose) -> Tensor:
            seen.append(scores)
            result: Tensor = choose(scores)
            return result

        chooses: Any = noting
        router.choose = chooses  # type: ignore[method-assign]
        _, found = router(x)
        expected = logits if chosen == [3, 2, 1] else logits.softmax(-1)
        assert torch.equal(seen[0][0, 0], expected)
        assert chosen is None or found.flatten().tolist() == chosen


@pytest.mark.parametrize("top_k", [1, 2])
def test_weights_of_inputs_are_factors_of_what_goes_into_experts(top_k: int) -> None:
    spec = MODELS["mixtral"].model_copy(
        update={"top_k": top_k, "router": Routing(score="sigmoid", normalised=False, weighs_inputs=True)}
    )
    layer = MixtureOfExperts(spec)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(parameter.numel()))
    x = leaf(2, 5, spec.hidden, seed=1)
    weights, chosen = layer.router(x)
    experts = layer.experts
    assert experts.gate is not None
    expected = torch.zeros_like(x)
    for choice in range(top_k):
        given = x * weights[..., choice, None]
        up, gate, down = (one[chosen[..., choice]] for one in (experts.up, experts.gate, experts.down))
        inner = F.silu((gate @ given.unsqueeze(-1)).squeeze(-1)) * (up @ given.unsqueeze(-1)).squeeze(-1)
        expected = expected + (down @ inner.unsqueeze(-1)).squeeze(-1)
    assert_same_gradients(layer(x), expected, [x, *layer.parameters()], seed=3)


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0, 2.5])
@pytest.mark.parametrize("normalised", [True, False])
def test_weights_are_scaled_whatever_the_factor(scale: float, normalised: bool) -> None:
    x = leaf(2, 16, 64, seed=7)
    _, plain, chosen = routed(spec_with(score="sigmoid", normalised=normalised), x)
    _, weights, alike = routed(spec_with(score="sigmoid", normalised=normalised, scale=scale), x)
    assert torch.equal(chosen, alike)
    torch.testing.assert_close(weights, scale * plain)

"""Matrices in 4 bits: what their codes stand for, and products with them."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor

from costmodels.layers.quantised import BLOCK, GROUP, matrix_bytes
from runtime.model.nf4 import LEVELS, NF4Weight, nf4_linear, rounded


def drawn(outputs: int, inputs: int, seed: int, spread: float = 1.0) -> Tensor:
    """Weights whose rows differ in size by factors up to exp(`spread`)."""
    random = torch.Generator().manual_seed(seed)
    sizes = torch.exp(spread * torch.rand(outputs, 1, generator=random))
    return torch.randn(outputs, inputs, generator=random) * sizes


def stored(weight: Tensor, dtype: torch.dtype = torch.float32) -> NF4Weight:
    outputs, inputs = weight.shape
    result = NF4Weight(outputs, inputs, dtype)
    result.fill(weight)
    return result


def test_levels_are_quantiles_of_a_normal_distribution() -> None:
    # QLoRA's code: 8 quantiles up to 1 - d, 7 below zero, and zero, all over the largest of them.
    last = (1 - 1 / 32 + 1 - 1 / 30) / 2
    normal = torch.distributions.Normal(0.0, 1.0)
    above = normal.icdf(torch.linspace(last, 0.5, 9, dtype=torch.float64)[:-1])
    below = -normal.icdf(torch.linspace(last, 0.5, 8, dtype=torch.float64)[:-1])
    every = torch.cat((above, below, torch.zeros(1, dtype=torch.float64))).sort().values
    torch.testing.assert_close(torch.tensor(LEVELS).double(), every / every.max(), rtol=0, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    outputs=st.integers(1, 600),
    inputs=st.integers(1, 200),
    seed=st.integers(0, 99),
    spread=st.sampled_from([0.0, 1.0, 4.0]),
)
def test_each_weight_becomes_the_nearest_level_of_its_scale(
    outputs: int, inputs: int, seed: int, spread: float
) -> None:
    weight = drawn(outputs, inputs, seed, spread)
    found, levels = stored(weight), torch.tensor(LEVELS)
    dense = found.dense()
    padded = F.pad(weight, (0, -inputs % BLOCK)).view(outputs, -1, BLOCK)
    largest = padded.abs().amax(-1)
    scales = found._own_scales()
    group_top = torch.stack([rows.amax(0) for rows in largest.split(GROUP)])
    group_top = group_top.repeat_interleave(GROUP, 0)[:outputs]
    assert bool(((scales - largest).abs() <= group_top / 255 / 2 * 1.001).all())
    every = scales.repeat_interleave(BLOCK, 1)[:, :inputs]
    distances = (weight.unsqueeze(-1) - every.unsqueeze(-1) * levels).abs()
    error = (weight - dense).abs()
    torch.testing.assert_close(error, distances.amin(-1), rtol=1e-5, atol=1e-6 * float(weight.abs().max()))
    # Half of the widest gap, or what a scale rounded down leaves of the largest weight.
    gap = (levels[1:] - levels[:-1]).max() / 2
    left = (largest - scales).clamp(min=0).repeat_interleave(BLOCK, 1)[:, :inputs]
    assert bool((error <= gap * every + left + 1e-6).all())


def test_what_is_stored_again_stays_and_zeros_are_zeros() -> None:
    # With the largest weight of all in every block, scales are exact.
    weight = drawn(70, 128, 3).clamp(-1, 1)
    weight[:, ::BLOCK] = 1.0
    once = rounded(weight)
    assert torch.equal(rounded(once), once)
    weight[5:9] = 0.0
    assert bool((rounded(weight)[5:9] == 0).all())
    assert not rounded(torch.zeros(3, 64)).any()


def test_bytes_are_those_that_are_counted_and_as_published() -> None:
    def held(outputs: int, inputs: int) -> int:
        weight = NF4Weight(outputs, inputs, torch.bfloat16)
        return sum(one.nbytes for one in (weight.codes, weight.scales, weight.factors))

    for outputs, inputs in ((14336, 4096), (1000, 100), (3, 64)):
        assert held(outputs, inputs) == matrix_bytes(inputs, outputs)
    # QLoRA, section 3: 8/64 + 32/(64 x 256) = 0.127 bits of scales for each weight.
    assert 8 * held(14336, 4096) / (14336 * 4096) == pytest.approx(4.127, abs=5e-4)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_and_gradients_are_those_of_the_dense_matrix(dtype: torch.dtype, compiled: bool) -> None:
    weight, bias = stored(drawn(96, 100, 1), dtype), torch.randn(96).to(dtype)
    x, dense = torch.randn(5, 3, 100).to(dtype).requires_grad_(), weight.dense()
    product = nf4_linear
    if compiled:
        product = torch.compile(nf4_linear, backend="aot_eager_decomp_partition", fullgraph=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        result = product(x, weight, bias)
    torch.testing.assert_close(result, F.linear(x, dense, bias))
    gradient = torch.randn_like(result)
    (found,) = torch.autograd.grad(result, x, gradient)
    torch.testing.assert_close(found, gradient @ dense)
    # Nothing as large as the matrix waits for backward.
    assert all(one.numel() < dense.numel() for one in kept)


@pytest.mark.parametrize(("first", "outputs"), [(0, 256), (256, 200), (100, 300), (300, 220), (511, 9)])
def test_rows_of_a_rank_are_those_of_the_whole_matrix(first: int, outputs: int) -> None:
    weight = drawn(520, 96, 5, spread=4.0)
    whole, part = stored(weight), NF4Weight(outputs, 96, torch.float32, first_row=first)
    groups = slice(first // GROUP, -(-(first + outputs) // GROUP))

    def largest(factors: Tensor) -> Tensor:
        assert bool((factors <= whole.factors[groups]).all())
        return whole.factors[groups]

    part.fill(weight[first : first + outputs], largest)
    assert torch.equal(part.dense(), whole.dense()[first : first + outputs])

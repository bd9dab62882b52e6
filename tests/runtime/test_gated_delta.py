"""The gated delta rule, in chunks, against its recurrence token by token."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from runtime.model import flash_linear_attention
from runtime.model.delta_rule import delta_rule, scan, scan_backward, unit_length
from runtime.model.gated_delta import DeltaCore

SEQ, CHUNK = 11, 4
"""Two whole chunks, whose states go on to the next one, and a part of a third."""


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Values that queries read of S_t = a_t S_{t-1} (1 - b_t k_t k_t^T) + b_t k_t v_t^T, and the last S_t.

    The recurrence is equation 10 of arXiv:2412.06464.
    """
    repeats = v.shape[1] // q.shape[1]
    q, k = (unit_length(x).repeat_interleave(repeats, dim=1) for x in (q, k))
    read = []
    for t in range(q.shape[2]):
        key, value, b = k[:, :, t], v[:, :, t], strength[:, :, t, None]
        state = state * decay[:, :, t, None, None].exp()
        held = (state * key.unsqueeze(-1)).sum(-2)
        state = state + key.unsqueeze(-1) * (b * (value - held)).unsqueeze(-2)
        read.append((state * q[:, :, t].unsqueeze(-1)).sum(-2) * q.shape[-1] ** -0.5)
    return torch.stack(read, dim=2), state


Given = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def drawn(keys: int, repeats: int, head: int, value: int, seq: int = SEQ) -> Given:
    """Queries, keys, values, log decays and strengths of two sequences, fp64; all need gradients."""
    torch.manual_seed(repeats)
    heads = keys * repeats
    q, k = (torch.randn(2, keys, seq, head, dtype=torch.float64) for _ in range(2))
    v = torch.randn(2, heads, seq, value, dtype=torch.float64)
    decay, strength = (torch.rand(2, heads, seq, dtype=torch.float64) for _ in range(2))
    given = q, k, v, -decay, strength
    for x in given:
        x.requires_grad_()
    return given


@pytest.mark.parametrize("repeats", [1, 2])
def test_chunks_read_and_learn_what_the_recurrence_does(repeats: int) -> None:
    keys, head, value = 2, 4, 3
    given = drawn(keys, repeats, head, value)
    state = torch.randn(2, keys * repeats, head, value, dtype=torch.float64)
    inputs = (*given, state.requires_grad_())
    weights = torch.randn_like(given[2]), torch.randn_like(state)
    found, expected = delta_rule(*given, CHUNK, state), recurrence(*given, state)
    gradients = [torch.autograd.grad(results, inputs, weights) for results in (found, expected)]
    for one, other in zip((*found, *gradients[0]), (*expected, *gradients[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_equal_keys_that_overwrite_each_other_are_exact() -> None:
    """Powers of the triangle would be as large as binomial coefficients; solving it has no such terms."""
    q, k, v, decay, strength = (x.float() for x in drawn(1, 1, 8, 4, seq=64))
    alike = k[:, :, :1].expand_as(k)
    found, _ = delta_rule(q, alike, v, 0 * decay, torch.ones_like(strength), 64)
    q, alike, v = (x.double() for x in (q, alike, v))
    state, ones = torch.zeros(2, 1, 8, 4, dtype=torch.float64), torch.ones_like(strength).double()
    expected, _ = recurrence(q, alike, v, 0 * ones, ones, state)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-4)


def operators(seq: int) -> int:
    """Operators of the graph of the rule and its gradients."""

    def both(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor) -> tuple[Tensor, ...]:
        read, _ = delta_rule(q, k, v, decay, strength, CHUNK)
        return torch.autograd.grad(read.sum(), (q, k, v, decay, strength))

    graph = make_fx(both)(*drawn(2, 2, 4, 3, seq)).graph
    return sum(node.op == "call_function" for node in graph.nodes)


def test_graphs_do_not_grow_with_the_sequence() -> None:
    assert operators(2 * CHUNK) == operators(6 * CHUNK)


def test_operators_keep_the_rules_of_compilers() -> None:
    """Shapes and strides of tensors without memory are those of real ones, and nothing given is written."""
    torch.manual_seed(0)
    values, reads, left = torch.randn(3, 2, 4, 5), torch.randn(3, 2, 4, 6), torch.randn(3, 2, 4, 6)
    kept, state = torch.rand(3, 2, 1, 1), torch.randn(2, 6, 5)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(scan, (values, reads, left, kept, state), test_utils=checks)
    states = torch.randn(3, 2, 6, 5)
    torch.library.opcheck(scan_backward, (values, states, state, reads, left, kept), test_utils=checks)


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package of the name whose kernel is the recurrence, on a machine that has a CUDA device."""
    package, operators = ModuleType("fla"), ModuleType("fla.ops")
    module: Any = ModuleType("fla.ops.gated_delta_rule")

    def chunk_gated_delta_rule(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
    ) -> tuple[Tensor, None]:
        assert use_qk_l2norm_in_kernel and not output_final_state and initial_state is None
        assert q.shape[2] == v.shape[2], "a head of keys for each of values"
        state = v.new_zeros(v.shape[0], v.shape[2], q.shape[-1], v.shape[-1])
        q, k, v, g, beta = (x.transpose(1, 2) for x in (q, k, v, g, beta))
        return recurrence(q, k, v, g, beta, state)[0].transpose(1, 2), None

    module.chunk_gated_delta_rule = chunk_gated_delta_rule
    for one in (package, operators, module):
        monkeypatch.setitem(sys.modules, one.__name__, one)
    monkeypatch.setattr(flash_linear_attention, "find_spec", lambda name: package)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    flash_linear_attention.chunked_kernel.cache_clear()
    yield module
    flash_linear_attention.chunked_kernel.cache_clear()


def test_kernels_of_fla_get_what_the_rule_gets(fla: ModuleType) -> None:
    inputs = drawn(2, 2, 4, 3)
    found, (expected, _) = flash_linear_attention.flash_delta_rule(*inputs), delta_rule(*inputs, CHUNK)
    weights = torch.randn_like(expected)
    gradients = [torch.autograd.grad(result, inputs, weights) for result in (found, expected)]
    for one, other in zip((found, *gradients[0]), (expected, *gradients[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    assert not flash_linear_attention.takes(inputs[2]), "they are of CUDA devices alone"


def test_compilers_stop_for_kernels_of_fla_alone(fla: ModuleType) -> None:
    def steps() -> bool:
        return DeltaCore(CHUNK).steps

    assert steps()
    fla.chunk_gated_delta_rule = lambda q, k, v, g, beta, head_first=True: None  # type: ignore[attr-defined]
    flash_linear_attention.chunked_kernel.cache_clear()
    assert not steps(), "a version with other parameters is left alone"
    flash_linear_attention.chunked_kernel.cache_clear()
    delattr(fla, "chunk_gated_delta_rule")
    assert not steps()

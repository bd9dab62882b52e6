"""Attention within a reach and with sinks: the softmax written out."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.model import capped_attention
from runtime.model.attention_kernels import equal_heads_attention
from runtime.model.fused_attention import _Reaching, fused_backward, fused_forward, reaching_attention
from runtime.model.reach import Reach
from runtime.parallel.documents import document_mask

KEYS = 20


def written_out(
    q: Tensor, k: Tensor, v: Tensor, reach: Reach, sinks: Tensor | None, starts: list[int]
) -> Tensor:
    """One softmax over the scores that the reach leaves within the last document of each row, and sinks."""
    repeats, tokens = q.shape[1] // k.shape[1], q.shape[2]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    scores = (scores / reach.softcap).tanh() * reach.softcap if reach.softcap else scores
    for row, begin in enumerate(starts):
        for at in range(tokens):
            own = KEYS - tokens + at
            start = begin if own >= begin else 0
            first = max(start, own - reach.window + 1) if reach.window else start
            first = start + (own - start) // reach.chunk * reach.chunk if reach.chunk else first
            scores[row, :, at, :first] = -torch.inf
            scores[row, :, at, own + 1 :] = -torch.inf
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), dim=-1)
    return scores.softmax(-1)[..., :KEYS] @ v


REACHES = [Reach(), Reach(5), Reach(0, 7), Reach(0, 5), Reach(50)]
CAPPED = [reach._replace(softcap=1.5) for reach in REACHES]


@pytest.mark.parametrize(
    ("reach", "has_sinks"),
    [
        *((reach, sinks) for reach in REACHES for sinks in (False, True)),
        *((reach, False) for reach in CAPPED),
    ],
)
@pytest.mark.parametrize("tokens", [KEYS, 13])
@pytest.mark.parametrize("has_mask", [False, True])
def test_outputs_and_gradients_are_those_of_one_softmax(
    reach: Reach, tokens: int, has_sinks: bool, has_mask: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Queries in several blocks, the last one not full.
    monkeypatch.setattr(capped_attention, "BLOCK", 8)
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, tokens, 8), (2, 2, KEYS, 8), (2, 2, KEYS, 8), (4,)
    leaves = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    leaves = leaves if has_sinks else leaves[:3]
    q, k, v = leaves[:3]
    sinks = leaves[3] if has_sinks else None
    starts, mask = [0, 0], None
    if has_mask:
        # A document begins at the tenth token of the second row.
        starts = [0, 9]
        at_BS = torch.arange(KEYS).expand(2, -1)
        starts_BS = torch.where(at_BS >= torch.tensor(starts)[:, None], torch.tensor(starts)[:, None], 0)
        mask = document_mask(starts_BS, torch.arange(KEYS - tokens, KEYS), KEYS, q.dtype, reach)
    found = reaching_attention(q, k, v, reach, sinks, mask)
    expected = written_out(q, k, v, reach, sinks, starts)
    assert torch.allclose(found, expected, atol=1e-5)
    pull = torch.randn(found.shape, generator=generator)
    for one, other in zip(
        torch.autograd.grad(found, leaves, pull), torch.autograd.grad(expected, leaves, pull), strict=True
    ):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize(("head", "value"), [(8, 12), (12, 8)])
def test_heads_of_two_sizes_attend_by_the_scores_of_their_queries(head: int, value: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, KEYS, size, generator=generator) for size in (head, head, value))
    attend = partial(scaled_dot_product_attention, is_causal=True)
    found = equal_heads_attention(attend, q, k, v)
    assert torch.allclose(found, written_out(q, k, v, Reach(), None, [0, 0]), atol=1e-5)


class _Flash(TorchDispatchMode):
    """The kernels of FlashAttention for windows, which CPUs lack, as its documentation has them.

    The query i of T sees the keys from i + P - T - left to i + P - T + right of P.
    """

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if operation not in (aten._flash_attention_forward.default, aten._flash_attention_backward.default):
            return operation(*args, **(kwargs or {}))
        backward = operation is aten._flash_attention_backward.default
        q, k, v = (x.transpose(1, 2) for x in args[backward : backward + 3])
        shape, heads = k.shape, q.shape[1]
        k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
        apart = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None] - (k.shape[2] - q.shape[2])
        hidden = (apart < -kwargs["window_size_left"]) | (apart > kwargs["window_size_right"])
        scores = (q @ k.mT * kwargs["scale"]).masked_fill(hidden, -torch.inf)
        shares = scores.softmax(-1)
        if not backward:
            return (shares @ v).transpose(1, 2), scores.logsumexp(-1), *torch.zeros(3, 1).unbind()
        grad = args[0].transpose(1, 2)
        to_shares = grad @ v.mT
        to_scores = shares * (to_shares - (to_shares * shares).sum(-1, keepdim=True)) * kwargs["scale"]
        to_k, to_v = (x.view(*shape[:2], -1, *shape[2:]).sum(2) for x in (to_scores.mT @ q, shares.mT @ grad))
        return tuple(x.transpose(1, 2) for x in (to_scores @ k, to_k, to_v))


@pytest.mark.parametrize(("window", "tokens"), [(1, KEYS), (5, KEYS), (5, 8)])
def test_the_flash_kernel_is_told_of_windows(window: int, tokens: int) -> None:
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    q, k, v = draw(2, 4, tokens, 8), draw(2, 2, KEYS, 8), draw(2, 2, KEYS, 8)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    own_q, own_k, own_v = leaves
    expected = written_out(own_q, own_k, own_v, Reach(window), None, [0, 0])
    pull = draw(expected.shape)
    with _Flash():
        out, lse, *state = fused_forward(q, k, v, True, 8**-0.5, window=window)
        found = fused_backward(
            grad_out=pull,
            query=q,
            key=k,
            value=v,
            out=out,
            logsumexp=lse,
            is_causal=True,
            scale=8**-0.5,
            state=state,
            window=window,
        )
    torch.testing.assert_close(out, expected)
    for one, other in zip(found, torch.autograd.grad(expected, leaves, pull), strict=True):
        torch.testing.assert_close(one, other)


class _Windows(TorchDispatchMode):
    """Notes how far the flash kernel may look back, in every call of it; None where it is not told."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int | None] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "flash_attention" in function.__name__:
            self.seen.append((kwargs or {}).get("window_size_left"))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("reach", "before"),
    # A window counts the token itself, the kernel those before it.
    [(Reach(5), [4]), (Reach(1), [0]), (Reach(), [None]), (Reach(50), [None]), (Reach(0, 7), [])],
)
@pytest.mark.parametrize("tokens", [KEYS, 13])
def test_the_flash_kernel_is_told_how_far_a_window_looks_back(
    reach: Reach, before: list[int | None], tokens: int
) -> None:
    with FakeTensorMode(), _Windows() as windows, torch.no_grad():
        q, k, v = (
            torch.empty(2, heads, count, 8, dtype=torch.bfloat16, device="cuda")
            for heads, count in ((4, tokens), (2, KEYS), (2, KEYS))
        )
        sinks = torch.empty(4, device="cuda")
        node: Any = SimpleNamespace()
        node.save_for_backward = lambda *saved: setattr(node, "saved_tensors", saved)
        out = _Reaching.forward(node, q, k, v, sinks, reach, None, 1.0)
        assert windows.seen == before
        gradients = _Reaching.backward(node, torch.empty_like(out))
        assert windows.seen == 2 * before
        assert [one.shape for one in gradients[:4] if one is not None] == [
            *(one.shape for one in (q, k, v, sinks)),
        ]

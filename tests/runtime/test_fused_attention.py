"""Attention within a reach and with sinks: the softmax written out."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from runtime.model import capped_attention
from runtime.model.attention_kernels import equal_heads_attention
from runtime.model.fused_attention import reaching_attention
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

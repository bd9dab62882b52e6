"""Attention within a reach and with sinks: the softmax written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from runtime.model import capped_attention
from runtime.model.fused_attention import reaching_attention
from runtime.model.reach import Reach

KEYS = 20


def written_out(q: Tensor, k: Tensor, v: Tensor, reach: Reach, sinks: Tensor | None, mask: Tensor) -> Tensor:
    """One softmax over the scores that the mask and the reach leave, and the sink."""
    repeats, tokens = q.shape[1] // k.shape[1], q.shape[2]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    scores = (scores / reach.softcap).tanh() * reach.softcap + mask if reach.softcap else scores + mask
    for at in range(tokens):
        own = KEYS - tokens + at
        first = max(0, own - reach.window + 1) if reach.window else 0
        first = own // reach.chunk * reach.chunk if reach.chunk else first
        scores[:, :, at, :first] = -torch.inf
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
    later = torch.ones(tokens, KEYS, dtype=torch.bool).triu(KEYS - tokens + 1)
    mask = torch.zeros(2, 1, tokens, KEYS).masked_fill(later, -torch.inf)
    if has_mask:
        # A document begins at the fourth token of the second row.
        mask[1, :, max(0, 3 - KEYS + tokens) :, :3] = -torch.inf
    found = reaching_attention(q, k, v, reach, sinks, mask if has_mask else None)
    expected = written_out(q, k, v, reach, sinks, mask)
    assert torch.allclose(found, expected, atol=1e-5)
    pull = torch.randn(found.shape, generator=generator)
    for one, other in zip(
        torch.autograd.grad(found, leaves, pull), torch.autograd.grad(expected, leaves, pull), strict=True
    ):
        assert torch.allclose(one, other, atol=1e-5)

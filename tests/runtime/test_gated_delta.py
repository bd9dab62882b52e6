"""The gated delta rule, in chunks, against its recurrence token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from runtime.model.gated_delta import delta_rule, unit_length

SEQ, CHUNK = 11, 4
"""Two whole chunks, whose states go on to the next one, and a part of a third."""


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """What queries read of S_t = a_t S_{t-1} (1 - b_t k_t k_t^T) + b_t k_t v_t^T, and the last S_t
    (arXiv:2412.06464, equation 10)."""
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


@pytest.mark.parametrize("repeats", [1, 2])
def test_chunks_read_and_learn_what_the_recurrence_does(repeats: int) -> None:
    torch.manual_seed(repeats)
    keys, head, value = 2, 4, 3
    q, k = (torch.randn(2, keys, SEQ, head) for _ in range(2))
    v, state = torch.randn(2, keys * repeats, SEQ, value), torch.randn(2, keys * repeats, head, value)
    decay, strength = -torch.rand(2, keys * repeats, SEQ), torch.rand(2, keys * repeats, SEQ)
    inputs = [x.requires_grad_() for x in (q, k, v, decay, strength, state)]
    weights = torch.randn(2, keys * repeats, SEQ, value), torch.randn_like(state)
    found, expected = delta_rule(q, k, v, decay, strength, CHUNK, state), recurrence(*inputs)
    gradients = [torch.autograd.grad(results, inputs, weights) for results in (found, expected)]
    for one, other in zip((*found, *gradients[0]), (*expected, *gradients[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)

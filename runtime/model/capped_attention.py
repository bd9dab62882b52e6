"""Attention with capped scores (Gemma 2, arXiv:2408.00118, section 2.4), in blocks of queries.

PyTorch has no kernel for this except compiled ones, so GEMMs are used. Forward keeps queries, keys, values
and results. Backward recomputes the scores of a block, like flash attention (arXiv:2205.14135, section 3.1).
Shapes: see `runtime.model`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from costmodels.layers.shapes import QUERY_BLOCK as BLOCK
from runtime.model.reach import Reach


def capped_attention(
    q_BNTH: Tensor, k_BKPH: Tensor, v_BKPH: Tensor, reach: Reach, mask: Tensor | None = None
) -> Tensor:
    """Causal attention with capped scores of the last T of P tokens within their reach.

    Args:
        q_BNTH: [B, N, T, H].
        k_BKPH: [B, K, P, H].
        v_BKPH: the same shape.
        reach: the reach of the layer.
        mask: [B, 1, T, P], added to the scores: 0, or -inf for hidden tokens.

    Returns:
        [B, N, T, H], contiguous by token, as the output matrix reads it.
    """
    result_BNTH: Tensor = _Capped.apply(q_BNTH, k_BKPH, v_BKPH, reach, mask)  # type: ignore[no-untyped-call]
    return result_BNTH


class _Block(NamedTuple):
    """A block of queries, and the keys that any of these queries sees."""

    queries: slice
    keys: slice


def _blocks(reach: Reach, tokens: int, keys: int, is_masked: bool) -> Iterator[_Block]:
    for first in range(0, tokens, BLOCK):
        last = min(first + BLOCK, tokens)
        # Positions in the sequence of the first query, and after the last one.
        start, end = keys - tokens + first, keys - tokens + last
        least = 0
        if is_masked:
            end = keys
        elif reach.window:
            least = max(0, start + 1 - reach.window)
        elif reach.chunk:
            least = start - start % reach.chunk
        yield _Block(slice(first, last), slice(least, end))


def _by_keys(x_BNTH: Tensor, block: _Block, shared: int) -> Tensor:
    """The queries of a block, [B, K, M, H]; M are the queries of all heads that share a key head."""
    batch, _, _, head = x_BNTH.shape
    return x_BNTH[:, :, block.queries].reshape(batch, shared, -1, head)


def _bounded(
    q_BKMH: Tensor, k_BKph: Tensor, hidden: Tensor, softcap: float, scale: float
) -> tuple[Tensor, Tensor]:
    """The probabilities of a block, and its scores divided by the cap, both [B, K, M, p] in fp32."""
    bounded = torch.tanh((q_BKMH @ k_BKph.transpose(2, 3)).float() * (scale / softcap))
    shape = bounded.shape
    scores = (bounded * softcap).view(*shape[:2], -1, hidden.shape[-2], shape[3]) + hidden
    return scores.view(shape).softmax(-1), bounded


class _Inputs(NamedTuple):
    """Queries, keys and values of attention, and the limits on visible tokens."""

    q_BNTH: Tensor
    k_BKPH: Tensor
    v_BKPH: Tensor
    reach: Reach
    mask: Tensor | None

    @property
    def blocks(self) -> Iterator[_Block]:
        """The blocks of queries."""
        tokens, keys = self.q_BNTH.shape[2], self.k_BKPH.shape[2]
        return _blocks(self.reach, tokens, keys, self.mask is not None)

    def probabilities(self, q_BKMH: Tensor, block: _Block) -> tuple[Tensor, Tensor]:
        """The probabilities and capped scores of a block (`_bounded`)."""
        hidden, scale = self._hidden(block), q_BKMH.shape[-1] ** -0.5
        return _bounded(q_BKMH, self.k_BKPH[:, :, block.keys], hidden, self.reach.softcap, scale)

    def _hidden(self, block: _Block) -> Tensor:
        """The mask that is added to the scores of a block: [t, p], or [B, 1, 1, t, p] of a mask."""
        if self.mask is not None:
            return self.mask[:, :, block.queries, block.keys].unsqueeze(1)
        tokens, keys = self.q_BNTH.shape[2], self.k_BKPH.shape[2]
        first = keys - tokens
        at_t = torch.arange(
            first + block.queries.start, first + block.queries.stop, device=self.q_BNTH.device
        )
        return self.reach.mask(at_t, keys, torch.float32)[:, block.keys]


class _Capped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BNTH: Tensor, k_BKPH: Tensor, v_BKPH: Tensor, reach: Reach, mask: Tensor | None
    ) -> Tensor:
        given = _Inputs(q_BNTH, k_BKPH, v_BKPH, reach, mask)
        out_BNTH = torch.empty_like(q_BNTH.transpose(1, 2), memory_format=torch.contiguous_format)
        out_BNTH = out_BNTH.transpose(1, 2)
        for block in given.blocks:
            _attend(given, block, out_BNTH)
        ctx.save_for_backward(q_BNTH, k_BKPH, v_BKPH, out_BNTH, mask)
        ctx.reach = reach
        return out_BNTH

    @staticmethod
    def backward(ctx: Any, grad_BNTH: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q_BNTH, k_BKPH, v_BKPH, out_BNTH, mask = ctx.saved_tensors
        given = _Inputs(q_BNTH, k_BKPH, v_BKPH, ctx.reach, mask)
        to_q = torch.empty_like(q_BNTH)
        to_k, to_v = (torch.zeros_like(x, dtype=torch.float32) for x in (k_BKPH, v_BKPH))
        for block in given.blocks:
            _add_gradients(given, block, out_BNTH, grad_BNTH, to_q, to_k, to_v)
        return to_q, to_k.to(k_BKPH.dtype), to_v.to(v_BKPH.dtype), None, None


# Functions of their own: the scores of a block end before those of the next one are made.
def _attend(given: _Inputs, block: _Block, out_BNTH: Tensor) -> None:
    """Write the attention output of a block."""
    shares, _ = given.probabilities(_by_keys(given.q_BNTH, block, given.k_BKPH.shape[1]), block)
    own = out_BNTH[:, :, block.queries]
    own.copy_((shares.to(given.v_BKPH.dtype) @ given.v_BKPH[:, :, block.keys]).view(own.shape))


def _add_gradients(
    given: _Inputs,
    block: _Block,
    out_BNTH: Tensor,
    grad_BNTH: Tensor,
    to_q: Tensor,
    to_k: Tensor,
    to_v: Tensor,
) -> None:
    """Write the gradient of a block's queries, and add to the gradients of all keys and values."""
    shared = given.k_BKPH.shape[1]
    q_BKMH, grad_BKMH, out_BKMH = (_by_keys(x, block, shared) for x in (given.q_BNTH, grad_BNTH, out_BNTH))
    k_here, v_here = given.k_BKPH[:, :, block.keys], given.v_BKPH[:, :, block.keys]
    shares, bounded = given.probabilities(q_BKMH, block)
    to_v[:, :, block.keys].add_(shares.to(grad_BKMH.dtype).transpose(2, 3) @ grad_BKMH)
    taken = (grad_BKMH.float() * out_BKMH.float()).sum(-1, keepdim=True)
    to_scores = (grad_BKMH @ v_here.transpose(2, 3)).float()
    to_scores = shares * (to_scores - taken) * (1.0 - bounded.square()) * q_BKMH.shape[-1] ** -0.5
    to_scores = to_scores.to(q_BKMH.dtype)
    own = to_q[:, :, block.queries]
    own.copy_((to_scores @ k_here).view(own.shape))
    to_k[:, :, block.keys].add_(to_scores.transpose(2, 3) @ q_BKMH)

"""Tensors that say they are of a CUDA device and have their numbers in memory, so that what runs on such
devices alone can be compared with what runs elsewhere.

Kernels that CPUs lack are written out, and refuse what the real ones do. No gradient flows: backward of an
autograd Function is called by its name (`Called`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

aten = torch.ops.aten

PADDED_TOKENS = 32
"""The memory-efficient kernel's log-sum-exps have a multiple of so many tokens."""


class StandIn(Tensor):
    """A tensor of `cuda` whose memory is the host's."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> StandIn:
        made: StandIn = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device("cuda"),
        )
        made.held = held.detach()
        return made

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in SAYS:
            return super().__torch_function__(function, types, args, kwargs or {})
        run = KERNELS.get(function, function)
        return tree_map(on_cuda, run(*tree_map(held, args), **tree_map(held, kwargs or {})))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{operation}: a call that PyTorch's functions do not see")


def held(x: Any) -> Any:
    """The stand-in of a tensor, or of a device, on the host; all else as it is."""
    if isinstance(x, torch.device):
        return torch.device("cpu")
    return x.held if isinstance(x, StandIn) else x


def on_cuda(x: Any) -> Any:
    """A tensor of the stand-in for a CUDA device; all else as it is."""
    return StandIn(x) if isinstance(x, Tensor) and not isinstance(x, StandIn) else x


@contextmanager
def made_on_host() -> Iterator[None]:
    """Let new tensors of the device be made on the host: they meet the others in operations."""

    def made(function: Callable[..., Tensor]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            on_host = function(*args, **tree_map(held, kwargs))
            return on_cuda(on_host) if kwargs.get("device") == torch.device("cuda") else on_host

        return make

    with ExitStack() as stack:
        for name in ("arange", "ones", "zeros", "full", "empty"):
            stack.enter_context(patch.object(torch, name, made(getattr(torch, name))))
        yield


class Called:
    """The context that autograd hands from a Function's forward to its backward."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        self.function, self.needs_input_grad = function, (True,) * 8
        self.saved_tensors: tuple[Tensor | None, ...] = ()

    def set_materialize_grads(self, value: bool) -> None:
        """All gradients are given."""

    def save_for_backward(self, *saved: Tensor | None) -> None:
        self.saved_tensors = saved

    def forward(self, *args: Any) -> Any:
        """Forward, as `apply` calls it."""
        return self.function.forward(self, *args)

    def backward(self, *grads: Any) -> tuple[Any, ...]:
        """The gradients of the arguments of `forward`."""
        return tuple(self.function.backward(self, *grads))


@pytest.fixture
def cuda() -> Iterator[None]:
    """The stand-in for a CUDA device."""

    # It tells no subclass of tensors that it is called.
    def scaled_mm(*args: Any, **kwargs: Any) -> Any:
        return StandIn.__torch_function__(_blockwise_product, (), args, kwargs)

    with (
        torch.no_grad(),
        made_on_host(),
        patch.object(F, "scaled_mm", scaled_mm),
        patch.object(torch.cuda, "is_available", lambda: False),
    ):
        yield


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Tensor:
    """PyTorch's function, which would hold all scores of grouped queries and a mask."""
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert not (enable_gqa and attn_mask is not None), "no kernel takes grouped queries with a mask"
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, enable_gqa=enable_gqa
    )


def _scores(q: Tensor, k: Tensor, hidden: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Scores in fp64; keys are repeated for each of the queries that share them."""
    scores = q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
    return (scores if bias is None else scores + bias.double()).masked_fill(hidden, -torch.inf)


def _apart(q: Tensor, k: Tensor, last: bool) -> Tensor:
    """Positions of keys behind queries, [T, P]; `last`: queries are those of the last tokens."""
    tokens, keys = q.shape[2], k.shape[2]
    return torch.arange(keys) - torch.arange(tokens)[:, None] - (keys - tokens) * last


def _forward(q: Tensor, k: Tensor, v: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    wide_v = v.double().repeat_interleave(q.shape[1] // v.shape[1], 1)
    return (scores.softmax(-1) @ wide_v).to(q.dtype), scores.logsumexp(-1).float()


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients as kernels make them, from the result and the log-sum-exp that they are given."""
    times = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.double().repeat_interleave(times, 1) for x in (k, v))
    shares = (scores - lse.double().unsqueeze(-1)).exp()
    taken = (grad.double() * out.double()).sum(-1, keepdim=True)
    to_scores = shares * (grad.double() @ wide_v.mT - taken) * scale
    to_k, to_v = to_scores.mT @ q.double(), shares.mT @ grad.double()
    to_k, to_v = (x.unflatten(1, (k.shape[1], times)).sum(2) for x in (to_k, to_v))
    return (to_scores @ wide_k).to(q.dtype), to_k.to(k.dtype), to_v.to(v.dtype)


def _check_flash(*heads: Tensor) -> None:
    assert all(x.shape[-1] == heads[0].shape[-1] and x.shape[-1] % 8 == 0 for x in heads)


def _flash(q: Tensor, k: Tensor, v: Tensor, dropout: float, is_causal: bool, scale: float) -> tuple[Any, ...]:
    _check_flash(q, k, v)
    assert not dropout
    scores = _scores(q, k, (_apart(q, k, last=True) > 0) & is_causal, None, scale)
    return *_forward(q, k, v, scores), None, None, q.shape[2], k.shape[2], *torch.zeros(3, 1).unbind()


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, scale: float
) -> tuple[Tensor, ...]:
    _check_flash(grad, q, k, v, out)
    sequences, lengths, (dropout, is_causal) = rest[:2], rest[2:4], rest[4:6]
    assert sequences == (None, None) and lengths == (q.shape[2], k.shape[2]) and not dropout
    assert len(rest) == 8, "the state of random numbers comes last"
    scores = _scores(q, k, (_apart(q, k, last=True) > 0) & is_causal, None, scale)
    return _backward(grad, q, k, v, out, lse, scores, scale)


def _window(q: Tensor, k: Tensor, left: int, right: int) -> Tensor:
    apart = _apart(q, k, last=True)
    return (apart < -left) | (apart > right)


def _flash_window(
    q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float, window_size_left: int, window_size_right: int
) -> tuple[Any, ...]:
    """Tokens before heads."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    _check_flash(q, k, v)
    assert rest == (None, None, q.shape[2], k.shape[2], 0.0, True, False)
    scores = _scores(q, k, _window(q, k, window_size_left, window_size_right), None, scale)
    out, lse = _forward(q, k, v, scores)
    return out.transpose(1, 2), lse, *torch.zeros(3, 1).unbind()


def _flash_window_backward(
    *given: Any, scale: float, window_size_left: int, window_size_right: int
) -> tuple[Tensor, ...]:
    grad, q, k, v, out = (x.transpose(1, 2) for x in given[:5])
    _check_flash(grad, q, k, v, out)
    assert given[6:12] == (None, None, q.shape[2], k.shape[2], 0.0, True) and len(given) == 14
    scores = _scores(q, k, _window(q, k, window_size_left, window_size_right), None, scale)
    return tuple(x.transpose(1, 2) for x in _backward(grad, q, k, v, out, given[5], scores, scale))


def _check_efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> None:
    assert q.shape[1] == k.shape[1] == v.shape[1], "it takes no grouped queries"
    assert bias is None or bias.shape == (*q.shape[:3], k.shape[2]), "a mask for each head"


def _efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    with_lse: bool,
    dropout: float,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, ...]:
    """The kernel's causal mask is that of the first tokens."""
    _check_efficient(q, k, v, bias)
    assert with_lse and not dropout
    scores = _scores(q, k, (_apart(q, k, last=False) > 0) & is_causal, bias, scale)
    out, lse = _forward(q, k, v, scores)
    filled = F.pad(lse, (0, -q.shape[2] % PADDED_TOKENS), value=torch.nan)
    return out, filled, *torch.zeros(2, 1).unbind()


def _efficient_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    seed: Tensor,
    offset: Tensor,
    dropout: float,
    wanted: list[bool],
    is_causal: bool,
    scale: float,
) -> tuple[Tensor | None, ...]:
    _check_efficient(q, k, v, bias)
    tokens = q.shape[2]
    assert lse.shape[2] == tokens + -tokens % PADDED_TOKENS and not dropout
    assert lse[..., tokens:].isposinf().all(), "tokens that are none have no share"
    scores = _scores(q, k, (_apart(q, k, last=False) > 0) & is_causal, bias, scale)
    gradients = _backward(grad, q, k, v, out, lse[..., :tokens], scores, scale)
    return *(x if asked else None for x, asked in zip(gradients, wanted, strict=False)), None


def _scaled_product(
    left: Tensor,
    right: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """One factor a matrix, which makes 8 bits wide; rows times columns in memory."""
    _check_narrow(left, right)
    assert scale_a.numel() == scale_b.numel() == 1 and scale_a.dtype == scale_b.dtype == torch.float32
    return (left.double() @ right.double() * scale_a * scale_b).to(out_dtype)


def _check_narrow(left: Tensor, right: Tensor) -> None:
    assert left.is_contiguous() and right.t().is_contiguous(), "rows times columns"
    assert left.shape[1] % 16 == 0 and right.shape[1] % 16 == 0, "sides are multiples of 16"


def _untiled(factors: Tensor, rows: int, blocks: int) -> Tensor:
    """Factors of the elements of a matrix, [rows, blocks], from cuBLAS' tiles of 128 x 4 factors."""
    tiles_across = -(-blocks // 4)
    assert factors.numel() == -(-rows // 128) * tiles_across * 512
    exponents = factors.view(torch.uint8).flatten().tolist()
    found = torch.zeros(rows, blocks, dtype=torch.float64)
    for row in range(rows):
        for block in range(blocks):
            tile, inside = (row // 128) * tiles_across + block // 4, row % 128
            place = tile * 512 + (inside % 32) * 16 + (inside // 32) * 4 + block % 4
            found[row, block] = 2.0 ** (exponents[place] - 127)
    return found


def _blockwise_product(
    left: Tensor,
    right: Tensor,
    left_factors: Tensor,
    left_kind: Any,
    right_factors: Tensor,
    right_kind: Any,
    *,
    output_dtype: torch.dtype,
    **layouts: Any,
) -> Tensor:
    """A factor for each 32 elements of a row of `left`, and of a column of `right`."""
    _check_narrow(left, right)
    assert left_kind == right_kind == F.ScalingType.BlockWise1x32
    assert set(layouts.values()) == {F.SwizzleType.SWIZZLE_32_4_4}

    def wide(matrix: Tensor, factors: Tensor) -> Tensor:
        blocks = matrix.double().unflatten(1, (-1, 32))
        return (blocks * _untiled(factors, *blocks.shape[:2]).unsqueeze(-1)).flatten(1)

    return (wide(left, left_factors) @ wide(right.t(), right_factors).t()).to(output_dtype)


SAYS = {Tensor.device.__get__, Tensor.is_cuda.__get__}  # type: ignore[attr-defined]
"""Attributes that the stand-in answers for itself."""

KERNELS: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention: _flash,
    aten._scaled_dot_product_flash_attention_backward: _flash_backward,
    aten._flash_attention_forward: _flash_window,
    aten._flash_attention_backward: _flash_window_backward,
    aten._scaled_dot_product_efficient_attention: _efficient,
    aten._scaled_dot_product_efficient_attention_backward: _efficient_backward,
    torch._scaled_mm: _scaled_product,
    F.scaled_dot_product_attention: _attention,
}
"""Kernels that CPUs lack, or that check less, on the host's tensors."""

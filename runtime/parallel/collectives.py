"""Differentiable collectives; the backward of each is its conjugate.

All ranks of `group` call them in the same order. Sums are made in the dtype of the summed tensor. Results are
ready on the current stream when a function returns. No function has parameters among its arguments, so
schedules can compute input gradients and weight gradients separately.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def copy_to_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`x`, equal on all ranks, for use in different computations on each rank.

    Backward sums the gradients (f of Megatron-LM, arXiv:1909.08053, section 3).
    """
    return _copy(x, 0, group)


def reduce_from_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of `x` over the ranks, written in place, so nothing else may read `x`.

    Backward is the identity (g of Megatron-LM, arXiv:1909.08053, section 3).
    """
    return _reduce(x, 0, group)


def gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The slices `x` of all ranks, concatenated along `dim`.

    Backward sums the gradients and keeps this rank's slice (g of arXiv:2205.05198, section 4.2.2).
    """
    return _gather(x, dim, group)


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's slice along `dim` of the sum of `x` over the ranks; their number divides the dimension.

    Backward gathers the gradients (g-bar of arXiv:2205.05198, section 4.2.2).
    """
    return _reduce_scatter(x, dim, group)


def split_to_ranks(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's slice along `dim` of `x`, which is equal on all ranks; their number divides the dimension.

    Backward gathers the gradients.
    """
    return _split(x, dim, group)


def join_from_ranks(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The slices `x` of all ranks, concatenated along `dim`, for equal use on all ranks.

    Backward keeps this rank's slice of the gradient, which is equal on all ranks.
    """
    return _join_same(x, dim, group)


def exchange_slices(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """On rank i, slice i along the first dimension of every rank's `x`; slices have equal sizes.

    Backward sends the gradients back the same way.
    """
    return _exchange_slices(x, 0, group)


class Exchange:
    """An exchange of rows between ranks of `group`.

    `start` sends rows and `finish` waits for received ones; in backward `finish` sends gradients and `start`
    waits. Work between the two calls overlaps with the exchange.
    """

    def __init__(self, sent: list[int], received: list[int], group: dist.ProcessGroup) -> None:
        """Args: sent, received: numbers of rows to and from each rank of `group`."""
        self.sent, self.received, self.group = sent, received, group
        self.travelling: Tensor | None = None

    def start(self, x: Tensor) -> Tensor:
        """Send the rows of `x` [R, D]; the result has no content and is passed to `finish`."""
        result: Tensor = _Start.apply(x, self)  # type: ignore[no-untyped-call]
        return result

    def finish(self, started: Tensor) -> Tensor:
        """The received rows."""
        result: Tensor = _Finish.apply(started, self)  # type: ignore[no-untyped-call]
        return result

    def whole(self, x: Tensor) -> Tensor:
        """Run `start` and `finish` directly after each other."""
        return self.finish(self.start(x))

    def _send(self, x: Tensor, sent: list[int], received: list[int]) -> None:
        exchange = torch.ops._c10d_functional.all_to_all_single
        self.travelling = exchange(x.contiguous(), received, sent, self.group.group_name)

    def _arrived(self) -> Tensor:
        assert self.travelling is not None
        arrived, self.travelling = _wait(self.travelling), None
        return arrived


Operation = Callable[[Tensor, int, dist.ProcessGroup], Tensor]
"""Maps a tensor, one of its dimensions and the ranks to a tensor."""


def _conjugates(operation: Operation, conjugate: Operation, traced: Operation | None = None) -> Operation:
    """A differentiable `operation` with `conjugate` as its backward.

    Args:
        traced: the same for compilers, of differentiable operators. Compilers of PyTorch 2.11 keep results of
            collectives within autograd functions, even if these are to be computed again.
    """

    class Collective(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
            ctx.dim, ctx.group = dim, group
            return operation(x, dim, group)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
            return conjugate(grad, ctx.dim, ctx.group), None, None

    def collective(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        if traced is not None and torch.compiler.is_compiling():
            return traced(x, dim, group)
        result: Tensor = Collective.apply(x, dim, group)  # type: ignore[no-untyped-call]
        return result

    return collective


def _view(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    # Not the input itself, which an autograd function may not return as its result.
    return x.view_as(x)


def _identity(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return x


def _slice(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    own = x.chunk(group.size(), dim)[group.rank()].contiguous()
    # A tensor of its own: of one with two names, compilers of PyTorch 2.11 lose the gradient.
    return own.view_as(own)


def _sum(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks, in place where the memory allows it."""
    x = x.contiguous()
    if torch.compiler.is_compiling():
        # Compilers trace backward functions on results of forward ones, which nothing may write to. What
        # they make of this sum is in place again.
        return all_reduce(x, "sum", group.group_name)
    dist.all_reduce(x, group=group)
    return x


def _join(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return _along(dim, all_gather(x.contiguous(), group.group_name, group.size()), x, group)


def _traced_join(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    gathered = torch.ops._c10d_functional_autograd.all_gather_into_tensor(
        x.contiguous(), group.size(), group.group_name
    )
    return _along(dim, _wait(gathered), x, group)


def _along(dim: int, gathered: Tensor, x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Slices like `x` of all ranks, one after the other in the first dimension, concatenated along `dim`."""
    return gathered.view(group.size(), *x.shape).movedim(0, dim).flatten(dim, dim + 1)


def _sum_slice(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    ranks = group.size()
    split = x.reshape(*x.shape[:dim], ranks, x.shape[dim] // ranks, *x.shape[dim + 1 :])
    parts = split.movedim(dim, 0).flatten(0, 1).contiguous()
    return sum_parts(parts, group.group_name, ranks)


def _all_to_all(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return all_to_all(x.contiguous(), group.group_name, group.size())


_copy, _reduce = _conjugates(_view, _sum), _conjugates(_sum, _identity)
_gather, _reduce_scatter = _conjugates(_join, _sum_slice, _traced_join), _conjugates(_sum_slice, _join)
_split, _join_same = _conjugates(_slice, _join), _conjugates(_join, _slice)
_exchange_slices = _conjugates(_all_to_all, _all_to_all)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange._send(x, exchange.sent, exchange.received)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.exchange._arrived(), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, started: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange._arrived()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        exchange = ctx.exchange
        exchange._send(grad, exchange.received, exchange.sent)
        return grad.new_empty(0), None


# The operators behind torch.distributed's functional collectives. Their public names change between the
# versions of PyTorch that this runs with; these do not, and torch.compile and fake tensors know them.


def all_gather(x: Tensor, group: str, size: int) -> Tensor:
    """`x` of all `size` ranks of a group (by name), concatenated along the first dimension; without
    gradient."""
    return _wait(torch.ops._c10d_functional.all_gather_into_tensor(x, size, group))


def all_reduce(x: Tensor, operation: str, group: str) -> Tensor:
    """The `operation` ("sum" or "max") of `x` over the ranks of a group, as a new tensor; without
    gradient."""
    return _wait(torch.ops._c10d_functional.all_reduce(x, operation, group))


def sum_parts(x: Tensor, group: str, size: int) -> Tensor:
    """This rank's part along the first dimension of the sum of `x` over the ranks; without gradient."""
    return _wait(torch.ops._c10d_functional.reduce_scatter_tensor(x, "sum", size, group))


def all_to_all(x: Tensor, group: str, size: int) -> Tensor:
    """On rank i, part i along the first dimension of every rank's `x`; without gradient."""
    splits = [x.shape[0] // size] * size
    return _wait(torch.ops._c10d_functional.all_to_all_single(x, splits, splits, group))


def _wait(x: Tensor) -> Tensor:
    done: Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return done

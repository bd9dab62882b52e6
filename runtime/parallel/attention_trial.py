"""A trial of one kernel of causal attention on one device: its results, seconds and bytes.

Shapes: see `runtime.model`.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.model.attention_switches import only
from runtime.parallel.accelerator import is_accelerator, synchronize

BUDGET_S = 0.007
"""Seconds of calls between two readings of the clock, if there are several calls."""

ROUNDS, MOST_CALLS = 3, 10
"""Readings of the clock for each kernel, and most calls of a reading."""

CHECKED_TOKENS = 64
"""Tokens at the begin and the end of a sequence whose results are compared."""

TOLERANCE = 0.02
"""Largest relative error of results in 16 bits, by the L2 norm. Kernels round probabilities to 16 bits: their
errors are below 0.01 in bf16."""


class AttentionCall(NamedTuple):
    """Causal attention of whole sequences, as a layer of a job calls it."""

    batch: int
    heads: int
    kv_heads: int
    seq: int
    head: int
    """Elements of a head of queries and keys."""
    value: int
    """Elements of a head of values."""
    dtype: torch.dtype
    tokens_first: bool = True
    """Heads of a token lie together in memory, as projections make them."""


class Trial(NamedTuple):
    """Seconds and bytes of a kernel's forward and backward."""

    seconds: float
    held: int
    """Bytes that forward leaves for backward, the result included."""
    peak: int
    """Most bytes at one time besides the operands."""


class WrongResult(RuntimeError):
    """A kernel's results differ from attention in fp32."""


class Operands(NamedTuple):
    """Queries, keys, values, and the gradient of the joined heads of the result, [B, S, N H]."""

    q: Tensor
    k: Tensor
    v: Tensor
    pull: Tensor


def operands(call: AttentionCall, device: torch.device) -> Operands:
    """Normal random operands; the generators of the job are left as they are."""
    draw = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=call.dtype, device=device)

    def heads(count: int, size: int) -> Tensor:
        if not call.tokens_first:
            return drawn(call.batch, count, call.seq, size).requires_grad_()
        return drawn(call.batch, call.seq, count, size).transpose(1, 2).requires_grad_()

    q, k = heads(call.heads, call.head), heads(call.kv_heads, call.head)
    v = heads(call.kv_heads, call.value)
    return Operands(q, k, v, drawn(call.batch, call.seq, call.heads * call.value))


def trial(given: Operands, kernel: str) -> Trial:
    """Run, check and time a kernel.

    Raises:
        WrongResult: the results are not those of attention.
        RuntimeError: the kernel does not take the operands.
    """
    with warnings.catch_warnings(), only(kernel), torch.enable_grad():
        warnings.simplefilter("ignore")  # PyTorch's reasons against a kernel.
        run = _Run(given)
        run()  # Kernels are chosen and compiled.
        held, peak = run.measured_bytes()
        check(given, *run.results())
        return Trial(_seconds(run, given.q.device), held, peak)


class _Run:
    """Forward and backward as in a layer, up to the operand of the output matrix."""

    def __init__(self, given: Operands) -> None:
        self.given, self.device = given, given.q.device

    def __call__(self) -> None:
        self.results()

    def forward(self) -> Tensor:
        q, k, v, _ = self.given
        result = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return result.transpose(1, 2).flatten(2)

    def results(self) -> tuple[Tensor, ...]:
        """The joined heads, and gradients of queries, keys and values."""
        out = self.forward()
        return (out.detach(), *torch.autograd.grad(out, self.given[:3], self.given.pull))

    def measured_bytes(self) -> tuple[int, int]:
        """Bytes held between forward and backward, and at the peak; zero on a CPU."""
        if not is_accelerator(self.device):
            return 0, 0
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        out = self.forward()
        held = torch.cuda.memory_allocated(self.device) - before
        torch.autograd.grad(out, self.given[:3], self.given.pull)
        return held, torch.cuda.max_memory_allocated(self.device) - before


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    """Seconds of a call: the least mean of a few readings."""
    first = _reading(run, 1, device)
    if first > BUDGET_S * ROUNDS:
        return first
    calls = max(1, min(MOST_CALLS, int(BUDGET_S / first)))
    return min(_reading(run, calls, device) for _ in range(ROUNDS))


def _reading(run: Callable[[], None], calls: int, device: torch.device) -> float:
    synchronize(device)
    started = time.perf_counter()
    for _ in range(calls):
        run()
    synchronize(device)
    return (time.perf_counter() - started) / calls


def check(given: Operands, out_BSD: Tensor, *gradients: Tensor) -> None:
    """Raise `WrongResult` where results differ from those in fp32.

    All elements must be finite. Compared are, for the first and the last head of keys, the first tokens and
    the last ones, in whose gradients of keys and values no other queries have a part.
    """
    for tensor in (out_BSD, *gradients):
        if not bool(tensor.isfinite().all()):
            raise WrongResult("results that are not finite")
    seq = given.q.shape[2]
    tokens = min(CHECKED_TOKENS, seq)
    for row, head in ((0, 0), (-1, -1)):
        _check_tokens(given, (out_BSD, *gradients), row, head, 0, tokens)
        _check_tokens(given, (out_BSD, *gradients), row, head, seq - tokens, seq)


def _check_tokens(
    given: Operands, results: tuple[Tensor, ...], row: int, head: int, first: int, end: int
) -> None:
    """Compare the results of tokens from `first` to `end` of the queries that share a head of keys."""
    q, k, v, pull = (x.detach()[row] for x in given)
    out, to_q, to_k, to_v = (x[row] for x in results)
    groups = q.shape[0] // k.shape[0]
    sharing = slice(0, groups) if head == 0 else slice(q.shape[0] - groups, q.shape[0])
    by_heads = (first, end, sharing, v.shape[-1])
    leaves = [x.float().requires_grad_() for x in (q[sharing, first:end], k[head, :end], v[head, :end])]
    scores = leaves[0] @ leaves[1].mT * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(first + 1)
    expected = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ leaves[2]
    wanted = torch.autograd.grad(expected, leaves, _joined(pull, *by_heads).float())
    _compare(_joined(out, *by_heads), expected.detach())
    _compare(to_q[sharing, first:end], wanted[0])
    if end == q.shape[1]:
        _compare(to_k[head, first:], wanted[1][first:])
        _compare(to_v[head, first:], wanted[2][first:])


def _joined(x_SD: Tensor, first: int, end: int, heads: slice, size: int) -> Tensor:
    """Heads [N, T, H] of some tokens, of joined ones."""
    return x_SD[first:end].reshape(end - first, -1, size)[:, heads].transpose(0, 1)


def _compare(found: Tensor, expected: Tensor) -> None:
    error = (found.float() - expected).norm() / expected.norm()
    if not float(error) <= TOLERANCE:
        raise WrongResult(f"results with a relative error of {float(error):.2g}")

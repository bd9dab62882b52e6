"""Cross entropy over a padded vocabulary, on one rank and split over several."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from runtime.parallel.loss import cross_entropy_sum
from tests.support.ranks import tensor as work
from tests.support.worker_pool import WorkerPool


def random_logits(*shape: int, vocab: int, seed: int = 0, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    """Logits, the padded ones far above all others, and targets below `vocab`."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(*shape, generator=generator)
    logits[..., vocab:] = 50.0
    return logits, torch.randint(0, vocab, shape[:-1], generator=generator)


def torch_loss(logits: Tensor, targets: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """PyTorch's loss of the entries that exist, and its gradient times three."""
    leaf = logits.float().clone().requires_grad_()
    loss = functional.cross_entropy(leaf[..., :vocab].flatten(0, -2), targets.flatten(), reduction="sum")
    (3 * loss).backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 3),
    seq=st.integers(1, 5),
    vocab=st.integers(1, 40),
    padding=st.integers(0, 20),
    scale=st.sampled_from([0.1, 3.0, 1e3]),
    seed=st.integers(0, 2**16),
)
def test_loss_and_gradient_are_pytorchs_without_the_padding(
    batch: int, seq: int, vocab: int, padding: int, scale: float, seed: int
) -> None:
    logits, targets = random_logits(batch, seq, vocab + padding, vocab=vocab, seed=seed, scale=scale)
    leaf = logits.clone().requires_grad_()
    loss = cross_entropy_sum(leaf, targets, vocab)
    (3 * loss).backward()
    expected, gradient = torch_loss(logits, targets, vocab)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(leaf.grad, gradient, rtol=1e-5, atol=1e-5)
    assert not leaf.grad[..., vocab:].any()  # type: ignore[index]


def test_bf16_logits_lose_nothing_but_the_rounding_of_the_gradient() -> None:
    logits, targets = random_logits(2, 7, 64, vocab=50)
    leaf = logits.bfloat16().requires_grad_()
    loss = cross_entropy_sum(leaf, targets, 50)
    (3 * loss).backward()
    expected, gradient = torch_loss(leaf.detach(), targets, 50)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert leaf.grad is not None and leaf.grad.dtype == torch.bfloat16
    torch.testing.assert_close(leaf.grad.float(), gradient, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(
    ("world_size", "width", "vocab"),
    [(2, 64, 50), (2, 64, 64), (2, 64, 32), (2, 64, 20), (4, 64, 17)],
    ids=["padding on the last rank", "no padding", "one rank all padding", "padding on both", "two empty"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_split_vocabulary_gives_the_loss_of_a_whole_one(
    pool: WorkerPool, world_size: int, width: int, vocab: int, dtype: torch.dtype
) -> None:
    logits, targets = random_logits(2, 5, width, vocab=vocab)
    logits = logits.to(dtype)
    expected, gradient = torch_loss(logits, targets, vocab)
    parts = pool.run(work.split_loss, world_size, logits, targets, vocab)
    for loss, _ in parts:
        assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    whole = torch.cat([part for _, part in parts], dim=-1)
    assert whole.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(whole.float(), gradient, rtol=tolerance, atol=1e-6)
    assert not whole[..., vocab:].any()

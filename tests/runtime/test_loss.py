"""Loss and the head's product, fused: on one rank and split over several, in chunks of tokens and whole."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from costmodels import MultiTokenPrediction
from costmodels.catalogue import load_model
from costmodels.layers import shapes
from costmodels.layers.shapes import CHUNK_TOKENS, MOST_CHUNKS, loss_chunks
from runtime.parallel.loss import (
    Scores,
    TokenLoss,
    Vocabulary,
    capped,
    eager_scores,
    fusible_scores,
    head_loss,
)
from tests.support.layouts import parse_layout
from tests.support.ranks import tensor as work
from tests.support.worker_pool import WorkerPool

WIDTH = 6

IGNORED_TARGET = -100
"""PyTorch's `ignore_index`; any negative target is not predicted."""

FORMS = {"eager": eager_scores, "fusible": fusible_scores}


def random_head(*shape: int, entries: int, vocab: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs of a head, its matrix, whose padded rows would win, and targets below `vocab`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, WIDTH, generator=generator)
    weight = torch.randn(entries, WIDTH, generator=generator)
    weight[vocab:] = 50.0
    return x, weight, torch.randint(0, vocab, shape, generator=generator)


def torch_loss(
    x: Tensor, weight: Tensor, targets: Tensor, vocab: int, softcap: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """PyTorch's loss in fp64 of the entries that exist, and gradients of three times that."""
    leaves = [leaf.double().clone().requires_grad_() for leaf in (x, weight)]
    logits = functional.linear(*leaves)[..., :vocab]
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    loss = functional.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum"
    )
    (3 * loss).backward()
    assert leaves[0].grad is not None and leaves[1].grad is not None
    return loss.detach(), leaves[0].grad, leaves[1].grad


@settings(max_examples=60, deadline=None)
@given(
    form=st.sampled_from(list(FORMS)),
    batch=st.integers(1, 3),
    seq=st.sampled_from([1, 3, 4, 16]),
    vocab=st.integers(1, 40),
    padding=st.integers(0, 20),
    chunk=st.sampled_from([1, 4, CHUNK_TOKENS]),
    ignored=st.integers(0, 2),
    softcap=st.sampled_from([0.0, 2.0]),
    seed=st.integers(0, 2**16),
)
def test_loss_and_gradients_are_pytorchs_without_the_padding(
    form: str,
    batch: int,
    seq: int,
    vocab: int,
    padding: int,
    chunk: int,
    ignored: int,
    softcap: float,
    seed: int,
) -> None:
    x, weight, targets = random_head(batch, seq, entries=vocab + padding, vocab=vocab, seed=seed)
    targets.view(-1)[:ignored] = IGNORED_TARGET
    leaves = [leaf.clone().requires_grad_() for leaf in (x, weight)]
    vocabulary = Vocabulary(vocab)
    scores: Scores = partial(FORMS[form], vocabulary)
    if softcap:
        scores = capped(scores, softcap)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shapes, "CHUNK_TOKENS", chunk)
        loss = head_loss(leaves[0], leaves[1], targets, vocabulary, 3.0, scores)
    loss.backward()
    expected, x_gradient, weight_gradient = torch_loss(x, weight, targets, vocab, softcap)
    torch.testing.assert_close(loss.double(), 3 * expected, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(leaves[0].grad, x_gradient.float(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(leaves[1].grad, weight_gradient.float(), rtol=1e-5, atol=1e-4)
    assert not leaves[1].grad[vocab:].any()  # type: ignore[index]


def test_the_gradient_of_what_follows_the_loss_is_heeded() -> None:
    x, weight, targets = random_head(2, 4, entries=9, vocab=9)
    leaves = [leaf.clone().requires_grad_() for leaf in (x, weight)]
    (3 * head_loss(leaves[0], leaves[1], targets, Vocabulary(9))).backward()
    _, x_gradient, weight_gradient = torch_loss(x, weight, targets, 9)
    torch.testing.assert_close(leaves[0].grad, x_gradient.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(leaves[1].grad, weight_gradient.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_16_bits_lose_nothing_but_roundings(form: str) -> None:
    x, weight, targets = random_head(2, 8, entries=64, vocab=50)
    leaves = [leaf.bfloat16().requires_grad_() for leaf in (x, weight)]
    vocabulary = Vocabulary(50)
    loss = head_loss(leaves[0], leaves[1], targets, vocabulary, 3.0, partial(FORMS[form], vocabulary))
    loss.backward()
    expected, x_gradient, weight_gradient = torch_loss(leaves[0].detach(), leaves[1].detach(), targets, 50)
    assert loss.dtype == torch.float32
    # The logits are in 16 bits.
    assert loss.item() == pytest.approx(3 * expected.item(), rel=1e-2)
    for leaf, gradient in zip(leaves, (x_gradient, weight_gradient), strict=True):
        assert leaf.grad is not None and leaf.grad.dtype == torch.bfloat16
        assert (leaf.grad.double() - gradient).norm() < 2e-2 * gradient.norm()


def test_without_gradients_there_is_the_loss_alone() -> None:
    x, weight, targets = random_head(2, 4, entries=9, vocab=7)
    expected, _, _ = torch_loss(x, weight, targets, 7)
    with torch.no_grad():
        loss = head_loss(x.requires_grad_(), weight.requires_grad_(), targets, Vocabulary(7))
    assert not loss.requires_grad
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)


@given(st.integers(1, 2**20), st.sampled_from([1, 2, 8]))
def test_chunks_are_equal_and_neither_small_nor_larger_than_they_must(tokens: int, ranks: int) -> None:
    chunks = int(loss_chunks(tokens, ranks))
    assert tokens % chunks == 0 and chunks <= MOST_CHUNKS
    assert chunks == 1 or tokens // chunks >= CHUNK_TOKENS * ranks
    twice = 2 * chunks
    assert chunks == MOST_CHUNKS or tokens % twice or tokens // twice < CHUNK_TOKENS * ranks


@pytest.mark.parametrize(
    ("world_size", "entries", "vocab"),
    [(2, 64, 50), (2, 64, 64), (2, 64, 32), (2, 64, 20), (4, 64, 17)],
    ids=["padding on the last rank", "no padding", "one rank all padding", "padding on both", "two empty"],
)
@pytest.mark.parametrize("form", FORMS)
def test_a_split_vocabulary_gives_the_loss_of_a_whole_one(
    pool: WorkerPool, world_size: int, entries: int, vocab: int, form: str
) -> None:
    x, weight, targets = random_head(2, 8, entries=entries, vocab=vocab)
    expected, x_gradient, weight_gradient = torch_loss(x, weight, targets, vocab)
    parts = pool.run(work.split_loss, world_size, x, weight, targets, vocab, form == "fusible")
    for loss, _, _ in parts:
        assert float(loss) == pytest.approx(3 * float(expected), rel=1e-6)
    summed = torch.stack([part for _, part, _ in parts]).sum(0)
    torch.testing.assert_close(summed, x_gradient.float(), rtol=1e-5, atol=1e-4)
    whole = torch.cat([part for _, _, part in parts])
    torch.testing.assert_close(whole, weight_gradient.float(), rtol=1e-5, atol=1e-4)
    assert not whole[vocab:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_no_logit_is_too_large(form: str, dtype: torch.dtype) -> None:
    """exp of a logit of 89 is beyond fp32, and of -104 is zero."""
    logits = torch.tensor([[300.0, 200.0, -100.0], [-300.0, -300.0, -400.0]]).to(dtype)
    targets = torch.tensor([1, 0])
    loss, gradient = FORMS[form](Vocabulary(3), logits.clone(), targets, torch.tensor(2.0))
    assert float(loss) == pytest.approx(100 + math.log(2))
    expected = 2 * (logits.float().softmax(-1) - functional.one_hot(targets, 3))
    torch.testing.assert_close(gradient, expected.to(dtype))


def token_loss(depths: int) -> TokenLoss:
    spec = load_model("gpt2-nano").model_copy(
        update={"vocab": 9, "seq": 8, "mtp": MultiTokenPrediction(depths=depths, loss_factor=0.6)}
    )
    grid: Any = SimpleNamespace(tp_rank=0, device=torch.device("cpu"))
    made = TokenLoss(spec, parse_layout("gbs=6", spec), grid)
    made.further_losses = torch.zeros(depths)
    return made


@pytest.mark.parametrize("stays", [False, True])
def test_the_loss_of_each_depth_is_a_mean_over_the_tokens_that_it_predicts(stays: bool) -> None:
    loss, head = token_loss(2), torch.nn.Linear(WIDTH, 9, bias=False)
    if stays:
        loss.stay()
    draw = torch.Generator().manual_seed(0)
    expected = torch.zeros(2)
    for scale, targets in ((4.0, None), (3.0, (40.0, 30.0, 20.0))):
        loss.scale, loss.targets = scale, targets
        loss.begin_step()
        predicted = targets or (48.0, 42.0, 36.0)
        assert [loss.predicted(depth) for depth in range(3)] == list(predicted)
        for depth in range(3):
            labels = torch.randint(0, 9, (2, 3, 8), generator=draw)
            # The last tokens of a sequence have none so far on.
            labels[:, depth, 8 - depth :] = ~labels[:, depth, 8 - depth :]
            loss.labels = labels
            assert torch.equal(loss.further(depth + 1) >= 0, torch.ones(2, 8, dtype=torch.bool))
            x = torch.randn(2, 8, WIDTH, generator=draw, requires_grad=True)
            found = loss(head, x, depth)
            part = functional.cross_entropy(
                head(x).flatten(0, 1),
                labels[:, depth].clamp(min=-1).flatten(),
                reduction="sum",
                ignore_index=-1,
            )
            part = part * scale / predicted[depth]
            if depth:
                expected[depth - 1] += part.detach()
            # Both depths together have the weight that the model gives them.
            part = part * (0.3 if depth else 1.0)
            torch.testing.assert_close(found, part)
            [one], [other] = (torch.autograd.grad(result, x) for result in (found, part))
            torch.testing.assert_close(one, other)
        torch.testing.assert_close(loss.further_losses, expected)

"""Tensor and sequence parallelism: gradients, collectives, and what is never made whole."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from costmodels import ModelSpec
from tests.support.layouts import parse_layout
from tests.support.models import MODELS
from tests.support.ranks import tensor as work
from tests.support.ranks.parity import losses_of, relative_difference
from tests.support.worker_pool import WorkerPool

LAYERS = 2


def model(name: str, **changes: Any) -> ModelSpec:
    """A small model of two layers."""
    return MODELS[name].model_copy(update={"layers": LAYERS, **changes})


SPECS = {
    "gpt2": model("gpt2"),
    "llama": model("llama"),
    "llama, 2 kv heads": model("llama", kv_heads=2),
    "llama, 1 kv head": model("llama", kv_heads=1),
    "gpt2, 1 kv head": model("gpt2", kv_heads=1),
}


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("gpt2", ["tp=2", "tp=2,sp=1", "tp=2,sp=1,dp=2,zero=3"]),
        ("llama", ["tp=2", "tp=2,sp=1", "tp=2,sp=1,dp=2,zero=1", "tp=2,dp=2,recompute=full"]),
        ("llama, 2 kv heads", ["tp=4", "tp=4,sp=1"]),
        ("llama, 1 kv head", ["tp=4,sp=1", "tp=2,dp=2,zero=3", "tp=2,sp=1,pp=2,schedule=zbv"]),
        ("gpt2, 1 kv head", ["tp=4", "tp=2,sp=1,recompute=full"]),
    ],
)
def test_loss_and_gradients_are_those_of_one_rank(pool: WorkerPool, name: str, texts: list[str]) -> None:
    spec = SPECS[name]
    if any("zbv" in text for text in texts):
        spec = spec.model_copy(update={"layers": 4})
    one = parse_layout("gbs=4", spec)
    [(loss, norm, expected)] = pool.run(work.loss_and_gradients, 1, spec, one)
    for text in texts:
        layout = parse_layout("gbs=4," + text, spec)
        results = pool.run(work.loss_and_gradients, layout.world_size, spec, layout)
        seen = set()
        for other_loss, other_norm, gradients in results:
            assert other_loss == pytest.approx(loss, rel=1e-6), text
            assert other_norm == pytest.approx(norm, rel=1e-5), text
            for parameter, gradient in gradients.items():
                tied = parameter == "head.weight" and spec.tied
                whole = expected["embedding.tokens.weight" if tied else parameter]
                assert torch.allclose(gradient, whole, rtol=1e-4, atol=1e-7), (text, parameter)
                seen.add(parameter)
        assert seen >= set(expected), text


COPIES = {"allreduce": 1 + 2 * LAYERS}
GATHERS = {"allgather": 1 + 2 * LAYERS, "reduce_scatter": 1 + 2 * LAYERS}


@pytest.mark.parametrize(
    ("name", "text", "forward", "backward"),
    [
        # Embedding, attention and MLP sum forward; attention, MLP and head sum backward.
        ("gpt2", "tp=2", COPIES, COPIES),
        ("llama", "tp=2,sp=1", GATHERS, GATHERS),
        # Weights and biases of keys and values are gathered from the ranks that share a head.
        (
            "gpt2, 1 kv head",
            "tp=2",
            COPIES | {"allgather": 4 * LAYERS},
            COPIES | {"reduce_scatter": 4 * LAYERS},
        ),
    ],
)
def test_collectives_are_one_for_each_way_in_and_out(
    pool: WorkerPool, name: str, text: str, forward: dict[str, int], backward: dict[str, int]
) -> None:
    spec = SPECS[name]
    layout = parse_layout(text, spec)
    for seen in pool.run(work.watched_passes, 2, spec, layout):
        # The loss sums twice: the highest logits, and exponents with the logits of targets.
        assert seen["forward"] == Counter(forward) + Counter(allreduce=2)
        assert seen["backward"] == backward
        # Logits are split, and no tensor spans the vocabulary: of 250 entries, padded to 256.
        assert spec.padded_vocab(2) // 2 in seen["widths"]
        assert not seen["widths"] & {spec.vocab, spec.padded_vocab(2)}


def test_a_block_compiles_in_one_graph(pool: WorkerPool) -> None:
    spec = SPECS["gpt2, 1 kv head"]
    assert max(pool.run(work.compiled_and_not, 2, spec, parse_layout("tp=2,sp=1", spec))) < 1e-5


def test_a_rank_of_a_large_job_is_traced_without_memory(pool: WorkerPool) -> None:
    spec = SPECS["llama, 2 kv heads"]
    layout = parse_layout("tp=8,sp=1,dp=2", spec).model_copy(update={"data_parallel": 1})
    [(logits, gradients)] = pool.run(work.traced_shapes, 1, spec, layout)
    padded = spec.padded_vocab(8)
    assert logits == (1, spec.seq, padded // 8)
    # Head and embedding, queries, a quarter of a key/value head, output, up, down, norms.
    assert gradients == {(padded // 8, 64), (8, 64), (2, 64), (64, 8), (22, 64), (64, 22), (64,)}


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_bf16_follows_fp32(pool: WorkerPool, name: str) -> None:
    spec = SPECS[name]
    reference = pool.run(losses_of, 1, spec, parse_layout("gbs=4", spec), 3)[0]
    layout = parse_layout("gbs=4,tp=2,sp=1,precision=bf16", spec)
    assert 1e-6 < relative_difference(pool.run(losses_of, 2, spec, layout, 3)[0], reference) < 2e-2

"""Context parallelism: every form gives causal attention, with the traffic and the work it promises."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from costmodels import Layout, ModelSpec
from costmodels.errors import InputError
from runtime.model.attention_kernels import suffix_attention
from runtime.model.fused_attention import fused_backward, fused_forward
from runtime.parallel import ring_attention
from runtime.parallel.context import local_positions
from runtime.train.stages import compiles_in_two
from tests.support.layouts import parse_layout
from tests.support.models import DENSE, MODELS
from tests.support.ranks import context as work
from tests.support.ranks.context import Heads
from tests.support.worker_pool import WorkerPool

FORMS = ("all_gather", "all_to_all", "ring")
BALANCED = ("all_gather", "ring")
GROUPED = Heads(8, 2, 8)
MULTI_QUERY = Heads(4, 1, 12)
"""Heads of 12 elements: no multiple of 8, which CUDA kernels would need."""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_attention_and_its_gradients_are_those_of_whole_sequences(
    pool: WorkerPool, form: str, ranks: int
) -> None:
    cases = [
        (heads, dtype)
        for heads in (Heads(8, 8, 16), GROUPED, MULTI_QUERY, Heads(12, 6, 8))
        for dtype in (torch.float32, torch.bfloat16)
    ]
    for by_case in pool.run(work.errors_of_cases, ranks, form, cases):
        for (heads, dtype), errors in zip(cases, by_case, strict=True):
            assert max(errors) < (2e-6 if dtype == torch.float32 else 2e-2), (heads, dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("how", ["compiled", "recomputed"])
def test_attention_can_be_compiled_and_recomputed(pool: WorkerPool, form: str, how: str) -> None:
    for errors in pool.run(work.attention_errors, 2, form, GROUPED, torch.float32, how):
        assert max(errors) < 2e-6


@pytest.mark.parametrize("form", FORMS)
def test_fake_tensors_pass_through(pool: WorkerPool, form: str) -> None:
    q, kv = (work.BATCH, 8, 16, 8), (work.BATCH, 2, 16, 8)
    assert pool.run(work.fake_gradients, 2, form, GROUPED) == [[q, q, kv, kv]] * 2


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("heads", [Heads(8, 8, 16), GROUPED])
def test_a_rank_sends_the_bytes_of_the_formulas(pool: WorkerPool, ranks: int, heads: Heads) -> None:
    dtype = torch.bfloat16
    tokens = work.BATCH * heads.seq // ranks
    kv = 2 * tokens * heads.keys * heads.size
    exchanged = 2 * tokens * heads.size * (heads.queries + heads.keys * ranks // math.gcd(heads.keys, ranks))
    exchanged = exchanged * (ranks - 1) // ranks
    e = dtype.itemsize
    expected = {
        "all_gather": ((ranks - 1) * kv * e, (ranks - 1) * kv * e),
        "all_to_all": (exchanged * e, exchanged * e),
        "ring": ((ranks - 1) * kv * e, (ranks - 1) * kv * e + ranks * kv * 4),
    }
    for form, sent in expected.items():
        for done in pool.run(work.attention_work, ranks, form, heads, dtype):
            assert (done.forward_bytes, done.backward_bytes) == sent, form


@pytest.mark.parametrize("ranks", [2, 4])
def test_no_rank_computes_more_than_its_share_of_the_causal_half(pool: WorkerPool, ranks: int) -> None:
    heads = Heads(4, 4, 8)
    half = heads.seq * (heads.seq + 1) // 2
    for form in BALANCED:
        done = pool.run(work.attention_work, ranks, form, heads, torch.float32)
        assert [one.pairs for one in done] == [half // ranks] * ranks
    # All pairs, of 1/ranks of the heads.
    done = pool.run(work.attention_work, ranks, "all_to_all", heads, torch.float32)
    assert [one.pairs for one in done] == [half] * ranks


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_positions_partition_the_sequence(form: str, ranks: int) -> None:
    spec = MODELS["gpt2"]
    text = f"cp={ranks},cp_form={form}" if ranks > 1 else ""
    layout = parse_layout(text, spec)
    parts = [local_positions(spec, layout, rank) for rank in range(ranks)]
    assert {len(part) for part in parts} == {spec.seq // ranks}
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(spec.seq))
    if form in BALANCED:
        assert len({int((part + 1).sum()) for part in parts}) == 1


def layouts_of(model: ModelSpec, *texts: str) -> list[Layout]:
    return [parse_layout(f"gbs=4,{text}", model) for text in texts]


TOGETHER = {
    "gpt2": ("cp=4", "cp=2,tp=2", "cp=2,dp=2,zero=1,recompute=full", "cp=2,pp=2"),
    "llama": ("cp=4", "cp=2,tp=2,sp=1,recompute=selective", "cp=2,dp=2,zero=3,mbs=2"),
}
"""Layouts of four ranks; a model's own kinds of layer meet each other kind of parallelism."""


@pytest.mark.parametrize("model", DENSE)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_losses_and_gradients_are_those_of_one_rank(
    pool: WorkerPool, model: str, form: str, ranks: int
) -> None:
    spec = MODELS[model]
    texts = ("cp=2",) if ranks == 2 else TOGETHER[model]
    layouts = layouts_of(spec, *(f"{text},cp_form={form}" for text in texts))
    [[(loss, norm, expected)]] = pool.run(work.loss_and_gradients, 1, spec, layouts_of(spec, ""))
    for results in pool.run(work.loss_and_gradients, ranks, spec, layouts):
        for text, (other_loss, other_norm, gradients) in zip(texts, results, strict=True):
            assert other_loss == pytest.approx(loss, rel=1e-6), text
            assert other_norm == pytest.approx(norm, rel=1e-5), text
            for name, gradient in gradients.items():
                whole = expected["embedding.tokens.weight" if name == "head.weight" and spec.tied else name]
                assert torch.allclose(gradient, whole, rtol=1e-4, atol=1e-7), (text, name)


@pytest.mark.parametrize("form", FORMS)
def test_a_ring_alone_cuts_compiled_layers_in_two(form: str) -> None:
    assert compiles_in_two(parse_layout(f"cp=2,cp_form={form}", MODELS["gpt2"])) == (form == "ring")
    assert not compiles_in_two(parse_layout("dp=2", MODELS["gpt2"]))


def test_a_pytorch_without_ring_attention_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.tensor.experimental._context_parallel import _attention

    monkeypatch.delattr(_attention, "_templated_ring_attention")
    with pytest.raises(InputError, match=r"no ring attention .*; use all_gather or all_to_all"):
        ring_attention.prepare_ring()


def on_gpu(heads: int, tokens: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(2, tokens, heads, size, dtype=dtype, device="cuda").transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 512])
@pytest.mark.parametrize(("causal", "tokens", "keys"), [(True, 16, 16), (False, 16, 8), (False, 8, 16)])
def test_cuda_kernels_take_what_they_are_given(
    dtype: torch.dtype, size: int, causal: bool, tokens: int, keys: int
) -> None:
    with FakeTensorMode(), torch.no_grad():
        q = on_gpu(8, tokens, size, dtype)
        k, v = (on_gpu(2, keys, size, dtype) for _ in range(2))
        out, lse, *state = fused_forward(q, k, v, is_causal=causal, scale=0.1)
        assert out.shape == q.shape
        assert lse.shape == q.shape[:3]
        known: dict[str, Any] = {"query": q, "key": k, "value": v, "out": out, "logsumexp": lse}
        gradients = fused_backward(
            grad_out=torch.empty_like(out), **known, is_causal=causal, scale=0.1, state=state
        )
        assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 12])
def test_the_last_tokens_attend_on_cuda(dtype: torch.dtype, size: int) -> None:
    with FakeTensorMode(), torch.no_grad():
        q, k = on_gpu(8, 8, size, dtype), on_gpu(2, 24, size, dtype)
        assert suffix_attention(q, k, k).shape == q.shape

"""The transformer against formulas written out with plain operations, and what must hold for any block."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from costmodels import ModelSpec
from runtime.model.attention import Attention
from runtime.model.mlp import clamped_swiglu
from runtime.model.norms import NormFromOne
from runtime.model.rotary import rotary_table, rotate
from runtime.model.transformer import Embedding, Transformer
from runtime.parallel.initialisation import initialise
from tests.support.models import FORMS, MODELS

SMALL: dict[str, Any] = {"name": "small", "layers": 2, "hidden": 32, "heads": 4, "vocab": 100, "seq": 12}

GPT2 = ModelSpec(**SMALL, activation="gelu_tanh", max_positions=20)
LLAMA = ModelSpec(
    **SMALL,
    kv_heads=2,
    ffn=48,
    gated=True,
    activation="silu",
    norm="rmsnorm",
    norm_eps=1e-6,
    position="rope",
    rope_theta=500.0,
    tied=False,
    linear_bias=False,
)
QWEN = LLAMA.model_copy(update={"qkv_bias": True})
NEOX = GPT2.model_copy(update={"position": "rope", "parallel_residual": True})


def built(spec: ModelSpec, **options: Any) -> Transformer:
    """A model with weights large enough that every part of it shows in the logits."""
    model = Transformer(spec, spec.padded_vocab(1), **options)
    initialise(model, spec, seed=1, std=0.3)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def tokens(spec: ModelSpec, batch: int = 2, seed: int = 3) -> Tensor:
    return torch.randint(0, spec.vocab, (batch, spec.seq), generator=torch.Generator().manual_seed(seed))


def reference(spec: ModelSpec, w: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Logits [S, V] of one sequence, one head and one position at a time, in fp64."""
    w = {name: value.double() for name, value in w.items()}
    x = w["embedding.tokens.weight"][ids]
    if spec.position == "learned":
        x = x + w["embedding.positions.weight"][: len(ids)]
    for layer in range(spec.layers):
        own = {
            n.removeprefix(f"layers.{layer}."): v for n, v in w.items() if n.startswith(f"layers.{layer}.")
        }
        attended = x + _reference_attention(spec, own, _reference_norm(spec, own, "attention_norm", x))
        entered = x if spec.parallel_residual else attended
        x = attended + _reference_mlp(spec, own, _reference_norm(spec, own, "mlp_norm", entered))
    return _reference_norm(spec, w, "norm", x) @ w["head.weight"].T


def _linear(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", torch.zeros((), dtype=torch.float64))


def _reference_norm(spec: ModelSpec, w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    if spec.norm == "layernorm":
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + spec.norm_eps).sqrt()
        return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]
    return x / (x.square().mean(-1, keepdim=True) + spec.norm_eps).sqrt() * w[f"{name}.weight"]


def _reference_attention(spec: ModelSpec, w: dict[str, Tensor], x: Tensor) -> Tensor:
    q, k, v = (
        _linear(w, f"attention.{name}", x).unflatten(-1, (-1, spec.head_dim))
        for name in ("query", "key", "value")
    )
    if spec.position == "rope":
        q, k = _turned(spec, q), _turned(spec, k)
    out = torch.zeros_like(q)
    for head in range(spec.heads):
        group = head * spec.kv_heads // spec.heads
        for position in range(len(x)):
            scores = k[: position + 1, group] @ q[position, head] / math.sqrt(spec.head_dim)
            weights = scores.exp() / scores.exp().sum()
            out[position, head] = weights @ v[: position + 1, group]
    return _linear(w, "attention.output", out.flatten(1))


def _turned(spec: ModelSpec, x: Tensor) -> Tensor:
    """Rotary positions as complex numbers: feature pair (i, i + H/2) turns by position x theta^(-2i/H)."""
    first, second = x.chunk(2, dim=-1)
    pairs = torch.arange(spec.head_dim // 2, dtype=torch.float64)
    angles = torch.outer(torch.arange(len(x)).double(), spec.rope_theta ** (-2 * pairs / spec.head_dim))
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    return torch.cat((turned.real, turned.imag), dim=-1)


def _reference_mlp(spec: ModelSpec, w: dict[str, Tensor], x: Tensor) -> Tensor:
    up = _linear(w, "mlp.up", x)
    inner = (
        _activate(spec.activation, _linear(w, "mlp.gate", x)) * up
        if spec.gated
        else _activate(spec.activation, up)
    )
    return _linear(w, "mlp.down", inner)


def _activate(name: str, x: Tensor) -> Tensor:
    if name == "gelu_tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return {
        "gelu": lambda: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
        "silu": lambda: x / (1 + torch.exp(-x)),
        "relu2": lambda: x.clamp(min=0) ** 2,
    }[name]()


@pytest.mark.parametrize("spec", [GPT2, LLAMA, QWEN, NEOX], ids=["gpt2", "llama", "qwen", "neox"])
def test_logits_are_those_of_the_written_out_formulas(spec: ModelSpec) -> None:
    model = built(spec)
    ids = tokens(spec)
    weights = dict(model.state_dict())
    with torch.no_grad():
        logits = model(ids)
    for row, sequence in zip(logits, ids, strict=True):
        expected = reference(spec, weights, sequence)
        torch.testing.assert_close(row.double(), expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", "relu2"])
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("gated", [False, True])
def test_every_activation_and_norm_is_the_formula(activation: Any, norm: Any, gated: bool) -> None:
    position: Any
    for position, tied, bias in (("none", True, True), ("rope", False, False)):
        spec = ModelSpec(
            **SMALL,
            activation=activation,
            norm=norm,
            gated=gated,
            position=position,
            tied=tied,
            linear_bias=bias,
            # No default of PyTorch's, and large enough to show.
            norm_eps=0.01,
        )
        model = built(spec)
        ids = tokens(spec, batch=1)
        with torch.no_grad():
            logits = model(ids)[0].double()
        expected = reference(spec, dict(model.state_dict()), ids[0])
        # GELU and its approximation are 5e-4 apart at most.
        torch.testing.assert_close(logits, expected, rtol=0.0, atol=1e-5 * expected.abs().max().item())


def test_norms_from_one_lose_nothing_of_a_weight_in_16_bits() -> None:
    norm = NormFromOne(64, eps=1e-6, dtype=torch.bfloat16)
    with torch.no_grad():
        # Beside one, a third of the resolution of 16 bits.
        norm.weight.fill_(0.0025)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + norm.weight.double())
    assert torch.equal(norm(x), expected.bfloat16())


def test_clamped_activations_are_those_of_gpt_oss() -> None:
    gate, up = (
        torch.linspace(-12.0, 12.0, 25)[None].double(),
        torch.linspace(-9.0, 9.0, 19)[:, None].double(),
    )
    low, within = gate.minimum(torch.tensor(7.0)), up.clamp(-7.0, 7.0)
    torch.testing.assert_close(clamped_swiglu(gate, up), low / (1 + (-1.702 * low).exp()) * (within + 1))


@pytest.mark.parametrize("spec", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_a_later_token_changes_no_earlier_logit(spec: ModelSpec) -> None:
    model = built(spec)
    ids = tokens(spec)
    changed = ids.clone()
    changed[:, 7] = (changed[:, 7] + 1) % spec.vocab
    with torch.no_grad():
        before, after = model(ids), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert all(not torch.equal(before[:, at], after[:, at]) for at in range(7, spec.seq))


def test_grouped_queries_equal_heads_with_repeated_keys_and_values() -> None:
    grouped = Attention(LLAMA)
    full = Attention(LLAMA.model_copy(update={"kv_heads": LLAMA.heads}))
    with torch.no_grad():
        full.query.weight.copy_(grouped.query.weight)
        full.output.weight.copy_(grouped.output.weight)
        for name in ("key", "value"):
            heads = getattr(grouped, name).weight.unflatten(0, (LLAMA.kv_heads, -1))
            repeated = heads.repeat_interleave(LLAMA.heads // LLAMA.kv_heads, dim=0)
            getattr(full, name).weight.copy_(repeated.flatten(0, 1))
    x = torch.randn(2, 12, LLAMA.hidden, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(grouped(x), full(x), rtol=1e-5, atol=1e-6)


def test_rotary_scores_depend_on_the_distance_only() -> None:
    cos, sin = rotary_table(torch.arange(32), 8, 10000.0, None)
    q, k = torch.randn(2, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    def score(at: int, other: int) -> float:
        turned = [rotate(x, cos[index], sin[index]) for x, index in ((q, at), (k, other))]
        return float(turned[0].double() @ turned[1].double())

    for distance in (0, 1, 5):
        scores = [score(at + distance, at) for at in (0, 3, 20)]
        assert scores == pytest.approx([scores[0]] * 3, abs=1e-5)
    assert score(0, 0) == pytest.approx(float(q @ k), abs=1e-5)
    assert abs(score(5, 0) - score(0, 0)) > 1e-2
    assert abs(score(5, 0) - score(0, 5)) > 1e-3


def test_biases_are_where_the_model_has_them() -> None:
    def biases(spec: ModelSpec) -> set[str]:
        names = {name for name, _ in Transformer(spec, 128, range(1)).named_parameters()}
        return {n.removeprefix("layers.0.").removesuffix(".bias") for n in names if n.endswith("bias")}

    projections = {f"attention.{name}" for name in ("query", "key", "value")}
    norms = {"attention_norm", "mlp_norm", "norm"}
    assert biases(GPT2) == projections | norms | {"attention.output", "mlp.up", "mlp.down"}
    assert biases(LLAMA) == set()
    assert biases(QWEN) == projections


def test_learned_positions_tell_equal_tokens_apart() -> None:
    ids = torch.full((1, GPT2.seq), 5)
    with torch.no_grad():
        logits = built(GPT2)(ids)[0]
        unplaced = built(GPT2.model_copy(update={"position": "none"}))(ids)[0]
    assert (logits[0] - logits[1]).abs().max() > 0.1
    torch.testing.assert_close(unplaced[0], unplaced[-1], rtol=1e-4, atol=1e-4)
    assert built(GPT2).embedding.positions.weight.shape == (20, 32)  # type: ignore[union-attr]


@pytest.mark.parametrize("spec", [GPT2, LLAMA, QWEN, *MODELS.values()], ids=lambda spec: spec.name)
def test_the_model_has_the_parameters_that_its_description_counts(spec: ModelSpec) -> None:
    model = Transformer(spec, spec.padded_vocab(1))
    padding = (spec.padded_vocab(1) - spec.vocab) * spec.hidden * (1 if spec.tied else 2)
    assert sum(p.numel() for p in model.parameters()) == spec.parameters + padding


def test_stages_in_a_row_are_the_whole_model() -> None:
    whole = built(GPT2)
    ids = tokens(GPT2)
    first = Transformer(GPT2, GPT2.padded_vocab(1), range(1), with_head=False)
    last = Transformer(GPT2, GPT2.padded_vocab(1), range(1, 2), with_embedding=False)
    for stage in (first, last):
        stage.load_state_dict({name: whole.state_dict()[name] for name in stage.state_dict()})
    with torch.no_grad():
        assert torch.equal(last(first(ids)), whole(ids))


@pytest.mark.parametrize(
    "spec",
    # A gate is made of the normalised input: no layout with a ring takes one.
    [spec for spec in (*MODELS.values(), *FORMS.values()) if not spec.attention_gate],
    ids=lambda spec: spec.name,
)
def test_a_layer_that_is_cut_around_its_core_is_the_same_layer(spec: ModelSpec) -> None:
    """Context-parallel rings compile what is before the core of attention, and what is after it."""
    x_BSD = torch.randn(2, spec.seq, spec.hidden, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for block in built(spec).blocks:
            attended_BNSH = block.attention.core(*block.up_to_core(x_BSD))
            assert torch.equal(block.from_core(x_BSD, attended_BNSH), block(x_BSD))


def test_the_factor_of_embeddings_is_rounded_to_their_format_first() -> None:
    # Gemma 3's width: its root is no number of bf16. Its code multiplies by a tensor in bf16.
    scale = math.sqrt(3840)
    embedding = Embedding(LLAMA.model_copy(update={"embedding_scale": scale}), LLAMA.vocab).bfloat16()
    table = embedding.tokens.weight.detach()
    with torch.no_grad():
        embedded = embedding(torch.arange(LLAMA.vocab).unsqueeze(0))[0]
    assert torch.equal(embedded, table * torch.tensor(scale).bfloat16())
    assert not torch.equal(embedded, table * scale)

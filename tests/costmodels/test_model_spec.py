"""Parameter and FLOP counts against weights that are listed one by one, and what a model refuses."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from costmodels import LatentAttention, ModelSpec
from costmodels.spec.model_flops import flops_per_sequence


def tiny(**fields: object) -> ModelSpec:
    base = {"name": "tiny", "layers": 3, "hidden": 24, "heads": 4, "vocab": 50, "seq": 16}
    return ModelSpec.model_validate({**base, **fields})


def count(*shapes: tuple[int, ...]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def test_gpt2_weights_one_by_one() -> None:
    layer = count(
        (24,), (24,), (24, 72), (72,), (24, 24), (24,),  # norm, queries keys values, output
        (24,), (24,), (24, 96), (96,), (96, 24), (24,),  # norm, MLP
    )  # fmt: skip
    assert tiny().parameters == count((50, 24), (16, 24)) + 3 * layer + count((24,), (24,))


def test_llama_weights_one_by_one() -> None:
    model = tiny(
        ffn=40, kv_heads=2, gated=True, norm="rmsnorm", position="rope", tied=False, linear_bias=False
    )
    attention = count((24, 24), (24, 12), (24, 12), (24, 24))
    layer = count((24,), (24,)) + attention + count((24, 40), (24, 40), (40, 24))
    assert model.parameters == count((50, 24), (50, 24), (24,)) + 3 * layer
    qwen2 = ModelSpec.model_validate({**model.model_dump(), "qkv_bias": True})
    assert qwen2.parameters - model.parameters == 3 * (24 + 12 + 12)
    qwen3 = ModelSpec.model_validate({**model.model_dump(), "qk_norm": True})
    assert qwen3.parameters - model.parameters == 3 * (6 + 6)


def test_mixture_of_experts_weights_one_by_one() -> None:
    model = tiny(
        ffn=40, gated=True, norm="rmsnorm", position="rope", tied=False, linear_bias=False,
        experts=5, top_k=2, expert_ffn=10, shared_expert_ffn=20, dense_layers=1,
    )  # fmt: skip
    attention = count((24,), (24,)) + 4 * count((24, 24))
    expert = 3 * count((24, 10))
    moe = attention + count((24, 5)) + 3 * count((24, 20)) + 5 * expert
    dense = attention + 3 * count((24, 40))
    assert model.moe_layers == 2
    assert model.parameters == count((50, 24), (50, 24), (24,)) + dense + 2 * moe
    assert model.parameters - model.active_parameters == 2 * 3 * expert


@pytest.mark.parametrize("q_rank", [0, 9])
def test_latent_attention_weights_one_by_one(q_rank: int) -> None:
    latent = LatentAttention(
        q_lora_rank=q_rank, kv_lora_rank=7, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=5
    )
    model = tiny(norm="rmsnorm", position="rope", linear_bias=False, latent_attention=latent)
    queries = count((24, 9), (9,), (9, 4 * 6)) if q_rank else count((24, 4 * 6))
    keys_values = count((24, 7 + 2), (7,), (7, 4 * (4 + 5)))
    assert model.attention_parameters() == queries + keys_values + count((4 * 5, 24))


def test_flops_follow_megatron() -> None:
    model = tiny(vocab=64)
    tokens, causal = 16, 0.5
    matmuls = 3 * (24 * 72 + 24 * 24 + 2 * 24 * 96) + 24 * 64
    attention = 3 * (2 * 2 * 16 * 24) * causal  # scores and context, 2 FLOPs each
    assert flops_per_sequence(model) == pytest.approx(3 * tokens * (2 * matmuls + attention))


def test_only_chosen_experts_count_as_flops() -> None:
    chosen = tiny(experts=8, top_k=2, expert_ffn=48)
    dense = tiny(ffn=96)
    assert flops_per_sequence(chosen) == pytest.approx(flops_per_sequence(dense))


@given(vocab=st.integers(1, 300_000), tensor_parallel=st.integers(1, 200))
def test_padded_vocabulary(vocab: int, tensor_parallel: int) -> None:
    padded = tiny(vocab=vocab).padded_vocab(tensor_parallel)
    multiple = math.lcm(128, tensor_parallel)
    assert padded % multiple == 0
    assert 0 <= padded - vocab < multiple
    if 128 % tensor_parallel == 0:
        assert padded == tiny(vocab=vocab).padded_vocab(1)


def test_defaults_are_those_of_a_plain_transformer() -> None:
    model = tiny()
    assert (model.ffn, model.kv_heads, model.head_dim, model.max_positions) == (96, 4, 6, 16)
    assert model.active_parameters == model.parameters


EXPERTS = {"experts": 8, "top_k": 2, "expert_ffn": 8}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 5}, "hidden 24 is not divisible by heads 5"),
        ({"kv_heads": 3}, "heads 4 is not divisible by kv_heads 3"),
        ({"max_positions": 8}, "seq 16 is longer than max_positions 8"),
        ({"experts": 4}, "a model of 4 experts needs expert_ffn"),
        ({"experts": 4, "top_k": 5, "expert_ffn": 8}, "top_k of 1 to 4"),
        ({"dense_layers": 4}, "dense_layers 4 exceeds layers 3"),
        (EXPERTS | {"router": {"groups": 3}}, "router groups 3 must divide experts 8"),
        (EXPERTS | {"router": {"groups": 4, "top_groups": 5}}, "top_groups 5 must be at most as many"),
        (
            EXPERTS | {"top_k": 3, "router": {"groups": 4}},
            "top_k 3 is more than the experts of 1 of 4 router",
        ),
        (EXPERTS | {"router": {"groups": 8, "top_groups": 8, "group_score": "top2"}}, "needs two experts"),
        (EXPERTS | {"shared_expert_gate": True}, "shared_expert_gate needs shared experts"),
        ({"rope_scaling": {"kind": "yarn"}}, "yarn needs original_positions"),
        (
            {"rope_scaling": {"kind": "llama3", "original_positions": 8, "high_freq_factor": 0.5}},
            "must be at most high_freq_factor 0.5",
        ),
        ({"layers": 0}, "layers"),
        ({"hidden": None}, "hidden"),
        ({"hidden": [1]}, "hidden"),
        ({"heads": 0}, "heads"),
        ({"layrs": 3}, "layrs"),
    ],
)
def test_a_model_refuses_what_does_not_fit(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        tiny(**fields)

"""Small models with every kind of layer."""

from __future__ import annotations

from typing import Any

from costmodels import LatentAttention, ModelSpec, RopeScaling, Router
from costmodels.spec.model_parts import LinearAttention, MultiTokenPrediction, ScoreGrowth


def llama(name: str, **sizes: Any) -> ModelSpec:
    """A model with the blocks of Llama."""
    return ModelSpec(
        name=name,
        gated=True,
        activation="silu",
        norm="rmsnorm",
        position="rope",
        tied=False,
        linear_bias=False,
        **sizes,
    )


LLAMA = llama("parity-llama", layers=4, hidden=64, heads=8, kv_heads=4, ffn=176, vocab=250, seq=32)

MODELS = {
    "gpt2": ModelSpec(
        name="parity-gpt2", layers=4, hidden=64, heads=4, vocab=250, seq=32, activation="gelu_tanh"
    ),
    "llama": LLAMA,
    "mixtral": LLAMA.model_copy(
        update={"name": "parity-mixtral", "experts": 4, "top_k": 2, "expert_ffn": 96}
    ),
    "qwen": LLAMA.model_copy(
        update={
            "name": "parity-qwen",
            "qkv_bias": True,
            "qk_norm": True,
            "head_dim": 16,
            "experts": 8,
            "top_k": 3,
            "expert_ffn": 32,
            "shared_expert_ffn": 64,
            "shared_expert_gate": True,
            "router": Router(normalised=False),
        }
    ),
    "deepseek": LLAMA.model_copy(
        update={
            "name": "parity-deepseek",
            "heads": 4,
            "kv_heads": 4,
            "head_dim": 24,
            "rope_scaling": RopeScaling(
                kind="yarn", factor=4.0, original_positions=8, mscale=1.0, mscale_all_dim=0.7
            ),
            "latent_attention": LatentAttention(
                q_lora_rank=32, kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12
            ),
            "experts": 8,
            "top_k": 2,
            "expert_ffn": 32,
            "shared_expert_ffn": 32,
            "dense_layers": 1,
            "router": Router(
                score="sigmoid", scale=2.5, groups=4, top_groups=2, group_score="top2", expert_bias=True
            ),
        }
    ),
}
"""Small models with every kind of layer; their vocabularies need padding."""

DENSE = ("gpt2", "llama")
"""Models without experts."""

KINDS = (*DENSE, "deepseek")
"""One more, with every part that the others have."""

FORMS = {
    "around": LLAMA.model_copy(
        update={
            "name": "parity-around",
            "norm_place": "around",
            "head_dim": 16,
            "rotary_dim": 8,
            "qkv_bias": True,
            "norm_from_one": True,
            "embedding_scale": 8.0,
            "logits_softcap": 5.0,
        }
    ),
    "after": LLAMA.model_copy(
        update={
            "name": "parity-after",
            "norm_place": "after",
            "qk_norm": True,
            "qk_norm_width": "all",
            "output_bias": True,
            "residual_scale": 0.5,
            "score_scale": 0.3,
            "logits_scale": 0.5,
        }
    ),
    "parallel": LLAMA.model_copy(
        update={
            "name": "parity-parallel",
            "parallel_residual": True,
            "norm": "layernorm",
            "linear_bias": True,
            "gated": False,
            "activation": "gelu_tanh",
            "head_dim": 16,
            "rotary_dim": 4,
        }
    ),
    "sigmoid": LLAMA.model_copy(
        update={
            "name": "parity-sigmoid",
            "head_dim": 16,
            "rotary_dim": 8,
            "qk_norm": True,
            "qk_norm_width": "all",
            "experts": 8,
            "top_k": 3,
            "expert_ffn": 32,
            "router": Router(score="sigmoid", expert_bias=True),
        }
    ),
    "sinks": LLAMA.model_copy(
        update={
            "name": "parity-sinks",
            "attention_pattern": ("window", "full"),
            "window": 10,
            "attention_sinks": True,
            "linear_bias": True,
            "activation": "clamped_silu",
            "rope_scaling": RopeScaling(kind="yarn", factor=4.0, original_positions=8, truncate=False),
            "experts": 8,
            "top_k": 3,
            "expert_ffn": 32,
            "router": Router(bias=True),
        }
    ),
    "windows": LLAMA.model_copy(
        update={
            "name": "parity-windows",
            "norm_place": "around",
            "head_dim": 16,
            "qk_norm": True,
            "norm_from_one": True,
            "embedding_scale": 8.0,
            "attention_pattern": ("window", "window", "full"),
            "window": 7,
            "window_rope_theta": 100.0,
            "rope_scaling": RopeScaling(kind="linear", factor=2.0),
            "tied": True,
        }
    ),
    "capped": LLAMA.model_copy(
        update={
            "name": "parity-capped",
            "norm_place": "around",
            "norm_from_one": True,
            "embedding_scale": 8.0,
            "attention_pattern": ("window", "full"),
            "window": 9,
            "attention_softcap": 2.0,
            "logits_softcap": 4.0,
            "score_scale": 0.25,
            "tied": True,
        }
    ),
    "delta": LLAMA.model_copy(
        update={
            "name": "parity-delta",
            "head_dim": 16,
            "rotary_dim": 4,
            "qk_norm": True,
            "norm_from_one": True,
            "attention_gate": True,
            "attention_pattern": ("linear", "full"),
            "linear_attention": LinearAttention(
                kind="gated_delta", key_heads=4, value_heads=8, key_dim=8, value_dim=6, chunk=10
            ),
            "experts": 8,
            "top_k": 3,
            "expert_ffn": 32,
            "shared_expert_ffn": 32,
            "shared_expert_gate": True,
        }
    ),
    "further": MODELS["deepseek"].model_copy(
        update={"name": "parity-further", "mtp": MultiTokenPrediction(depths=2, loss_factor=0.3)}
    ),
    "further-tied": LLAMA.model_copy(
        update={
            "name": "parity-further-tied",
            "tied": True,
            "embedding_scale": 8.0,
            "logits_scale": 0.5,
            "mtp": MultiTokenPrediction(depths=1, loss_factor=1.0),
        }
    ),
    "chunks": LLAMA.model_copy(
        update={
            "name": "parity-chunks",
            "attention_pattern": ("chunk", "full"),
            "window": 12,
            "rotates_full": False,
            "mlp_pattern": ("dense", "experts"),
            "experts": 8,
            "top_k": 1,
            "expert_ffn": 32,
            "shared_expert_ffn": 32,
            "router": Router(score="sigmoid", normalised=False, weighs_inputs=True),
            "qk_norm": True,
            "qk_norm_weights": False,
            "score_growth": ScoreGrowth(positions=6, factor=0.3),
        }
    ),
}
"""Small models with what few models have: GLM-4's and Gemma's, OLMo 2's, MiniMax-M2's, gpt-oss's, Gemma 2's
and 3's, Llama 4's and Qwen3-Next's blocks, and DeepSeek-V3's MTP modules."""


TINY = ModelSpec(name="tiny", layers=4, hidden=256, heads=8, vocab=1000, seq=128)
"""A dense model of which a search takes no time."""

TINY_EXPERTS = ModelSpec(
    name="mixture", layers=8, hidden=256, heads=8, vocab=1000, seq=128, experts=8, top_k=2, expert_ffn=512
)
"""A model with experts of which a search takes little time."""

SMALL = ModelSpec(name="small", layers=8, hidden=1024, heads=16, vocab=32000, seq=2048)
"""A dense model whose layouts differ in memory and time."""

SMALL_EXPERTS = ModelSpec(
    name="mixture",
    layers=8,
    hidden=1024,
    heads=16,
    vocab=32000,
    seq=1024,
    experts=8,
    top_k=2,
    expert_ffn=1024,
)
"""A model with experts whose layouts differ in memory and time."""


def small_spec(**sizes: int) -> ModelSpec:
    """A dense model that many layouts divide, with other sizes where they are given."""
    usual: dict[str, Any] = {
        "layers": 4,
        "hidden": 64,
        "heads": 8,
        "head_dim": 8,
        "ffn": 256,
        "vocab": 100,
        "seq": 64,
    }
    return ModelSpec(**{"name": "tiny", **usual, **sizes})

"""Small models with every kind of layer."""

from __future__ import annotations

from costmodels import LatentAttention, ModelSpec, RopeScaling, Router

LLAMA = ModelSpec(
    name="parity-llama",
    layers=4,
    hidden=64,
    heads=8,
    kv_heads=4,
    ffn=176,
    vocab=250,
    seq=32,
    gated=True,
    activation="silu",
    norm="rmsnorm",
    position="rope",
    tied=False,
    linear_bias=False,
)

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

"""Plans as the YAML configuration of nanotron (src/nanotron/config/config.py)."""

from __future__ import annotations

from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from planner.formats.nanotron.names import FORMATS, KEYS, OPTIMIZERS, TP_MODES, TRAINING
from planner.formats.writing.export import (
    Export,
    Values,
    flag_values,
    lacks,
    lacks_bundled_features,
    lacks_fp8,
    lacks_recomputation,
    lacks_some_layers,
    yaml_text,
)
from planner.formats.writing.model_words import Said, lacks_of_model

AT = "model.model_config"

SAID: Said = {
    "gated": (True,),
    "activation": ("silu",),
    "norm": ("rmsnorm",),
    "position": ("rope",),
    "linear_bias": (False,),
    **dict.fromkeys(("kv_heads", "max_positions", "norm_eps", "rope_theta", "tied", "qkv_bias")),
    **dict.fromkeys(("experts", "top_k", "expert_ffn", "shared_expert_ffn", "mlp_pattern")),
}
"""Parts of a model that nanotron supports; its models are Llama and Qwen 2."""

BECAUSE = dict.fromkeys(
    ("gated", "activation", "norm", "position", "linear_bias", "qk_norm", "latent_attention"),
    "its models are Llama and Qwen 2",
) | {
    "head_dim": "heads are hidden / heads wide",
    "router": "experts are chosen by their softmax, and none drops",
}


def export_nanotron(model: ModelSpec, layout: Layout) -> Export:
    """The whole configuration except the data; steps and learning rates are those of nanotron's examples."""
    missing: list[str] = []
    of_layout = layout_values(layout, missing)
    values: Values = {
        "general.project": "planner",
        "general.run": model.name,
        TRAINING["--seed"]: 42,
        **{path: of_layout[path] for path in of_layout if path.startswith("parallelism.")},
        "model.ddp_bucket_cap_mb": 25,
        KEYS["precision"]: of_layout[KEYS["precision"]],
        "model.init_method.std": 0.02,
        "model.make_vocab_size_divisible_by": 1,
        **model_values(model, missing, ring=layout.context_parallel > 1),
        TRAINING["--train-iters"]: 100,
        KEYS["seq"]: model.seq,
        **{path: of_layout[path] for path in of_layout if path.startswith("tokens.")},
        **_optimizer(layout),
        **{path: of_layout[path] for path in of_layout if path.startswith("optimizer.")},
    }
    if layout.context_parallel > 1:
        values |= {f"{AT}._attn_implementation": "llama3_ring_attention", f"{AT}.ring_attn_heads_k_stride": 1}
        if model.experts:
            lacks(missing, layout, "context_parallel", "its parser takes experts with flash attention alone")
    return Export("nanotron", yaml_text(values), tuple(missing), flag_values(of_layout))


def layout_values(layout: Layout, missing: list[str]) -> Values:
    """The keys of a layout; degrees without a key are added to `missing`."""
    values: Values = {
        KEYS["data_parallel"]: layout.data_parallel,
        KEYS["pipeline_parallel"]: layout.pipeline_parallel,
        KEYS["tensor_parallel"]: layout.tensor_parallel,
        KEYS["schedule"]: "1f1b",
        KEYS["sequence_parallel"]: next(
            name for name, split in TP_MODES.items() if split == layout.sequence_parallel
        ),
        KEYS["asynchronous_messages"]: layout.sequence_parallel,
        KEYS["recompute"]: layout.recompute == "full",
        KEYS["expert_parallel"]: 1,
        KEYS["context_parallel"]: layout.context_parallel,
        KEYS["precision"]: next(
            (name for name, short in FORMATS.items() if short == layout.precision), "bfloat16"
        ),
        KEYS["micro_batch_size"]: layout.micro_batch_size,
        KEYS["micro_batches"]: layout.micro_batches,
        KEYS["zero_stage"]: min(layout.zero_stage, 1),
        KEYS["gradient_reduction"]: layout.gradient_reduction == "fp32",
    }
    _name_missing(layout, missing)
    return values


def _name_missing(layout: Layout, missing: list[str]) -> None:
    if layout.schedule != "1f1b":
        lacks(missing, layout, "schedule", "its pipelines are 1f1b")
        lacks(missing, layout, "virtual_pipeline_parallel", "a rank has one chunk")
    if layout.pipeline_parallel > 1:
        lacks(missing, layout, "layers_per_stage", "it shares out layers by their cost")
    if layout.context_parallel > 1 and layout.context_parallel_form != "all_gather":
        lacks(missing, layout, "context_parallel_form", "its ranks gather keys and values")
    if layout.expert_parallel > 1:
        lacks(missing, layout, "expert_parallel", "its ranks leave no room for it (parallel/context.py)")
    if layout.expert_tensor_parallel > 1:
        lacks(missing, layout, "expert_tensor_parallel", "experts are whole")
    if layout.zero_stage > 1:
        lacks(missing, layout, "zero_stage", "it shards the optimizer's state alone")
    if layout.zero_replicas > 1:
        lacks(missing, layout, "zero_replicas", "it shards over all data-parallel ranks")
    if layout.recompute == "selective":
        lacks_recomputation(missing, layout, "layers are recomputed whole")
    else:
        lacks_some_layers(missing, layout)
    for name in ("offload_activations", "offload_optimizer"):
        if getattr(layout, name):
            lacks(missing, layout, name, "it offloads nothing")
    if layout.precision not in FORMATS.values():
        lacks(missing, layout, "precision", f"it computes in {', '.join(FORMATS.values())}")
    lacks_fp8(missing, layout, "as precision")
    lacks_bundled_features(missing, layout)
    if layout.optimizer not in OPTIMIZERS.values():
        lacks(missing, layout, "optimizer", "it has adam and sgd")


def _optimizer(layout: Layout) -> Values:
    at = "optimizer.optimizer_factory"
    name = next((name for name, short in OPTIMIZERS.items() if short == layout.optimizer), "adamW")
    values: Values = {KEYS["optimizer"]: name}
    if name == "adamW":
        values |= {
            TRAINING["--adam-beta1"]: 0.9,
            TRAINING["--adam-beta2"]: 0.95,
            TRAINING["--adam-eps"]: 1e-8,
            f"{at}.torch_adam_is_fused": True,
        }
    schedule = "optimizer.learning_rate_scheduler"
    return values | {
        TRAINING["--weight-decay"]: 0.01,
        TRAINING["--clip-grad"]: 1.0,
        TRAINING["--lr"]: 3e-4,
        TRAINING["--lr-warmup-iters"]: 10,
        f"{schedule}.lr_warmup_style": "linear",
        TRAINING["--lr-decay-style"]: "cosine",
        TRAINING["--min-lr"]: 3e-5,
    }


def model_values(model: ModelSpec, missing: list[str], ring: bool) -> Values:
    """The keys of a model, as nanotron's Llama; with experts, query biases or a ring as its Qwen 2."""
    qwen = bool(model.experts) or model.qkv_bias or ring
    lacks_of_model(missing, model, SAID, BECAUSE)
    values: Values = {
        KEYS["qwen2" if qwen else "llama"]: True,
        KEYS["hidden"]: model.hidden,
        KEYS["ffn"]: model.ffn,
        KEYS["layers"]: model.layers,
        KEYS["heads"]: model.heads,
        KEYS["kv_heads"]: model.kv_heads,
        f"{AT}.hidden_act": "silu",
        KEYS["max_positions"]: model.max_positions,
        KEYS["norm_eps"]: model.norm_eps,
        KEYS["rope_theta"]: model.rope_theta,
        f"{AT}.rope_interleaved": False,
        KEYS["qkv_bias"]: model.qkv_bias,
        KEYS["tied"]: model.tied,
        KEYS["vocab"]: model.vocab,
    }
    if not model.experts:
        return values
    kinds = [model.layer_kind(layer).mlp for layer in range(model.layers)]
    mixed = [layer for layer, kind in enumerate(kinds) if kind == "experts"]
    values |= {
        KEYS["experts"]: model.experts,
        KEYS["top_k"]: model.top_k,
        KEYS["expert_ffn"]: model.expert_ffn,
        KEYS["shared_expert"]: bool(model.shared_expert_ffn),
        KEYS["layers_with_experts"]: mixed if len(mixed) < model.layers else [-1],
    }
    if model.shared_expert_ffn:
        values[KEYS["shared_expert_ffn"]] = model.shared_expert_ffn
    return values

"""Plans as the YAML of MindFormers for the static graph (mindformers 1.7, configs/README.md)."""

from __future__ import annotations

from typing import Any

from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from costmodels.spec.model_parts import LatentAttention
from planner.formats.mindformers.names import CAME_VALUES, CONTEXT_ALGORITHMS, FORMATS, SCHEDULES, STATIC_KEYS
from planner.formats.writing.export import (
    Export,
    Values,
    flag_values,
    lacks,
    lacks_bundled_features,
    lacks_fp8,
    lacks_recomputation,
    yaml_text,
)
from planner.formats.writing.model_words import Said, lacks_of_model

AT = "model.model_config"

OPTIMIZERS: dict[str, Values] = {
    "adam": {STATIC_KEYS["optimizer"]: "AdamW"},
    "came": {
        STATIC_KEYS["optimizer"]: "Came",
        **{f"optimizer.{name}": value for name, value in CAME_VALUES.items()},
    },
}
"""Names of the optimizers that MindFormers and the runtime share, with the settings that both have by
default."""

PATTERNS = {
    "norm": (r"ffn_norm\.norm", r"attention_norm\.norm"),
    "activation": (r"feed_forward\.mul", r"feed_forward\.w1\.activation\.silu"),
}
"""Operators of MindFormers' Llama by the module that recomputes them (its page "Memory Optimization")."""


_EXPERTS = dict.fromkeys(("experts", "top_k", "expert_ffn", "shared_expert_ffn", "mlp_pattern"))

LLAMA: Said = {
    "gated": (True,),
    "activation": ("silu",),
    "norm": ("rmsnorm",),
    "position": ("rope",),
    "linear_bias": (False,),
    **dict.fromkeys(("kv_heads", "head_dim", "norm_eps", "rope_theta", "tied", "qkv_bias", "max_positions")),
    **dict.fromkeys(f"latent_attention.{name}" for name in LatentAttention.model_fields),
    **_EXPERTS,
}
"""Parts of a model that MindFormers' Llama supports."""

GPT2: Said = {
    "gated": (False,),
    "activation": ("gelu",),
    "norm": ("layernorm",),
    "position": ("learned",),
    "linear_bias": (True,),
    "tied": (True,),
    "max_positions": None,
    **_EXPERTS,
}
"""Parts of a model that MindFormers' GPT-2 supports."""

BECAUSE = dict.fromkeys(
    ("gated", "activation", "norm", "position", "linear_bias", "qk_norm", "compressed_attention"),
    "its layers are a Llama's or a GPT-2's",
)


def export_mindformers(model: ModelSpec, layout: Layout) -> Export:
    """The keys of the model, the layout and the context; the user has to add data and learning rates."""
    missing: list[str] = []
    of_layout = layout_values(layout, model, missing)
    values: Values = {
        "run_mode": "train",
        "use_parallel": True,
        "trainer.type": "CausalLanguageModelingTrainer",
        STATIC_KEYS["name"]: model.name,
        "runner_config.epochs": 1,
        "context.mode": 0,
        "context.device_target": "Ascend",
        STATIC_KEYS["mode"]: 1,
        "parallel.full_batch": True,
        "parallel.gradients_mean": False,
        "parallel.search_mode": "sharding_propagation",
        STATIC_KEYS["table_on_each_rank"]: False,
        **of_layout,
        **model_values(model, missing),
        "runner_wrapper.type": "MFTrainOneStepCell",
        "runner_wrapper.scale_sense": 1.0,
    }
    return Export("mindformers", yaml_text(values), tuple(missing), flag_values(of_layout))


def layout_values(layout: Layout, model: ModelSpec, missing: list[str]) -> Values:
    """The keys of a layout; degrees without a key are added to `missing`."""
    keys = STATIC_KEYS
    values: Values = {
        keys["data_parallel"]: layout.data_parallel,
        keys["tensor_parallel"]: layout.tensor_parallel,
        keys["context_parallel"]: layout.context_parallel,
        keys["pipeline_parallel"]: layout.pipeline_parallel,
        keys["sequence_parallel"]: layout.sequence_parallel,
    }
    if layout.context_parallel > 1:
        form = layout.context_parallel_form
        name = next((name for name, known in CONTEXT_ALGORITHMS.items() if known == form), None)
        if name is None:
            lacks(
                missing, layout, "context_parallel_form", "keys and values go round, or heads are exchanged"
            )
        values[keys["context_parallel_form"]] = name or "colossalai_cp"
    if model.experts:
        values[keys["expert_parallel"]] = layout.expert_parallel
        if layout.expert_tensor_parallel != layout.tensor_parallel:
            lacks(missing, layout, "expert_tensor_parallel", "experts are split as their layers are")
        elif layout.data_parallel % layout.expert_parallel:
            lacks(missing, layout, "expert_parallel", "experts are spread over data-parallel ranks alone")
    pipelined = layout.pipeline_parallel > 1
    values[keys["micro_batches"]] = layout.micro_batches if pipelined else 1
    values[STATIC_KEYS["accumulated_batches"]] = 1 if pipelined else layout.micro_batches
    values[keys["micro_batch_size"]] = layout.micro_batch_size
    values |= _stages(layout, missing) | _zero(layout, missing) | _recompute(layout, missing)
    if layout.offload_activations:
        values[STATIC_KEYS["offload_activations"]] = True
    if layout.offload_optimizer:
        lacks(missing, layout, "offload_optimizer", "it keeps the state of the optimizer on devices")
    name = next((name for name, short in FORMATS.items() if short == layout.precision), None)
    if name is None:
        lacks(missing, layout, "precision", f"it computes in {', '.join(FORMATS)}")
    values[keys["precision"]] = name or "bfloat16"
    lacks_fp8(missing, layout, "as precision")
    lacks_bundled_features(missing, layout)
    if layout.gradient_reduction != "fp32":
        lacks(missing, layout, "gradient_reduction", "gradients are summed in fp32")
    if layout.optimizer not in OPTIMIZERS:
        lacks(missing, layout, "optimizer", f"its optimizers are written for {' and '.join(OPTIMIZERS)}")
    return values | OPTIMIZERS.get(layout.optimizer, OPTIMIZERS["adam"])


def _stages(layout: Layout, missing: list[str]) -> Values:
    """The keys of chunks, schedule, and of each stage's difference from an even share of the layers."""
    ranks, chunks, listed = (
        layout.pipeline_parallel,
        layout.virtual_pipeline_parallel,
        layout.layers_per_stage,
    )
    each = sum(listed) // len(listed)
    offsets = [count - each for count in listed]
    if ranks == 1:
        return {}
    values: Values = {}
    if chunks > 1:
        scheduler = next((name for name, short in SCHEDULES.items() if short == layout.schedule), "1f1b")
        if layout.schedule not in ("interleaved", *SCHEDULES.values()):
            lacks(missing, layout, "schedule", f"its schedulers are {', '.join(SCHEDULES)}")
        values = {
            STATIC_KEYS["interleaves"]: True,
            STATIC_KEYS["schedule"]: scheduler,
            STATIC_KEYS["virtual_pipeline_parallel"]: chunks,
        }
    rows: Any = [offsets[row * ranks : (row + 1) * ranks] for row in range(chunks)]
    values[STATIC_KEYS["layers_per_stage"]] = (rows if chunks > 1 else rows[0]) if any(offsets) else 0
    return values


def _zero(layout: Layout, missing: list[str]) -> Values:
    values: Values = {STATIC_KEYS["zero_stage"]: layout.zero_stage > 0}
    if layout.zero_stage:
        values[STATIC_KEYS["shards_gradients"]] = layout.zero_stage >= 2
        if layout.zero_replicas > 1:
            values[STATIC_KEYS["zero_replicas"]] = layout.zero_shards
    if layout.zero_stage == 3:
        values[STATIC_KEYS["gathers_again"]] = True
    return values


def _recompute(layout: Layout, missing: list[str]) -> Values:
    """The keys of recomputation: whole layers (all, or the first of each stage), or operators of modules."""
    some = layout.recompute_num_layers if layout.recompute_method == "block" else None
    of_stages: Any = [some] * layout.pipeline_parallel
    if layout.virtual_pipeline_parallel > 1:
        of_stages = [of_stages] * layout.virtual_pipeline_parallel
    layers: Any = True if some is None else of_stages
    if layout.recompute == "none":
        return {STATIC_KEYS["recompute"]: False}
    if layout.recompute == "full":
        if layout.recompute_method == "uniform" and layout.recompute_num_layers > 1:
            lacks(missing, layout, "recompute_num_layers", "each layer keeps its own input")
        return {STATIC_KEYS["recompute"]: layers}
    others = [name for name in layout.recompute_modules if name not in PATTERNS]
    if others:
        lacks_recomputation(missing, layout, f"operators of {', '.join(others)} differ by model")
        return {STATIC_KEYS["recompute"]: False}
    patterns = {pattern: layers for name in layout.recompute_modules for pattern in PATTERNS[name]}
    return {STATIC_KEYS["recompute"]: False, STATIC_KEYS["recompute_modules"]: patterns}


def model_values(model: ModelSpec, missing: list[str]) -> Values:
    """The keys of a model, as MindFormers' Llama or GPT-2."""
    llama = model.gated or model.position == "rope"
    lacks_of_model(missing, model, LLAMA if llama else GPT2, BECAUSE)
    keys = STATIC_KEYS
    values: Values = {
        f"{AT}.type": "LlamaConfig" if llama else "GPT2Config",
        keys["layers"]: model.layers,
        keys["hidden"]: model.hidden,
        keys["heads"]: model.heads,
        keys["ffn"]: model.ffn,
        keys["seq"]: model.seq,
        keys["vocab"]: model.vocab,
        f"{AT}.max_position_embedding": model.max_positions,
        f"{AT}.use_flash_attention": True,
        f"{AT}.tie_word_embeddings": model.tied,
    }
    if llama:
        values |= {
            keys["kv_heads"]: model.kv_heads,
            f"{AT}.head_dim": model.head_dim,
            f"{AT}.rms_norm_eps": model.norm_eps,
            f"{AT}.theta": model.rope_theta,
            f"{AT}.qkv_has_bias": model.qkv_bias,
        }
    if model.latent_attention is not None:
        values |= {f"{AT}.{name}": size for name, size in model.latent_attention.model_dump().items()}
    if not model.experts:
        return values
    shared = model.shared_expert_ffn
    if shared % model.expert_ffn:
        missing.append(f"shared_expert_ffn={shared}: it has whole experts of {model.expert_ffn}")
    kinds = [model.layer_kind(layer).mlp for layer in range(model.layers)]
    dense = kinds.index("experts") if "experts" in kinds else model.layers
    if "dense" in kinds[dense:]:
        missing.append("mlp_pattern=dense,experts: the first layers alone are dense")
    return values | {
        keys["experts"]: model.experts,
        "moe_config.num_experts_chosen": model.top_k,
        "moe_config.moe_intermediate_size": model.expert_ffn,
        "moe_config.shared_expert_num": shared // model.expert_ffn,
        "moe_config.first_k_dense_replace": dense,
    }

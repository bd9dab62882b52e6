"""Plans as flags of Megatron-LM (core 0.13 and later) and MindSpeed."""

from __future__ import annotations

from costmodels.spec.hardware import NARROW
from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from planner.formats.export import Export, flag_lines, lacks_own_ways
from planner.formats.megatron_names import (
    COMMUNICATION_TYPES,
    CONTEXT_ALGORITHMS,
    DEGREE_FLAGS,
    MODULES,
    OPTIMIZERS,
    SHARDING,
)

Flags = dict[str, str]


def export_megatron(model: ModelSpec, layout: Layout, framework: str = "megatron") -> Export:
    """The flags of a job: those of its model, and those of its layout."""
    missing: list[str] = []
    of_model = model_flags(model, missing)
    of_layout = layout_flags(layout, model, framework, missing)
    notes: tuple[str, ...] = ()
    if "--fine-grained-activation-offloading" in of_layout:
        notes = ("with Transformer Engine 2.10 and later it wants NVTE_CPU_OFFLOAD_V1=1 in the environment",)
    return Export(framework, flag_lines(of_model | of_layout), tuple(missing), of_layout, notes)


def layout_flags(layout: Layout, model: ModelSpec, framework: str, missing: list[str]) -> Flags:
    """The flags of a layout; what there are none for is added to `missing`."""
    mindspeed = framework == "mindspeed"
    flags: Flags = {DEGREE_FLAGS["tensor_parallel"]: str(layout.tensor_parallel)}
    if layout.sequence_parallel:
        flags["--sequence-parallel"] = ""
    flags[DEGREE_FLAGS["pipeline_parallel"]] = str(layout.pipeline_parallel)
    flags |= _stages(layout, model, mindspeed, missing)
    flags[DEGREE_FLAGS["context_parallel"]] = str(layout.context_parallel)
    if layout.context_parallel > 1:
        known, name = (
            (CONTEXT_ALGORITHMS, "--context-parallel-algo")
            if mindspeed
            else (COMMUNICATION_TYPES, "--cp-comm-type")
        )
        flags[name] = next(word for word, form in known.items() if form == layout.context_parallel_form)
    if model.experts:
        flags[DEGREE_FLAGS["expert_parallel"]] = str(layout.expert_parallel)
        flags[DEGREE_FLAGS["expert_tensor_parallel"]] = str(layout.expert_tensor_parallel)
    flags |= _zero(layout, mindspeed, missing)
    flags[DEGREE_FLAGS["micro_batch_size"]] = str(layout.micro_batch_size)
    flags[DEGREE_FLAGS["global_batch_size"]] = str(layout.global_batch_size)
    flags |= _recompute(layout, model, mindspeed, missing)
    if layout.offload_activations and mindspeed:
        flags["--swap-attention"] = ""
    elif layout.offload_activations:
        flags |= {"--fine-grained-activation-offloading": "", "--offload-modules": "core_attn"}
    if layout.offload_optimizer:
        flags |= (
            {"--swap-optimizer": ""}
            if mindspeed
            else {"--optimizer-cpu-offload": "", "--use-precision-aware-optimizer": ""}
        )
    return flags | _formats(layout, missing)


def _stages(layout: Layout, model: ModelSpec, mindspeed: bool, missing: list[str]) -> Flags:
    """Chunks, schedule, and layers of each stage where they differ."""
    flags: Flags = {}
    chunks, listed = layout.virtual_pipeline_parallel, layout.layers_per_stage
    even = len(set(listed)) == 1
    if layout.schedule == "dualpipev" and mindspeed:
        flags["--schedules-method"] = "dualpipev"
    elif layout.schedule not in ("1f1b", "interleaved"):
        missing.append(f"schedule={layout.schedule}: its schedules are 1f1b and interleaved")
    if chunks > 1 and layout.schedule != "dualpipev":
        if even:
            flags["--num-layers-per-virtual-pipeline-stage"] = str(listed[0])
        elif mindspeed:
            flags["--num-virtual-stages-per-pipeline-rank"] = str(chunks)
    if even:
        return flags
    if not mindspeed:
        return flags | {"--pipeline-model-parallel-layout": stage_layout(listed, model.mtp_depths)}
    if chunks == 1:
        return flags | {"--num-layer-list": ",".join(map(str, listed))}
    if layout.schedule == "dualpipev":
        missing.append(f"layers_per_stage={','.join(map(str, listed))}: stages of DualPipe-V are alike")
        return flags
    flags.pop("--num-virtual-stages-per-pipeline-rank", None)
    return flags | {"--pipeline-model-parallel-layout": stage_layout(listed, model.mtp_depths)}


def stage_layout(layers: tuple[int, ...], further: int = 0) -> str:
    """Layers of each stage in Megatron-LM's letters, such as `Et*3|t*4|t*3mL` with one `further` token."""
    stages = [f"t*{count}" if count > 1 else "t" for count in layers]
    stages[0], stages[-1] = f"E{stages[0]}", f"{stages[-1]}{'m' * further}L"
    return "|".join(stages)


def _zero(layout: Layout, mindspeed: bool, missing: list[str]) -> Flags:
    flags: Flags = {}
    if layout.zero_stage == 1:
        flags["--use-distributed-optimizer"] = ""
    elif layout.zero_stage and mindspeed:
        missing.append(f"zero_stage={layout.zero_stage}: it shards the optimizer's state alone")
    elif layout.zero_stage:
        strategy = next(name for name, stage in SHARDING.items() if stage == layout.zero_stage)
        flags = {"--use-megatron-fsdp": "", "--data-parallel-sharding-strategy": strategy}
    if layout.zero_replicas > 1:
        flags["--num-distributed-optimizer-instances"] = str(layout.zero_replicas)
    return flags


def _recompute(layout: Layout, model: ModelSpec, mindspeed: bool, missing: list[str]) -> Flags:
    if layout.recompute == "none":
        return {}
    if layout.recompute == "full":
        return {
            "--recompute-granularity": "full",
            "--recompute-method": layout.recompute_method,
            "--recompute-num-layers": str(layout.recompute_num_layers),
        }
    modules = layout.recompute_modules
    if mindspeed:
        return _mindspeeds_modules(layout, missing)
    if layout.recompute_method == "block":
        missing.append("recompute_method=block: modules are recomputed in every layer")
    words = [word for word, name in MODULES.items() if name in modules]
    if "activation" in modules and not model.experts:
        missing.append("recompute_modules=activation: of a model without experts it is not recomputed alone")
    return {"--recompute-granularity": "selective", "--recompute-modules": " ".join(words)}


def _mindspeeds_modules(layout: Layout, missing: list[str]) -> Flags:
    modules, block = layout.recompute_modules, layout.recompute_method == "block"
    layers = str(layout.recompute_num_layers)
    if modules == ("mlp",) and block and layout.offload_activations:
        return {"--recompute-num-layers": layers}
    flags: Flags = {}
    if set(modules) & {"core_attention", "mlp"}:
        words = [word for word, name in MODULES.items() if name in modules]
        flags = {"--recompute-granularity": "selective", "--recompute-modules": " ".join(words)}
        if block:
            missing.append("recompute_method=block: these modules are recomputed in every layer")
        return flags
    for name, flag in (("activation", "--recompute-activation-function"), ("norm", "--recompute-norm")):
        if name in modules:
            flags[flag] = ""
            if block:
                flags[f"{flag}-num-layers"] = layers
    return flags


RECIPES: dict[str, Flags] = {
    "fp8": {"--fp8-format": "hybrid"},
    "mxfp8": {"--fp8-format": "e4m3", "--fp8-recipe": "mxfp8"},
    "nvfp4": {"--fp4-format": "e2m1", "--fp4-recipe": "nvfp4"},
}
"""Flags of number formats of fewer than 16 bits, beside `--bf16`."""


FP8_RECIPES: dict[str, Flags] = {
    "delayed": {"--fp8-recipe": "delayed"},
    "tensorwise": {"--fp8-recipe": "tensorwise"},
    "blockwise": {"--fp8-format": "e4m3", "--fp8-recipe": "blockwise"},
}
"""Flags of scales of fp8, beside or instead of those of `RECIPES`."""


def _formats(layout: Layout, missing: list[str]) -> Flags:
    flags: Flags = {}
    if layout.precision in ("bf16", *NARROW):
        flags["--bf16"] = ""
    flags |= RECIPES.get(layout.precision, {})
    if layout.fp8_recipe in FP8_RECIPES:
        flags |= FP8_RECIPES[layout.fp8_recipe]
    elif layout.fp8_recipe != "default":
        missing.append(f"fp8_recipe={layout.fp8_recipe}: it has {', '.join(FP8_RECIPES)}")
    if layout.fp8_param_gather:
        flags["--fp8-param-gather"] = ""
    if layout.precision == "fp16":
        flags["--fp16"] = ""
    if layout.gradient_reduction == "bf16":
        flags["--grad-reduce-in-bf16"] = ""
    lacks_own_ways(missing, layout)
    if layout.optimizer not in OPTIMIZERS.values():
        missing.append(f"optimizer={layout.optimizer}: it has adam, sgd and muon")
    elif layout.optimizer != "adam":
        flags["--optimizer"] = layout.optimizer
    return flags


def model_flags(model: ModelSpec, missing: list[str]) -> Flags:
    """The flags of a model; what there are none for is added to `missing`."""
    flags: Flags = {
        "--num-layers": str(model.layers),
        "--hidden-size": str(model.hidden),
        "--ffn-hidden-size": str(model.ffn),
        "--num-attention-heads": str(model.heads),
    }
    if model.latent_attention is None:
        flags["--kv-channels"] = str(model.head_dim)
        if model.kv_heads != model.heads:
            flags |= {"--group-query-attention": "", "--num-query-groups": str(model.kv_heads)}
    flags |= {
        "--seq-length": str(model.seq),
        "--max-position-embeddings": str(model.max_positions),
        "--position-embedding-type": {"learned": "learned_absolute"}.get(model.position, model.position),
        "--normalization": {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[model.norm],
        "--norm-epsilon": repr(model.norm_eps),
        "--vocab-size": str(model.vocab),
    }
    if model.position == "rope":
        if model.rope_theta.is_integer():
            flags["--rotary-base"] = str(int(model.rope_theta))
        else:
            missing.append(f"rope_theta={model.rope_theta}: --rotary-base takes whole numbers")
    if model.rope_scaling is not None:
        missing.append(f"rope_scaling {model.rope_scaling.kind}: give the flags of your version by hand")
    if model.compressed_attention is not None:
        missing.append("compressed_attention: its latent attention has keys of each head and position")
    if model.gated and model.activation == "silu":
        flags["--swiglu"] = ""
    elif model.activation == "relu2" and not model.gated:
        flags["--squared-relu"] = ""
    elif model.gated or model.activation not in ("gelu", "gelu_tanh"):
        missing.append(f"activation {'gated ' * model.gated}{model.activation}")
    for name, given in (
        ("--disable-bias-linear", not model.linear_bias),
        ("--add-qkv-bias", model.qkv_bias),
        ("--qk-layernorm", model.qk_norm),
        ("--untie-embeddings-and-output-weights", not model.tied),
    ):
        if given:
            flags[name] = ""
    if model.mtp is not None:
        flags |= {
            "--mtp-num-layers": str(model.mtp.depths),
            "--mtp-loss-scaling-factor": repr(model.mtp.loss_factor),
        }
    return flags | _expert_flags(model) | _latent_flags(model)


def _expert_flags(model: ModelSpec) -> Flags:
    if not model.experts:
        return {}
    router = model.router
    flags: Flags = {
        "--num-experts": str(model.experts),
        "--moe-router-topk": str(model.top_k),
        "--moe-ffn-hidden-size": str(model.expert_ffn),
        "--moe-grouped-gemm": "",
        "--moe-token-dispatcher-type": "alltoall",
        "--moe-router-score-function": router.score,
    }
    if model.shared_expert_ffn:
        flags["--moe-shared-expert-intermediate-size"] = str(model.shared_expert_ffn)
    if model.shared_expert_gate:
        flags["--moe-shared-expert-gate"] = ""
    if model.dense_layers:
        flags["--moe-layer-freq"] = f"([0]*{model.dense_layers}+[1]*{model.layers - model.dense_layers})"
    if router.score == "softmax" and not router.normalised:
        flags["--moe-router-pre-softmax"] = ""
    if router.scale != 1:
        flags["--moe-router-topk-scaling-factor"] = repr(router.scale)
    if router.groups > 1:
        flags["--moe-router-num-groups"] = str(router.groups)
        flags["--moe-router-group-topk"] = str(router.top_groups)
    if router.expert_bias:
        flags["--moe-router-enable-expert-bias"] = ""
    if router.capacity_factor:
        flags["--moe-expert-capacity-factor"] = repr(router.capacity_factor)
    return flags


def _latent_flags(model: ModelSpec) -> Flags:
    latent = model.latent_attention
    if latent is None:
        return {}
    flags: Flags = {"--multi-latent-attention": "", "--qk-layernorm": ""}
    if latent.q_lora_rank:
        flags["--q-lora-rank"] = str(latent.q_lora_rank)
    return flags | {
        "--kv-lora-rank": str(latent.kv_lora_rank),
        "--qk-head-dim": str(latent.qk_nope_head_dim),
        "--qk-pos-emb-head-dim": str(latent.qk_rope_head_dim),
        "--v-head-dim": str(latent.v_head_dim),
    }

"""Plans as flags of Megatron-LM (core 0.13 and later) and MindSpeed."""

from __future__ import annotations

from collections.abc import Collection

from costmodels.spec.hardware import NARROW
from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from costmodels.spec.model_parts import LatentAttention
from planner.formats.megatron.dispatch import MANY_CONNECTIONS, OVERLAP
from planner.formats.megatron.layers import BECAUSE, is_yarn, layer_flags, pattern_text, why_not_scaled
from planner.formats.megatron.names import (
    COMMUNICATION_TYPES,
    CONTEXT_ALGORITHMS,
    DEGREE_FLAGS,
    MODULES,
    OPTIMIZERS,
    SHARDING,
)
from planner.formats.megatron.rules import refused_attention
from planner.formats.writing.export import (
    Export,
    flag_lines,
    lacks,
    lacks_bundled_features,
    lacks_some_layers,
)
from planner.formats.writing.model_words import Said, lacks_of_model

Flags = dict[str, str]


def export_megatron(
    model: ModelSpec,
    layout: Layout,
    framework: str = "megatron",
    overlaps: bool = False,
    exchange: Flags | None = None,
) -> Export:
    """The flags of a job: those of its model, and those of its layout.

    Args:
        overlaps: True if the price assumes overlap of data-parallel communication.
        exchange: flags of dispatch that the price assumes (`dispatch_flags`).
    """
    missing: list[str] = []
    of_model = model_flags(model, missing, framework)
    of_layout = layout_flags(layout, model, framework, missing)
    flags = of_model | of_layout | (overlap_flags(layout) if overlaps else {}) | (exchange or {})
    if FSDP in of_layout:
        flags["--ckpt-format"] = "fsdp_dtensor"  # Its parser refuses Megatron-FSDP with another.
    return Export(
        framework,
        flag_lines(flags),
        tuple(missing),
        of_layout,
        environment=environment(of_layout | (exchange or {})),
    )


FSDP = "--use-megatron-fsdp"


def environment(flags: Collection[str]) -> dict[str, str]:
    """Environment variables that a job with these flags of its layout needs.

    A single connection keeps communication and kernels in the order that overlap needs; Megatron-FSDP refuses
    it (megatron/training/arguments.py). Offload of activations is Transformer Engine's first version.
    """
    connections = MANY_CONNECTIONS if OVERLAP in flags else "1"
    found = {} if FSDP in flags else {"CUDA_DEVICE_MAX_CONNECTIONS": connections}
    if "--fine-grained-activation-offloading" in flags:
        found["NVTE_CPU_OFFLOAD_V1"] = "1"
    return found


def overlap_flags(layout: Layout) -> Flags:
    """The flags for overlap of data-parallel communication."""
    if layout.data_parallel * layout.context_parallel == 1:
        return {}
    return {"--overlap-grad-reduce": ""} | ({"--overlap-param-gather": ""} if layout.zero_stage else {})


def layout_flags(layout: Layout, model: ModelSpec, framework: str, missing: list[str]) -> Flags:
    """The flags of a layout; degrees without a flag are added to `missing`."""
    mindspeed = framework == "mindspeed"
    flags: Flags = {DEGREE_FLAGS["tensor_parallel"]: str(layout.tensor_parallel)}
    unsplit = bool(model.experts) and layout.tensor_parallel > 1 and not layout.sequence_parallel
    if unsplit:
        lacks(missing, layout, "sequence_parallel", "experts beside tensor parallelism want it")
    if layout.sequence_parallel or unsplit:
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
        form = layout.context_parallel_form
        flags[name] = next(word for word, known_form in known.items() if known_form == form)
        if not mindspeed:
            for text, _ in refused_attention(model, form, layout.tensor_parallel, layout.context_parallel):
                lacks(missing, layout, "context_parallel_form", text)
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
    if layout.offload_optimizer and mindspeed:
        flags["--swap-optimizer"] = ""
    elif (
        layout.offload_optimizer
        and not layout.zero_stage
        and layout.data_parallel * layout.context_parallel > 1
    ):
        lacks(
            missing,
            layout,
            "offload_optimizer",
            "it offloads only states that the distributed optimizer shards",
        )
    elif layout.offload_optimizer:
        flags |= {"--optimizer-cpu-offload": "", "--use-precision-aware-optimizer": ""}
        if not layout.zero_stage:
            flags["--use-distributed-optimizer"] = ""  # Of one rank: the code that offloads is there.
    return flags | _formats(layout, mindspeed, missing)


def _stages(layout: Layout, model: ModelSpec, mindspeed: bool, missing: list[str]) -> Flags:
    """The flags of chunks, schedule, and of layers of each stage where they differ."""
    flags: Flags = {}
    if layout.schedule not in ("1f1b", "interleaved", *(("dualpipev",) if mindspeed else ())):
        missing.append(f"schedule={layout.schedule}: its schedules are 1f1b and interleaved")
        layout = _of_other_schedule(layout, missing)
    chunks, listed = layout.virtual_pipeline_parallel, layout.layers_per_stage
    even = len(set(listed)) == 1
    if layout.schedule == "dualpipev" and mindspeed:
        flags["--schedules-method"] = "dualpipev"
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


def _of_other_schedule(layout: Layout, missing: list[str]) -> Layout:
    """The nearest layout with an interleaved schedule, or with 1f1b where microbatches are no multiple of
    pp."""
    ranks = layout.pipeline_parallel
    if layout.micro_batches % ranks == 0:
        return layout.model_copy(update={"schedule": "interleaved"})
    for name in ("virtual_pipeline_parallel", "layers_per_stage"):
        lacks(missing, layout, name, "interleaving wants microbatches in multiples of the pipeline ranks")
    held = tuple(
        sum(layout.layers_per_stage[stage] for stage in layout.stages_of(rank)) for rank in range(ranks)
    )
    return layout.model_copy(
        update={"schedule": "1f1b", "virtual_pipeline_parallel": 1, "layers_per_stage": held}
    )


def stage_layout(layers: tuple[int, ...], further: int = 0) -> str:
    """Layers of each stage in Megatron-LM's letters, such as `Et*3|t*4|t*3mL` with one MTP module
    (`further`)."""
    stages = [f"t*{count}" if count > 1 else "t" for count in layers]
    stages[0], stages[-1] = f"E{stages[0]}", f"{stages[-1]}{'m' * further}L"
    return "|".join(stages)


def _zero(layout: Layout, mindspeed: bool, missing: list[str]) -> Flags:
    flags: Flags = {}
    if layout.zero_stage > 1 and mindspeed:
        missing.append(f"zero_stage={layout.zero_stage}: it shards the optimizer's state alone")
    if layout.zero_stage == 1 or (layout.zero_stage and mindspeed):
        flags["--use-distributed-optimizer"] = ""
    elif layout.zero_stage:
        strategy = next(name for name, stage in SHARDING.items() if stage == layout.zero_stage)
        flags = {FSDP: "", "--data-parallel-sharding-strategy": strategy}
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
        return _mindspeeds_modules(layout, model, missing)
    if layout.recompute_method == "block":
        lacks_some_layers(missing, layout, "modules are recomputed in every layer")
    words = _module_words(modules, model)
    if "activation" in modules and not model.experts:
        missing.append("recompute_modules=activation: of a model without experts it is not recomputed alone")
    return {"--recompute-granularity": "selective", "--recompute-modules": " ".join(words)}


def _module_words(modules: Collection[str], model: ModelSpec) -> list[str]:
    """Megatron-LM's names of recomputed modules: `mlp` is an MLP without experts, `moe` one with experts.

    (megatron/core/transformer/transformer_layer.py: recompute_mlp is set where `is_moe_layer` is not.)
    """
    words = [word for word, name in MODULES.items() if name in modules]
    if "mlp" not in modules or not model.experts:
        return words
    dense = model.moe_layers < model.layers
    return [word for word in words if word != "mlp" or dense] + ["moe"]


def _mindspeeds_modules(layout: Layout, model: ModelSpec, missing: list[str]) -> Flags:
    modules, block = layout.recompute_modules, layout.recompute_method == "block"
    layers = str(layout.recompute_num_layers)
    if modules == ("mlp",) and block and layout.offload_activations:
        return {"--recompute-num-layers": layers}
    flags: Flags = {}
    if set(modules) & {"core_attention", "mlp"}:
        words = _module_words(modules, model)
        flags = {"--recompute-granularity": "selective", "--recompute-modules": " ".join(words)}
        if block:
            lacks_some_layers(missing, layout, "these modules are recomputed in every layer")
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
"""Flags of fp8 scales, which add to or replace those of `RECIPES`."""


def _formats(layout: Layout, mindspeed: bool, missing: list[str]) -> Flags:
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
    lacks_bundled_features(missing, layout, says_muon_mode=not mindspeed)
    if layout.optimizer not in OPTIMIZERS.values():
        missing.append(f"optimizer={layout.optimizer}: it has {', '.join(sorted({*OPTIMIZERS.values()}))}")
    elif layout.optimizer == "muon" and layout.zero_stage > 1 and not mindspeed:
        missing.append("optimizer=muon: Megatron-FSDP has adam and sgd")
    elif layout.optimizer != "adam":
        flags["--optimizer"] = layout.optimizer
    if layout.muon_mode != "default" and not mindspeed:
        flags["--muon-tp-mode"] = layout.muon_mode
    return flags


def model_flags(model: ModelSpec, missing: list[str], framework: str = "megatron") -> Flags:
    """The flags of a model; features without a flag are added to `missing`."""
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
        "--position-embedding-type": _position(model, framework, missing),
        "--normalization": {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[model.norm],
        "--norm-epsilon": repr(model.norm_eps),
        "--vocab-size": str(model.vocab),
    }
    if model.position == "rope":
        if model.rope_theta.is_integer():
            flags["--rotary-base"] = str(int(model.rope_theta))
        else:
            missing.append(f"rope_theta={model.rope_theta}: --rotary-base takes whole numbers")
    for name, given in (
        ("--disable-bias-linear", not model.linear_bias),
        ("--add-qkv-bias", model.qkv_bias),
        ("--untie-embeddings-and-output-weights", not model.tied),
    ):
        if given:
            flags[name] = ""
    if model.mtp is not None:
        flags |= {
            "--mtp-num-layers": str(model.mtp.depths),
            "--mtp-loss-scaling-factor": repr(model.mtp.loss_factor),
        }
    of_layers, said = layer_flags(model, framework, missing)
    of_experts, of_routers = _expert_flags(model, framework, missing)
    because = BECAUSE | {"rope_scaling": why_not_scaled(model, framework)}
    lacks_of_model(missing, model, {**SAID, **said, **of_routers}, because)
    return flags | of_layers | of_experts | _latent_flags(model)


SAID: Said = dict.fromkeys(("kv_heads", "head_dim", "tied", "linear_bias", "qkv_bias")) | dict.fromkeys(
    f"latent_attention.{name}" for name in LatentAttention.model_fields
)
"""Parts of a model whose every value has a flag, besides those of its layers and its experts."""


def _position(model: ModelSpec, framework: str, missing: list[str]) -> str:
    if framework != "mindspeed" and is_yarn(model):
        return "yarn"
    if model.latent_attention is not None and model.position != "rope":
        missing.append(f"position={model.position}: latent attention has rotary positions")
        return "rope"
    return {"learned": "learned_absolute"}.get(model.position, model.position)


def _expert_flags(model: ModelSpec, framework: str, missing: list[str]) -> tuple[Flags, Said]:
    """The flags of experts, and the parts of a model that they cover."""
    said: dict[str, tuple[object, ...] | None] = {}
    kinds = [model.layer_kind(layer).mlp for layer in range(model.layers)]
    if not model.experts:
        return {}, said
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
    if {*kinds} == {"dense", "experts"}:
        flags["--moe-layer-freq"] = pattern_text([int(kind == "experts") for kind in kinds])
        said["mlp_pattern"] = None
    if router.scale != 1:
        flags["--moe-router-topk-scaling-factor"] = repr(router.scale)
    if router.capacity_factor:
        flags["--moe-expert-capacity-factor"] = repr(router.capacity_factor)
    if router.weighs_inputs and model.top_k == 1 and framework != "mindspeed":
        flags["--moe-apply-probs-on-input"] = ""
        said["router.weighs_inputs"] = None
    if model.linear_bias and framework != "mindspeed":
        said["router.bias"] = None  # Its routers have biases where linear layers do (moe/router.py).
    flags |= _choice(model, missing)
    names = ("experts", "top_k", "expert_ffn", "shared_expert_ffn", "shared_expert_gate")
    parts = ("scale", "groups", "top_groups", "group_score", "expert_bias", "capacity_factor")
    said |= dict.fromkeys((*names, *(f"router.{name}" for name in parts)))
    return flags, said | {"router.score": ("softmax", "sigmoid"), "router.normalised": None}


def _choice(model: ModelSpec, missing: list[str]) -> Flags:
    """The flags of routing: the choice of experts, and the weights of their outputs."""
    router, flags = model.router, Flags()
    if router.score == "softmax" and not router.normalised:
        flags["--moe-router-pre-softmax"] = ""
    # One weight is not divided by itself, and of several those of a sigmoid always are by their sum.
    can_be_plain = model.top_k == 1 if router.score != "softmax" else True
    can_be_normalised = model.top_k > 1
    if not (can_be_normalised if router.normalised else can_be_plain):
        number = "one expert's weight is not" if router.normalised else "weights of several experts are"
        text = f"router.normalised={str(router.normalised).lower()}"
        missing.append(f"{text}: by {router.score} {number} divided by their sum")
    if router.groups > router.top_groups:
        flags["--moe-router-num-groups"] = str(router.groups)
        flags["--moe-router-group-topk"] = str(router.top_groups)
        ranked = {1: "max", 2: "top2"}.get(model.top_k // router.top_groups)
        if ranked != router.group_score:
            best = model.top_k // router.top_groups
            missing.append(
                f"router.group_score={router.group_score}: groups count by {best} best experts each"
            )
    if router.expert_bias:
        flags["--moe-router-enable-expert-bias"] = ""
        if router.score == "softmax":
            missing.append("router.expert_bias=true: biases want scores of a sigmoid")
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

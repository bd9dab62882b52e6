"""Plans as the YAML of `accelerate launch --config_file` (accelerate/commands/config/config_args.py)."""

from __future__ import annotations

from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from planner.formats.hugging_face.accelerate_names import (
    DEEPSPEED_OFFLOAD,
    DEEPSPEED_ZERO,
    FORMATS,
    KEYS,
    KIND,
    STRATEGIES,
)
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


def export_accelerate(model: ModelSpec, layout: Layout, machines: int) -> Export:
    """The configuration of a launch on `machines` nodes; model and batch belong to the training script."""
    missing: list[str] = []
    of_layout = layout_values(layout, missing)
    values: Values = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        **{path: of_layout[path] for path in of_layout if "." not in path},
        "downcast_bf16": "no",
        "enable_cpu_affinity": False,
        "machine_rank": 0,
        "main_training_function": "main",
        "num_machines": machines,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
        **{path: of_layout[path] for path in of_layout if "." in path},
    }
    if of_layout[KIND] == "FSDP":
        values |= {
            "fsdp_config.fsdp_version": 2,
            "fsdp_config.fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_config.fsdp_cpu_ram_efficient_loading": True,
            "fsdp_config.fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
    in_script = [f"model {model.name}: the training script makes it"]
    for name in ("micro_batch_size", "global_batch_size"):
        lacks(in_script, layout, name, "the training script gives it")
    if of_layout[KIND] == "FSDP" and layout.precision != "fp32":
        why = "a policy of the training script says it; without one it is the format of the GEMMs"
        lacks(in_script, layout, "gradient_reduction", why)
    return Export(
        "accelerate", yaml_text(values), tuple(missing), flag_values(of_layout), in_script=tuple(in_script)
    )


def layout_values(layout: Layout, missing: list[str]) -> Values:
    """The keys of a layout; degrees without a key are added to `missing`."""
    precision = next((name for name, short in FORMATS.items() if short == layout.precision), "no")
    split = layout.tensor_parallel > 1 or layout.context_parallel > 1
    kind = "FSDP"
    if layout.zero_stage == 0 and not split:
        kind = "MULTI_GPU" if layout.world_size > 1 else "NO"
    elif layout.zero_stage == 1 and not split:
        kind = "DEEPSPEED"
    values: Values = {KIND: kind, KEYS["precision"]: precision, KEYS["world_size"]: layout.world_size}
    if kind == "DEEPSPEED":
        values |= {
            DEEPSPEED_ZERO: 1,
            KEYS["micro_batches"]: layout.micro_batches,
            DEEPSPEED_OFFLOAD: "cpu" if layout.offload_optimizer else "none",
            "deepspeed_config.zero3_init_flag": False,
        }
    elif kind == "FSDP":
        values |= {
            KEYS["zero_stage"]: layout.zero_stage == 3,
            KEYS["offload_optimizer"]: layout.offload_optimizer,
            KEYS["recompute"]: layout.recompute == "full",
            **_parallelism(layout, missing),
        }
    _name_missing(layout, kind, missing)
    return values


def _parallelism(layout: Layout, missing: list[str]) -> Values:
    replicas, context = layout.zero_replicas, layout.context_parallel
    if layout.data_parallel % replicas:
        lacks(missing, layout, "zero_replicas", "copies are of whole context-parallel groups")
        replicas = 1
    elif 1 < replicas == layout.data_parallel:
        lacks(missing, layout, "zero_replicas", "a copy is split over two data-parallel ranks at least")
        replicas = 1
    shards = layout.data_parallel // replicas
    if (replicas, layout.tensor_parallel, context) == (1, 1, 1):
        return {}
    values: Values = {
        KEYS["zero_replicas"]: replicas,
        KEYS["data_parallel"]: shards,
        KEYS["tensor_parallel"]: layout.tensor_parallel,
        KEYS["context_parallel"]: context,
    }
    if context > 1:
        strategy = next(
            (name for name, form in STRATEGIES.items() if form == layout.context_parallel_form), None
        )
        if strategy is None:
            lacks(missing, layout, "context_parallel_form", "heads are not exchanged")
        values[KEYS["context_parallel_form"]] = strategy or "allgather"
    return values


def _name_missing(layout: Layout, kind: str, missing: list[str]) -> None:
    if layout.zero_stage < 2 and kind == "FSDP":
        lacks(missing, layout, "zero_stage", "beside other parallelism gradients are sharded, too")
    if layout.sequence_parallel:
        lacks(missing, layout, "sequence_parallel", "its tensor parallelism is the model's own plan")
    for name in ("expert_parallel", "expert_tensor_parallel"):
        if getattr(layout, name) > 1:
            lacks(missing, layout, name, "experts are the model's own")
    if layout.pipeline_parallel > 1:
        for name in ("pipeline_parallel", "virtual_pipeline_parallel", "schedule", "layers_per_stage"):
            lacks(missing, layout, name, "it has no pipelines")
    if layout.recompute == "selective" or (layout.recompute == "full" and kind != "FSDP"):
        lacks_recomputation(missing, layout, "layers are wrapped by the training script")
    else:
        lacks_some_layers(missing, layout)
    if layout.offload_optimizer and kind not in ("FSDP", "DEEPSPEED"):
        lacks(missing, layout, "offload_optimizer", "only sharded states are offloaded")
    if layout.offload_activations:
        lacks(missing, layout, "offload_activations", "the training script sends activations")
    if layout.precision not in FORMATS.values():
        lacks(missing, layout, "precision", f"it computes in {', '.join(FORMATS.values())}")
    lacks_fp8(missing, layout, "its backends have recipes of their own")
    lacks_bundled_features(missing, layout)
    if layout.gradient_reduction != "fp32" and kind != "FSDP":
        lacks(missing, layout, "gradient_reduction", "gradients are summed in fp32")
    if layout.optimizer != "adam":
        lacks(missing, layout, "optimizer", "the training script makes it")

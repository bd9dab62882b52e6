"""Plans as flags of torchtitan 0.3, whose only configuration files are Python
(torchtitan/config/manager.py)."""

from __future__ import annotations

from costmodels.catalogue import load_model
from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from costmodels.spec.model_parts import RopeScaling
from planner.formats.torchtitan.names import (
    FIRST_LESS,
    FORMATS,
    KEYS,
    LAST_LESS,
    MICRO_BATCH,
    MODELS,
    SCHEDULES,
    zero_stage,
)
from planner.formats.writing.export import (
    Export,
    Values,
    flag_lines,
    flag_values,
    lacks,
    lacks_bundled_features,
    lacks_fp8,
    lacks_recomputation,
    lacks_some_layers,
)
from planner.formats.writing.model_words import model_parts
from planner.space.shared_stages import less_layers

SHAPELESS = {"name", "seq", "max_positions", "source", "published_parameters", "rope_scaling", "norm_eps"}
"""Fields of a model that are not sizes, or that torchtitan has flags for."""


def export_torchtitan(model: ModelSpec, layout: Layout) -> Export:
    """The flags of a job; a model must be one of torchtitan's configurations, or is named as not
    expressible."""
    missing: list[str] = []
    flags = {}
    name = configuration_of(model)
    if name is None:
        missing.append(
            f"model {model.name}: sizes are written in Python there, and none of its models has these"
        )
    else:
        flags = {"--module": MODELS[name][0], "--config": MODELS[name][1]}
        its = load_model(name)
        for field in ("rope_scaling", "norm_eps", "max_positions"):
            theirs, ours = (model_parts(one).get(field) for one in (its, model))
            if field == "rope_scaling":
                theirs, ours = its.rope_scaling, model.rope_scaling
            if theirs != ours:
                shown = ours.kind if isinstance(ours, RopeScaling) else ours
                missing.append(f"{field}={shown}: its {MODELS[name][1]} has another, in Python")
    values = layout_values(layout, model, missing)
    of_layout = flag_values(values)
    for path, value in ({KEYS["seq"]: model.seq} | values).items():
        section, _, key = path.rpartition(".")
        if isinstance(value, bool):
            flags[f"--{section}.{'' if value else 'no-'}{key}"] = ""
        elif path != KEYS["recompute"]:
            flags[f"--{path}"] = str(value)
    if layout.pipeline_parallel > 1 or layout.expert_parallel > 1:
        flags["--training.disable_cuda_graphs"] = ""  # They are on unless said, and run neither.
    flags[f"activation-checkpoint:{values[KEYS['recompute']]}"] = ""
    return Export("torchtitan", flag_lines(flags), tuple(missing), of_layout)


def configuration_of(model: ModelSpec) -> str | None:
    """The catalogue's model with these sizes that torchtitan has, too."""
    sizes = model.model_dump(exclude=SHAPELESS)
    return next((name for name in MODELS if load_model(name).model_dump(exclude=SHAPELESS) == sizes), None)


def layout_values(layout: Layout, model: ModelSpec, missing: list[str]) -> Values:
    """The keys of a layout; degrees without a key are added to `missing`."""
    pipeline = layout.pipeline_parallel
    values: Values = {
        **_data_parallel(layout, missing),
        KEYS["tensor_parallel"]: layout.tensor_parallel,
        KEYS["sequence_parallel"]: layout.sequence_parallel or layout.tensor_parallel == 1,
        KEYS["pipeline_parallel"]: pipeline,
    }
    local = layout.micro_batch_size
    if pipeline > 1:
        local *= layout.micro_batches
        values |= _stages(layout, missing)
        values[MICRO_BATCH] = layout.micro_batch_size
    values |= {
        KEYS["context_parallel"]: layout.context_parallel,
        KEYS["expert_parallel"]: layout.expert_parallel,
        KEYS["micro_batch_size"]: local,
        KEYS["global_batch_size"]: layout.global_batch_size,
        KEYS["precision"]: "float32" if layout.precision == "fp32" else "bfloat16",
        KEYS["gradient_reduction"]: "float32",
        KEYS["offload_optimizer"]: layout.offload_optimizer,
        KEYS["recompute"]: "full" if layout.recompute == "full" else "none",
    }
    _name_missing(layout, missing, bool(model.experts))
    return values


def _data_parallel(layout: Layout, missing: list[str]) -> Values:
    context, replicas = layout.context_parallel, layout.zero_replicas
    shards = layout.zero_shards // context
    if layout.zero_stage == 0:
        shards, replicas = 1, layout.data_parallel
        if context > 1:
            lacks(missing, layout, "zero_stage", "it always shards over the ranks of a sequence")
    elif layout.zero_shards % context:
        shards, replicas = layout.data_parallel, 1
        lacks(missing, layout, "zero_replicas", "copies are of whole context-parallel groups")
    reshard = "always" if layout.zero_stage == 3 else "never"
    if layout.zero_stage and zero_stage(2, layout.pipeline_parallel, reshard) != layout.zero_stage:
        kept = "whole gradients under a pipeline" if layout.pipeline_parallel > 1 else "shards of gradients"
        lacks(missing, layout, "zero_stage", f"gathered parameters go with {kept}")
    return {
        KEYS["zero_replicas"]: replicas,
        KEYS["data_parallel"]: shards,
        KEYS["zero_stage"]: reshard,
    }


def _stages(layout: Layout, missing: list[str]) -> Values:
    values: Values = {
        KEYS["schedule"]: next(name for name, short in SCHEDULES.items() if short == layout.schedule)
    }
    shared = less_layers(layout.layers_per_stage, layout.virtual_pipeline_parallel)
    if shared is None:
        lacks(missing, layout, "layers_per_stage", "its stages are alike but for the first and the last")
        shared = -(-sum(layout.layers_per_stage) // len(layout.layers_per_stage)), 0, 0
    each, values[FIRST_LESS], values[LAST_LESS] = shared
    if each is not None:
        values[KEYS["layers_per_stage"]] = each
    return values


def _name_missing(layout: Layout, missing: list[str], experts: bool) -> None:
    if layout.context_parallel > 1 and layout.context_parallel_form != "all_gather":
        lacks(missing, layout, "context_parallel_form", "its ranks gather keys and values")
    split = layout.tensor_parallel if layout.expert_parallel == 1 else 1
    if experts and layout.expert_tensor_parallel != split:
        lacks(missing, layout, "expert_tensor_parallel", f"it is {split} beside expert_parallel")
    if layout.recompute == "selective":
        lacks_recomputation(missing, layout, "its selective form chooses operators, not modules")
    else:
        lacks_some_layers(missing, layout)
    if layout.offload_activations:
        lacks(missing, layout, "offload_activations", "it is no flag of the trainer")
    if layout.precision not in FORMATS.values():
        lacks(missing, layout, "precision", "converters of GEMMs are chosen in Python")
    lacks_fp8(missing, layout, "converters of GEMMs are chosen in Python")
    lacks_bundled_features(missing, layout)
    if layout.gradient_reduction != "fp32":
        lacks(missing, layout, "gradient_reduction", "gradients are summed in fp32")
    if layout.optimizer != "adam":
        lacks(missing, layout, "optimizer", "optimizers are chosen in Python")

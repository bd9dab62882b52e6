"""Plans as overrides of a recipe of Megatron-Bridge: Megatron-LM's flags as fields of its configuration."""

from __future__ import annotations

from typing import Any

from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from planner.formats.megatron.export import environment, layout_flags, model_flags, overlap_flags
from planner.formats.megatron.layers import with_own_yarn
from planner.formats.megatron.names import DEGREE_FLAGS
from planner.formats.nemo.bridge_names import CHUNKS, FP8_RECIPES, KEYS, OFF, PRECISION, RECIPES
from planner.formats.writing.export import Export, Values, flag_values, lacks, yaml_text
from planner.options.experts import list_of_layers

_LISTS = ("--recompute-modules", "--offload-modules")
_PATTERNS = ("--moe-layer-freq", "--window-attn-skip-freq", "--no-rope-freq", "--linear-attention-freq")
_ELSEWHERE = (
    *(
        "--bf16",
        "--fp16",
        "--fp8-format",
        "--fp8-recipe",
        "--fp4-format",
        "--fp4-recipe",
        "--fp8-param-gather",
    ),
    "--grad-reduce-in-bf16",
    *("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"),
    *("--group-query-attention", "--max-position-embeddings"),
)
"""Flags that other fields express, or that need no field."""


RESET: Values = {
    KEYS["--sequence-parallel"]: False,
    CHUNKS: None,
    KEYS["--use-distributed-optimizer"]: False,
    KEYS["--recompute-granularity"]: None,
    KEYS["--recompute-method"]: None,
    KEYS["--recompute-num-layers"]: None,
}
"""Settings of recipes that must be reset, as plans do not have them."""


def export_bridge(
    model: ModelSpec,
    layout: Layout,
    overlaps: bool = False,
    exchange: dict[str, str] | None = None,
    *,
    wide_gradients: bool = True,
) -> Export:
    """The file of overrides of a pre-training script (`--config-file`).

    Args:
        overlaps: True if the price assumes overlap of data-parallel communication.
        exchange: flags of dispatch that the price assumes (`dispatch_flags`).
        wide_gradients: True if the price assumes gradients that are summed in fp32.
    """
    missing: list[str] = []
    model, of_yarn = with_own_yarn(model)
    flags = model_flags(model, missing) | (exchange or {})
    in_script = []
    if model.activation not in ("gelu", "gelu_tanh"):
        in_script = [f"activation={model.activation}: a function, which the recipe gives"]
        flags.pop("--squared-relu", None)
        if flags.pop("--quick-geglu", None) is not None:
            flags["--swiglu"] = ""  # Says that there is a gate.
    if model.position == "learned" and model.max_positions != model.seq:
        missing.append(f"max_positions={model.max_positions}: there are as many as a sequence has tokens")
    of_layout = layout_values(layout, model, missing)
    values = _values(flags, model) | {f"model.{name}": value for name, value in of_yarn.items()} | of_layout
    values |= _values(overlap_flags(layout) if overlaps else {}, model)
    notes = _notes(layout)
    if wide_gradients:
        values["ddp.grad_reduce_in_fp32"] = True
    elif layout.precision != "fp16":
        notes += (
            "gradients are priced as summed in bf16: a recipe sums them so with "
            "mixed_precision.grad_reduce_in_fp32 = False, for which overrides have no words",
        )
    variables = environment(layout_flags(layout, model, "megatron", []) | (exchange or {}))
    return Export(
        "megatron-bridge",
        yaml_text(values),
        tuple(missing),
        flag_values(of_layout),
        notes=notes,
        environment=variables,
        in_script=tuple(in_script),
    )


def _notes(layout: Layout) -> tuple[str, ...]:
    recipe = _mixed_precision(layout) or ""
    if layout.precision != "fp8" or layout.fp8_recipe != "default":
        return ()
    return (f"fp8_recipe=default: recipes have names there, and {recipe} is the usual one",)


def layout_values(layout: Layout, model: ModelSpec, missing: list[str]) -> Values:
    """The fields of a layout; degrees without a field are added to `missing`."""
    flags = layout_flags(layout, model, "megatron", missing)
    values = RESET | _values(flags, model)
    if layout.virtual_pipeline_parallel > 1 and DEGREE_FLAGS["layers_per_stage"] not in flags:
        values[CHUNKS] = layout.virtual_pipeline_parallel
    sharded = values[KEYS["--use-distributed-optimizer"]]
    values["optimizer.use_distributed_optimizer"] = sharded
    values[PRECISION] = _mixed_precision(layout)
    if layout.fp8_param_gather:
        lacks(missing, layout, "fp8_param_gather", "recipes of mixed precision decide it")
    if layout.gradient_reduction != "fp32":
        lacks(missing, layout, "gradient_reduction", "recipes of mixed precision sum in fp32")
    return values


def _mixed_precision(layout: Layout) -> str | None:
    """The recipe of a number format; for fp8 the first one, unless the scales need another."""
    named = [name for name, short in RECIPES.items() if short == layout.precision]
    word = next((word for word, recipe in FP8_RECIPES.items() if recipe == layout.fp8_recipe), "")
    return next((name for name in named if word in name), None)


def _values(flags: dict[str, str], model: ModelSpec) -> Values:
    return {KEYS[flag]: _value(flag, text, model) for flag, text in flags.items() if flag not in _ELSEWHERE}


def _value(flag: str, text: str, model: ModelSpec) -> Any:
    if flag in _PATTERNS:
        return list_of_layers(text)
    if flag == "--window-size":
        return [int(part) for part in text.split(",")]
    if flag in _LISTS:
        return text.split()
    if not text:
        return flag not in OFF
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text

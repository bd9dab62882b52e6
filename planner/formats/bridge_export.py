"""Plans as overrides of a recipe of Megatron-Bridge: Megatron-LM's flags as fields of its configuration."""

from __future__ import annotations

from typing import Any

from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from planner.formats.bridge_names import CHUNKS, FP8_RECIPES, KEYS, OFF, PRECISION, RECIPES
from planner.formats.export import Export, Values, flag_values, lacks, yaml_text
from planner.formats.megatron_export import layout_flags, model_flags
from planner.formats.megatron_names import DEGREE_FLAGS

_LISTS = ("--recompute-modules", "--offload-modules")
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
"""Flags that other fields say, or that need none."""


RESET: Values = {
    KEYS["--sequence-parallel"]: False,
    CHUNKS: None,
    KEYS["--use-distributed-optimizer"]: False,
    KEYS["--recompute-granularity"]: None,
    KEYS["--recompute-method"]: None,
    KEYS["--recompute-num-layers"]: None,
}
"""What a recipe may have set, and a plan has not."""


def export_bridge(model: ModelSpec, layout: Layout) -> Export:
    """The file of overrides of a pre-training script (`--config-file`)."""
    missing: list[str] = []
    of_model = _values(model_flags(model, missing), model)
    if model.gated or model.activation not in ("gelu", "gelu_tanh"):
        missing.append(f"activation {model.activation} of {model.name}: a function, which the recipe gives")
    of_layout = layout_values(layout, model, missing)
    text = yaml_text(of_model | of_layout)
    return Export("megatron-bridge", text, tuple(missing), flag_values(of_layout))


def layout_values(layout: Layout, model: ModelSpec, missing: list[str]) -> Values:
    """The fields of a layout; what there are none for is added to `missing`."""
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
    """The recipe of a number format; of fp8 the first one unless its scales say another."""
    named = [name for name, short in RECIPES.items() if short == layout.precision]
    word = next((word for word, recipe in FP8_RECIPES.items() if recipe == layout.fp8_recipe), "")
    return next((name for name in named if word in name), None)


def _values(flags: dict[str, str], model: ModelSpec) -> Values:
    return {KEYS[flag]: _value(flag, text, model) for flag, text in flags.items() if flag not in _ELSEWHERE}


def _value(flag: str, text: str, model: ModelSpec) -> Any:
    if flag == "--moe-layer-freq":
        return [0] * model.dense_layers + [1] * (model.layers - model.dense_layers)
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

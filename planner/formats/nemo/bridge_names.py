"""Names of Megatron-LM's flags in Megatron-Bridge: fields of its `ConfigContainer`.

The fields are those of release 0.3.1 (megatron/bridge/training/config.py, models/gpt_provider.py).
"""

from __future__ import annotations

from planner.formats.facts.key_table import key_table

KEYS = key_table("megatron-bridge").flags
"""Paths by flag; a switch is a true field, except for those in `OFF`."""

OFF = tuple(flag for flag, key in KEYS.items() if key in key_table("megatron-bridge").opposite)
"""Switches that are expressed by a false field."""

CHUNKS = KEYS["--num-virtual-stages-per-pipeline-rank"]
"""Path of the chunks of each pipeline rank."""

PRECISION = "mixed_precision"

RECIPES = {
    "bf16_mixed": "bf16",
    "fp16_mixed": "fp16",
    "bf16_with_fp8_current_scaling_mixed": "fp8",
    "bf16_with_fp8_delayed_scaling_mixed": "fp8",
    "bf16_with_fp8_subchannel_scaling_mixed": "fp8",
    "bf16_with_mxfp8_mixed": "mxfp8",
    "bf16_with_nvfp4_mixed": "nvfp4",
}
"""Number formats by the name of a recipe in `mixed_precision`."""

FP8_RECIPES = {"current": "tensorwise", "delayed": "delayed", "subchannel": "blockwise", "mxfp8": "mxfp8"}
"""Values of `--fp8-recipe` by their words in these recipe names."""

PERFORMANCE = {
    f"_perf_precision('{name}')": recipe
    for name, recipe in {
        "bf16": "bf16_mixed",
        "fp8_cs": "bf16_with_fp8_current_scaling_mixed",
        "fp8_ds": "bf16_with_fp8_delayed_scaling_mixed",
        "fp8_mx": "bf16_with_mxfp8_mixed",
        "nvfp4": "bf16_with_nvfp4_mixed",
    }.items()
}
"""Recipes in `RECIPES` by the call of recipes of performance that makes them (perf_recipes/_common.py)."""

"""Names of degrees of a layout in torchtitan, and its distribution of layers to stages (release 0.3.0)."""

from __future__ import annotations

from typing import Any

from planner.formats.facts.key_table import key_table

KEYS = key_table("torchtitan").fields
"""Keys by their field of `Layout` or `ModelSpec` (keys/torchtitan.yaml)."""

MICRO_BATCH = KEYS["pipeline_micro_batch"]
FIRST_LESS = KEYS["first_less_layers"]
LAST_LESS = KEYS["last_less_layers"]

SCHEDULES = {
    "1F1B": "1f1b",
    "Interleaved1F1B": "interleaved",
    "InterleavedZeroBubble": "interleaved_zb",
    "ZBVZeroBubble": "zbv",
    "DualPipeV": "dualpipev",
    "GPipe": "1f1b",
    "LoopedBFS": "interleaved",
}
"""Schedules by `pipeline_parallel_schedule`, with names of torch.distributed.pipelining; the last two keep
more memory than the schedules as which they are priced."""

ROTATE_METHODS = {"allgather": "all_gather", "alltoall": "ring"}
"""Forms of context parallelism by `context_parallel_rotate_method` of releases up to 0.2; 0.3 always uses
all-gather."""

FORMATS = {"bfloat16": "bf16", "float32": "fp32"}
"""Number formats by `mixed_precision_param` and `mixed_precision_reduce`."""

MODELS = {
    "llama3-8b": ("llama3", "llama3_8b", "8B"),
    "llama3-70b": ("llama3", "llama3_70b", "70B"),
    "llama3-405b": ("llama3", "llama3_405b", "405B"),
    "qwen3-0.6b": ("qwen3", "qwen3_0_6b", "0.6B"),
    "qwen3-1.7b": ("qwen3", "qwen3_1_7b", "1.7B"),
    "qwen3-14b": ("qwen3", "qwen3_14b", "14B"),
    "qwen3-32b": ("qwen3", "qwen3_32b", "32B"),
    "qwen3-30b-a3b": ("qwen3", "qwen3_30b_a3b", "30B-A3B"),
    "deepseek-v2-lite": ("deepseek_v3", "deepseek_v3_16b", "16B"),
    "deepseek-v3": ("deepseek_v3", "deepseek_v3_671b", "671B"),
}
"""Names of the catalogue's models in torchtitan: module, configuration, and the flavor of releases up to
0.2."""


FLAVORS = {(module, flavor): name for name, (module, _, flavor) in MODELS.items()} | {
    ("deepseek_v3", "236B"): "deepseek-v2",
    ("qwen3", "4B"): "qwen3-4b",
    ("qwen3", "8B"): "qwen3-8b",
    ("qwen3", "235B-A22B"): "qwen3-235b-a22b",
}
"""Models of the catalogue by `model.name` and `model.flavor` of releases up to 0.2; endings such as `_flex`
are kernels of attention."""

DEBUG_MODEL: dict[str, Any] = {
    "name": "llama3-debugmodel",
    "layers": 6,
    "hidden": 256,
    "heads": 16,
    "ffn": 768,
    "vocab": 2048,
    "gated": True,
    "activation": "silu",
    "norm": "rmsnorm",
    "position": "rope",
    "rope_theta": 500000.0,
    "tied": False,
    "linear_bias": False,
}
"""The model of llama3's flavor `debugmodel`."""


def zero_stage(shards: int, pipeline_parallel: int, reshard: str) -> int:
    """The ZeRO stage of FSDP2 over `shards` ranks, from `fsdp_reshard_after_forward`.

    If parameters stay gathered, each microbatch reduce-scatters its gradients without a pipeline (stage 2).
    In a pipeline whole gradients are summed until the last microbatch (stage 1).
    """
    if shards == 1:
        return 0
    if reshard == "always" or (reshard == "default" and pipeline_parallel == 1):
        return 3
    return 2 if pipeline_parallel == 1 else 1


def before_0_1(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage before release 0.1; middle stages get the remaining layers."""
    each, more = divmod(layers, stages)
    middle = [each + (stage < more) for stage in range(stages - 2)]
    return (each, *middle, layers - each - sum(middle)) if stages > 1 else (layers,)

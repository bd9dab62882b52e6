"""Flags of a layout in Megatron-DeepSpeed, which has some of Megatron-LM's under other names."""

from __future__ import annotations

from collections.abc import Mapping

from costmodels.spec.layout import Layout

CPU_OPTIMIZER = "--cpu-optimizer"
"""The switch of an optimizer in host memory."""

_OTHERS = (
    *("--use-distributed-optimizer", "--use-megatron-fsdp", "--data-parallel-sharding-strategy"),
    *("--optimizer-cpu-offload", "--use-precision-aware-optimizer"),
    *("--recompute-granularity", "--recompute-method", "--recompute-num-layers"),
)
"""Flags of Megatron-LM in whose place Megatron-DeepSpeed has others."""


def deepspeed_flags(flags: Mapping[str, str], layout: Layout) -> dict[str, str]:
    """The flags of a layout in Megatron-LM, as those of Megatron-DeepSpeed."""
    found = {name: text for name, text in flags.items() if name not in _OTHERS}
    found["--zero-stage"] = str(layout.zero_stage)
    if layout.recompute == "full":
        found["--checkpoint-activations"] = ""
        found["--checkpoint-num-layers"] = str(layout.recompute_num_layers)
    if layout.offload_optimizer:
        found[CPU_OPTIMIZER] = ""
    return found

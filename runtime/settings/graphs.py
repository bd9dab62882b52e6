"""How many layers a compiled graph may have. It needs no torch."""

from __future__ import annotations

from costmodels import Layout, ModelSpec
from costmodels.spec.layout import SPLIT_BACKWARD


def single_layer_graphs(spec: ModelSpec, layout: Layout) -> str | None:
    """Why no graph has more than one layer; None where layers can share one."""
    if layout.schedule in SPLIT_BACKWARD:
        return f"schedule {layout.schedule} runs layers that are not compiled"
    if layout.zero_stage > 0 or layout.offload_optimizer:
        return "FSDP2 gathers the parameters of each layer before it"
    if layout.context_parallel > 1:
        return "ranks exchange keys and values in each layer"
    if spec.moe_layers:
        return "rows of experts come in any number, and no graph holds them"
    if "linear" in spec.attention_pattern:
        return "no graph holds the loop of linear attention"
    if spec.attention_softcap:
        return "no graph holds the loop of attention with capped scores"
    if layout.offload_activations:
        return "activations leave for the host after each layer"
    units = layout.recompute == "full" and layout.recompute_method == "uniform"
    if units and layout.recompute_num_layers > 1:
        return "units of several layers are recomputed around compiled layers"
    return None

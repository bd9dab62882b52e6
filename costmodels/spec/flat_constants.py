"""Files of engines and plans from before constants had groups: `gemm_efficiency` is `gemm.efficiency` now."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

OLD_NAMES = """
gemm: gemm_efficiency=efficiency whole_head_efficiency gemm_launch=launch gemm_wave=wave
    fp32_gemm_efficiency=fp32_efficiency fp8_gemm_efficiency=fp8_efficiency fp8_half_width fp8_cast_bytes
    fused_accumulation
attention: flash_attention=flash attention_efficiency=efficiency attention_scale=scale
    attention_wave=wave attention_half_seq=half_seq attention_half_head=half_head softmax_passes
    softmax_batch
elementwise: memory_efficiency=efficiency elementwise_passes=passes norm_passes loss_bytes
    split_backward_elementwise=split_backward
network: network_efficiency=efficiency inter_node_efficiency sharded_efficiency collective_latency
    message_latency ring_step scatters_messages waits_for_messages reduction_bucket step_reductions
host: layer_overhead kernel_gaps backward_launch=backward launch_sharpness=sharpness
    tensor_parallel_launch=tensor_parallel sequence_parallel_launch=sequence_parallel node_launch=nodes
    tensor_parallel_step unfused_softmax_launch=unfused_softmax split_backward_launch=split_backward
    shard_launch=shard
overlap: tensor_parallel_overlap=tensor_parallel data_parallel_overlap=data_parallel
    sharded_overlap=sharded overlap_sharpness=sharpness
activations: norm_bytes unfused_norm_bytes score_bytes keeps_unrotated packs_attention fused_activation
    dropout regathers_sequence saves_alternate_products recompute_stops_early compiled_keeps_gathered=compiled
loss: logits_copies split_logits_copies loss_apart=apart gathers_logits
allocator: fragmentation score_reserve held_reductions=reduction_outputs sequence_buffers rotary_tables
    workspace_bytes communicator_bytes
sharding: eager_reduction_stage fully_sharded
experts: expert_load=load grouped_products=grouped fp8_experts=fp8 dispatches_by_node
"""
"""The former names of constants, by group; after `=` the present name, if it differs."""


@cache
def former_names() -> dict[str, tuple[str, str]]:
    """The group and the present name of each constant, by its former name."""
    names = {}
    group = ""
    for word in OLD_NAMES.split():
        if word.endswith(":"):
            group = word[:-1]
        else:
            former, _, present = word.partition("=")
            names[former] = group, present or former
    return names


def in_groups(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of an engine, or of an engine's part for a device, with formerly named constants moved to their
    groups."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        if name == "devices" and isinstance(value, Mapping):
            result[name] = {
                key: in_groups(changes) if isinstance(changes, Mapping) else changes
                for key, changes in value.items()
            }
            continue
        group, field = former_names().get(name, (name, ""))
        result[group] = {**result.get(group, {}), field: value} if field else value
    return result

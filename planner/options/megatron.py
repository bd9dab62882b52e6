"""Flags of Megatron-LM and MindSpeed scripts that are always on in this runtime.

They are data: the meaning of each flag here, and the accepted values. They change no result; a value with
another meaning is refused.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from planner.options.command import epilog_section, name_list
from planner.options.flags import flag, flag_names


def _same(meaning: str, *values: str, instead: str = "") -> Any:
    """A flag that is accepted and ignored: a switch, or a flag that takes one of `values`."""
    field = flag(None if values else False, meaning, hidden=True)
    return dataclasses.field(
        default=field.default, metadata={**field.metadata, "accepted": values, "instead": instead}
    )


WHOLE = "#"
"""Marker for any whole number."""


@dataclass(frozen=True)
class AcceptedFlags:
    """The accepted and ignored flags, one field for each."""

    use_mcore_models: bool = _same("there is one model")
    transformer_impl: str | None = _same("PyTorch's own operators", "local", "transformer_engine")
    use_flash_attn: bool = _same("flash attention through scaled_dot_product_attention")
    attention_backend: str | None = _same(
        "the fastest kernel that runs", "auto", "flash", "fused", instead="a fused kernel is used"
    )
    attention_softmax_in_fp32: bool = _same("attention's softmax is in fp32")
    use_fused_rotary_pos_emb: bool = _same("fused where layers are compiled")
    use_fused_rmsnorm: bool = _same("PyTorch's rms_norm")
    use_fused_swiglu: bool = _same("fused where layers are compiled")
    no_rope_fusion: bool = _same("no kernel of its own")
    no_bias_gelu_fusion: bool = _same("no kernel of its own")
    no_bias_swiglu_fusion: bool = _same("no kernel of its own")
    no_bias_dropout_fusion: bool = _same("no kernel of its own")
    no_masked_softmax_fusion: bool = _same("no kernel of its own")
    cross_entropy_loss_fusion: bool = _same("no kernel of its own")
    rotary_percent: str | None = _same(
        "whole heads turn", "1.0", "1", instead="rotary positions turn whole heads; use 1.0"
    )
    no_gradient_accumulation_fusion: bool = _same("gradients are added up after their products")
    no_async_tensor_model_parallel_allreduce: bool = _same("PyTorch orders the collectives")
    overlap_grad_reduce: bool = _same("FSDP2 reduces gradients during backward")
    overlap_param_gather: bool = _same("FSDP2 gathers parameters ahead of forward")
    reuse_fp32_param: bool = _same("saves nothing: FSDP2 keeps an fp32 shard and gathers 16-bit copies")
    accumulate_allreduce_grads_in_fp32: bool = _same("gradients add up in fp32")
    make_vocab_size_divisible_by: str | None = _same(
        "the table's rows", "128", instead="the vocabulary is padded to a multiple of 128"
    )
    moe_model_type: str | None = _same(
        "Megatron-Core's experts", "megatron_moe", instead="experts are Megatron-Core's; use megatron_moe"
    )
    moe_router_fusion: bool = _same("no kernel of its own")
    moe_per_layer_logging: bool = _same("the load of each layer's experts is logged")
    moe_grouped_gemm: bool = _same("experts are one grouped product")
    moe_token_dispatcher_type: str | None = _same(
        "tokens travel by all-to-all",
        "alltoall",
        "alltoall_seq",
        instead="tokens travel to experts by all-to-all; use alltoall",
    )
    moe_permutation_async_comm: bool = _same("shared experts compute while tokens travel")
    moe_shared_expert_overlap: bool = _same("shared experts compute while tokens travel")
    moe_permute_fusion: bool = _same("rows are sorted by index")
    moe_router_dtype: str | None = _same("the router computes in fp32", "fp32", instead="routers run in fp32")
    moe_token_drop_policy: str | None = _same(
        "the smallest weights are dropped", "probs", instead="the smallest weights are dropped; use probs"
    )
    distributed_backend: str | None = _same(
        "nccl on GPUs, gloo on CPUs",
        "nccl",
        "gloo",
        instead="ranks talk through nccl on GPUs and gloo on CPUs; leave it out",
    )
    num_workers: str | None = _same(
        "samples are mapped from the file", WHOLE, instead="expected a whole number"
    )
    dataloader_type: str | None = _same(
        "samples come in the order of a seed", "single", instead="one order of samples; use single"
    )
    no_create_attention_mask_in_dataloader: bool = _same("attention is causal, and needs no mask")
    mock_data: bool = _same("without --data-path the built-in corpus is learned")
    exit_signal_handler: bool = _same("SIGTERM saves and ends a job")
    manual_gc: bool = _same("when Python collects garbage changes no result")
    log_throughput: bool = _same("every log line has tokens/s")
    timing_log_level: str | None = _same("steps are timed as a whole", "0", "1", "2")
    timing_log_option: str | None = _same("steps are timed as a whole", "max", "minmax", "all")
    no_barrier_with_level_1_timing: bool = _same("no barriers for timing")

    @staticmethod
    def help_note() -> str:
        """The end of the help of a command."""
        names = name_list(flag_names(field)[0] for field in ACCEPTED)
        return epilog_section("Accepted and ignored (always on)", names)

    def given_accepted(self) -> list[str]:
        """The names of the flags that are given."""
        return [flag_names(field)[0] for field in ACCEPTED if getattr(self, field.name) != field.default]

    def check_accepted(self) -> None:
        """Raise `InputError` for a value that differs from this runtime's behaviour."""
        for field in ACCEPTED:
            values, given = field.metadata["accepted"], getattr(self, field.name)
            if values and given is not None and not _is_one_of(given, values):
                why = field.metadata["instead"] or f"expected {' or '.join(values)}"
                raise InputError(f"{flag_names(field)[0]} {given}: {why}")


def _is_one_of(given: str, values: tuple[str, ...]) -> bool:
    return given in values or (WHOLE in values and given.isascii() and given.isdigit())


ACCEPTED = dataclasses.fields(AcceptedFlags)


def accepted_names() -> set[str]:
    """The spellings of all accepted and ignored flags."""
    return {name for field in ACCEPTED for name in flag_names(field)}

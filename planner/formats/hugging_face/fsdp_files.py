"""Recognition of accelerate's keys, and of the FSDP file that a trainer's flag names."""

from __future__ import annotations

from planner.formats.facts.entries import Entries, Entry


def is_accelerate(entries: Entries) -> bool:
    """Return whether keys are those of accelerate's YAML, or of its FSDP part in a separate file."""
    return (
        "distributed_type" in entries or "fsdp_config.fsdp_sharding_strategy" in entries or is_fsdp(entries)
    )


FSDP_KEYS = {
    *("transformer_layer_cls_to_wrap", "min_num_params", "backward_prefetch", "forward_prefetch"),
    *("limit_all_gathers", "use_orig_params", "sync_module_states", "cpu_ram_efficient_loading"),
    *("activation_checkpointing", "reshard_after_forward", "version", "state_dict_type", "offload_params"),
    *("auto_wrap_policy", "sharding_strategy", "xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt"),
}
"""Keys of a file that `--fsdp_config` names (transformers/training_args.py), with or without the prefix
`fsdp_`."""


def is_fsdp(entries: Entries) -> bool:
    """Return whether keys are those of a file that `--fsdp_config` names."""
    return bool(entries) and {path.partition(".")[0].removeprefix("fsdp_") for path in entries} <= FSDP_KEYS


def under_fsdp(entries: Entries) -> Entries:
    """Keys of an FSDP file as those of accelerate's YAML."""
    found = {path: f"fsdp_config.fsdp_{path.removeprefix('fsdp_')}" for path in entries}
    return {
        name: Entry(name, entries[path].text, entries[path].line, entries[path].items, entries[path].quoted)
        for path, name in found.items()
    }

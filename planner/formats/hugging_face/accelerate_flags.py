"""Flags of `accelerate launch` as the keys of its YAML (accelerate/commands/launch.py)."""

from __future__ import annotations

from planner.formats.facts.entries import Entries, Entry
from planner.formats.facts.launcher import Launch, flag_values

_SWITCHES = {
    "use_fsdp": "FSDP",
    "use_deepspeed": "DEEPSPEED",
    "use_megatron_lm": "MEGATRON_LM",
    "multi_gpu": "MULTI_GPU",
}
"""Switches by the kind of job that they select."""

_DEEPSPEED = (
    *("deepspeed_config_file", "zero_stage", "offload_optimizer_device", "offload_param_device"),
    *("gradient_accumulation_steps", "gradient_clipping", "zero3_init_flag", "zero3_save_16bit_model"),
)


def accelerate_entries(launch: Launch | None) -> Entries:
    """The keys that a command of `accelerate launch` gives; empty for another launcher."""
    words = [] if launch is None else [*launch.launcher]
    at = next((at for at, word in enumerate(words) if word.text.rpartition("/")[2] == "accelerate"), None)
    if at is None:
        at = next((at for at, word in enumerate(words) if word.text == "accelerate.commands.launch"), None)
    if at is None:
        return {}
    found: Entries = {}
    for name, values, line in flag_values(words[at + 1 :]):
        text = values[0] if values else "true"
        if name in _SWITCHES:
            if text.lower() != "false":
                found["distributed_type"] = Entry("distributed_type", _SWITCHES[name], line)
            continue
        path = f"fsdp_config.{name}" if name.startswith("fsdp_") else name
        path = f"deepspeed_config.{name}" if name in _DEEPSPEED else path
        path = f"parallelism_config.{name}" if name.startswith("parallelism_config_") else path
        found[path] = Entry(path, text, line)
    return found

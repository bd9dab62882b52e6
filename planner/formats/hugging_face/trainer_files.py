"""YAML of trainers on top of Hugging Face's: axolotl, LLaMA-Factory, TRL (open-r1), as flags of that."""

from __future__ import annotations

from collections.abc import Mapping

from planner.formats.facts.entries import Entries, Entry

AXOLOTL = {
    "base_model": "--model_name_or_path",
    "sequence_len": "--max_seq_length",
    "micro_batch_size": "--per_device_train_batch_size",
    "gradient_accumulation_steps": "--gradient_accumulation_steps",
    "gradient_checkpointing": "--gradient_checkpointing",
    "bf16": "--bf16",
    "bfloat16": "--bf16",
    "fp16": "--fp16",
    "float16": "--fp16",
    "optimizer": "--optim",
    "adapter": "--adapter",
    "lora_r": "--lora_r",
    "lora_alpha": "--lora_alpha",
    "lora_target_modules": "--lora_target_modules",
    "lora_target_linear": "--lora_target_linear",
    "load_in_4bit": "--load_in_4bit",
    "load_in_8bit": "--load_in_8bit",
    "fsdp": "--fsdp",
    "deepspeed": "--deepspeed",
    "learning_rate": "--learning_rate",
    "lr_scheduler": "--lr_scheduler_type",
    "max_steps": "--max_steps",
    "seed": "--seed",
    "weight_decay": "--weight_decay",
    "warmup_steps": "--warmup_steps",
}
"""Flags of Hugging Face's trainer by the keys of axolotl (axolotl/utils/schemas/config.py)."""

_AXOLOTL_DEGREES = {
    "tensor_parallel_size": "parallelism_config.parallelism_config_tp_size",
    "context_parallel_size": "parallelism_config.parallelism_config_cp_size",
    "sequence_parallel_degree": "parallelism_config.parallelism_config_cp_size",
    "dp_replicate_size": "parallelism_config.parallelism_config_dp_replicate_size",
}
"""Keys of accelerate by those of axolotl that it turns into them."""

_FSDP = {
    "offload_params": "fsdp_offload_params",
    "activation_checkpointing": "fsdp_activation_checkpointing",
    "reshard_after_forward": "fsdp_reshard_after_forward",
    "sharding_strategy": "fsdp_sharding_strategy",
}
"""Keys of accelerate's `fsdp_config` by those that axolotl and TrainingArguments have without their begin."""


def is_axolotl(entries: Entries) -> bool:
    """Whether keys are those of axolotl."""
    marks = {"sequence_len", "micro_batch_size", "adapter", "sample_packing", "val_set_size"}
    return "base_model" in entries and any(mark in entries for mark in marks)


def is_llama_factory(entries: Entries) -> bool:
    """Whether keys are those of LLaMA-Factory."""
    marks = {"finetuning_type", "cutoff_len", "template", "stage"}
    return "model_name_or_path" in entries and len(marks & entries.keys()) > 1


def is_trl(entries: Entries) -> bool:
    """Whether keys are those of TRL's scripts, or of open-r1's, which take the arguments of a trainer."""
    return "model_name_or_path" in entries and "per_device_train_batch_size" in entries


def is_open_instruct(entries: Entries) -> bool:
    """Whether keys are those of open-instruct's own loop (open_instruct/finetune.py)."""
    marks = {"use_slow_tokenizer", "checkpointing_steps", "dataset_mixer", "dataset_mixer_list"}
    return is_trl(entries) and len(marks & entries.keys()) > 1


SOFTWARE = {
    "axolotl": is_axolotl,
    "llama-factory": is_llama_factory,
    "open-instruct": is_open_instruct,
    "trl": is_trl,
}
"""Which software keys are of; the first that takes them has them."""


def as_flags(entries: Entries, software: str) -> tuple[Entries, Entries]:
    """The same job as flags of Hugging Face's trainer, and as keys of accelerate's YAML."""
    names: Mapping[str, str] = AXOLOTL if software == "axolotl" else {}
    flags: Entries = {}
    accelerate: Entries = {}
    for path, entry in entries.items():
        if software == "axolotl" and path in _AXOLOTL_DEGREES:
            where = _AXOLOTL_DEGREES[path]
            accelerate[where] = Entry(where, entry.text, entry.line)
        elif path.startswith("fsdp_config."):
            leaf = path.partition(".")[2]
            where = f"fsdp_config.{_FSDP.get(leaf, leaf)}"
            accelerate[where] = Entry(where, entry.text, entry.line)
        else:
            name = names.get(path, f"--{path}")
            text = "true" if name in ("--bf16", "--fp16") and entry.text == "auto" else entry.text
            flags[name] = Entry(name, text, entry.line, entry.items, entry.quoted)
    return flags, accelerate

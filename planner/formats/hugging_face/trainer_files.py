"""YAML of trainers built on Hugging Face's (axolotl, LLaMA-Factory, TRL, open-r1), as flags of Hugging Face's
trainer."""

from __future__ import annotations

from collections.abc import Mapping

from planner.formats.facts.entries import Entries, Entry
from planner.formats.facts.key_table import key_table


def is_axolotl(entries: Entries) -> bool:
    """Return whether keys are those of axolotl."""
    marks = {"sequence_len", "micro_batch_size", "adapter", "sample_packing", "val_set_size"}
    return "base_model" in entries and any(mark in entries for mark in marks)


def is_llama_factory(entries: Entries) -> bool:
    """Return whether keys are those of LLaMA-Factory."""
    marks = {"finetuning_type", "cutoff_len", "template", "stage"}
    return "model_name_or_path" in entries and len(marks & entries.keys()) > 1


def is_trl(entries: Entries) -> bool:
    """Return whether keys are those of TRL's scripts, or of open-r1's, which accept a trainer's arguments."""
    return "model_name_or_path" in entries and "per_device_train_batch_size" in entries


def is_open_instruct(entries: Entries) -> bool:
    """Return whether keys are those of open-instruct's own loop (open_instruct/finetune.py)."""
    marks = {"use_slow_tokenizer", "checkpointing_steps", "dataset_mixer", "dataset_mixer_list"}
    return is_trl(entries) and len(marks & entries.keys()) > 1


SOFTWARE = {
    "axolotl": is_axolotl,
    "llama-factory": is_llama_factory,
    "open-instruct": is_open_instruct,
    "trl": is_trl,
}
"""Tests for the keys of a software, by its name; the first test that holds decides."""


def as_flags(entries: Entries, software: str) -> tuple[Entries, Entries]:
    """The job as flags of Hugging Face's trainer, and as keys of accelerate's YAML."""
    named = _named(software)
    flags: Entries = {}
    accelerate: Entries = {}
    for path, entry in entries.items():
        name = named.get(path, f"--{path}")
        if path.startswith("fsdp_config."):
            # As accelerate has them, whose names begin alike.
            name = f"fsdp_config.fsdp_{path.partition('.')[2].removeprefix('fsdp_')}"
        if name.startswith("--"):
            text = "true" if name in ("--bf16", "--fp16") and entry.text == "auto" else entry.text
            flags[name] = Entry(name, text, entry.line, entry.items, entry.quoted)
        else:
            accelerate[name] = Entry(name, entry.text, entry.line)
    return flags, accelerate


def _named(software: str) -> Mapping[str, str]:
    """Flags of the trainer, and keys of accelerate, by the different keys of a software."""
    if software != "axolotl":
        return {}
    table = key_table(software)
    found = {**table.flag_of, **{key: field for field, key in table.fields.items()}}
    return found | {name: found[key] for name, key in table.earlier.items()}

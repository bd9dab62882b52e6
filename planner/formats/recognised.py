"""Software whose files are recognised but not read; the error names the software in one line."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from costmodels.errors import InputError


class NotReadError(InputError):
    """Error: a file of software that is recognised but not read."""

    def __init__(self, line: str, software: str = "") -> None:
        super().__init__(line)
        self.software = software


class Mark(NamedTuple):
    """Keys and texts that only occur in files of one software."""

    software: str
    keys: tuple[frozenset[str], ...] = ()
    """Alternative sets of keys that occur together in its files; `name.` is a section."""
    text: str = ""
    """A pattern that matches its programs and commands."""


MARKS = (
    Mark(
        "MaxText",
        (
            frozenset({"per_device_batch_size", "ici_fsdp_parallelism"}),
            frozenset({"base_emb_dim", "base_num_decoder_layers"}),
        ),
        r"MaxText[/.]|maxtext[/.](?:configs|train|trainers)",
    ),
    Mark("OLMo", (frozenset({"device_train_microbatch_size", "tokenizer.identifier"}),)),
    Mark(
        "llm-foundry",
        (frozenset({"device_train_microbatch_size"}), frozenset({"max_duration", "model.", "train_loader."})),
        r"llmfoundry|composer [^\n]*train\.py",
    ),
    Mark(
        "torchtune",
        (frozenset({"model._component_"}), frozenset({"tokenizer._component_"})),
        r"\btune run\b|torchtune",
    ),
    Mark(
        "lingua",
        (frozenset({"distributed.fsdp_type"}), frozenset({"distributed.dp_shard", "optim."})),
        r"apps\.main\.train|lingua\.",
    ),
    Mark("InternEvo", (frozenset({"parallel.zero1"}),), r"internlm\.|internevo|dict\(zero1=|zero1=dict\("),
    Mark(
        "OLMo-core",
        (frozenset({"train_module."}),),
        r"olmo_core|olmo-core",
    ),
    Mark(
        "Levanter", (frozenset({"trainer.mp"}), frozenset({"trainer.tensor_parallel_axes"})), r"levanter[./]"
    ),
    Mark("OpenRLHF", (), r"openrlhf\.cli|--module openrlhf"),
    Mark(
        "FlagScale",
        (
            frozenset({"experiment.runner.", "experiment.task."}),
            frozenset({"system.", "model.", "data."}),  # The file of a task beside it (conf/train).
        ),
    ),
    Mark("Kubernetes", (frozenset({"apiVersion", "kind"}),), r"(?m)^apiVersion:\s"),
    Mark("ROLL", (frozenset({"actor_train."}),)),
    Mark("NeMo AutoModel", (frozenset({"step_scheduler.", "model._target_"}),)),
    Mark("NeuronX Distributed Training", (frozenset({"distributed_strategy.", "model_source"}),)),
    Mark(
        "MindSpeed-LLM's FSDP2 backend",
        (
            # mindspeed_llm/fsdp2/utils/arguments.py, and the file of --fsdp2-config-path.
            frozenset({"parallel.fsdp_modules"}),
            frozenset({"parallel.fsdp_size"}),
            frozenset({"sub_modules_to_wrap", "sharding_size"}),
        ),
        r"train_fsdp2\.py",
    ),
    Mark("MindSpeed-MM's FSDP2 backend", (frozenset({"fsdp_plan."}), frozenset({"parallel.fsdp_plan."}))),
)


def refuse_recognised(file: str, keys: Collection[str], text: str = "") -> None:
    """Raise `InputError` for a file of software that is recognised but not read.

    Args:
        keys: the file's keys, if it has keys.
        text: the file's text, if it is a script or a program.
    """
    for mark in MARKS:
        hit = any(all(_has(keys, name) for name in names) for names in mark.keys)
        if hit or (mark.text and text and re.search(mark.text, text)):
            line = (
                f"file {file} is of {mark.software}, whose files are not read: write its layout as flags of "
                "Megatron-LM, or ask planner suggest"
            )
            raise NotReadError(line, mark.software)


def _has(keys: Collection[str], name: str) -> bool:
    if name.endswith("."):
        return any(key.startswith(name) for key in keys)
    return name in keys

"""Adapters in the format of Hugging Face's peft: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from planner.inputs.huggingface.keys import Config
from runtime.huggingface.mapping import Entry
from runtime.huggingface.model_folder import entries_of
from runtime.huggingface.stored_model import TunedModel

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"

LIKE_EXPERTS = frozenset(("gate_proj", "up_proj", "down_proj"))
"""Modules that peft treats as routed experts in any model with experts; their tensors are named instead."""


def write_adapter(
    root: Path, model: TunedModel, config: Config, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Write the adapters of a checkpoint in peft's format, in `dtype` or fp32; returns the tensors.

    If a Hugging Face matrix joins several of this runtime's, their adapters become one whose rank is the sum
    of theirs. Its alpha grows with the rank, so the result is the same.

    Args:
        config: config.json of the base.
    """
    lora, tensors, patterns = model.lora, {}, dict[str, int]()
    targets: list[str] = []
    parameters: list[str] = []
    for entry in entries_of(config, model.spec):
        joined = _joined(model, entry)
        if joined is None:
            continue
        module = entry.theirs.removesuffix(".weight")
        target = ".".join(module.split(".")[-2:])
        if model.spec.experts and target.rpartition(".")[2] in LIKE_EXPERTS:
            named, target = parameters, f"{target}.weight"
        else:
            named = targets
        if target not in named:
            named.append(target)
        if len(joined[0]) != lora.rank:
            patterns[target] = len(joined[0]) // lora.rank
        for name, tensor in zip(("lora_A", "lora_B"), joined, strict=True):
            stored = tensor.to(dtype or torch.float32).contiguous()
            tensors[f"base_model.model.{module}.{name}.weight"] = stored
    save_file(tensors, root / WEIGHTS_FILE, metadata={"format": "pt"})
    described: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.base_folder,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": targets,
        "target_parameters": parameters or None,
        "rank_pattern": {target: times * lora.rank for target, times in patterns.items()},
        "alpha_pattern": {target: times * lora.alpha for target, times in patterns.items()},
        "fan_in_fan_out": config.get("model_type") == "gpt2",
        "lora_dropout": 0.0,
        "bias": "none",
        "init_lora_weights": True,
        "inference_mode": True,
    }
    (root / CONFIG_FILE).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    return tensors


def _joined(model: TunedModel, entry: Entry) -> tuple[Tensor, Tensor] | None:
    """A and B of a Hugging Face tensor, from A and B of its parts; None without an adapter."""
    found = [model.adapter(part.ours) for part in entry.parts]
    if not any(found):
        return None
    blocks = [*_blocks(model, entry, found)]
    lora_a = torch.cat([one[0] for one in found if one is not None])
    lora_b: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
    return lora_a, lora_b


def _blocks(model: TunedModel, entry: Entry, found: list[tuple[Tensor, Tensor] | None]) -> Iterator[Tensor]:
    """B of each part, with rows in Hugging Face's order; without columns for a part without an adapter."""
    for part, one in zip(entry.parts, found, strict=True):
        if one is None:
            yield torch.zeros(model.shapes[part.ours][0], 0)
        else:
            # peft keeps B as [outputs, rank], whichever way round theirs holds the matrix.
            yield replace(part, transposed=False).to_theirs(one[1])

"""A model as callers write it: a record, a catalogue name, a YAML file, or a Hugging Face config.json."""

from __future__ import annotations

from pathlib import Path

from costmodels.catalogue import load_model
from costmodels.catalogue.yaml_files import build
from costmodels.paths import is_file
from costmodels.spec.model import ModelSpec
from costmodels.spec.model_parts import Lora, MultiTokenPrediction


def resolve_model(model: ModelSpec | str | Path, seq: int | None = None) -> ModelSpec:
    """A model from itself, a catalogue name, a YAML file, or a Hugging Face config.json (or its folder).

    `seq`, in tokens, replaces the sequence length; a model whose positions end earlier is extended.
    """
    if isinstance(model, ModelSpec):
        return with_seq(model, seq)
    if is_hf_config(model):
        from planner.inputs.huggingface.config_file import (
            model_from_hf_config,  # Only few runs read such a file.
        )

        return model_from_hf_config(model, seq=seq)
    return with_seq(load_model(str(model)), seq)


def is_hf_config(model: str | Path) -> bool:
    """Whether a model is given as a Hugging Face config.json or its folder."""
    path = Path(model)
    return path.suffix == ".json" or is_file(path / "config.json")


def with_seq(model: ModelSpec, seq: int | None) -> ModelSpec:
    """`model` trained on sequences of `seq` tokens; its positions grow where they were fewer."""
    if seq is None or seq == model.seq:
        return model
    values = model.model_dump() | {"seq": seq, "max_positions": max(seq, model.max_positions)}
    return build(ModelSpec, values, f"model {model.name}")


def with_lora(spec: ModelSpec, lora: Lora) -> ModelSpec:
    """`spec` with adapters; raises `InputError` where it has no layers for them."""
    return build(ModelSpec, spec.model_dump() | {"lora": lora.model_dump()}, f"LoRA of {spec.name}")


def with_mtp(spec: ModelSpec, mtp: MultiTokenPrediction) -> ModelSpec:
    """`spec` with MTP modules; raises `InputError` where it cannot have them."""
    values = spec.model_dump() | {"mtp": mtp.model_dump()}
    return build(ModelSpec, values, f"multi-token prediction of {spec.name}")

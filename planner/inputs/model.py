"""A model from callers' inputs: a record, a catalogue name, a file, or an id of Hugging Face's Hub."""

from __future__ import annotations

from pathlib import Path

from costmodels.catalogue import load_model
from costmodels.catalogue.yaml_files import build, is_file_name
from costmodels.errors import InputError
from costmodels.files import shown_path
from costmodels.paths import is_file, is_folder
from costmodels.spec.model import ModelSpec
from costmodels.spec.model_parts import Lora, MultiTokenPrediction


def resolve_model(model: ModelSpec | str | Path, seq: int | None = None) -> ModelSpec:
    """The model of a `ModelSpec`, a catalogue name, a YAML file, or a Hugging Face config.json, its folder or
    id.

    The config.json of an id such as `Qwen/Qwen3-8B` comes from Hugging Face's cache, or else from the Hub.
    `seq`, in tokens, replaces the sequence length; a model whose positions end earlier is extended.
    """
    if isinstance(model, ModelSpec):
        return with_seq(model, seq)
    if is_hf_config(model):
        return _of_config(model, seq)
    if is_hub_id(model):
        from planner.inputs.huggingface.hub import hub_file, hub_model

        named = hub_model(model)
        assert named is not None
        return _of_config(hub_file(named), seq)
    if "/" in str(model) and is_folder(model):
        raise InputError(f"model {shown_path(model)}: a folder without config.json")
    return with_seq(load_model(str(model)), seq)


def is_hf_config(model: str | Path) -> bool:
    """Return whether a model is given as a Hugging Face config.json or its folder."""
    path = Path(model)
    return path.suffix == ".json" or is_file(path / "config.json")


def is_hub_id(model: str | Path) -> bool:
    """Return whether a model is given as an id of Hugging Face's Hub, such as `Qwen/Qwen3-8B`."""
    if "/" not in str(model) or is_file_name(str(model)):
        return False
    from planner.inputs.huggingface.hub import hub_model  # Only few runs name one.

    return hub_model(model) is not None


def _of_config(path: str | Path, seq: int | None) -> ModelSpec:
    from planner.inputs.huggingface.config_file import model_from_hf_config  # Only few runs read such a file.

    return model_from_hf_config(path, seq=seq)


def with_seq(model: ModelSpec, seq: int | None) -> ModelSpec:
    """`model` trained on sequences of `seq` tokens; its positions are extended where they are fewer."""
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

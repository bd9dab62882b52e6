"""The kind of a folder (checkpoints or a Hugging Face model), found without PyTorch."""

from __future__ import annotations

from pathlib import Path

from costmodels.errors import InputError
from costmodels.files import shown_path
from costmodels.paths import exists, expanded, is_file
from planner.inputs.huggingface.config_file import model_from_hf_config
from planner.inputs.huggingface.hub import cache_folder, cached_folder, hub_model
from runtime import checkpoint

COMPANIONS = "huggingface"
"""Folder beside the iterations of a checkpoint."""

CONFIG_FILE = "config.json"
ONE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
"""The file of all tensors, and the index that names each tensor's file where there are several."""


def model_folder(given: str) -> str:
    """The folder of a model: the given one, or for an id the folder of its files in the Hub's cache.

    Raises `InputError` where the cache has no weights of it.
    """
    model = hub_model(given)
    if model is None:
        return given
    folder = cached_folder(model)
    if folder is None or not any(is_file(folder / name) for name in (ONE_FILE, INDEX_FILE)):
        raise InputError(
            f"{given}: no such folder, and no weights of such a model in {shown_path(cache_folder())}; where "
            f"there is a network: hf download {model.repo}"
        )
    return str(folder)


def is_hugging_face(folder: str | Path) -> bool:
    """Return whether a folder holds a Hugging Face model rather than checkpoints.

    Raises `InputError` where it holds both, as an added file must not change the meaning of the others.
    """
    path = expanded(folder)
    theirs = [name for name in (CONFIG_FILE, ONE_FILE, INDEX_FILE) if exists(path / name)]
    if theirs and (exists(path / checkpoint.TRACKER) or checkpoint.iterations(path)):
        raise InputError(
            f"{folder} holds both a Hugging Face model ({theirs[0]}) and checkpoints; keep them in folders "
            "of their own, and give the one that is meant"
        )
    return CONFIG_FILE in theirs


def checkpoint_in(folder: str | Path, iteration: int | None = None) -> int:
    """The iteration of the checkpoint to read from a folder; the newest when not given.

    Raises `InputError` where there is none.
    """
    path = expanded(folder)
    if is_hugging_face(path):
        raise InputError(f"{folder} is a Hugging Face model, not a folder of checkpoints")
    found = checkpoint.iteration_to_load(path, iteration)
    if found is None:
        raise InputError(
            f"{folder}: neither a folder of checkpoints (it has no {checkpoint.TRACKER}) nor of a Hugging "
            "Face model"
        )
    return found


def check_model_folder(folder: str | Path, iteration: int | None = None) -> None:
    """Raise `InputError` where a folder has no readable model, by a quick check."""
    path = expanded(folder)
    if not is_hugging_face(path):
        checkpoint_in(folder, iteration)
        return
    if iteration is not None:
        raise InputError(f"--ckpt-step {iteration}: {folder} is a Hugging Face model, which has none")
    model_from_hf_config(path)

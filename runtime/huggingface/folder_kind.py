"""What a folder holds: checkpoints or a Hugging Face model; found out without PyTorch."""

from __future__ import annotations

from pathlib import Path

from costmodels.errors import InputError
from costmodels.paths import exists, expanded
from planner.inputs.huggingface.config_file import model_from_hf_config
from runtime import checkpoint

COMPANIONS = "huggingface"
"""Folder beside the iterations of a checkpoint."""

CONFIG_FILE = "config.json"
ONE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
"""The tensors in one file, and what names each tensor's file where there are several."""


def is_hugging_face(folder: str | Path) -> bool:
    """Whether a folder holds a Hugging Face model rather than checkpoints.

    Raises `InputError` where it holds both: a file that was added must not change how the others are read.
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
    """The iteration of the checkpoint that a folder is to hold, the newest one's when none is given.

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
    """Raise `InputError` where a folder holds no model that can be read, as far as that shows at once."""
    path = expanded(folder)
    if not is_hugging_face(path):
        checkpoint_in(folder, iteration)
        return
    if iteration is not None:
        raise InputError(f"--ckpt-step {iteration}: {folder} is a Hugging Face model, which has none")
    model_from_hf_config(path)

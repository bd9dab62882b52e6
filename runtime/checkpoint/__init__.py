"""Checkpoints: `FOLDER/iter_0000100`, written whole or not at all, through torch.distributed.checkpoint.

Tensors are stored under their names in the whole model, so that any layout can read what another wrote. With
them are `run.json`, which describes model and run, and `manifest.json` with a checksum of every file.
`verify` compares the files of a checkpoint with the manifest; `publish` adds a folder of files written by
other code.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodels import ModelSpec
from runtime.checkpoint.folders import (
    TRACKER,
    clear_folder,
    file_records,
    iteration_folder,
    iteration_to_load,
    iterations,
    latest_iteration,
    partial_folder,
    publish,
)
from runtime.checkpoint.manifest import MANIFEST, reader_lock, verify
from runtime.checkpoint.run_file import RUN_FILE, RunFile, read_run

if TYPE_CHECKING:
    from runtime.checkpoint.loader import load, load_weights_only
    from runtime.checkpoint.saver import Saver
    from runtime.checkpoint.writer import SaveFailed
    from runtime.train.trainer import Trainer

__all__ = [
    "MANIFEST",
    "RUN_FILE",
    "TRACKER",
    "RunFile",
    "SaveFailed",
    "Saver",
    "clear_folder",
    "file_records",
    "iteration_folder",
    "iteration_to_load",
    "iterations",
    "latest_iteration",
    "load",
    "load_weights_only",
    "partial_folder",
    "publish",
    "read_run",
    "reader_lock",
    "save",
    "verify",
]

WITH_PYTORCH = {
    "load": "loader",
    "load_weights_only": "loader",
    "Saver": "saver",
    "SaveFailed": "writer",
}
"""Names whose modules import PyTorch; they are imported on first use, as questions about a folder do not need
PyTorch."""


def __getattr__(name: str) -> Any:
    if name in WITH_PYTORCH:
        return getattr(import_module(f"runtime.checkpoint.{WITH_PYTORCH[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def save(folder: str | Path, trainer: Trainer, spec: ModelSpec, run: dict[str, Any]) -> Path:
    """Write the state of `trainer`; every rank calls it. Returns the checkpoint's folder.

    Raises:
        SaveFailed: the files could not be written.
    """
    from runtime.checkpoint.tensors import run_contents, stored_tensors
    from runtime.checkpoint.writer import write

    tensors, contents = stored_tensors(trainer, spec), run_contents(trainer, spec, run)
    return write(Path(folder), trainer.iteration, tensors, contents)

"""The base checkpoint of adapters: the reference to it, and the check that it is unchanged."""

from __future__ import annotations

from pathlib import Path

from costmodels.errors import InputError
from costmodels.paths import is_folder, resolved
from runtime.checkpoint.folders import iteration_folder
from runtime.checkpoint.manifest import read_manifest
from runtime.settings.adapter_base import Base


def base_in(folder: str | Path, iteration: int) -> Base:
    """The reference to the checkpoint of `iteration` in `folder`, as the base of adapters."""
    manifest = read_manifest(iteration_folder(folder, iteration))
    return Base(folder=str(resolved(folder)), iteration=iteration, crc32=manifest.crc32)


def check_base(source: Path, base: Base) -> Path:
    """The base checkpoint of the adapters in `source`.

    Raises `InputError` where it is missing or has changed.
    """
    where = iteration_folder(base.folder, base.iteration)
    if not is_folder(where):
        raise InputError(
            f"checkpoint {source} holds adapters of the model in {where}, which is not there; put it back"
        )
    if read_manifest(where).crc32 != base.crc32:
        raise InputError(
            f"checkpoint {source} holds adapters of the model that was in {where}, but there is another one; "
            "put that one back"
        )
    return where

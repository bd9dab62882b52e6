"""The tensors of a checkpoint's folder, for torch.distributed.checkpoint to load from."""

from __future__ import annotations

import io
import os
import zipfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from costmodels.errors import InputError
from costmodels.files import open_regular
from runtime.checkpoint.manifest import damage_error
from runtime.checkpoint.metadata import Place, read_metadata


class CheckpointReader(StorageReader):
    """A reader of the files of PyTorch's `FileSystemWriter` that runs no code from them.

    PyTorch's own reader unpickles `.metadata`, which may come from anybody.

    Raises:
        InputError: the folder has no readable `.metadata`; or, while tensors are read, a file is missing or
            damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.metadata = read_metadata(self.folder)

    def read_metadata(self, *_: Any) -> Metadata:
        """The tensors of the folder."""
        return self.metadata

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: each reader reads one folder."""

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Do nothing; planners may change the requested tensors, but not their places."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged; every rank reads its own tensors."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged; every rank reads its own tensors."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False, as readers are made for a folder and never chosen by an id."""
        return False

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of a plan."""
        by_file: dict[str, list[tuple[Place, ReadItem]]] = defaultdict(list)
        for item in plan.items:
            place = self.metadata.storage_data[item.storage_index]
            by_file[place.file].append((place, item))
        for name, items in by_file.items():
            self._read_file(self.folder / name, items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_file(self, path: Path, items: Sequence[tuple[Place, ReadItem]], planner: LoadPlanner) -> None:
        try:
            with open_regular(path) as file:
                for place, item in items:
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(_part(_tensor(file, place), item))
                    planner.commit_tensor(item, target)
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None
        except Exception as error:
            # A crafted file may bring PyTorch to raise any error.
            raise damage_error(
                path, f"does not hold the tensors of .metadata ({type(error).__name__})"
            ) from error


def _tensor(file: BinaryIO, place: Place) -> Tensor:
    """A tensor read from a place in a file."""
    # One archive for each piece: anything else, and what would unpack to more than there is, is refused.
    with zipfile.ZipFile(_Slice(file, place)) as archive:
        records = archive.infolist()
    if any(one.compress_type != zipfile.ZIP_STORED for one in records):
        raise ValueError("compressed")
    stream: Any = _Slice(file, place)
    found = torch.load(stream, map_location="cpu", weights_only=True)
    if not isinstance(found, Tensor) or found.layout is not torch.strided:
        raise TypeError("no tensor")
    return found


def _part(tensor: Tensor, item: ReadItem) -> Tensor:
    """The slices of a stored piece that a load plan requests."""
    for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


class _Slice(io.RawIOBase):
    """A part of a file as a file object."""

    def __init__(self, file: BinaryIO, place: Place) -> None:
        self.file, self.start, self.size = file, place.offset, place.length
        self.at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.size}[whence]
        if base + offset < 0:
            raise ValueError("before the beginning")
        self.at = base + offset
        return self.at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self.size - self.at)]
        if not len(view):
            return 0
        self.file.seek(self.start + self.at)
        done = 0
        # The system reads at most 2 GiB at once, and PyTorch takes less than it asked for as the end.
        while done < len(view) and (count := self.file.readinto(view[done:])):  # type: ignore[attr-defined]
            done += count
        self.at += done
        return done

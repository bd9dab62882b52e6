"""The tensors of a checkpoint without ranks: written piece by piece, and read one at a time.

The files are those of torch.distributed.checkpoint, which any layout reads. Reading and writing hold only a
few pieces in memory, for a model of any size.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.futures import Future

from costmodels.errors import InputError
from runtime.checkpoint.reader import CheckpointReader

FILE_BYTES = 2**28
"""Approximate bytes of a file; PyTorch keeps the contents of a file in memory until it is complete."""


_OF_FILES = (OSError, RuntimeError, ValueError, EOFError)
"""Exceptions that PyTorch raises for files that are damaged or cannot be written."""


class Piece(NamedTuple):
    """A block of a tensor."""

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    """A function that returns the contents; it is called when they are written."""


class Whole(NamedTuple):
    """Shape and number format of a whole tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def write_tensors(folder: Path, wholes: Mapping[str, Whole], pieces: Sequence[Piece]) -> None:
    """Write a checkpoint's tensors, one piece after the other.

    Args:
        folder: created if missing.
        wholes: shape and number format of each tensor.
        pieces: blocks that fill the tensors, without gaps and without overlap.
    """
    with _alone(f"checkpoint {folder} cannot be written"):
        save({}, storage_writer=_Writer(folder), planner=_Planner(wholes, pieces), no_dist=True)


@contextmanager
def _alone(failure: str) -> Iterator[None]:
    """Run PyTorch's functions without ranks; errors of files become `InputError`, other errors are raised
    unchanged."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            cause, _ = next(iter(error.failures.values()))
            if isinstance(cause, InputError) or not isinstance(cause, _OF_FILES):
                # Ctrl-C, too.
                raise cause from None
            raise InputError(f"{failure}: {_reason(cause)}") from error


def _reason(error: BaseException) -> str:
    """The system's own error message, which PyTorch's errors hide."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__context__
    return str(error) if found is None else found.strerror or str(found)


class _Planner(DefaultSavePlanner):
    """A planner that gives the place of each piece, and reads the piece when it is written."""

    def __init__(self, wholes: Mapping[str, Whole], pieces: Sequence[Piece]) -> None:
        super().__init__(flatten_state_dict=False)
        self.wholes, self.pieces = wholes, pieces
        self.readers: dict[MetadataIndex, Callable[[], Tensor]] = {}

    def create_local_plan(self) -> SavePlan:
        items = []
        for piece in self.pieces:
            whole = self.wholes[piece.name]
            index = MetadataIndex(piece.name, torch.Size(piece.start))
            self.readers[index] = piece.read
            data = TensorWriteData(
                chunk=ChunkStorageMetadata(torch.Size(piece.start), torch.Size(piece.shape)),
                properties=TensorProperties(dtype=whole.dtype),
                size=torch.Size(whole.shape),
            )
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        # Numbers of pieces, which the plan has added, are no part of an index's identity.
        return self.readers[write_item.index]()


class _Writer(FileSystemWriter):
    """A writer that distributes pieces over files, which are written one by one."""

    def write_data(self, plan: SavePlan, planner: Any) -> Future[Any]:
        results = []
        for number, items in enumerate(_by_file(plan.items)):
            prefix = dataclasses.replace(plan.storage_data, prefix=f"__{number}_")
            part = dataclasses.replace(plan, items=items, storage_data=prefix)
            results += super().write_data(part, planner).wait()
        done: Future[Any] = Future()
        done.set_result(results)
        return done


def _by_file(items: Sequence[WriteItem]) -> Iterator[list[WriteItem]]:
    group: list[WriteItem] = []
    size = 0
    for item in items:
        assert item.tensor_data is not None
        group.append(item)
        size += math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
        if size >= FILE_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


class StoredTensors:
    """The tensors of a checkpoint's folder, by name.

    Raises `InputError` where the folder holds no checkpoint that can be read.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.reader = CheckpointReader(folder)
        self.wholes = {
            name: Whole(tuple(stored.size), stored.properties.dtype)
            for name, stored in self.reader.metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }

    def read(self, name: str) -> Tensor:
        """A whole tensor, in its stored number format."""
        whole = self.wholes[name]
        tensor = torch.empty(whole.shape, dtype=whole.dtype)
        self.read_into({name: tensor})
        return tensor

    def read_into(self, tensors: dict[str, Any]) -> None:
        """Fill tensors in place; they may be distributed and have other number formats."""
        with _alone(f"checkpoint {self.folder} cannot be read"):
            load(tensors, storage_reader=self.reader, no_dist=True)

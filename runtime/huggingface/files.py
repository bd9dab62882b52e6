"""Safetensors files: listing the tensors of a folder, reading one of them, and writing files piece by
piece."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from costmodels.errors import InputError
from costmodels.files import MIB, open_regular, read_text
from costmodels.paths import entries, exists, is_file
from runtime.huggingface.folder_kind import INDEX_FILE, ONE_FILE

LARGEST_INDEX = 256 * MIB

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""Number formats of weights by their names in safetensors files."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


class TensorPlace(NamedTuple):
    """The file, place, shape and number format of a tensor."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """The number format in PyTorch; None for a format that weights do not have."""


def list_tensors(folder: Path) -> dict[str, TensorPlace]:
    """The tensors of a model's folder by name.

    Raises `InputError` where a file of the index is missing, is not a safetensors file or lacks a tensor.
    """
    found: dict[str, TensorPlace] = {}
    for file, names in _files(folder).items():
        try:
            # The library maps a file, which a device is not.
            with open_regular(file), safe_open(file, framework="pt") as opened:
                there = list(opened.keys())
                for name in there if names is None else names:
                    if name not in there:
                        raise InputError(
                            f"{file}: tensor {name} is missing, which {INDEX_FILE} says is there"
                        )
                    part = opened.get_slice(name)
                    shape, dtype = tuple(part.get_shape()), DTYPES.get(part.get_dtype())
                    found[name] = TensorPlace(file, name, shape, dtype)
        except (SafetensorError, OSError) as error:
            raise _unreadable(file, error) from None
    return found


def read_tensor(found: TensorPlace) -> Tensor:
    """A copy of a tensor; the file is mapped only during the copy."""
    try:
        with safe_open(found.file, framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(found.name).clone()
    except (SafetensorError, OSError) as error:
        raise _unreadable(found.file, error) from None
    return tensor


def _unreadable(file: Path, error: Exception) -> InputError:
    reason = getattr(error, "strerror", None) or error
    return InputError(f"{file}: no safetensors file that can be read: {reason}; copy or download it again")


def _files(folder: Path) -> dict[Path, list[str] | None]:
    """Files with tensors, and the names to read from each; None for all."""
    index = folder / INDEX_FILE
    if not exists(index):
        if exists(folder / ONE_FILE):
            return {folder / ONE_FILE: None}
        pickled = [path.name for path in entries(folder) if path.suffix == ".bin"]
        instead = (
            f"{pickled[0]} is a pickle; save the model with safe_serialization=True of transformers"
            if pickled
            else "give a folder with a model's weights"
        )
        raise InputError(f"model {str(folder)!r} has no {ONE_FILE} and no {INDEX_FILE}: {instead}")
    try:
        weight_map = json.loads(read_text(index, LARGEST_INDEX))["weight_map"]
        files: dict[Path, list[str] | None] = {}
        for name, file in weight_map.items():
            # A name with a path could lead anywhere.
            names = files.setdefault(folder / Path(file).name, [])
            assert names is not None
            names.append(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise InputError(
            f"{index}: not an index of safetensors files: expected weight_map, the file of each tensor"
        ) from None
    missing = [file.name for file in files if not is_file(file)]
    if missing:
        raise InputError(f"model {str(folder)!r}: {missing[0]} is missing, which {INDEX_FILE} names")
    return files


class PlannedTensor(NamedTuple):
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    """A function that returns the contents; it is called when they are written."""

    @property
    def bytes(self) -> int:
        """The tensor's bytes in the file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_files(folder: Path, tensors: Sequence[PlannedTensor], largest_file: int) -> list[Path]:
    """Write tensors to one or several files, with an index for several.

    Args:
        largest_file: most bytes of tensors in a file; a larger tensor has its own file.

    Returns:
        The files of tensors.
    """
    groups = list(_by_file(tensors, largest_file))
    names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    names = [ONE_FILE] if len(groups) == 1 else names
    for name, group in zip(names, groups, strict=True):
        _write_file(folder / name, group)
    if len(groups) > 1:
        places = {one.name: name for name, group in zip(names, groups, strict=True) for one in group}
        index = {"metadata": {"total_size": sum(one.bytes for one in tensors)}, "weight_map": places}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return [folder / name for name in names]


def _by_file(tensors: Sequence[PlannedTensor], largest_file: int) -> Iterator[list[PlannedTensor]]:
    group: list[PlannedTensor] = []
    size = 0
    for tensor in tensors:
        if group and size + tensor.bytes > largest_file:
            yield group
            group, size = [], 0
        group.append(tensor)
        size += tensor.bytes
    yield group


def _write_file(path: Path, tensors: Sequence[PlannedTensor]) -> None:
    """Write one safetensors file, tensor after tensor, as the library's own writer needs all of them in
    memory.

    The format is: eight bytes with the header's length, little-endian; the header as JSON, padded with blanks
    to a multiple of 8 bytes; the tensors (https://github.com/huggingface/safetensors, "Format").
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.bytes
        fields = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        header[tensor.name] = fields
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            contents = tensor.read().contiguous()
            assert tuple(contents.shape) == tensor.shape and contents.dtype == tensor.dtype, tensor.name
            file.write(contents.flatten().view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def file_size(text: str) -> int:
    """Bytes of `5GB`, `500MB`, `2GiB` or a plain number; raises `InputError` for anything else."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([A-Za-z]*)", text.strip())
    unit = None if match is None else _UNITS.get(match[2].upper())
    size = 0 if match is None or unit is None else int(float(match[1]) * unit)
    if size < 1:
        raise InputError(f"--max-shard-size {text}: expected a size such as 5GB or 500MB")
    return size

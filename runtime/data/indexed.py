"""Megatron's indexed token files: `.bin` holds the tokens, `.idx` where each sequence lies.

All numbers are little-endian and unpadded (megatron/core/datasets/indexed_dataset.py):

    .bin  the tokens of all sequences, one after the other
    .idx  9 bytes "MMIDIDX" 0 0 | uint64 version 1 | uint8 dtype code | uint64 N | uint64 D |
          int32[N] sequence lengths, tokens | int64[N] sequence offsets in .bin, bytes |
          int64[D] document ends, in sequences, after a leading 0 | int8[N] modes, multimodal files only

A document is written as one sequence; an empty document has none and repeats the previous end.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from costmodels.errors import InputError

Tokens = npt.NDArray[np.integer]

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_VERSION = 1
# Codes 6 and 7 are floating point, and were swapped between releases of Megatron: never token ids.
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_CODES = {np.dtype(dtype): code for code, dtype in _DTYPES.items()}


def best_dtype(vocab: int) -> np.dtype[np.integer]:
    """The type in which Megatron stores the ids of a vocabulary of this size."""
    return np.dtype(np.uint16 if vocab < 65500 else np.int32)


def bin_path(prefix: str | Path) -> Path:
    """The token file of a prefix, which may be given with or without `.bin` or `.idx`."""
    return Path(f"{_bare(prefix)}.bin")


def idx_path(prefix: str | Path) -> Path:
    """The index file of a prefix, which may be given with or without `.bin` or `.idx`."""
    return Path(f"{_bare(prefix)}.idx")


def _bare(prefix: str | Path) -> str:
    return str(prefix).removesuffix(".bin").removesuffix(".idx")


class IndexedWriter:
    """Writes a pair of `.bin` and `.idx`; the pair appears when the context ends without an error.

    Until then the tokens lie in a temporary file beside the target, which an error removes.
    """

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        if self._dtype not in _CODES:
            names = ", ".join(known.name for known in _CODES)
            raise InputError(f"token dtype {self._dtype.name!r} cannot be indexed: use one of {names}")
        self._targets = bin_path(prefix), idx_path(prefix)
        self._parts = tuple(path.with_name(f".{path.name}.{os.getpid()}.part") for path in self._targets)
        self._lengths: list[npt.NDArray[np.int32]] = []

    def __enter__(self) -> IndexedWriter:
        try:
            self._targets[0].parent.mkdir(parents=True, exist_ok=True)
            self._bin = self._parts[0].open("wb")
        except OSError as error:
            raise InputError(f"{self._targets[0]}: cannot be written: {error.strerror}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._bin.close()
            if kind is None:
                self._parts[1].write_bytes(self._index())
                # Without its index a .bin is not readable, so no moment shows a mixed pair.
                self._targets[1].unlink(missing_ok=True)
                for part, target in zip(self._parts, self._targets, strict=True):
                    part.replace(target)
        finally:
            for part in self._parts:
                part.unlink(missing_ok=True)

    def add_document(self, tokens: npt.ArrayLike) -> None:
        """Append one document (token ids, 1-d); an empty one is counted but has no sequence."""
        ids = np.asarray(tokens) if np.size(tokens) else np.empty(0, self._dtype)
        self.add_documents(ids, np.array([ids.size]))

    def add_documents(self, tokens: Tokens, lengths: Tokens) -> None:
        """Append many documents: their tokens one after the other, and the length of each, tokens."""
        limits = np.iinfo(self._dtype)
        if tokens.size and not (limits.min <= tokens.min() and tokens.max() <= limits.max):
            raise InputError(
                f"token id {tokens.min() if tokens.min() < limits.min else tokens.max()} does not fit the "
                f"{self._dtype.name} of {self._targets[0]}: give a larger vocabulary size"
            )
        if lengths.size and lengths.max() > np.iinfo(np.int32).max:
            raise InputError(f"a document of {lengths.max()} tokens is too long: split it below 2^31 tokens")
        self._bin.write(np.ascontiguousarray(tokens, self._dtype.newbyteorder("<")).data)
        self._lengths.append(lengths.astype(np.int32))

    def _index(self) -> bytes:
        documents = np.concatenate([np.empty(0, np.int32), *self._lengths])
        ends = np.concatenate([[0], np.cumsum(documents > 0)]).astype("<i8")
        lengths = documents[documents > 0].astype("<i4")
        # An exclusive sum: where the sequences before this one end.
        pointers = (np.cumsum(lengths, dtype="<i8") - lengths) * self._dtype.itemsize
        header = _HEADER.pack(_MAGIC, _VERSION, _CODES[self._dtype], lengths.size, ends.size)
        fields = lengths, pointers.astype("<i8"), ends
        return b"".join([header, *(field.tobytes() for field in fields)])


class IndexedDataset:
    """Reads a pair of `.bin` and `.idx`, memory-mapped.

    Attributes: `prefix`; `dtype` of the tokens; `lengths` int32[N], tokens of each sequence;
    `pointers` int64[N], its byte offset in `.bin`; `document_indices` int64[D], 0 and then the number
    of sequences up to the end of each document.

    Raises InputError if a file is missing, unreadable, truncated or not in this format, or if the two
    do not belong together.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(_bare(prefix))
        index = _mapped(idx_path(prefix))
        self.dtype, sequences, documents = _read_header(idx_path(prefix), index)
        offset = _HEADER.size
        self.lengths: npt.NDArray[np.int32] = np.frombuffer(index, "<i4", sequences, offset)
        offset += self.lengths.nbytes
        self.pointers: npt.NDArray[np.int64] = np.frombuffer(index, "<i8", sequences, offset)
        offset += self.pointers.nbytes
        self.document_indices: npt.NDArray[np.int64] = np.frombuffer(index, "<i8", documents, offset)
        self._bin = _mapped(bin_path(prefix))
        self._check()

    def __len__(self) -> int:
        return self.lengths.size

    @property
    def documents(self) -> int:
        """Number of documents, empty ones included."""
        return self.document_indices.size - 1

    @property
    def tokens(self) -> Tokens:
        """All tokens in the order of the file: a view, nothing is read yet."""
        return self._bin.view(self.dtype)

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> Tokens:
        """`length` tokens of a sequence from `offset` on (all that remain by default): a view."""
        available = int(self.lengths[sequence]) - offset
        count = available if length is None else length
        if offset < 0 or not 0 <= count <= available:
            raise IndexError(f"tokens {offset}:{offset + count} of sequence {sequence} do not exist")
        start = int(self.pointers[sequence]) + offset * self.dtype.itemsize
        view: Tokens = np.frombuffer(self._bin, self.dtype, count, start) if count else self.tokens[:0]
        return view

    def _check(self) -> None:
        where, ends = idx_path(self.prefix), self.document_indices
        if ends.size == 0 or ends[0] != 0 or ends[-1] != len(self) or np.any(np.diff(ends) < 0):
            raise InputError(f"{where}: corrupt index: documents do not cover its {len(self)} sequences")
        if np.any(self.lengths < 0):
            raise InputError(f"{where}: corrupt index: negative sequence length")
        size = self.dtype.itemsize
        wanted, found = int(self.lengths.sum(dtype=np.int64)) * size, self._bin.size
        if wanted != found:
            raise InputError(
                f"{bin_path(self.prefix)}: holds {found} bytes, but {where.name} describes {wanted}: "
                "the files do not belong together or one is truncated"
            )
        if len(self) and (
            np.any(self.pointers < 0) or np.any(self.pointers > found - self.lengths.astype(np.int64) * size)
        ):
            raise InputError(f"{where}: corrupt index: a sequence lies outside {bin_path(self.prefix).name}")


def _mapped(path: Path) -> npt.NDArray[np.uint8]:
    try:
        if path.stat().st_size == 0:
            return np.empty(0, np.uint8)
        return np.memmap(path, np.uint8, mode="r")
    except FileNotFoundError:
        raise InputError(
            f"{path}: no such file: give the prefix of a .bin/.idx pair, as `planner data prepare` writes it"
        ) from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def _read_header(path: Path, index: npt.NDArray[np.uint8]) -> tuple[np.dtype[np.integer], int, int]:
    """Token type, number of sequences and length of the document list; the file's size agrees with them."""
    if index.size < _HEADER.size:
        raise InputError(
            f"{path}: truncated index: {index.size} bytes, a header takes {_HEADER.size}; prepare it again"
        )
    magic, version, code, sequences, documents = _HEADER.unpack(index[: _HEADER.size].tobytes())
    if magic != _MAGIC:
        raise InputError(f"{path}: not a Megatron index: starts with {magic!r} instead of {_MAGIC!r}")
    if version != _VERSION:
        raise InputError(f"{path}: index version {version} is not known: expected {_VERSION}")
    if code not in _DTYPES:
        known = ", ".join(f"{code} {np.dtype(dtype).name}" for code, dtype in _DTYPES.items())
        raise InputError(f"{path}: dtype code {code} holds no token ids: expected one of {known}")
    size = _HEADER.size + 12 * sequences + 8 * documents
    if index.size not in (size, size + sequences):
        raise InputError(
            f"{path}: truncated or corrupt index: {index.size} bytes, but {sequences} sequences and "
            f"{documents} document ends take {size}; prepare it again"
        )
    return np.dtype(_DTYPES[code]).newbyteorder("<"), sequences, documents

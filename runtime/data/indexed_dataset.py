"""Megatron's indexed token files: `.bin` has the tokens, `.idx` the place of each sequence.

All numbers are little-endian and unpadded (megatron/core/datasets/indexed_dataset.py):

    .bin  the tokens of all sequences, one after the other
    .idx  9 bytes "MMIDIDX" 0 0 | uint64 version 1 | uint8 dtype code | uint64 N | uint64 D |
          int32[N] sequence lengths, tokens | int64[N] sequence offsets in .bin, bytes |
          int64[D] document ends, in sequences, after a leading 0 | int8[N] modes, multimodal files only

A document of one text is one sequence; a document of a list of texts has one sequence for each. An empty
document has no sequence and repeats the previous end. `runtime.data.indexed_writer` writes them.
"""

from __future__ import annotations

import os
import struct
import weakref
from pathlib import Path

import numpy as np
import numpy.typing as npt

from costmodels.errors import InputError
from costmodels.files import open_regular

Tokens = npt.NDArray[np.integer]

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
VERSION = 1
# Codes 6 and 7 are floating point, and were swapped between releases of Megatron: never token ids.
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
CODES = {np.dtype(dtype): code for code, dtype in _DTYPES.items()}

_CHECKED = 2**20
"""Number of sequences that are checked at a time."""

_READ_BYTES = 16 * 2**20


def best_dtype(vocab: int) -> np.dtype[np.integer]:
    """The integer type with which Megatron stores the ids of a vocabulary of this size."""
    return np.dtype(np.uint16 if vocab < 65500 else np.int32)


def bin_path(prefix: str | Path) -> Path:
    """The token file of a prefix, which may be given with or without `.bin` or `.idx`."""
    return Path(f"{bare_prefix(prefix)}.bin")


def idx_path(prefix: str | Path) -> Path:
    """The index file of a prefix, which may be given with or without `.bin` or `.idx`."""
    return Path(f"{bare_prefix(prefix)}.idx")


def bare_prefix(prefix: str | Path) -> str:
    """A prefix without the suffix of either file."""
    return str(prefix).removesuffix(".bin").removesuffix(".idx")


class IndexedDataset:
    """A reader of a pair of `.bin` and `.idx`. The index is memory-mapped; tokens are read on demand.

    Attributes: `prefix`; `dtype` of the tokens; `lengths` int32[N], tokens of each sequence; `pointers`
    int64[N], its byte offset in `.bin`; `document_indices` int64[D], 0 and then the number of sequences up to
    the end of each document; `modes` int8[N] for multimodal files, otherwise None.

    Raises InputError if a file is missing, unreadable, truncated or not in this format, or if the two do not
    belong together. Reading tokens raises it if the file has become unreadable.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(bare_prefix(prefix))
        index = _mapped(idx_path(prefix))
        self.dtype, sequences, documents = _read_header(idx_path(prefix), index)
        offset = HEADER.size
        self.lengths: npt.NDArray[np.int32] = np.frombuffer(index, "<i4", sequences, offset)
        offset += self.lengths.nbytes
        self.pointers: npt.NDArray[np.int64] = np.frombuffer(index, "<i8", sequences, offset)
        offset += self.pointers.nbytes
        self.document_indices: npt.NDArray[np.int64] = np.frombuffer(index, "<i8", documents, offset)
        offset += self.document_indices.nbytes
        self.modes: npt.NDArray[np.int8] | None = None
        if sequences and index.size > offset:
            self.modes = np.frombuffer(index, np.int8, sequences, offset)
        # Read and not mapped: a failing disk is then an error of this process and not its end by a signal.
        try:
            with open_regular(bin_path(prefix)) as file:
                self._file = os.dup(file.fileno())
            weakref.finalize(self, os.close, self._file)
            self._bytes = os.fstat(self._file).st_size
        except OSError as error:
            raise _unreadable(bin_path(prefix), error) from None
        self._check()

    def __len__(self) -> int:
        return self.lengths.size

    @property
    def documents(self) -> int:
        """Number of documents, empty ones included."""
        return self.document_indices.size - 1

    @property
    def token_count(self) -> int:
        """Number of tokens of all sequences."""
        return self._bytes // self.dtype.itemsize

    @property
    def tokens(self) -> Tokens:
        """All tokens in the order of the file, memory-mapped without reading."""
        path = bin_path(self.prefix)
        return np.memmap(path, self.dtype, mode="r") if self._bytes else np.empty(0, self.dtype)

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> Tokens:
        """`length` tokens of a sequence from `offset` on (all that remain by default)."""
        available = int(self.lengths[sequence]) - offset
        count = available if length is None else length
        if offset < 0 or not 0 <= count <= available:
            raise IndexError(f"tokens {offset}:{offset + count} of sequence {sequence} do not exist")
        return self.read(int(self.pointers[sequence]) // self.dtype.itemsize + offset, count)

    def read(self, start: int, count: int) -> Tokens:
        """`count` tokens from token `start` of the file on.

        Raises InputError if the file cannot be read or has become shorter.
        """
        tokens: Tokens = np.empty(count, self.dtype)
        view = tokens.data.cast("B") if count else memoryview(b"")
        position, done = start * self.dtype.itemsize, 0
        while done < view.nbytes:
            try:
                read = os.preadv(self._file, [view[done:]], position + done)
            except OSError as error:
                raise _unreadable(bin_path(self.prefix), error) from None
            if not read:
                raise InputError(
                    f"{bin_path(self.prefix)}: holds {os.fstat(self._file).st_size} bytes now, but held "
                    f"{self._bytes} when it was opened: it has been truncated meanwhile"
                )
            done += read
        return tokens

    def _check(self) -> None:
        where, ends = idx_path(self.prefix), self.document_indices
        if ends.size == 0 or ends[0] != 0 or ends[-1] != len(self) or np.any(ends[1:] < ends[:-1]):
            raise InputError(f"{where}: corrupt index: documents do not cover its {len(self)} sequences")
        if np.any(self.lengths < 0):
            raise InputError(f"{where}: corrupt index: negative sequence length")
        size = self.dtype.itemsize
        wanted = int(self.lengths.sum(dtype=np.int64)) * size
        if wanted != self._bytes:
            raise InputError(
                f"{bin_path(self.prefix)}: holds {self._bytes} bytes, but {where.name} describes {wanted}: "
                "the files do not belong together or one is truncated"
            )
        start = 0
        for first in range(0, len(self), _CHECKED):
            part = self.lengths[first : first + _CHECKED].astype(np.int64) * size
            found, expected = self.pointers[first : first + _CHECKED], start + np.cumsum(part) - part
            wrong = np.flatnonzero(found != expected)
            if wrong.size:
                one = int(wrong[0])
                inside = 0 <= found[one] <= wanted - int(part[one])
                what = "does not start where the one before it ends"
                where_else = f"lies outside {bin_path(self.prefix).name}"
                raise InputError(
                    f"{where}: corrupt index: sequence {first + one} {what if inside else where_else}"
                )
            start = int(expected[-1] + part[-1])


def _unreadable(path: Path, error: OSError) -> InputError:
    if isinstance(error, FileNotFoundError):
        return InputError(
            f"{path}: no such file: give the prefix of a .bin/.idx pair, as `planner data prepare` writes it"
        )
    return InputError(f"{path}: cannot be read: {error.strerror or error}")


def _mapped(path: Path) -> npt.NDArray[np.uint8]:
    """The mapped bytes of a file after one full read, as a mapping cannot report a failing disk."""
    try:
        with open_regular(path) as file:
            buffer = bytearray(min(_READ_BYTES, os.fstat(file.fileno()).st_size))
            while buffer and file.readinto(buffer):  # type: ignore[attr-defined]
                pass
        return np.memmap(path, np.uint8, mode="r") if buffer else np.empty(0, np.uint8)
    except (OSError, ValueError) as error:
        # numpy refuses with a ValueError a file that has become empty meanwhile.
        raise _unreadable(path, error if isinstance(error, OSError) else OSError(str(error))) from None


def _read_header(path: Path, index: npt.NDArray[np.uint8]) -> tuple[np.dtype[np.integer], int, int]:
    """Token type, number of sequences and length of the document list; the file's size agrees with them."""
    if index.size < HEADER.size:
        raise InputError(
            f"{path}: truncated index: {index.size} bytes, a header takes {HEADER.size}; prepare it again"
        )
    magic, version, code, sequences, documents = HEADER.unpack(index[: HEADER.size].tobytes())
    if magic != MAGIC:
        raise InputError(f"{path}: not a Megatron index: starts with {magic!r} instead of {MAGIC!r}")
    if version != VERSION:
        raise InputError(f"{path}: index version {version} is not known: expected {VERSION}")
    if code not in _DTYPES:
        known = ", ".join(f"{code} {np.dtype(dtype).name}" for code, dtype in _DTYPES.items())
        raise InputError(f"{path}: dtype code {code} holds no token ids: expected one of {known}")
    size = HEADER.size + 12 * sequences + 8 * documents
    if index.size not in (size, size + sequences):
        raise InputError(
            f"{path}: truncated or corrupt index: {index.size} bytes, but {sequences} sequences and "
            f"{documents} document ends take {size}; prepare it again"
        )
    return np.dtype(_DTYPES[code]).newbyteorder("<"), sequences, documents

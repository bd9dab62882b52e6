"""A writer of Megatron's indexed token files, atomic and with constant memory."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np
import numpy.typing as npt

from costmodels.errors import InputError
from runtime.data.indexed_dataset import (
    CODES,
    HEADER,
    MAGIC,
    VERSION,
    IndexedDataset,
    Tokens,
    bin_path,
    idx_path,
)
from runtime.data.record import Record, record_path

_CHUNK_BYTES = 16 * 2**20


class IndexedWriter:
    """Writes a pair of `.bin` and `.idx`; the pair appears when the context ends without an error.

    The `record` of its tokenizer appears too, if one is given.

    Until then the tokens are in a temporary file beside the target, which is removed on an error. The numbers
    of the index are in unnamed files.
    """

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike, record: Record | None = None) -> None:
        self._dtype = np.dtype(dtype)
        if self._dtype not in CODES:
            names = ", ".join(known.name for known in CODES)
            raise InputError(f"token dtype {self._dtype.name!r} cannot be indexed: use one of {names}")
        self._record = record
        self._targets = bin_path(prefix), idx_path(prefix), record_path(prefix)
        self._parts = tuple(path.with_name(f".{path.name}.{os.getpid()}.part") for path in self._targets)
        self._stack = ExitStack()
        self._sequences = self._documents = 0
        self._has_modes = self._finished = False

    def __enter__(self) -> IndexedWriter:
        folder = self._targets[0].parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._bin = self._stack.enter_context(self._parts[0].open("wb"))
            self._lengths, self._ends, self._modes = (self._spool(folder) for _ in range(3))
        except OSError as error:
            self._discard()
            raise InputError(f"{self._targets[0]}: cannot be written: {error.strerror}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.finish()
                # Without its index a .bin is not readable, so no moment shows a mixed pair.
                for stale in self._targets[1:]:
                    stale.unlink(missing_ok=True)
                named = (0, 1) if self._record is None else (0, 2, 1)
                for file in named:
                    self._parts[file].replace(self._targets[file])
            elif isinstance(error, OSError) and error.filename is None:
                # Written to a disk that is full, or fails.
                raise error
        except OSError as failed:
            reason = failed.strerror or failed
            raise InputError(f"{self._targets[0]}: cannot be written: {reason}") from None
        finally:
            self._discard()

    def add_document(self, tokens: npt.ArrayLike) -> None:
        """Append one document (token ids, 1-d); an empty one is counted but has no sequence."""
        ids = np.asarray(tokens) if np.size(tokens) else np.empty(0, self._dtype)
        self.add_documents(ids, np.array([ids.size]))

    def add_documents(
        self,
        tokens: Tokens,
        lengths: npt.NDArray[np.integer],
        sequences: npt.NDArray[np.integer] | None = None,
    ) -> None:
        """Append many documents: their tokens one after the other, and the length of each, tokens.

        With `sequences`, the number of sequences of each document, `lengths` are those of the sequences.
        """
        limits = np.iinfo(self._dtype)
        if tokens.size and not (limits.min <= tokens.min() and tokens.max() <= limits.max):
            raise InputError(
                f"token id {tokens.min() if tokens.min() < limits.min else tokens.max()} does not fit the "
                f"{self._dtype.name} of {self._targets[0]}: give a larger vocabulary size"
            )
        if lengths.size and lengths.max() > np.iinfo(np.int32).max:
            raise InputError(f"a document of {lengths.max()} tokens is too long: split it below 2^31 tokens")
        counts = (lengths > 0).astype(np.int64) if sequences is None else sequences
        self._bin.write(np.ascontiguousarray(tokens, self._dtype.newbyteorder("<")).data)
        self._count(lengths[lengths > 0], self._sequences + np.cumsum(counts, dtype=np.int64))

    def add_pair(self, pair: IndexedDataset) -> None:
        """Append all documents of another pair, like Megatron-LM's `add_index`; its dtype must be the
        same."""
        step = _CHUNK_BYTES // self._dtype.itemsize
        for start in range(0, pair.token_count, step):
            self._bin.write(pair.read(start, min(step, pair.token_count - start)).data)
        if pair.modes is not None:
            self._has_modes = True
            self._modes.write(pair.modes.tobytes())
        first, step = self._sequences, _CHUNK_BYTES // 8
        for start in range(0, max(len(pair), pair.documents), step):
            ends = first + pair.document_indices[1 + start : 1 + start + step]
            self._count(pair.lengths[start : start + step], ends)

    def finish(self) -> None:
        """Write all remaining data, so that only renaming is left."""
        if self._finished:
            return
        self._bin.flush()
        os.fsync(self._bin.fileno())
        with self._parts[1].open("wb") as index:
            self._write_index(index)
            index.flush()
            os.fsync(index.fileno())
        if self._record is not None:
            tokens = self._bin.tell() // self._dtype.itemsize
            with self._parts[2].open("w", encoding="utf-8") as record:
                record.write(self._record.text(self._sequences, tokens))
                record.flush()
                os.fsync(record.fileno())
        self._finished = True

    def _count(self, lengths: npt.NDArray[np.integer], ends: npt.NDArray[np.integer]) -> None:
        """Note lengths of sequences, and the number of sequences at each document's end."""
        self._lengths.write(lengths.astype("<i4").tobytes())
        self._ends.write(ends.astype("<i8").tobytes())
        self._sequences += lengths.size
        self._documents += ends.size

    def _write_index(self, index: IO[bytes]) -> None:
        index.write(HEADER.pack(MAGIC, VERSION, CODES[self._dtype], self._sequences, self._documents + 1))
        _append(self._lengths, index)
        start = 0
        for lengths in _chunks(self._lengths):
            # An exclusive sum: where the sequences before this one end.
            ends = start + np.cumsum(lengths, dtype=np.int64) * self._dtype.itemsize
            starts = ends - lengths.astype(np.int64) * self._dtype.itemsize
            index.write(starts.astype("<i8").tobytes())
            start = int(ends[-1])
        index.write(np.zeros(1, "<i8").tobytes())
        _append(self._ends, index)
        if self._has_modes:
            _append(self._modes, index)

    def _spool(self, folder: Path) -> IO[bytes]:
        return self._stack.enter_context(tempfile.TemporaryFile(dir=folder))

    def _discard(self) -> None:
        with suppress(OSError):
            # Buffered bytes are not needed, and a full disk does not take them.
            self._stack.close()
        for part in self._parts:
            # A file that could not be made need not be removed.
            with suppress(OSError):
                part.unlink()


def _append(source: IO[bytes], target: IO[bytes]) -> None:
    source.seek(0)
    shutil.copyfileobj(source, target, _CHUNK_BYTES)


def _chunks(file: IO[bytes]) -> Iterator[npt.NDArray[np.int32]]:
    file.seek(0)
    while part := file.read(_CHUNK_BYTES):
        yield np.frombuffer(part, "<i4")

"""Checksums that identify the data of a run without reading all of it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from runtime.data.indexed_dataset import IndexedDataset

BLOCKS = 64
BLOCK_BYTES = 2**16
"""Bytes of a block of `.bin`; the blocks read cover all of a file of up to 4 MiB."""

_STEP = 2**22


def identity(files: Sequence[IndexedDataset]) -> list[dict[str, Any]]:
    """The name of each file, with checksums of its index and of sampled blocks of its tokens."""
    return [{"name": one.prefix.name, **_checksums(one)} for one in files]


def difference(before: Any, now: Sequence[dict[str, Any]]) -> str | None:
    """The first difference of data from the `identity` noted `before`; None where they are the same."""
    if not isinstance(before, list) or len(before) != len(now):
        count = len(before) if isinstance(before, list) else 0
        return f"{len(now)} pairs of .bin and .idx instead of {count}"
    for old, new in zip(before, now, strict=True):
        for kind, what in (("idx", "lengths or order of documents"), ("bin", "tokens")):
            if not isinstance(old, dict) or old.get(kind) != new[kind]:
                was = old.get("name") if isinstance(old, dict) else None
                instead = f", in the place of {was}," if was not in (None, new["name"]) else ""
                return f"{new['name']}.{kind}{instead} has other {what}"
    return None


@lru_cache(maxsize=256)
def _checksums(indexed: IndexedDataset) -> dict[str, str]:
    index = zlib.crc32(indexed.dtype.str.encode())
    for array in (indexed.lengths, indexed.document_indices):
        for start in range(0, array.size, _STEP):
            index = zlib.crc32(array[start : start + _STEP].tobytes(), index)
    tokens, count, block = 0, indexed.token_count, BLOCK_BYTES // indexed.dtype.itemsize
    blocks = min(BLOCKS, -(-count // block))
    # The first and the last block are among them; those of small files touch.
    for start in np.linspace(0, max(0, count - block), blocks, dtype=np.int64).tolist():
        tokens = zlib.crc32(indexed.read(start, min(block, count - start)).tobytes(), tokens)
    return {"idx": f"{index:08x}", "bin": f"{tokens:08x}"}

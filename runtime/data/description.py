"""What a pair of token files holds: counts, ids and the first text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from runtime.data.indexed import IndexedDataset
from runtime.data.tokenizers import Tokenizer

_SCANNED_TOKENS = 2**28
_STEP = 2**22
_ENDS = 1000
_FIRST_TOKENS = 64


@dataclass(frozen=True)
class Description:
    """Counts of a pair; lengths in tokens.

    `smallest` and `largest` are ids among the first 2^28 tokens, None of an empty file. `ended` of the first
    `looked_at` documents that are not empty end with the tokenizer's end of document. `first_text` is how the
    first of them begins, None if its ids are not the tokenizer's.
    """

    prefix: Path
    documents: int
    empty_documents: int
    sequences: int
    tokens: int
    dtype: str
    longest: int
    is_multimodal: bool
    smallest: int | None
    largest: int | None
    ended: int
    looked_at: int
    first_ids: tuple[int, ...]
    first_text: str | None


def describe(prefix: str | Path, tokenizer: Tokenizer) -> Description:
    """Read a pair; raises InputError if it is not readable."""
    pair = IndexedDataset(prefix)
    ends = pair.document_indices
    filled = np.flatnonzero(ends[1:] > ends[:-1])
    last = (ends[1:][filled[:_ENDS]] - 1).tolist()
    final = [pair.get(sequence, int(pair.lengths[sequence]) - 1) for sequence in last]
    ended = sum(1 for token in final if token.size and int(token[0]) == tokenizer.eod)
    smallest, largest = _range(pair)
    first: list[int] = []
    if filled.size:
        sequence = int(ends[filled[0]])
        first = pair.get(sequence, 0, min(_FIRST_TOKENS, int(pair.lengths[sequence]))).tolist()
    is_known = all(0 <= token < tokenizer.vocab_size for token in first)
    return Description(
        prefix=pair.prefix,
        documents=pair.documents,
        empty_documents=pair.documents - filled.size,
        sequences=len(pair),
        tokens=pair.token_count,
        dtype=pair.dtype.name,
        longest=int(pair.lengths.max()) if len(pair) else 0,
        is_multimodal=pair.modes is not None,
        smallest=smallest,
        largest=largest,
        ended=ended,
        looked_at=len(last),
        first_ids=tuple(first),
        first_text=tokenizer.decode(first) if is_known else None,
    )


def _range(pair: IndexedDataset) -> tuple[int | None, int | None]:
    """The smallest and the largest id."""
    smallest: int | None = None
    largest: int | None = None
    scanned = min(pair.token_count, _SCANNED_TOKENS)
    for start in range(0, scanned, _STEP):
        part = pair.read(start, min(_STEP, scanned - start))
        low, high = int(part.min()), int(part.max())
        smallest = low if smallest is None else min(smallest, low)
        largest = high if largest is None else max(largest, high)
    return smallest, largest

"""A summary of a pair of token files: counts, ids and the first text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from costmodels.errors import InputError
from runtime.data.indexed_dataset import IndexedDataset
from runtime.data.packing import with_prompts
from runtime.data.record import Record, digest, read_record, recorded_tokenizer
from runtime.data.tokenizers import Tokenizer

_SCANNED_TOKENS = 2**28
_STEP = 2**22
_ENDS = 1000
_FIRST_TOKENS = 64


@dataclass(frozen=True)
class Description:
    """Counts of a pair of token files; lengths in tokens.

    `prepared_with` is the tokenizer of its record, or None. `tokenizer` is the one used to read it; None if
    unknown. `smallest` and `largest` are the extreme ids among the first 2^28 tokens; None for an empty file.
    `looked_at` non-empty documents were examined, and `ended` of them end with the end-of-document token
    `eod`. `first_text` is the beginning of the first document; if it is None, `lacking` has the reason.
    """

    prefix: Path
    documents: int
    empty_documents: int
    sequences: int
    tokens: int
    dtype: str
    longest: int
    is_multimodal: bool
    prepared_with: str | None
    tokenizer: str | None
    eod: int | None
    smallest: int | None
    largest: int | None
    ended: int | None
    looked_at: int
    first_ids: tuple[int, ...]
    first_text: str | None
    lacking: str | None


def describe(prefix: str | Path, tokenizer: Tokenizer | None = None) -> Description:
    """Read a pair, with the tokenizer of its record if none is given.

    Raises InputError if the pair or its record is not readable.
    """
    pair = IndexedDataset(prefix)
    record, lacking = read_record(pair), None
    named: Tokenizer | Record | None = tokenizer or record
    if tokenizer is None and record is None:
        lacking = "there is no record of its tokenizer: name it with --tokenizer-type"
    elif tokenizer is None and record is not None:
        try:
            tokenizer = recorded_tokenizer(record)
        except InputError as error:
            lacking = f"{error}; say where {record.name} is, with --tokenizer-type {record.origin.kind}"
    elif tokenizer is not None and record is not None and digest(tokenizer) == record.digest:
        # The same one may be called otherwise where its files lie.
        named = record
    ends = pair.document_indices
    filled = np.flatnonzero(ends[1:] > ends[:-1])
    last = (ends[1:][filled[:_ENDS]] - 1).tolist()
    final = [pair.get(sequence, int(pair.lengths[sequence]) - 1) for sequence in last]
    ended = None
    if named is not None:
        ended = sum(1 for token in final if token.size and int(token[0]) == named.eod)
    smallest, largest = id_range(pair, record is not None and record.hides_prompts)
    first: list[int] = []
    if filled.size:
        sequence = int(ends[filled[0]])
        first = pair.get(sequence, 0, min(_FIRST_TOKENS, int(pair.lengths[sequence]))).tolist()
        if record is not None and record.hides_prompts:
            first = [~token if token < 0 else token for token in first]
    text = None
    if tokenizer is not None:
        if all(0 <= token < tokenizer.vocab_size for token in first):
            text = tokenizer.decode(first)
        else:
            lacking = f"not of {tokenizer.name}"
    return Description(
        prefix=pair.prefix,
        documents=pair.documents,
        empty_documents=pair.documents - filled.size,
        sequences=len(pair),
        tokens=pair.token_count,
        dtype=pair.dtype.name,
        longest=int(pair.lengths.max()) if len(pair) else 0,
        is_multimodal=pair.modes is not None,
        prepared_with=record.name if record else None,
        tokenizer=named.name if named else None,
        eod=named.eod if named else None,
        smallest=smallest,
        largest=largest,
        ended=ended,
        looked_at=len(last),
        first_ids=tuple(first),
        first_text=text,
        lacking=lacking,
    )


def id_range(pair: IndexedDataset, hides: bool = False) -> tuple[int | None, int | None]:
    """The smallest and the largest id among the first 2^28 tokens; None for an empty file."""
    smallest: int | None = None
    largest: int | None = None
    scanned = min(pair.token_count, _SCANNED_TOKENS)
    for start in range(0, scanned, _STEP):
        part = pair.read(start, min(_STEP, scanned - start))
        if hides:
            part = with_prompts(part.astype(np.int64))
        low, high = int(part.min()), int(part.max())
        smallest = low if smallest is None else min(smallest, low)
        largest = high if largest is None else max(largest, high)
    return smallest, largest

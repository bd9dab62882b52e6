"""Options for boundaries between the documents of a sample."""

from __future__ import annotations

from dataclasses import dataclass

from costmodels.errors import InputError
from runtime.data.indexed_dataset import IndexedDataset
from runtime.data.record import Record
from runtime.data.tokenizers import Tokenizer

_LOOKED_AT = 1000


@dataclass(frozen=True)
class Boundaries:
    """Options for attention across documents, and the mark of a document's end.

    In a stream of documents the token `eod` ends a document and belongs to it. If `eod` is None, samples hold
    whole documents with known starts (`runtime.data.packing`), which may contain that token anywhere.

    The options have the names of Megatron-LM's. `reset_attention_mask`: tokens attend to their own document
    only. `reset_position_ids`: positions count from the start of the document. `eod_mask_loss`: the token
    after the end of a document is not predicted. `hides_prompts`: a negative id ~i stands for the id i, which
    is not predicted (`runtime.data.packing`).
    """

    eod: int | None
    reset_attention_mask: bool = False
    reset_position_ids: bool = False
    eod_mask_loss: bool = False
    hides_prompts: bool = False


def check_ends(indexed: IndexedDataset, tokenizer: Tokenizer | Record) -> None:
    """Raise InputError if none of the first documents ends with the end-of-document token of `tokenizer`."""
    ends = indexed.document_indices[: _LOOKED_AT + 1]
    last = (ends[1:][ends[1:] > ends[:-1]] - 1).tolist()
    for sequence in last:
        length = int(indexed.lengths[sequence])
        if length and int(indexed.get(sequence, length - 1)[0]) == tokenizer.eod:
            return
    raise InputError(
        f"{indexed.prefix}: none of its first {len(last)} documents ends with {tokenizer.eod}, the end of a "
        f"document of {tokenizer.name}: prepare it with --append-eod, or name the tokenizer that prepared it"
    )

"""The tokenizer of a pair of token files, recorded in `PREFIX.tokenizer` beside its `.bin` and `.idx`.

The record is a JSON object. It identifies the tokenizer and the files to load it from. It also has the pair's
numbers of sequences and tokens, so a record left over from other files of the same name is detected. Pairs
written by Megatron-LM have no record. Megatron-LM's merge_datasets.py only accepts files with a `.idx` of the
same prefix, which the record has.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from costmodels.errors import InputError
from costmodels.files import MIB, read_text
from runtime.data.indexed_dataset import IndexedDataset, bare_prefix
from runtime.data.tokenizers import Origin, Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Record:
    """The tokenizer of prepared files; `digest` identifies it."""

    name: str
    vocab_size: int
    eod: int
    digest: str
    origin: Origin
    hides_prompts: bool = False
    """True if ids of prompts are stored as their complement."""

    def __str__(self) -> str:
        return f"{self.name} ({self.vocab_size} ids, {self.eod} ends a document)"

    def text(self, sequences: int, tokens: int) -> str:
        """The text of the record for a pair with the given numbers of sequences and tokens."""
        return json.dumps({**asdict(self), "sequences": sequences, "tokens": tokens}, indent=2) + "\n"


def digest(tokenizer: Tokenizer, eod: int | None = None) -> str:
    """A checksum of a tokenizer; tokenizers whose ids have the same meaning have the same one, from any
    files.

    With `eod`, that id is taken as the end-of-document token.
    """
    meaning = sorted(tokenizer.vocabulary().items()), tokenizer.eod if eod is None else eod
    return hashlib.sha256(repr(meaning).encode()).hexdigest()[:32]


def record_of(tokenizer: Tokenizer) -> Record:
    """The record of a tokenizer."""
    return Record(tokenizer.name, tokenizer.vocab_size, tokenizer.eod, digest(tokenizer), tokenizer.origin)


def record_path(prefix: str | Path) -> Path:
    """The record of a prefix, which may be given with or without `.bin` or `.idx`."""
    return Path(f"{bare_prefix(prefix)}.tokenizer")


def read_record(pair: IndexedDataset) -> Record | None:
    """The record of a pair; None if it has none, or a record of other tokens.

    Raises InputError if it cannot be read or is damaged.
    """
    path = record_path(pair.prefix)
    try:
        content = json.loads(read_text(path, MIB))
        origin = Origin(**content.pop("origin"))
        counts = content.pop("sequences"), content.pop("tokens")
        record = Record(**content, origin=origin)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        raise _damaged(path) from None
    texts = (record.name, record.digest, origin.kind)
    files = (origin.vocab_file, origin.merge_file, origin.tokenizer_model)
    numbers = (record.vocab_size, record.eod, *counts)
    is_sound = (
        type(record.hides_prompts) is bool
        and all(isinstance(text, str) and text.isprintable() for text in texts)
        and all(file is None or isinstance(file, str) for file in files)
        and all(type(number) is int and number >= 0 for number in numbers)
    )
    if not is_sound:
        raise _damaged(path)
    return record if counts == (len(pair), pair.token_count) else None


def _damaged(path: Path) -> InputError:
    return InputError(
        f"{path}: is not the record of a tokenizer that `planner data prepare` writes: delete it, or prepare "
        "the data again"
    )


KnownTokenizer = tuple[Path, Record]
"""The prefix of a pair, and its record."""


def common_tokenizer(known: KnownTokenizer | None, flag: str, pair: IndexedDataset) -> KnownTokenizer | None:
    """The tokenizer `known`, or else the recorded one of a pair named by `flag`; raises InputError if they
    differ."""
    record = read_record(pair)
    if record is None:
        return known
    if known is None:
        return pair.prefix, record
    if record.digest != known[1].digest:
        raise InputError(
            f"{flag} {pair.prefix}: was prepared with {record}, but {known[0]} with {known[1]}: their ids "
            "differ in meaning: prepare all with one tokenizer"
        )
    return known


def recorded_tokenizer(record: Record) -> Tokenizer:
    """The tokenizer of a record; raises InputError if its files are missing or have changed."""
    tokenizer, found = _loaded(record.origin)
    if found != record.digest:
        file = record.origin.tokenizer_model or record.origin.vocab_file or record.origin.kind
        raise InputError(f"{file}: is not {record} any more")
    return tokenizer


@lru_cache(maxsize=2)
def _loaded(origin: Origin) -> tuple[Tokenizer, str]:
    tokenizer = load_tokenizer(**asdict(origin))
    return tokenizer, digest(tokenizer)

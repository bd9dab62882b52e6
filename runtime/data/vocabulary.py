"""Vocabularies made from a corpus (characters, words or byte pairs), written as a `tokenizer.json`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import tokenizers as hf

from costmodels.errors import InputError
from costmodels.files import write_whole
from costmodels.paths import is_file
from runtime.data.documents import detect_format, extract_texts, read_pieces
from runtime.data.sources import expand
from runtime.data.tokenizers import BPETokenizer, Tokenizer, load_tokenizer

UNKNOWN, END = "[UNK]", "<|endoftext|>"
SPECIAL = {"char": (UNKNOWN, END), "word": (UNKNOWN, END), "bpe": (END,)}
"""Special tokens of each kind of vocabulary: one for unknown text, and one for the end of a document.

Byte pairs need no token for unknown text."""

BYTES = 256
"""Number of single-byte tokens in every vocabulary of byte pairs."""


def make_vocabulary(
    inputs: Sequence[str | Path],
    folder: str | Path,
    kind: str,
    size: int,
    json_keys: Sequence[str] = ("text",),
) -> Tokenizer:
    """Write a tokenizer of a corpus's `size` commonest tokens to `folder`, and return it.

    Kind `char` has single characters; `word` has parts between white space and punctuation; `bpe` has byte
    pairs (arXiv:1508.07909) under GPT-2's rules. The commonest tokens come first; equally common ones are
    ordered by code point. A corpus with fewer tokens gives a smaller vocabulary. Raises InputError if files
    cannot be read, have no text, or `size` leaves no room for the corpus's tokens.
    """
    if kind not in SPECIAL:
        raise InputError(f"--kind {kind!r}: expected one of {', '.join(SPECIAL)}")
    special = SPECIAL[kind]
    least = len(special) + (BYTES if kind == "bpe" else 1)
    if size < least:
        others = f"{BYTES} bytes" if kind == "bpe" else "a token of the corpus"
        raise InputError(
            f"--vocab-size {size}: expected at least {least}, for {', '.join(special)} and {others}"
        )
    files = expand([str(path) for path in inputs])
    for file in files:
        if not is_file(file):
            raise InputError(f"--input {file}: is no regular file; give files of text")
    model = _MAKERS[kind](_texts(files, json_keys), size, special)
    model.add_special_tokens(list(special))
    _write(Path(folder), model)
    made = load_tokenizer("HuggingFaceTokenizer", tokenizer_model=folder)
    assert isinstance(made, BPETokenizer)
    return made


def _texts(files: Sequence[Path], keys: Sequence[str]) -> Iterator[str]:
    """The texts of a corpus; raises `InputError` at its end if it has none."""
    found = False
    for file in files:
        form = detect_format(file)
        for piece in read_pieces(file, form, 1024):
            for documents in extract_texts(piece, form, keys):
                for document in documents:
                    for text in [document] if isinstance(document, str) else document:
                        found = found or bool(text.strip())
                        yield text
    if not found:
        raise InputError(f"--input {files[0]}: holds no text")


def _of_parts(parts: hf.pre_tokenizers.PreTokenizer, joined: bool) -> Callable[..., hf.Tokenizer]:
    """Make a vocabulary of the commonest parts into which a rule cuts texts."""

    def make(texts: Iterator[str], size: int, special: Sequence[str]) -> hf.Tokenizer:
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(part for part, _ in parts.pre_tokenize_str(text))
        for token in special:
            counts.pop(token, None)
        commonest = sorted(counts, key=lambda part: (-counts[part], part))[: size - len(special)]
        vocabulary = {token: number for number, token in enumerate([*special, *commonest])}
        model = hf.Tokenizer(hf.models.WordLevel(vocabulary, unk_token=UNKNOWN))
        model.pre_tokenizer = parts
        if joined:
            model.decoder = hf.decoders.Fuse()
        return model

    return make


def _byte_pairs(texts: Iterator[str], size: int, special: Sequence[str]) -> hf.Tokenizer:
    model = hf.Tokenizer(hf.models.BPE())
    model.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = hf.decoders.ByteLevel()
    alphabet = sorted(hf.pre_tokenizers.ByteLevel.alphabet())
    trainer = hf.trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    # The library hides what its iterators raise.
    model.train_from_iterator(list(texts), trainer)
    return model


_MAKERS: dict[str, Callable[[Iterator[str], int, Sequence[str]], hf.Tokenizer]] = {
    "char": _of_parts(hf.pre_tokenizers.Split(hf.Regex(r"[\s\S]"), "isolated"), joined=True),
    "word": _of_parts(hf.pre_tokenizers.Whitespace(), joined=False),
    "bpe": _byte_pairs,
}


def _write(folder: Path, model: hf.Tokenizer) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output {folder}: cannot be made: {error.strerror}") from None
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    write_whole("--output", folder / "tokenizer.json", model.to_str(pretty=True) + "\n")
    write_whole("--output", folder / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")

"""Tokenizers: GPT-2's byte-pair encoding, any `tokenizer.json`, or plain bytes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import tokenizers as hf

from costmodels.errors import InputError
from costmodels.files import MIB, read_text
from costmodels.paths import exists, is_file, is_folder
from planner.inputs.huggingface.hub import NoSuchFileError, hub_file, hub_model, hub_origin

Ids = npt.NDArray[np.integer]

END_OF_TEXT = "<|endoftext|>"
# Names of the end of a document in widespread tokenizers, tried in turn when tokenizer_config.json is silent.
_END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eos|>", "<｜end▁of▁sentence｜>")
LARGEST_TOKENIZER = 200 * MIB
"""Most bytes of a tokenizer's file; the largest have some tens of MiB."""
_GPT2_MERGES = Path(__file__).with_name("gpt2_merges.txt")


@dataclass(frozen=True)
class Origin:
    """The files from which `load_tokenizer` made a tokenizer; paths are absolute."""

    kind: str
    vocab_file: str | None = None
    merge_file: str | None = None
    tokenizer_model: str | None = None


class Tokenizer(Protocol):
    """The interface of a tokenizer for the data preparation.

    `name` identifies the tokenizer, contents included; ids are below `vocab_size`; `eod` ends a document.
    """

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eod(self) -> int: ...
    @property
    def origin(self) -> Origin: ...

    def vocabulary(self) -> dict[str, int]:
        """The id of each token."""

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, without any special token added."""

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """The text of some ids."""


@dataclass(frozen=True)
class ByteTokenizer:
    """A tokenizer with UTF-8 bytes as ids 0 to 255; 256 ends a document."""

    name: ClassVar[str] = "bytes"
    vocab_size: ClassVar[int] = 257
    eod: ClassVar[int] = 256
    origin: ClassVar[Origin] = Origin("ByteTokenizer")

    def vocabulary(self) -> dict[str, int]:
        """The id of each byte's symbol, as in a byte-level encoding without pairs."""
        return {symbol: byte for byte, symbol in enumerate(_byte_symbols())} | {END_OF_TEXT: self.eod}

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: Sequence[int] | Ids) -> str:
        values = np.asarray(ids, np.int64)
        return values[values < 256].astype(np.uint8).tobytes().decode(errors="replace")


@dataclass(frozen=True)
class BPETokenizer:
    """A tokenizer of the `tokenizers` library.

    With GPT-2's rules (`is_gpt2`) long texts are encoded in parts: the library needs some hundred bytes of
    memory for each token.
    """

    name: str
    vocab_size: int
    eod: int
    model: hf.Tokenizer
    origin: Origin
    is_gpt2: bool = False

    def vocabulary(self) -> dict[str, int]:
        found: dict[str, int] = self.model.get_vocab(with_added_tokens=True)
        return found

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        if self.is_gpt2 and any(len(text) > _PART_CHARS for text in texts):
            return [np.concatenate([self._encode([part])[0] for part in _parts(text)]) for text in texts]
        return self._encode(texts)

    def _encode(self, texts: Sequence[str]) -> list[Ids]:
        encoded = self.model.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(one.ids, np.int64) for one in encoded]

    def decode(self, ids: Sequence[int] | Ids) -> str:
        text: str = self.model.decode([int(token) for token in ids], skip_special_tokens=False)
        return text


def _byte_symbols() -> list[str]:
    """The character that stands for each byte in byte-level encodings (GPT-2's `bytes_to_unicode`)."""
    themselves = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in themselves else next(others)) for byte in range(256)]


_PART_CHARS = 2**20
# GPT-2's tokens never reach over a line break that stands alone between other than white space.
_LONE_BREAK = re.compile(r"(?<=\S\n)(?=\S)")


def _parts(text: str) -> Iterator[str]:
    """A text in parts of about a million characters; under GPT-2's rules, the parts' ids are those of the
    whole text."""
    start = 0
    while start < len(text):
        found = _LONE_BREAK.search(text, start + _PART_CHARS)
        end = found.start() if found else len(text)
        yield text[start:end]
        start = end
    if not text:
        yield text


def implied_kind(
    vocab_file: str | Path | None, merge_file: str | Path | None, tokenizer_model: str | Path | None
) -> str | None:
    """The `--tokenizer-type` implied by the given files; None without files."""
    return (
        "HuggingFaceTokenizer"
        if tokenizer_model
        else "GPT2BPETokenizer"
        if vocab_file or merge_file
        else None
    )


def load_tokenizer(
    kind: str,
    vocab_file: str | Path | None = None,
    merge_file: str | Path | None = None,
    tokenizer_model: str | Path | None = None,
) -> Tokenizer:
    """The tokenizer that Megatron's `--tokenizer-type` names.

    GPT2BPETokenizer reads `vocab_file` and `merge_file` (when neither is given, GPT-2's own, which are part
    of the package). HuggingFaceTokenizer reads a `tokenizer.json`: `tokenizer_model` is its path, its folder,
    or the id of a model on the Hugging Face Hub. ByteTokenizer needs no file. Raises InputError if a file is
    missing or wrong.
    """
    if kind == "GPT2BPETokenizer":
        if bool(vocab_file) != bool(merge_file):
            given, lacking = ("vocab", "merge") if vocab_file else ("merge", "vocab")
            raise InputError(
                f"--{given}-file given without --{lacking}-file: give both, or neither for GPT-2's own"
            )
        return (
            _gpt2_bpe(Path(vocab_file), Path(merge_file)) if vocab_file and merge_file else gpt2_tokenizer()
        )
    if kind == "HuggingFaceTokenizer":
        if not tokenizer_model:
            raise InputError(
                "--tokenizer-type HuggingFaceTokenizer: give --tokenizer-model PATH-to-tokenizer.json"
            )
        return _hugging_face(Path(tokenizer_model))
    if kind == "ByteTokenizer":
        return ByteTokenizer()
    raise InputError(
        f"--tokenizer-type {kind!r}: expected GPT2BPETokenizer, HuggingFaceTokenizer or ByteTokenizer"
    )


def gpt2_tokenizer() -> BPETokenizer:
    """GPT-2's tokenizer from the merges in this package."""
    merges = _merges(_GPT2_MERGES)
    origin = Origin("GPT2BPETokenizer")
    return _byte_level_bpe("gpt2", gpt2_vocabulary(merges), merges, _GPT2_MERGES, origin)


def gpt2_vocabulary(merges: Sequence[tuple[str, str]]) -> dict[str, int]:
    """GPT-2's ids: the symbols of the 256 bytes by code point, the merges in order, then <|endoftext|>."""
    symbols = sorted(hf.pre_tokenizers.ByteLevel.alphabet())
    return {
        token: number
        for number, token in enumerate([*symbols, *(first + second for first, second in merges), END_OF_TEXT])
    }


def _gpt2_bpe(vocab_file: Path, merge_file: Path) -> BPETokenizer:
    vocabulary = _json_object(vocab_file, "--vocab-file")
    if not all(isinstance(number, int) for number in vocabulary.values()):
        raise InputError(f"--vocab-file {vocab_file}: expected a JSON object of token: id")
    merges = _merges(merge_file)
    digest = hashlib.sha256(repr((sorted(vocabulary.items()), merges)).encode()).hexdigest()[:12]
    origin = Origin("GPT2BPETokenizer", str(vocab_file.absolute()), str(merge_file.absolute()))
    return _byte_level_bpe(f"gpt2-{digest}", vocabulary, merges, vocab_file, origin)


def _byte_level_bpe(
    name: str, vocabulary: dict[str, int], merges: list[tuple[str, str]], source: Path, origin: Origin
) -> BPETokenizer:
    if END_OF_TEXT not in vocabulary:
        raise InputError(f"--vocab-file {source}: has no {END_OF_TEXT}, which ends a document")
    try:
        model = hf.Tokenizer(hf.models.BPE(vocabulary, merges))
    except Exception as error:
        # The library raises plain exceptions, e.g. for a merge whose token is not in the vocabulary.
        raise InputError(f"--vocab-file {source}: does not belong to the merges: {error}") from None
    model.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = hf.decoders.ByteLevel()
    size, end = max(vocabulary.values()) + 1, vocabulary[END_OF_TEXT]
    return BPETokenizer(name, size, end, model, origin, is_gpt2=True)


def _hugging_face(path: Path) -> BPETokenizer:
    file = _tokenizer_file(path)
    text = _read(file, "--tokenizer-model")
    try:
        model = hf.Tokenizer.from_str(text)
    except BaseException as error:
        # The library raises plain exceptions for whatever it cannot parse, and panics are no `Exception`.
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise InputError(f"--tokenizer-model {file}: not a tokenizer.json: {error}") from None
    # Documents are encoded whole: a file made for fine-tuning may cut or pad them.
    model.no_truncation()
    model.no_padding()
    vocabulary = model.get_vocab(with_added_tokens=True)
    names = [_configured_end(file.with_name("tokenizer_config.json")), *_END_NAMES]
    ends = [vocabulary[name] for name in names if name in vocabulary]
    if not ends:
        raise InputError(
            f"--tokenizer-model {file}: no token ends a document: name it as eos_token in "
            "tokenizer_config.json beside it"
        )
    stood = hub_origin(file)
    place = file.parent.name if stood is None else stood.name
    name = f"{place or 'tokenizer'}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    origin = Origin("HuggingFaceTokenizer", tokenizer_model=str((path if exists(path) else file).absolute()))
    return BPETokenizer(name, max(vocabulary.values()) + 1, ends[0], model, origin)


def _tokenizer_file(path: Path) -> Path:
    """The tokenizer.json at a path or in a folder, or that of the model with a Hub id."""
    model = hub_model(path)
    if model is None:
        return path / "tokenizer.json" if is_folder(path) else path
    found = hub_file(model, "tokenizer.json")
    # Some models have none, and what ends a document is then found by its usual names.
    with suppress(NoSuchFileError):
        hub_file(model, "tokenizer_config.json")
    return found


def _configured_end(path: Path) -> str | None:
    if not is_file(path):
        return None
    end = _json_object(path, "--tokenizer-model").get("eos_token")
    return end.get("content") if isinstance(end, dict) else end


def _merges(path: Path) -> list[tuple[str, str]]:
    lines = _read(path, "--merge-file").replace("\r\n", "\n").split("\n")
    merges = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) != 2:
            raise InputError(f"--merge-file {path}: line {number} is not a pair of tokens: {line[:40]!r}")
        merges.append((pair[0], pair[1]))
    return merges


def _json_object(path: Path, flag: str) -> dict[str, Any]:
    try:
        content = json.loads(_read(path, flag))
    except json.JSONDecodeError as error:
        raise InputError(f"{flag} {path}: not JSON: line {error.lineno}: {error.msg}") from None
    if not isinstance(content, dict):
        raise InputError(f"{flag} {path}: expected a JSON object, found a {type(content).__name__}")
    return content


def _read(path: Path, flag: str) -> str:
    try:
        return read_text(path, LARGEST_TOKENIZER)
    except OSError as error:
        raise InputError(f"{flag} {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{flag} {path}: not UTF-8 text: byte {error.start}") from None

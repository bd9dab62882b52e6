"""Reading raw text in bounded pieces: JSON lines, a JSON array, WikiExtractor's documents, or plain text.

One process cuts pieces, and other processes extract the documents, so parsing runs in parallel.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from costmodels.errors import InputError
from runtime.data.json_array import ArrayReader
from runtime.data.sources import Source, bare_name, open_source

FORMATS = ("jsonl", "json", "wiki", "text")
_PIECE_BYTES = 4 * 2**20
_BOM = b"\xef\xbb\xbf"
ARRAY = 'an array of them, [{"text": ...}, ...]'
"""The name of the JSON-array format, for messages."""

MOST_KEYS = 8
"""Most keys of an object that a message lists."""

_WIKI_START, _WIKI_END = b"<doc ", b"</doc>"

Texts = str | list[str]
"""The text of a document, or its sentences."""


@dataclass(frozen=True)
class Piece:
    """Consecutive documents of one file.

    `documents` are raw bytes, texts (str) or parsed values, by format, and `lines` their line numbers. `size`
    is the bytes of their text, `taken` the bytes of the file, which may be compressed.
    """

    path: Path
    documents: Sequence[Any]
    lines: Sequence[int]
    size: int
    taken: int


def detect_format(path: Path) -> str:
    """The format of a file: by its suffix if that is .jsonl or .txt, else by its beginning.

    An array of strings or objects is a JSON array, `{` begins JSON lines, and `<doc` is WikiExtractor's.
    Other files are plain text, unless the suffix is .json.
    """
    ending = bare_name(path).suffix.lower()
    by_name = {".jsonl": "jsonl", ".txt": "text"}.get(ending)
    if by_name:
        return by_name
    with open_source(path) as source:
        start = source.text.read(4096).decode("utf-8-sig", errors="replace")
    if start.lstrip().startswith(_WIKI_START.decode()):
        return "wiki"
    begin = "".join(start.split(maxsplit=1))[:2]
    if begin in ("[", '["', "[{", "[]"):
        return "json"
    return "jsonl" if begin.startswith("{") or ending == ".json" else "text"


def read_pieces(path: Path, form: str, most: int) -> Iterator[Piece]:
    """The documents of a file in order, in pieces of at most `most` documents and about 4 MiB."""
    with open_source(path) as source:
        taken = 0
        for documents, lines, size in _READERS[form](path, source, most):
            now = source.taken()
            yield Piece(path, documents, lines, size, now - taken)
            taken = now


def extract_texts(piece: Piece, form: str, keys: Sequence[str]) -> list[list[Texts]]:
    """The text of each document of a piece under each of `keys`; a list of texts is a list of sentences.

    Raises InputError with file and line if a document is not JSON or has no text under a key.
    """
    texts: list[list[Texts]] = [[] for _ in keys]
    for line, document in zip(piece.lines, piece.documents, strict=True):
        where = f"{piece.path}:{line}"
        value = _EXTRACTED[form](document, where) if form in _EXTRACTED else document
        for key, found in zip(keys, texts, strict=True):
            text = value.get(key) if isinstance(value, dict) else value if len(keys) == 1 else None
            is_text = isinstance(text, str) or (isinstance(value, dict) and isinstance(text, list))
            sentences: list[Any] = text if isinstance(text, list) else [text]
            if not is_text or not all(isinstance(sentence, str) for sentence in sentences):
                raise InputError(f"{where}: {_no_text(value, key)}")
            for sentence in sentences:
                if not sentence.isascii():
                    _refuse_surrogates(sentence, where)
            found.append(sentences if isinstance(text, list) else sentences[0])
    return texts


Part = tuple[Sequence[Any], Sequence[int], int]
"""Documents, their line numbers, and their bytes of text."""


class _Cutter:
    """A collector of documents until a piece is full."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.part: tuple[list[Any], list[int]] = ([], [])
        self.size = 0

    def add(self, document: Any, line: int) -> None:
        self.part[0].append(document)
        self.part[1].append(line)

    def is_full(self) -> bool:
        return len(self.part[0]) >= self.most or self.size >= _PIECE_BYTES

    def cut(self) -> Part:
        (documents, lines), size = self.part, self.size
        self.part, self.size = ([], []), 0
        return documents, lines, size


def _read_lines(path: Path, source: Source, most: int) -> Iterator[Part]:
    cutter = _Cutter(most)
    for number, line in enumerate(source.text, 1):
        cutter.size += len(line)
        if line.strip():
            cutter.add(line.removeprefix(_BOM) if number == 1 else line, number)
        if cutter.is_full():
            yield cutter.cut()
    if cutter.size:
        yield cutter.cut()


def _read_wiki(path: Path, source: Source, most: int) -> Iterator[Part]:
    """Texts between the lines <doc ...> and </doc>, as WikiExtractor writes them with the title on top."""
    cutter = _Cutter(most)
    body: list[bytes] | None = None
    first = number = 0
    for number, line in enumerate(source.text, 1):
        cutter.size += len(line)
        bare = (line.removeprefix(_BOM) if number == 1 else line).strip()
        if body is None:
            if bare.startswith(_WIKI_START):
                body, first = [], number
            elif bare:
                raise InputError(f"{path}:{number}: text outside of <doc ...> and </doc>: {bare[:40]!r}")
        elif bare == _WIKI_END:
            cutter.add(b"".join(body).strip(b"\r\n"), first + 1)
            body = None
            if cutter.is_full():
                yield cutter.cut()
        else:
            body.append(line)
    if body is not None:
        raise InputError(f"{path}:{number}: the <doc ...> of line {first} has no </doc>: the file is cut off")
    if cutter.size:
        yield cutter.cut()


def _read_text(path: Path, source: Source, most: int) -> Iterator[Part]:
    content = source.text.read()
    yield [_decoded(content.removeprefix(_BOM), f"{path}:1")], [1], len(content)


def _read_array(path: Path, source: Source, most: int) -> Iterator[Part]:
    array = ArrayReader(path, io.TextIOWrapper(source.text, "utf-8-sig", newline=""))
    cutter = _Cutter(most)
    before = array.consumed
    for line, value in array.values():
        cutter.add(value, line)
        cutter.size = array.consumed - before
        if cutter.is_full():
            yield cutter.cut()
            before = array.consumed
    cutter.size = array.consumed - before
    yield cutter.cut()


_READERS: dict[str, Callable[[Path, Source, int], Iterator[Part]]] = {
    "jsonl": _read_lines,
    "json": _read_array,
    "wiki": _read_wiki,
    "text": _read_text,
}


def _parsed(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode())
    except json.JSONDecodeError as error:
        goes_on = line.lstrip().startswith(b"{") and error.pos >= len(line.decode().rstrip())
        instead = f"; expected a whole object on each line, or {ARRAY}" if goes_on else ""
        raise InputError(f"{where}: bad JSON: {error.msg} at column {error.colno}{instead}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 text: byte {error.start} of the line") from None
    except (ValueError, RecursionError) as error:
        # A number of thousands of digits, or nesting thousands of levels deep.
        raise InputError(f"{where}: bad JSON: {error}") from None


def _no_text(value: Any, key: str) -> str:
    if isinstance(value, str):
        return f"expected an object with {key!r}, found a string: give one of --json-keys for strings"
    if not isinstance(value, dict):
        return f"expected a string or an object with {key!r}, found a {type(value).__name__}"
    if key in value:
        return f"{key!r} is a {type(value[key]).__name__}, expected a string or a list of strings"
    texts = [repr(name) for name, text in value.items() if isinstance(text, str)][:MOST_KEYS]
    if not texts:
        return f"no {key!r} in this object, and no other text; expected an object for each text, or {ARRAY}"
    return f"no {key!r} in this object: give --json-keys one of {', '.join(texts)}"


def _refuse_surrogates(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{where}: a lone surrogate ({text[error.start]!r}) at character {error.start} is no text"
        ) from None


def _decoded(content: bytes, where: str) -> str:
    """The text of a document that starts at `where`, file:line."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        path, _, line = where.rpartition(":")
        number = int(line) + content.count(b"\n", 0, error.start)
        raise InputError(f"{path}:{number}: not UTF-8 text: byte {error.start}") from None


# Decoders of values that are cut as bytes, by the kind of file.
_EXTRACTED: dict[str, Callable[[bytes, str], Any]] = {"jsonl": _parsed, "wiki": _decoded}

"""Reading raw text in bounded pieces: JSON lines, a JSON array, or plain text with one document a file.

A piece is cut in one process and its documents are extracted in another, so that parsing runs in parallel.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from costmodels.errors import InputError

FORMATS = ("jsonl", "json", "text")
_PIECE_BYTES = 4 * 2**20
_READ_CHARS = 2**20


@dataclass(frozen=True)
class Piece:
    """Consecutive documents of one file.

    `documents` are raw lines (bytes), texts (str) or parsed values, by format; `lines` are their line
    numbers; `size` is the bytes of the file that they take.
    """

    path: Path
    documents: Sequence[Any]
    lines: Sequence[int]
    size: int


def detect_format(path: Path) -> str:
    """The format of a file: by its name if that says .jsonl or .txt, else by how it begins.

    A [ that opens an array of strings or objects is a JSON array, a { opens JSON lines, all else is plain
    text, unless the name says .json.
    """
    by_name = {".jsonl": "jsonl", ".txt": "text"}.get(path.suffix.lower())
    if by_name:
        return by_name
    with path.open("rb") as file:
        start = file.read(4096).decode("utf-8-sig", errors="replace").split(maxsplit=1)
    begin = "".join(start)[:2]
    if begin in ("[", '["', "[{", "[]"):
        return "json"
    return "jsonl" if begin.startswith("{") or path.suffix.lower() == ".json" else "text"


def read_pieces(path: Path, form: str, most: int) -> Iterator[Piece]:
    """The documents of a file in order, at most `most` and about 4 MiB at a time."""
    return {"jsonl": _read_lines, "json": _read_array, "text": _read_text}[form](path, most)


def extract_texts(piece: Piece, form: str, key: str) -> list[str]:
    """The text of each document of a piece.

    Raises InputError with file and line if a document is not JSON or has no text under `key`.
    """
    texts = []
    for line, document in zip(piece.lines, piece.documents, strict=True):
        value = _parsed(document, f"{piece.path}:{line}") if form == "jsonl" else document
        text = value.get(key) if isinstance(value, dict) else value
        if not isinstance(text, str):
            raise InputError(f"{piece.path}:{line}: {_no_text(value, key)}")
        if not text.isascii():
            _refuse_surrogates(text, f"{piece.path}:{line}")
        texts.append(text)
    return texts


def _read_lines(path: Path, most: int) -> Iterator[Piece]:
    with path.open("rb") as file:
        documents: list[bytes] = []
        lines: list[int] = []
        size = 0
        for number, line in enumerate(file, 1):
            size += len(line)
            if line.strip():
                documents.append(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
                lines.append(number)
            if len(documents) >= most or size >= _PIECE_BYTES:
                yield Piece(path, documents, lines, size)
                documents, lines, size = [], [], 0
        if size:
            yield Piece(path, documents, lines, size)


def _read_text(path: Path, most: int) -> Iterator[Piece]:
    content = path.read_bytes()
    try:
        yield Piece(path, [content.decode("utf-8-sig")], [1], len(content))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}:{line}: not UTF-8 text: byte {error.start}") from None


def _read_array(path: Path, most: int) -> Iterator[Piece]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        array = _ArrayReader(path, file)
        documents: list[Any] = []
        lines: list[int] = []
        before = array.consumed
        for line, value in array.values():
            documents.append(value)
            lines.append(line)
            if len(documents) >= most or array.consumed - before >= _PIECE_BYTES:
                yield Piece(path, documents, lines, array.consumed - before)
                documents, lines, before = [], [], array.consumed
        yield Piece(path, documents, lines, array.consumed - before)


class _ArrayReader:
    """Yields the values of a JSON array one by one, with only the current stretch of the file in memory."""

    def __init__(self, path: Path, file: IO[str]) -> None:
        self.path, self.file = path, file
        self.buffer, self.position, self.line = "", 0, 1
        self.consumed = 0
        self.ended = False
        self.decoder = json.JSONDecoder()

    def values(self) -> Iterator[tuple[int, Any]]:
        """(line, value) of each element."""
        self._expect("[")
        if self._peek() != "]":
            while True:
                self._peek()
                line = self.line
                yield line, self._value()
                if self._peek() != ",":
                    break
                self._expect(",")
        self._expect("]")
        if self._peek():
            raise InputError(f"{self.path}:{self.line}: text after the end of the JSON array")

    def _more(self) -> None:
        """Drop what is behind the position and read as much again as there is ahead of it."""
        rest = self.buffer[self.position :]
        try:
            read = self.file.read(max(_READ_CHARS, len(rest)))
        except UnicodeDecodeError as error:
            raise InputError(f"{self.path}: not UTF-8 text near line {self.line}: {error.reason}") from None
        self.ended = not read
        self.buffer, self.position = rest + read, 0

    def _advance(self, position: int) -> None:
        passed = self.buffer[self.position : position]
        self.line += passed.count("\n")
        self.consumed += len(passed) if passed.isascii() else len(passed.encode("utf-8", "surrogatepass"))
        self.position = position

    def _peek(self) -> str:
        """The next character that is not white space; none at the end of the file."""
        while True:
            position = self.position
            while position < len(self.buffer) and self.buffer[position] in " \t\r\n":
                position += 1
            self._advance(position)
            if self.position < len(self.buffer) or self.ended:
                return self.buffer[self.position : self.position + 1]
            self._more()

    def _expect(self, character: str) -> None:
        found = self._peek()
        if found != character:
            raise InputError(
                f"{self.path}:{self.line}: bad JSON array: expected {character!r}, found "
                + (repr(found) if found else "the end of the file")
            )
        self._advance(self.position + 1)

    def _value(self) -> Any:
        while True:
            try:
                value, end = self.decoder.raw_decode(self.buffer, self.position)
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated") or error.pos > len(self.buffer) - 16
                if self.ended or not cut:
                    line = self.line + self.buffer.count("\n", self.position, error.pos)
                    raise InputError(f"{self.path}:{line}: bad JSON: {error.msg}") from None
                self._more()
            except (ValueError, RecursionError) as error:
                raise InputError(f"{self.path}:{self.line}: bad JSON: {error}") from None
            else:
                self._advance(end)
                return value


def _parsed(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode())
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: bad JSON: {error.msg} at column {error.colno}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 text: byte {error.start} of the line") from None
    except (ValueError, RecursionError) as error:
        # A number of thousands of digits, or nesting thousands of levels deep.
        raise InputError(f"{where}: bad JSON: {error}") from None


def _no_text(value: Any, key: str) -> str:
    if not isinstance(value, dict):
        return f"expected a string or an object with {key!r}, found a {type(value).__name__}"
    if key in value:
        return f"{key!r} is a {type(value[key]).__name__}, expected a string"
    return f"no {key!r} in this object: give --json-keys one of {', '.join(map(repr, value)) or 'its keys'}"


def _refuse_surrogates(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{where}: a lone surrogate ({text[error.start]!r}) at character {error.start} is no text"
        ) from None

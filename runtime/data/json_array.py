"""Reading the values of a JSON array that does not fit into memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from costmodels.errors import InputError

_READ_CHARS = 2**20


class ArrayReader:
    """A reader of the values of a JSON array, one by one, with only a part of the file in memory."""

    def __init__(self, path: Path, file: IO[str]) -> None:
        self.path, self.file = path, file
        self.buffer, self.position, self.line = "", 0, 1
        self.consumed = 0
        self.ended = False
        self.decoder = json.JSONDecoder()

    def values(self) -> Iterator[tuple[int, Any]]:
        """The line and the value of each element."""
        if self._peek() == "{":
            raise InputError(
                f"{self.path}:{self.line}: a JSON dictionary; expected an array of texts or of objects, "
                '[{"text": ...}, ...], or with --format jsonl an object on each line'
            )
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
        """Drop the text before the position, and double the text after it."""
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
        """The next character that is not white space; empty at the end of the file."""
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

"""The progress of a command that writes token files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class Summary:
    """The prefix of the files (the first of several), and counts of written documents and tokens.

    `documents` and `tokens` count all files. `bytes_read` are bytes of text, and `bytes_taken` bytes of their
    files, which may be compressed.
    """

    prefix: Path
    documents: int = 0
    tokens: int = 0
    bytes_read: int = 0
    bytes_taken: int = 0

    def plus(self, documents: int, tokens: int, bytes_read: int, bytes_taken: int) -> Summary:
        """The summary with further counts added."""
        return replace(
            self,
            documents=self.documents + documents,
            tokens=self.tokens + tokens,
            bytes_read=self.bytes_read + bytes_read,
            bytes_taken=self.bytes_taken + bytes_taken,
        )

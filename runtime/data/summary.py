"""The progress of a command that writes token files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class Summary:
    """The prefix of the files (the first of several), and counts of what has been written.

    `documents` and `tokens` of all files; `bytes_read` of text, and `bytes_taken` of the files it came from,
    which may be compressed.
    """

    prefix: Path
    documents: int = 0
    tokens: int = 0
    bytes_read: int = 0
    bytes_taken: int = 0

    def plus(self, documents: int, tokens: int, bytes_read: int, bytes_taken: int) -> Summary:
        """The summary after some more."""
        return replace(
            self,
            documents=self.documents + documents,
            tokens=self.tokens + tokens,
            bytes_read=self.bytes_read + bytes_read,
            bytes_taken=self.bytes_taken + bytes_taken,
        )

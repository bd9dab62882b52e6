"""Flags and files of other software for a plan: each field is expressed, or named as not expressible."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Export:
    """A plan in the words of another software."""

    target: str
    text: str
    """What its file holds: flags, one on each line, or the file itself."""
    inexpressible: tuple[str, ...]
    """What the software has no words for, each with the reason."""
    layout_flags: Mapping[str, str]
    """Flags that say the layout, with their values (empty for switches), where there are flags."""


def flag_lines(flags: Mapping[str, str]) -> str:
    """Flags as they are typed, one on each line."""
    return "\n".join(f"{name} {_quoted(value)}".rstrip() for name, value in flags.items()) + "\n"


def _quoted(value: str) -> str:
    return shlex.quote(value) if set(value) & set("()*|") else value

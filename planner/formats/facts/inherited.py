"""Configuration files that inherit from other given files (`extends`, `defaults`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path

from costmodels.dataclass import dataclass
from planner.formats.facts.entries import PARSERS, Entries, Entry

_LINE = re.compile(r"^[ \t]*(?:-|(?:extends|defaults|model|config)[ \t]*:)[ \t]+(.+)$", re.MULTILINE)
_NAME = re.compile(r"[^\s,#\"'\[\]]+\.ya?ml\b")
_VARIABLE = re.compile(r"\$\{(\w+)(?::([^{}]*))?\}")

DEEPEST = 20
"""Deepest chain of inherited files that is followed."""


@dataclass(frozen=True)
class Inherited:
    """The keys of a file with those of the inherited files."""

    entries: Entries
    files: Mapping[str, str]
    """The file of each key that comes from an inherited file."""
    missing: tuple[tuple[str, Entry], ...] = field(default=())
    """The files and keys that name each inherited file that was not given."""


def named_files(text: str) -> Iterator[str]:
    """Names of the inherited files, without folders; variables have their defaults."""
    for line in _LINE.findall(text):
        for name in _NAME.findall(with_variables(line.partition(" #")[0], {})):
            yield name.rpartition("/")[2]


def with_variables(text: str, define: Mapping[str, str]) -> str:
    """A text with `${NAME:VALUE}` replaced by the value in `define`, or by its default."""
    return _VARIABLE.sub(
        lambda match: (
            define.get(match[1], match[2] if match[2] is not None else match[0]) if match[1] else match[0]
        ),
        text,
    )


def variables(text: str) -> set[str]:
    """Environment variables that a configuration file uses."""
    return {match[1] for match in _VARIABLE.finditer(text)}


def inherit(entries: Entries, file: str, key: str, beside: Mapping[str, str], depth: int = 0) -> Inherited:
    """The keys of a file with those of the files named by `key`; the file's own keys take precedence.

    Args:
        beside: texts of further files by their names without folders.
    """
    found: Entries = {}
    files: dict[str, str] = {}
    missing: list[tuple[str, Entry]] = []
    entry = entries.get(key)
    names = () if entry is None or entry.null else entry.items or (entry.text,)
    for name in names:
        assert entry is not None
        base = Path(name).name
        if base not in beside or depth > DEEPEST or Path(base).suffix not in PARSERS:
            missing.append((file, Entry(key, name, entry.line)))
            continue
        other = PARSERS[Path(base).suffix](beside[base], f"file {base}")
        whole = inherit(other, base, key, beside, depth + 1)
        found |= whole.entries
        files |= {path: whole.files.get(path, base) for path in whole.entries}
        missing += whole.missing
    for path in entries:
        files.pop(path, None)
    own = {path: one for path, one in entries.items() if path != key}
    # A key that is set anew takes the place of all that stood below it.
    kept = {path: one for path, one in found.items() if not _is_below(path, own)}
    return Inherited(kept | own, files, tuple(missing))


def _is_below(path: str, own: Entries) -> bool:
    return any(path.startswith(f"{one}.") for one in own)

"""Files of keys that start from others (`extends`, `defaults`), which are given beside them."""

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
"""Files that start from each other, beyond which they are not followed."""


@dataclass(frozen=True)
class Inherited:
    """The keys of a file with those of the files that it starts from."""

    entries: Entries
    files: Mapping[str, str]
    """The file of each key that stands in another one."""
    missing: tuple[tuple[str, Entry], ...] = field(default=())
    """Files that are not given: where each is named, by the file and the key."""


def named_files(text: str) -> Iterator[str]:
    """Files of keys that a file starts from, without folders; variables have their defaults."""
    for line in _LINE.findall(text):
        for name in _NAME.findall(with_variables(line.partition(" #")[0], {})):
            yield name.rpartition("/")[2]


def with_variables(text: str, define: Mapping[str, str]) -> str:
    """A text with `${NAME:VALUE}` as `define` says it, or as its own default."""
    return _VARIABLE.sub(
        lambda match: (
            define.get(match[1], match[2] if match[2] is not None else match[0]) if match[1] else match[0]
        ),
        text,
    )


def variables(text: str) -> set[str]:
    """Variables that a file of keys takes from outside."""
    return {match[1] for match in _VARIABLE.finditer(text)}


def inherit(entries: Entries, file: str, key: str, beside: Mapping[str, str], depth: int = 0) -> Inherited:
    """The keys of a file, each of which comes before those of the files that `key` names.

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

"""Values of a configuration of keys, by path: numbers, switches and words, with their problems."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import cast

from costmodels.dataclass import dataclass
from costmodels.spelling import nearest
from planner.formats.facts.definitions import with_definitions
from planner.formats.facts.entries import Entries, Entry
from planner.formats.facts.flag_catalogue import GivenFlag, KnownFlag, Role
from planner.formats.facts.key_table import key_table
from planner.formats.facts.reading import Problems, Severity
from planner.formats.shell.text import Word

DECIDING = ("model", "batch", "layout", "special")
"""Roles of keys that determine the price."""

_TRUE, _FALSE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}


def known_keys(framework: str) -> Mapping[str, Role]:
    """The role of each key of a software, by path; `*` in a path matches anything."""
    return key_table(framework).roles


def defined(entries: Entries, define: Mapping[str, str], framework: str) -> Entries:
    """The keys of a file with the caller's keys replaced or added."""
    return with_definitions(entries, define, known_keys(framework))


def todays(entries: Entries, framework: str) -> tuple[Entries, dict[str, str]]:
    """The keys under their present names, and the file's names of renamed keys.

    If a file has both names of a key, the last one counts.
    """
    earlier = key_table(framework).earlier
    found: Entries = {}
    own: dict[str, str] = {}
    for path, entry in entries.items():
        key = earlier.get(path, path)
        found.pop(key, None)
        own.pop(key, None)
        found[key] = entry if key == path else dataclasses.replace(entry, path=key)
        if key != path:
            own[key] = path
    return found, own


@dataclass
class Keyed:
    """The keys of one file."""

    entries: Entries
    framework: str
    file: str
    problems: Problems

    def __contains__(self, path: str) -> bool:
        return path in self.entries and not self.entries[path].null

    def under(self, *sections: str) -> bool:
        """Return whether any key is in one of these sections."""
        return any(path.startswith(f"{section}.") for path in self.entries for section in sections)

    def first(self, *paths: str) -> Entry | None:
        """The first of the keys that has a value."""
        return next((self.entries[path] for path in paths if path in self), None)

    def text(self, *paths: str) -> str | None:
        """The value of the first of these keys that has one."""
        entry = self.first(*paths)
        return None if entry is None else resolved_value(entry, self.entries)

    def count(self, *paths: str, least: int = 1) -> int | None:
        """The whole number of the first of these keys that has a value; any other value adds a problem."""
        entry = self.first(*paths)
        if entry is None or self._is_unknown(entry):
            return None
        text = resolved_value(entry, self.entries)
        number = decimal(text)
        if number is None or number != math.floor(number) or not least <= number < 1e9:
            self.add_certain(f"{text!r} is not a whole number from {least}", entry.path)
            return None
        return int(number)

    def number(self, *paths: str) -> float | None:
        """The number of the first of these keys that has a value; any other value adds a problem."""
        entry = self.first(*paths)
        if entry is None or self._is_unknown(entry):
            return None
        number = decimal(resolved_value(entry, self.entries))
        if number is None:
            self.add_certain(f"{entry.text!r} is not a number", entry.path)
        return number

    def switch(self, *paths: str, default: bool = False) -> bool:
        """The truth value of the first of these keys that has a value; any other value adds a problem."""
        entry = self.first(*paths)
        if entry is None or self._is_unknown(entry):
            return default
        text = resolved_value(entry, self.entries).lower()
        if text in _TRUE or text in _FALSE:
            return text in _TRUE
        self.add_certain(f"{entry.text!r} is neither true nor false", entry.path)
        return default

    def choice(self, path: str, values: Iterable[str], default: str) -> str:
        """The word of a key, one of `values`; any other word adds a problem."""
        text = self.text(path)
        if text is None:
            return default
        if text.lower() in values:
            return text.lower()
        self.add_certain(f"{text!r} is not one of {', '.join(values)}", path)
        return default

    def line(self, path: str) -> int | None:
        """Line of a key; None for a key that the file does not have."""
        return self.entries[path].line if path in self.entries else None

    def add(self, severity: Severity, text: str, path: str = "", remedy: str = "") -> None:
        """Add a problem with a key."""
        self.problems.add(severity, text, path, self.line(path), remedy, self.file)

    def add_certain(self, text: str, path: str) -> None:
        """Add an error of a key that does not depend on the rest of the job."""
        self.problems.add("illegal", text, path, self.line(path), "", self.file, certain=True)

    def _is_unknown(self, entry: Entry) -> bool:
        text = resolved_value(entry, self.entries)
        if not _LEFT_OPEN.search(text):
            return False
        remedy = f"write the value out, or give --define {entry.path.lstrip('-')}=VALUE"
        text = f"{text} depends on a value that the file does not give"
        self.add("unknown", text, entry.path, remedy)
        return True

    def name_unread(self) -> None:
        """Add problems for unknown values on which the price depends."""
        for flag in self.flags():
            if flag.known.role in DECIDING and flag.values:
                self._is_unknown(self.entries[flag.name])

    def training(self) -> dict[str, str]:
        """The settings of training, as flags of Megatron-LM."""
        pairs = {flag: self.text(path) for flag, path in key_table(self.framework).flags.items()}
        return {flag: text for flag, text in pairs.items() if text}

    def flags(self) -> tuple[GivenFlag, ...]:
        """All keys with their effect on the answer."""
        known = known_keys(self.framework)
        patterns = [(path, role) for path, role in known.items() if "*" in path]
        found = []
        for entry in self.entries.values():
            role = known.get(entry.path) or next(
                (role for pattern, role in patterns if fnmatchcase(entry.path, pattern)), "unknown"
            )
            about = nearest(entry.path, known) if role == "unknown" else ""
            flag = KnownFlag(entry.path, cast(Role, role), "1", self.framework, about)
            words = () if entry.null else (Word(entry.text, entry.line),)
            found.append(GivenFlag(entry.path, words, entry.line, flag))
        return tuple(found)


_LEFT_OPEN = re.compile(r"\$\{|\{\{|\$[A-Za-z_]|^\?\?\?$")
"""A variable of a shell, a template or another key, or Hydra's mark of a value that the caller must give."""


def word_of(text: str, line: int) -> Word:
    """The value of a key as a word of a command; a value that the file leaves open is unknown."""
    return Word(text, line, (text.strip("${}"),) if _LEFT_OPEN.search(text) else ())


_REFERENCE = re.compile(r"\$\{(\.*)([\w.]+)\}")


def resolved_value(entry: Entry, entries: Entries, depth: int = 0) -> str:
    """The value of a key; a reference to another key (`${model.hidden_size}`) is resolved."""
    match = _REFERENCE.fullmatch(entry.text)
    if match is None or depth > 20:
        return entry.text
    dots, name = match.groups()
    parents = entry.path.split(".")[: -len(dots)] if dots else []
    other = entries.get(".".join([*parents, name]))
    if (
        other is None
        and not dots
        and name.startswith(GROUP)
        and not any(key.startswith(GROUP) for key in entries)
    ):
        other = entries.get(name.removeprefix(GROUP))
    return entry.text if other is None else resolved_value(other, entries, depth + 1)


GROUP = "training."
"""The section of NeMo-Framework-Launcher's whole configuration that a job's file belongs to."""


_DECIMAL = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?")


def decimal(text: str) -> float | None:
    """The number in a text; None where the text is not a number."""
    cleaned = text.replace("_", "").strip()
    number = float(cleaned) if len(cleaned) <= 40 and _DECIMAL.fullmatch(cleaned) else math.inf
    return None if math.isinf(number) else number

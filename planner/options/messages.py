"""Messages in the words of a command line: `global_batch_size` becomes `--global-batch-size`.

Code below the command line names arguments and degrees in Python's spelling. A user who gave a flag does not
know these names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise

from costmodels.dataclass import dataclass
from costmodels.spec.layout import SHORT_NAMES, Layout

_OF_A_FILE = re.compile(r"(the )?plan \S+: |[\w ]*\b(file|config|table) ")
"""The beginning of messages about the content of a file, whose fields keep their names."""

_BATCH, _LARGEST = "global_batch_size", "max_global_batch_size"

PIN_FLAGS = ("--pin", "--forbid")

UNPIN_FLAG = "--unpin"
"""The flag whose value is the name of a degree, kept as it is typed."""


@dataclass(frozen=True)
class Spelling:
    """Spellings that names in messages have on one command line."""

    flags: Mapping[str, str]
    """The flag of each argument, by the argument's name."""
    typed: Mapping[str, str]
    """The typed word that fixes each degree, by the degree: a flag, or the name in a pin."""
    begins: Mapping[str, str]
    """Flags whose names are English words, by the beginning of messages about their values."""
    switches: frozenset[str]
    """Flags of `typed` that are given without a value."""

    def of(self, message: str) -> str:
        """`message` with the names in the command line's spelling."""
        if _OF_A_FILE.match(message):
            return message
        for begin, flag in self.begins.items():
            if message.startswith(begin):
                return flag + self._with_flags(message.removeprefix(begin))
        return self._with_flags(message)

    def _with_flags(self, message: str) -> str:
        for name, flag in self.flags.items():
            message = re.sub(_alone(name), flag, message)
        for name, word in self.typed.items():
            if word.startswith("--"):
                # Layouts are described by the names that have no short form.
                pin = rf"(\b(the )?pin ){'?' * (name in SHORT_NAMES.values())}(?<!forbid )"
                given = rf"{pin}{_alone(name, '=')}(?=[\w.])"
                if word in self.switches:
                    message = re.sub(rf"{given}\w+( where possible)?", word, message)
                    continue
                message = re.sub(given, f"{word} ", message)
                message = re.sub(rf"\bpin {_alone(name)}", word, message)
            else:
                message = re.sub(_alone(name, "(?==)"), word, message)
            if "_" in name:
                message = re.sub(_alone(name), word, message)
        return message


def _alone(name: str, after: str = r"(?![\w=(/'\"-]|\.\w)") -> str:
    """A regular expression for a name that stands alone: not in another name, a path, a quotation or a
    suggested flag."""
    return rf"(?<![\w.\-'\"/])(?<!{UNPIN_FLAG} ){name}{after}"


def spelling(fields: Sequence[tuple[str, tuple[str, ...], str | None]], words: Sequence[str]) -> Spelling:
    """The spelling of names on a command line.

    Args:
        fields: the command's flags: name, spellings, and the degree that a flag sets where that is not its
            name.
        words: the words that were typed.
    """
    given = [word.partition("=")[0] for word in words]
    values = dict(pairwise(words)) | {
        word.partition("=")[0]: word.partition("=")[2] for word in words if "=" in word
    }
    flags, typed, begins = {}, {}, {}
    for name, spellings, degree in fields:
        target = degree or name
        used = [word for word in given if word in spellings]
        if target in Layout.model_fields and target != _BATCH:
            if used:
                typed[target] = used[0]
        elif "_" in name:
            flags[name] = used[0] if used else spellings[0]
        elif used:
            begins[f"{name} {values.get(used[0], '')}:"] = f"{used[0]} {values.get(used[0], '')}:"
    for name, short in _pinned(words):
        typed.setdefault(name, short)
    if _BATCH in flags and flags[_BATCH] not in given and flags.get(_LARGEST) in given:
        # The batch of a layout under a maximum, which nobody gave.
        flags[_BATCH] = "a batch of"
    switches = {word for word, after in pairwise([*words, "--"]) if after.startswith("-")}
    return Spelling(flags, typed, begins, frozenset(switches))


def _pinned(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Full names of pinned degrees, and the names as typed."""
    for before, word in zip(["", *words], words, strict=False):
        flag, _, rest = word.partition("=")
        text = rest if flag in PIN_FLAGS else word if before in PIN_FLAGS else ""
        short = text.partition("=")[0].strip()
        full = SHORT_NAMES.get(short.lower(), short)
        if short and full in Layout.model_fields:
            yield full, short


_NOW: ContextVar[Spelling | None] = ContextVar("spoken", default=None)


@contextmanager
def message_spelling(names: Spelling) -> Iterator[None]:
    """Within this context `command_message` uses `names`."""
    token = _NOW.set(names)
    try:
        yield
    finally:
        _NOW.reset(token)


def command_message(message: str) -> str:
    """`message` with the names of the running command; unchanged where no command runs."""
    names = _NOW.get()
    return message if names is None else names.of(message)

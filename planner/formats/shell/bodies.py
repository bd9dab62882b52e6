"""Bodies of loops and functions of a shell script, as lists of commands."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence

from planner.formats.shell.commands import KEYWORDS, SUBSHELL, SUBSHELL_END
from planner.formats.shell.text import Chars, plain
from planner.formats.shell.variables import DECLARATIONS, as_assignment

TESTS = ("[", "[[", "test")
LOOPS = ("for", "while", "until", "select")
_SETS = (*DECLARATIONS, *TESTS, *LOOPS, "case", "let", "shift", "echo", "printf", "true", ":", "exit")
"""First words of commands that only set variables."""
_BRACKETS = (SUBSHELL, SUBSHELL_END)

Event = tuple[str, list[Chars]]
"""The operator before a command, and the command's unexpanded words."""


def body_of(events: deque[Event], opens: tuple[str, ...], closes: str) -> list[Event]:
    """The commands up to the word that closes a construct; they are removed from `events`."""
    found: list[Event] = []
    depth = 1
    while events:
        before, raw = events.popleft()
        at = 0
        while at < len(raw):
            word = plain(raw[at][:10])
            depth += (word in opens) - (word == closes)
            if not depth:
                if at:
                    found.append((before, raw[:at]))
                if raw[at + 1 :]:
                    events.appendleft(("\n", raw[at + 1 :]))
                return found
            if word == "function":
                at += 2
            elif word in KEYWORDS:
                at += 1
            else:
                break
        found.append((before, raw))
    return found


def assigned(body: Sequence[Event]) -> list[str]:
    """Names of the variables that a part of a script sets."""
    found: list[str] = []
    for _, raw in body:
        words = [word for word in raw if plain(word[:10]) not in KEYWORDS]
        first = plain(words[0][:10]) if words else ""
        if first == "let" or first.startswith("(("):
            found += re.findall(r"[A-Za-z_]\w*", plain([char for word in words for char in word][:1000]))
        if first == "printf" and len(words) > 2 and plain(words[1]) == "-v":
            found += [plain(words[2]).strip("\"'")]
        for word in words[first in DECLARATIONS :]:
            match = as_assignment(word)
            if match is None:
                break
            found.append(match[1])
    return list(dict.fromkeys(found))


def starts_nothing(body: Sequence[Event]) -> bool:
    """Return whether no command of a loop can be a training command, and none leaves the loop."""
    for at, (_, raw) in enumerate(body):
        words = [word for word in raw if plain(word[:10]) not in KEYWORDS]
        first = plain(words[0][:10]) if words else ":"
        sets = first in _SETS + _BRACKETS or first.startswith("((") or as_assignment(words[0]) is not None
        is_pattern = len(raw) == 1 and at + 1 < len(body) and body[at + 1][0] in (")", "|")
        if not sets and not is_pattern:
            return False
    return True

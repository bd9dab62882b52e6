"""Words of a command that may hold flags: variables with values that only a run of the script would tell."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence

from planner.formats.facts.launcher import Launch
from planner.formats.facts.reading import Problems
from planner.formats.shell.text import Word

_ASSIGNED = re.compile(r"(?<![\w-])([A-Za-z_]\w*)(?:\[[^\]\n]{0,40}\])?\+?=")


def deciding_names(source: str, launch: Launch, decides: Callable[[str], bool]) -> set[str]:
    """Variables that a script sets, perhaps only under a condition, to flags on which the price depends.

    Args:
        decides: whether the price depends on a flag.
    """
    names = set(_ASSIGNED.findall(source)) & launch.assigned
    return {name for name in names if not _changes_nothing(name, source, decides)}


def _changes_nothing(name: str, source: str, decides: Callable[[str], bool]) -> bool:
    """Return whether all texts that a script assigns to a variable are flags without effect on the price."""
    assigned = rf"(?<![\w-]){name}\+?=(\"(?:[^\"\\]|\\.)*\"|'[^']*'|\([^()]*\)|[^\s;&|]*)"
    for value in re.findall(assigned, source, re.DOTALL):
        before = ""
        for word in re.sub(r"[\"'()]|\\\n", " ", value).split():
            is_flag = word.startswith("--")
            if decides(word.partition("=")[0]) if is_flag else not before and word.strip("${}") != name:
                return False
            before = word if is_flag else before
    return True


def name_open_words(words: Iterable[Word], names: Collection[str], problems: Problems) -> set[Word]:
    """Add a problem for each word that may hold flags, and return these words.

    Args:
        words: words of a command that are no values of flags.
        names: the variables of `deciding_names`.
    """
    found = set()
    for word in words:
        could = [name for name in word.unknown if name in names or name.startswith(("$(", "`"))]
        if could:
            found.add(word)
            text = f"{could[0]} may hold flags, and is set by a command that is not run here"
            remedy = f"give --define {could[0]}=VALUE" if could[0] in names else "write the flags out"
            problems.add("unknown", text, "", word.line, remedy)
    return found


def loose_words(words: Sequence[Word]) -> list[Word]:
    """The words that are whole variables and hardly values of a flag.

    The word after a flag is its value. A command after two values of a flag makes further ones
    (`--sizes 1 2 $(seq 4 8)`).
    """
    found = []
    values = 1  # Since the last flag.
    for word in words:
        if word.text.startswith("--"):
            values = int("=" in word.text)
            continue
        if word.is_variable and values and (values == 1 or word.unknown[0].isidentifier()):
            found.append(word)
        values += 1
    return found

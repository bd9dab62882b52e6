"""Commands with a script for another shell, as an argument or as a here-document."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from planner.formats.shell.text import Word

_SHELLS = ("bash", "sh", "zsh", "/bin/bash", "/bin/sh")

BATCH = ("sbatch",)
"""Programs that accept a batch script."""


def takes_script(words: Sequence[Word]) -> bool:
    """Return whether a command runs its here-document: `sbatch <<END`, `srun bash <<END`."""
    if words[0].text in BATCH:
        return all(word.text.startswith("-") for word in words[1:])
    return words[-1].text in _SHELLS or (
        len(words) > 1 and words[-1].text == "-s" and words[-2].text in _SHELLS
    )


def inner_script(words: list[Word]) -> tuple[int, bool] | None:
    """The index of the script that a command passes to another shell, and True if it continues to the last
    word."""
    for at, word in enumerate(words):
        if word.text == "eval" and at == 0 and len(words) > 1:
            return 1, True
        if word.text in _SHELLS:
            rest = at + 1
            while rest < len(words) and re.fullmatch(r"-[a-z]*|[+-]o|pipefail", words[rest].text):
                rest += 1
                if re.fullmatch(r"-[a-z]*c[a-z]*", words[rest - 1].text) and rest < len(words):
                    return rest, False
        if word.text.endswith(".py") or word.text in ("-m", "--module"):
            return None
    return None


def started_file(words: list[Word], given: Collection[str]) -> int | None:
    """The index of the word that names a given script which a command starts: `bash train.sh`, `./train.sh`.

    `given` has names without folders.
    """
    for at, word in enumerate(words):
        if word.text.endswith(".py") or word.text in ("-m", "--module"):
            return None
        folder, slash, name = word.text.rpartition("/")
        if name not in given:
            continue
        before = [each.text for each in words[:at] if not each.text.startswith("-")]
        shell = bool(before) and before[-1].rpartition("/")[2] in ("bash", "sh", "zsh")
        batch = words[0].text in BATCH
        if shell or batch or (slash and "=" not in folder):
            return at
    return None

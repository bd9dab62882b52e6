"""The pages of the repository, and what of them can be tried: files, commands and changes of code."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

FENCE = re.compile(r"^ *```(\w+)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A block of code in a page."""

    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    """The blocks of code of a page."""
    return [Block(*found) for found in FENCE.findall(page.read_text(encoding="utf-8"))]


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """The words of each sentence of paragraphs and lists, and the sentence; tables and code have none.

    A piece of code is one word, a link its text.
    """
    text = re.sub(r"<!--.*?-->", "", FENCE.sub("", text), flags=re.DOTALL)
    paragraphs: list[list[str]] = [[]]
    for line in text.splitlines():
        words = line.strip()
        item = re.match(r"(?:[-*]|\d+\.) +", words)
        if not words or item or words.startswith(("#", "|", "<", "!!!", "???", "![")):
            paragraphs.append([])
        if words and not words.startswith(("#", "|", "<", "!!!", "???", "![")):
            paragraphs[-1].append(words[item.end() :] if item else words)
    for lines in paragraphs:
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(lines))
        plain = re.sub(r"`[^`]*`", "CODE", plain)
        for sentence in re.split(r"(?<=[.!?])[\"”)]* +(?=[A-Z0-9\"“(])", plain):
            if sentence:
                yield len(re.findall(r"\w[\w.,%'’/-]*", sentence)), sentence


def planner_commands(page: Path) -> list[list[str]]:
    """Arguments of each `planner` of a page, in its order."""
    lines = [
        line for block in blocks(page) if block.language == "console" for line in block.text.splitlines()
    ]
    return [shlex.split(line, comments=True)[2:] for line in lines if line.startswith("$ planner ")]


def new_files(page: Path) -> dict[str, str]:
    """Texts of the files that a page writes out: blocks that open with a comment of their name."""
    opened = [(re.match(r"# ([\w./-]+\.\w+)\n", block.text), block.text) for block in blocks(page)]
    return {name[1]: text[name.end() :] for name, text in opened if name}


@dataclass(frozen=True)
class Change:
    """Lines of a file, and what stands in their place afterwards."""

    file: str
    before: str
    after: str


def changes(page: Path) -> list[Change]:
    """The changes of files that a page shows as `diff` blocks: `--- FILE`, and hunks that begin with `@@`."""
    found = []
    for block in blocks(page):
        if block.language == "diff":
            head, *hunks = re.split(r"^@@.*\n", block.text, flags=re.MULTILINE)
            name = head.removeprefix("--- ").strip()
            found += [Change(name, _side(hunk, "-"), _side(hunk, "+")) for hunk in hunks]
    return found


def _side(hunk: str, sign: str) -> str:
    lines = hunk.splitlines(keepends=True)
    return "".join(line[1:] for line in lines if line[0] in (" ", sign))


def write_changes(page: Path, folder: Path) -> None:
    """Make the changes of a page, and its new files, in a copy of the repository.

    Raises:
        AssertionError: what a change replaces is not in its file, or is there more than once.
    """
    for name, text in new_files(page).items():
        (folder / name).write_text(text, encoding="utf-8")
    for change in changes(page):
        file = folder / change.file
        text = file.read_text(encoding="utf-8")
        assert text.count(change.before) == 1, (
            f"{page.name} shows lines that {change.file} has not:\n{change.before}"
        )
        file.write_text(text.replace(change.before, change.after), encoding="utf-8")


def copied_code(folder: Path) -> Path:
    """A copy of the packages in `folder`, to change."""
    for package in ("cli", "costmodels", "planner", "runtime"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder

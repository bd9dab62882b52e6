"""Keys of a configuration on a web page: in code blocks, or in running text without its line breaks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from costmodels.errors import InputError
from planner.formats.facts.entries import PARSERS, Entries, Entry

_FENCE = re.compile(
    r"^[ \t]*(```+|~~~+)[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*\1[ \t]*$", re.MULTILINE | re.DOTALL
)

LANGUAGES = {"yaml": ".yaml", "yml": ".yaml", "json": ".json", "toml": ".toml", "": ".yaml"}
"""Kinds of files in code blocks, by the language after the fence."""


def code_blocks(text: str) -> Iterator[tuple[str, str, int]]:
    """The code blocks of a page: language, contents, and the line on which the contents begin."""
    for match in _FENCE.finditer(text):
        yield match.group(2).lower(), match.group(3), text.count("\n", 0, match.start(3)) + 1


def block_entries(text: str, file: str) -> Iterator[Entries]:
    """The keys of each code block of a page that is a file of keys."""
    for language, block, line in code_blocks(text):
        ending = LANGUAGES.get(language)
        if ending is None:
            continue
        try:
            yield PARSERS[ending]("\n" * (line - 1) + block, file)
        except InputError:
            continue  # It is some other text.


_PAIR = re.compile(
    r"(?<![\w./\"'-])[\"']?([A-Za-z_]\w*)[\"']?[ \t]*:(?![/\w:])[ \t]*"
    r"(\"[^\"\n]*\"|'[^'\n]*'|\[[^\]\n]{0,400}\]|(?![A-Za-z_]\w*[ \t]*:)[^\s#,\"'\[\]{}]+)?"
)


def running_entries(text: str, known: Mapping[str, object]) -> tuple[Entries, dict[str, list[Entry]]]:
    """The known keys in a text that has only `key: value` left of a file, without indentation.

    A key that occurs again with another value belongs to the second mapping, by path.
    """
    paths = [path for path in known if "*" not in path]
    sections = {path.rpartition(".")[0].rpartition(".")[2] for path in paths} - {""}
    by_leaf: dict[str, list[str]] = {}
    for path in paths:
        by_leaf.setdefault(path.rpartition(".")[2], []).append(path)
    found: Entries = {}
    again: dict[str, list[Entry]] = {}
    section = ""
    line, counted = 1, 0
    for match in _PAIR.finditer(text):
        line += text.count("\n", counted, match.start())
        counted = match.start()
        name, value = match.group(1), match.group(2)
        if value is None or name not in by_leaf:
            section = name if name in sections else section
            continue
        inside = [path for path in by_leaf[name] if path.rpartition(".")[0].rpartition(".")[2] == section]
        path = (inside or by_leaf[name])[0]
        quoted = value[0] in "\"'"
        bare = value.strip("\"'")
        items = tuple(word.strip(" \"'") for word in bare[1:-1].split(",")) if bare.startswith("[") else None
        entry = Entry(path, ",".join(items) if items is not None else bare, line, items, quoted)
        if path not in found:
            found[path] = entry
        elif found[path].text != entry.text:
            again.setdefault(path, []).append(entry)
    return found, again

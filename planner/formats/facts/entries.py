"""Keys and values of configuration files, each with its path and its line: YAML, JSON and TOML.

Only text is constructed, so tags, aliases or huge numbers in a file have no effect.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import yaml

from costmodels.catalogue.yaml_files import yaml_loader
from costmodels.dataclass import dataclass
from costmodels.errors import InputError

MOST_ENTRIES = 20_000
"""Most keys of one file, including keys repeated by aliases."""

DEEPEST = 60
"""Deepest nesting of mappings."""

_NULLS = {"", "~", "null", "Null", "NULL", "None"}


@dataclass(frozen=True)
class Entry:
    """A key of a file."""

    path: str
    """The keys from the outermost to this one, separated by points; items of a list are numbered from 0."""
    text: str
    """The value as text; elements of a list are separated by commas."""
    line: int
    items: tuple[str, ...] | None = None
    """The values of a list; None for a single value."""
    quoted: bool = False

    @property
    def null(self) -> bool:
        """True if the entry has no value."""
        return self.items is None and not self.quoted and self.text in _NULLS


Entries = dict[str, Entry]
"""Keys of a file by path, in the file's order."""


def yaml_entries(text: str, origin: str) -> Entries:
    """The keys of a YAML file that holds a mapping; raises `InputError` for any other text."""
    try:
        root = yaml.compose(text, yaml_loader())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        reason = getattr(error, "problem", None) or "it cannot be parsed"
        if reason == "but found another document":
            raise InputError(f"{origin} holds several YAML documents: give one of them as a file") from None
        raise InputError(f"{origin} is not valid YAML{place}: {reason}") from None
    except (ValueError, RecursionError):
        raise InputError(f"{origin} is nested too deeply, or is no text of YAML") from None
    if not isinstance(root, yaml.MappingNode):
        raise InputError(f"{origin} must hold keys and values (`name: value` lines)")
    found: Entries = {}
    for entry in _of_node(root, "", 0, origin):
        found.setdefault(entry.path, entry)
        if len(found) > MOST_ENTRIES:
            raise InputError(f"{origin} has more than {MOST_ENTRIES} keys")
    return found


def _of_node(node: yaml.Node, path: str, depth: int, origin: str) -> Iterator[Entry]:
    line = node.start_mark.line + 1
    if depth > DEEPEST:
        raise InputError(f"{origin} is nested too deeply at line {line}")
    if isinstance(node, yaml.ScalarNode):
        yield Entry(path, node.value, line, quoted=node.style in ("'", '"'))
    elif isinstance(node, yaml.SequenceNode):
        if all(isinstance(item, yaml.ScalarNode) for item in node.value):
            items = tuple(str(item.value) for item in node.value)
            yield Entry(path, ",".join(items), line, items)
            return
        for at, item in enumerate(node.value):
            yield from _of_node(item, f"{path}.{at}", depth + 1, origin)
    elif isinstance(node, yaml.MappingNode):
        merged = []
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else "?"
            if key.tag == "tag:yaml.org,2002:merge":
                merged.append(value)
            else:
                yield from _of_node(value, f"{path}.{name}" if path else name, depth + 1, origin)
        for value in merged:
            for each in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                yield from _of_node(each, path, depth + 1, origin)


_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+|\n')


def json_entries(text: str, origin: str) -> Entries:
    """The keys of a JSON file that holds an object; raises `InputError` for any other text."""
    try:
        content = json.loads(text, parse_int=str, parse_float=str)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{origin} is not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}"
        ) from None
    except RecursionError:
        raise InputError(f"{origin} is nested too deeply") from None
    if not isinstance(content, dict):
        raise InputError(f"{origin} must hold one JSON object of keys and values")
    lines = _json_lines(text)
    found: Entries = {}

    def walk(value: Any, path: str, depth: int) -> None:
        if len(found) > MOST_ENTRIES or depth > DEEPEST:
            raise InputError(f"{origin} is nested too deeply, or has more than {MOST_ENTRIES} keys")
        if isinstance(value, dict):
            for key, each in value.items():
                walk(each, f"{path}.{key}" if path else key, depth + 1)
        elif isinstance(value, list) and any(isinstance(each, (dict, list)) for each in value):
            for at, each in enumerate(value):
                walk(each, f"{path}.{at}", depth + 1)
        else:
            items = tuple(map(_json_text, value)) if isinstance(value, list) else None
            single = ",".join(items) if items is not None else _json_text(value)
            found[path] = Entry(
                path, single, lines.get(path, 1), items, isinstance(value, str) and not single
            )

    walk(content, "", 0)
    return found


def _json_text(value: Any) -> str:
    return {True: "true", False: "false", None: "null"}.get(value) or str(value) if value != "" else ""


def _json_lines(text: str) -> dict[str, int]:
    """The line of each key of a valid JSON text."""
    lines: dict[str, int] = {}
    stack: list[list[Any]] = []  # Each the path of an open value, and the index of the next item of a list.
    key, line, last = "", 1, ""
    for token in _JSON_TOKEN.findall(text):
        if token == "\n":
            line += 1
            continue
        if token in "{[":
            base = stack[-1][0] if stack else ""
            inside = stack[-1][1] if stack and stack[-1][1] is not None else key
            path = f"{base}.{inside}".strip(".") if stack else ""
            stack.append([path, 0 if token == "[" else None])
        elif token in "}]":
            if stack:
                stack.pop()
        elif token == "," and stack and stack[-1][1] is not None:
            stack[-1][1] += 1
        elif token == ":" and last.startswith('"'):
            key = json.loads(last, strict=False)
            base = stack[-1][0] if stack else ""
            lines.setdefault(f"{base}.{key}".strip("."), line)
        last = token
    return lines


_TABLE = re.compile(r"\s*\[\s*([\w.\-\"' ]+?)\s*\]\s*(?:#.*)?$")
_PAIR = re.compile(r"\s*([\w.\-]+|\"[^\"]*\")\s*=\s*(.*)$")


def toml_entries(text: str, origin: str) -> Entries:
    """The keys of a TOML file: tables of strings, numbers, truth values, and lists of these.

    Raises `InputError` for other lines.
    """
    found: Entries = {}
    table = ""
    lines = text.split("\n")
    at = 0
    while at < len(lines):
        line, number = lines[at].rstrip("\r"), at + 1
        at += 1
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        header = _TABLE.match(line)
        if header:
            table = header.group(1).replace('"', "").replace(" ", "")
            continue
        if line.lstrip().startswith("[["):
            table = line.strip().strip("[] ")
            continue
        pair = _PAIR.match(line)
        if pair is None:
            raise InputError(f"{origin} is not valid TOML at line {number}: expected `key = value`")
        value = pair.group(2)
        while value.lstrip().startswith("[") and not _closed(value) and at < len(lines):
            value += " " + _without_comment(lines[at])
            at += 1
        name = pair.group(1).strip('"')
        path = f"{table}.{name}" if table else name
        for entry in _toml_entries(path, value, number, origin):
            found[entry.path] = entry
        if len(found) > MOST_ENTRIES:
            raise InputError(f"{origin} has more than {MOST_ENTRIES} keys")
    if not found:
        raise InputError(f"{origin} has no key of TOML")
    return found


_TOML_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"|\'([^\']*)\'')


def _without_comment(line: str) -> str:
    masked = _TOML_STRING.sub(lambda match: "_" * len(match.group(0)), line)
    return line[: masked.index("#")] if "#" in masked else line


def _closed(value: str) -> bool:
    masked = _TOML_STRING.sub("_", _without_comment(value))
    return masked.count("[") <= masked.count("]")


_MEMBER = re.compile(r"(?:[^,\[\"']|\"(?:[^\"\\]|\\.)*\"|'[^']*'|\[[^\]]*\])+")


def _toml_entries(path: str, value: str, line: int, origin: str) -> Iterator[Entry]:
    """The entry of a value, or the entries of an inline table (`{tensor_parallel_degree = 2}`)."""
    text = _without_comment(value).strip()
    if not (text.startswith("{") and text.endswith("}")):
        yield _toml_value(path, value, line, origin)
        return
    for member in _MEMBER.findall(text[1:-1]):
        pair = _PAIR.match(member)
        if pair is not None:
            yield _toml_value(f"{path}.{pair.group(1).strip(chr(34))}", pair.group(2), line, origin)
        elif member.strip():
            raise InputError(f"{origin} is not valid TOML at line {line}: expected `key = value` in {path}")


def _toml_value(path: str, value: str, line: int, origin: str) -> Entry:
    text = _without_comment(value).strip()
    if text.startswith("["):
        inner = text.strip("[] ")
        words = [one.strip() for one in re.split(r",(?=(?:[^\"']|\"[^\"]*\"|'[^']*')*$)", inner)]
        items = tuple(_toml_text(word)[0] for word in words if word)
        return Entry(path, ",".join(items), line, items)
    if not text:
        raise InputError(f"{origin} is not valid TOML at line {line}: {path} has no value")
    single, quoted = _toml_text(text)
    return Entry(path, single, line, quoted=quoted)


def _toml_text(word: str) -> tuple[str, bool]:
    match = _TOML_STRING.fullmatch(word)
    if match is not None:
        return match.group(1) if match.group(1) is not None else match.group(2), True
    return re.sub(r"(?<=\d)_(?=\d)", "", word), False


PARSERS: dict[str, Callable[[str, str], Entries]] = {
    ".yaml": yaml_entries,
    ".yml": yaml_entries,
    ".json": json_entries,
    ".toml": toml_entries,
}
"""Parsers of files, by the suffix of the file's name."""

"""Values that a caller defines besides files: variables of scripts, flags and keys; and a check that they
exist."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from costmodels.errors import InputError
from costmodels.spelling import nearest
from planner.formats.facts.entries import Entries, Entry

_NAME = re.compile(r"(?:--)?[A-Za-z_][\w.-]*|[0-9]+")


def parse_definitions(define: Mapping[str, str] | Iterable[str] | None) -> dict[str, str]:
    """Values by name; raises `InputError` for a text that is not `NAME=VALUE`."""
    if define is None:
        return {}
    if isinstance(define, Mapping):
        pairs = [(str(name), "=", str(value)) for name, value in define.items()]
    else:
        pairs = [text.partition("=") for text in ([define] if isinstance(define, str) else define)]
    for name, equals, _ in pairs:
        if not equals or not _NAME.fullmatch(name):
            raise InputError(f"define {name!r}: expected NAME=VALUE, such as NNODES=4")
    return {name: value for name, _, value in pairs}


def path_of(name: str, entries: Collection[str], known: Collection[str]) -> str | None:
    """The key that a name stands for; the name may be the key's path, its flag or its last word. None where
    there is no such key.

    Args:
        entries: keys of the file, which take precedence.
        known: other keys of the software.
    """
    flag = "--" + name.lstrip("-").replace("-", "_")
    for paths in (entries, known):
        for path in (name, flag):
            if path in paths:
                return path
        ends = (path for path in paths if "*" not in path and path.rpartition(".")[2] == name)
        found = next(ends, None)
        if found is not None:
            return found
    pattern = re.compile(
        "|".join(re.escape(path).replace(r"\*", ".+") for path in known if "*" in path) or r"\A\Z."
    )
    return name if "." in name and pattern.fullmatch(name) else None


def with_definitions(entries: Entries, define: Mapping[str, str], known: Collection[str] = ()) -> Entries:
    """The keys of a file with the caller's keys replaced or added.

    An empty value removes a key.
    """
    found = dict(entries)
    for name, value in define.items():
        path = path_of(name, entries, known)
        if path is None:
            continue
        if value == "":
            found.pop(path, None)
        else:
            line = entries[path].line if path in entries else 0
            found[path] = Entry(path, value, line)
    return found


def is_mentioned(name: str, text: str) -> bool:
    """Return whether a script or a program mentions a name: the number of an argument, a variable, or a
    parameter."""
    if name.isdigit():
        return bool(re.search(rf"\$(?:\{{?{name}\b|\{{?[@*])", text))
    return bool(re.search(rf"(?<![\w-]){re.escape(name)}(?!\w)", text))


def _is_flag(name: str, text: str) -> bool:
    """Return whether a script gives a flag of this name, which the definition may have removed."""
    spelled = re.sub(r"[-_]", "[-_]", re.escape(name.lstrip("-")).replace(r"\-", "-"))
    return bool(re.search(rf"--{spelled}(?![\w-])", text))


def check_definitions(
    define: Mapping[str, str], texts: Iterable[str], known: Collection[str], files: str
) -> None:
    """Raise `InputError` for the first definition of a name that neither the files nor their software know.

    Args:
        texts: scripts and programs, whose variables count.
        known: flags and keys of the files and of their software.
    """
    scripts = list(texts)
    for name in define:
        if any(is_mentioned(name, text) or _is_flag(name, text) for text in scripts) or _is_known(
            name, known
        ):
            continue
        names = {
            *(path.rpartition(".")[2].lstrip("-") for path in known if "*" not in path),
            *_variables(scripts),
        }
        near = nearest(name, names)
        raise InputError(
            f"define {name}: no variable, flag or key of {files} is called so" + (f"; {near}" if near else "")
        )


def _is_known(name: str, known: Collection[str]) -> bool:
    return path_of(name, (), known) is not None or "--" + name.lstrip("-").replace("_", "-") in known


def _variables(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from re.findall(r"\$\{?([A-Za-z_]\w*)", text)

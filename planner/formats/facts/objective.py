"""The training objective of a job: next-token training of one model is priced; the price of any other
objective is not known.

Words and keys of all software are in `objectives.yaml`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import NamedTuple

from costmodels.catalogue.yaml_files import parse
from planner.formats.facts.flag_catalogue import GivenFlag
from planner.formats.facts.reading import NEXT_TOKEN, ConfigProblem, Reading

FILE = Path(__file__).with_name("objectives.yaml")

NOT_KNOWN = "not known"

NOTHING = "nothing"
"""The objective of programs that do not train: they generate, evaluate, or change files of weights."""

OTHER = "the training objective is not the next token of one sample, and is not priced"

DEFINED = "objective"
"""The name with which a caller defines the objective (`--define objective=next-token`)."""

_OFF = ("false", "no", "off", "none", "null", "0", "")

_PLAIN = {"main", "__main__", "train", "trainer", "run", "start", "launch", "finetune", "cli"}
"""Names of programs that do not tell the objective; the names of their folders do."""


class Objective(NamedTuple):
    """The training objective of a job, and its place in the files."""

    name: str
    """`NEXT_TOKEN`, `NOT_KNOWN`, or a word for another objective."""
    flag: str = ""
    line: int | None = None
    said: str = ""
    """The value, or the name of the program, that gives the objective."""


class _Tables(NamedTuple):
    words: Mapping[str, str]
    named: frozenset[str]
    values: Mapping[str, tuple[str, ...]]
    marks: Mapping[str, str]
    untrained: Mapping[str, str]
    next_token: tuple[str, ...]
    defaults: Mapping[str, str]
    costs: Mapping[str, str]


@cache
def _tables() -> _Tables:
    content = parse(FILE.read_text(encoding="utf-8"), FILE.name)
    return _Tables(
        words={word: name for name, words in content["programs"].items() for word in words.split()},
        named=frozenset(content["named"].split()),
        values={key: tuple(words.split()) for key, words in content["values"].items()},
        marks={pattern: name for name, keys in content["marks"].items() for pattern in keys.split()},
        untrained=content["untrained"],
        next_token=tuple(content["next_token"].split()),
        defaults=content["defaults"],
        costs=content["costs"],
    )


def with_objective(reading: Reading, define: Mapping[str, str]) -> Reading:
    """A reading with its training objective; any objective except next-token training of one model makes the
    price unknown.

    All readers use this function.
    """
    if define.get(DEFINED):
        found = _of_value(define[DEFINED], _tables().values[DEFINED])
        objective = Objective(found, DEFINED, None, define[DEFINED])
    else:
        objective = objective_of(reading.framework, reading.flags, reading.program)
    reading = dataclasses.replace(reading, objective=objective.name)
    if objective.name == NEXT_TOKEN:
        return reading
    remedy = f"give --define {DEFINED}=next-token for the step of that model alone"
    cost = _tables().costs.get(objective.name, "")
    text = f"{objective.said or objective.name}: {OTHER}" + (f": {cost}" if cost else "")
    if objective.name == NOT_KNOWN:
        text = "the training program decides the training objective, and is not given"
        remedy = f"give the command of the program too, or --define {DEFINED}=next-token"
    if objective.name == NOTHING:
        text = f"{objective.said}: nothing is trained, so no step is priced"
        remedy = f"give --define {DEFINED}=next-token if it trains"
    file = reading.files.get(objective.flag, reading.file)
    problem = ConfigProblem("unknown", text, objective.flag, objective.line, remedy, file)
    return dataclasses.replace(reading, problems=(*reading.problems, problem))


def objective_of(software: str, given: Iterable[GivenFlag], program: str) -> Objective:
    """The training objective, from flags and keys, the name of the program, or the software's default."""
    tables = _tables()
    named = [(flag.name.lstrip("-").replace("-", "_"), flag) for flag in given]
    flags = [(name, flag) for name, flag in named if not _is_off(flag)]
    other = _by_values(flags) or _by_marks(flags)
    if other is not None:
        return other
    on = dict(flags)
    for name, trains in tables.untrained.items():
        if name in on and trains not in on:
            return Objective(NOTHING, on[name].name, on[name].line, f"without {trains}")
    found = _by_words(_named(program))
    if found not in ("", NEXT_TOKEN):
        return Objective(found, said=program.rpartition("/")[2])
    default = tables.defaults.get(software, NEXT_TOKEN)
    says_next = found == NEXT_TOKEN or any(name in tables.values for name, _ in flags)
    if default == NOT_KNOWN:
        says_next |= bool(program) or any(_matches(name, tables.next_token) for name, _ in named)
    return Objective(NEXT_TOKEN if says_next else default)


_Flags = list[tuple[str, GivenFlag]]


def _is_off(flag: GivenFlag) -> bool:
    """Return whether a key's value means off; a flag without a value is an enabled switch."""
    on = flag.name.startswith("-") and not flag.values
    return not on and flag.text.strip().lower() in _OFF


def _by_values(flags: _Flags) -> Objective | None:
    """The first flag whose value names an objective other than the next token."""
    tables = _tables()
    for name, flag in flags:
        text = flag.text.strip()
        found = NEXT_TOKEN
        if name in tables.values:
            found = _of_value(text, tables.values[name])
        elif name in tables.named:
            named = _by_words(text)
            found = NEXT_TOKEN if named in ("", NOTHING) else named
        if found != NEXT_TOKEN:
            return Objective(found, flag.name, flag.line, text)
    return None


def _by_marks(flags: _Flags) -> Objective | None:
    """The first flag that is used only with another objective."""
    for name, flag in flags:
        found = next((what for mark, what in _tables().marks.items() if fnmatchcase(name, mark)), "")
        if found:
            return Objective(found, flag.name, flag.line)
    return None


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _of_value(text: str, next_token: Iterable[str]) -> str:
    """The objective that a value names; an unknown word is returned unchanged."""
    return NEXT_TOKEN if _matches(text.lower(), next_token) else _by_words(text) or text


def _by_words(text: str) -> str:
    """The objective from the first word of a name that gives one; empty where none does.

    A program of another objective, or one that trains, may also evaluate or convert.
    """
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", text).lower()
    words = _tables().words
    found = [words[word] for word in re.findall(r"[a-z0-9]+", parted) if word in words]
    if NOTHING in found and (set(found) > {NOTHING} or re.search("train|tun", parted)):
        found = [one for one in found if one != NOTHING]
    return next((one for one in found if one != NEXT_TOKEN), found[0] if found else "")


def _named(program: str) -> str:
    """The last part of a program's path, or the last two parts if the last one does not tell the
    objective."""
    folder, _, name = program.removesuffix(".py").rpartition("/")
    return f"{folder.rpartition('/')[2]}/{name}" if name.lower() in _PLAIN else name

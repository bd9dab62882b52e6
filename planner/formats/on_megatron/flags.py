"""Translation of other software's keys to flags of Megatron-LM, and of the read facts back to these keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from planner.formats.facts.entries import Entry
from planner.formats.facts.flag_catalogue import GivenFlag, known_flags
from planner.formats.facts.keyed import word_of
from planner.formats.facts.reading import Reading
from planner.formats.megatron.names import DEGREE_FLAGS


def as_flags(pairs: Iterable[tuple[str, Entry]]) -> list[GivenFlag]:
    """Keys as flags; a true key is a given switch."""
    known = known_flags()
    found = []
    for name, entry in pairs:
        flag = known[name]
        if entry.null or (not flag.words and entry.text.lower() in ("false", "0", "")):
            continue
        texts = (entry.text,) if entry.items is None else entry.items
        words = tuple(word_of(text, entry.line) for text in texts if flag.words)
        found.append(GivenFlag(name, words, entry.line, flag))
    return found


def renamed(reading: Reading, names: Mapping[str, str], framework: str, engine: str) -> Reading:
    """A reading of flags, with the flags replaced by their keys."""
    problems = []
    for problem in reading.problems:
        name = names.get(problem.flag, problem.flag)
        text, remedy = problem.text, problem.remedy
        for flag, key in sorted(names.items(), key=lambda pair: -len(pair[0])):
            text, remedy = text.replace(flag, key), remedy.replace(flag, key)
            remedy = remedy.replace(f"--define {flag[2:].replace('-', '_')}=", f"--define {key.lstrip('-')}=")
        problems.append(
            dataclasses.replace(problem, flag=name, text=text, remedy=remedy, line=problem.line or None)
        )
    return dataclasses.replace(
        reading,
        framework=framework,
        engine=engine,
        flags=tuple(
            dataclasses.replace(flag, name=names.get(flag.name, flag.name)) for flag in reading.flags
        ),
        names={field: names.get(flag, flag) for field, flag in DEGREE_FLAGS.items()},
        words=names,
        problems=tuple(problems),
    )

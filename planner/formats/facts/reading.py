"""`Reading`: a training job as files describe it, in the planner's terms, with its problems."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Any, Literal

from costmodels.dataclass import dataclass
from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from planner.formats.facts.flag_catalogue import GivenFlag

Severity = Literal["illegal", "unknown", "too_big", "note"]
"""illegal: the framework refuses it, or would train something else; unknown: the files do not say it;
too_big: a device has too little memory; note: it runs, and there is something to know."""


NEXT_TOKEN = "next token"
"""The training objective that is priced: the next token of one model, with or without given answers."""


@dataclass(frozen=True)
class ConfigProblem:
    """An error in a configuration, or a note on it, and the remedy."""

    severity: Severity
    text: str
    flag: str = ""
    """The flag or key to blame; empty where it is none alone."""
    line: int | None = None
    remedy: str = ""
    file: str = ""
    certain: bool = False
    """The problem holds whatever the rest of the job is: a value is wrong by itself."""
    of_price: bool = False
    """Memory and time depend on the problem, and legality does not."""

    def describe(self) -> str:
        """One line: where, what, what instead."""
        where = ":".join(part for part in (self.file, str(self.line or "")) if part)
        parts = [f"{where}: " if where else "", f"{self.flag}: " if self.flag else "", self.text]
        return "".join(parts) + (f"; {self.remedy}" if self.remedy else "")


@dataclass(frozen=True)
class Reading:
    """A job as its files describe it; what they leave out has the framework's default."""

    framework: str
    """The software that the files are for: its name in `targets.TARGETS`, where it is there."""
    engine: str
    """The name in the catalogue of engines."""
    file: str
    """The file that says the layout, of several."""
    model: ModelSpec | None
    layout: Layout | None
    """None where the files do not say one, or none that is consistent."""
    objective: str = NEXT_TOKEN
    """The training objective (`objective.py`)."""
    program: str = ""
    """The program that a command starts, or the name of a recipe; empty where the files have none."""
    chooses_layout: bool = True
    """The files fix a layout; False for tools that look for one themselves."""
    precision: str | None = None
    world_size: int | None = None
    local_world_size: int | None = None
    device: str | None = None
    device_memory_gib: float | None = None
    global_batch_size: int | None = None
    max_global_batch_size: int | None = None
    flags: tuple[GivenFlag, ...] = ()
    """Everything that is given, in order. A key of a file is a flag with its path for a name, such as
    `parallel_config.data_parallel`."""
    files: Mapping[str, str] = field(default_factory=dict)
    """The files of flags that stand in another one than `file`."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The flags or keys of the software by the field of `Layout` or `ModelSpec` that they give."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Names of flags or keys in this file, by their names in plans for the same software."""
    training: Mapping[str, str] = field(default_factory=dict)
    """Settings of training and data as flags of Megatron-LM, which the runtime takes too, with their values:
    the empty text for a switch."""
    assumed: tuple[str, ...] = ()
    """Assumptions about facts that no file states."""
    problems: tuple[ConfigProblem, ...] = ()
    engine_constants: Mapping[str, Any] = field(default_factory=dict)
    """Constants of the engine that the files decide, by names such as `overlap.expert_parallel`."""
    memory_is_bound: bool = False
    """The layout stands for one that needs less: where it does not fit, that one may."""

    @property
    def by_role(self) -> Mapping[str, tuple[str, ...]]:
        """Names of the flags by what they do to the answer (`flag_catalogue.Role`)."""
        found: dict[str, list[str]] = {}
        for flag in self.flags:
            found.setdefault(flag.known.role, []).append(flag.name)
        return {role: tuple(dict.fromkeys(names)) for role, names in found.items()}


def in_own_words(reading: Reading, own: Mapping[str, str]) -> Reading:
    """A reading with the names that a file has for keys, by those of today."""
    if not own:
        return reading

    def spelled(text: str) -> str:
        return re.sub(r"[\w.]*\w", lambda match: own.get(match[0], match[0]), text)

    problems = tuple(
        dataclasses.replace(
            one, flag=own.get(one.flag, one.flag), text=spelled(one.text), remedy=spelled(one.remedy)
        )
        for one in reading.problems
    )
    flags = tuple(dataclasses.replace(one, name=own.get(one.name, one.name)) for one in reading.flags)
    names = {field: own.get(path, path) for field, path in reading.names.items()}
    return dataclasses.replace(reading, problems=problems, flags=flags, names=names, words=own)


def verdict(problems: Iterable[ConfigProblem]) -> tuple[bool | None, tuple[ConfigProblem, ...]]:
    """The legality of a job and the problems that count; None where a fact of the job is not known.

    All readers pass through here. While a fact is not known, only problems that are wrong by themselves make
    a job illegal: the others rest on the value assumed in the place of that fact.
    """
    found = tuple(problems)
    open_facts = any(problem.severity == "unknown" and not problem.of_price for problem in found)
    kept = tuple(
        problem for problem in found if problem.certain or not (open_facts and problem.severity == "illegal")
    )
    if any(problem.severity == "illegal" for problem in kept):
        return False, kept
    return (None if open_facts else True), kept


@dataclass
class Problems:
    """Problems as they are met while a file is read."""

    file: str
    found: list[ConfigProblem] = field(default_factory=list)

    def add(
        self,
        severity: Severity,
        text: str,
        flag: str = "",
        line: int | None = None,
        remedy: str = "",
        file: str = "",
        certain: bool = False,
        of_price: bool = False,
    ) -> None:
        """Add a problem, of this file unless another is named; equal problems are kept once."""
        problem = ConfigProblem(severity, text, flag, line, remedy, file or self.file, certain, of_price)
        if problem not in self.found:
            self.found.append(problem)

    @property
    def fatal(self) -> bool:
        """True if a problem keeps the layout from being known or legal."""
        return any(
            problem.severity in ("illegal", "unknown") and not problem.of_price for problem in self.found
        )

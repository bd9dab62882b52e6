"""`Reading`: a training job read from files, in the planner's terms, with its problems."""

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
"""illegal: the framework refuses the job, or would train something else; unknown: the files do not give the
fact; too_big: a device has too little memory; note: the job runs, with a remark."""


NEXT_TOKEN = "next token"
"""The training objective that is priced: the next token of one model, with or without given answers."""


@dataclass(frozen=True)
class ConfigProblem:
    """An error in a configuration, or a note on it, and the remedy."""

    severity: Severity
    text: str
    flag: str = ""
    """The flag or key that causes the problem; empty where it is not a single one."""
    line: int | None = None
    remedy: str = ""
    file: str = ""
    certain: bool = False
    """True if a value is wrong by itself, so that the problem does not depend on the rest of the job."""
    of_price: bool = False
    """True if memory and time depend on the problem, but legality does not."""

    def describe(self) -> str:
        """One line with the place, the problem and the remedy."""
        where = ":".join(part for part in (self.file, str(self.line or "")) if part)
        parts = [f"{where}: " if where else "", f"{self.flag}: " if self.flag else "", self.text]
        return "".join(parts) + (f"; {self.remedy}" if self.remedy else "")


@dataclass(frozen=True)
class Reading:
    """A job read from files; values that the files leave out have the framework's defaults."""

    framework: str
    """The software of the files, by its name in `targets.TARGETS` if it has one."""
    engine: str
    """The name in the catalogue of engines."""
    file: str
    """The file with the layout, if there are several files."""
    model: ModelSpec | None
    layout: Layout | None
    """The layout; None where the files give none, or a contradictory one."""
    objective: str = NEXT_TOKEN
    """The training objective, from `objective.py`."""
    program: str = ""
    """The program that a command starts, or the name of a recipe; empty where the files have none."""
    chooses_layout: bool = True
    """True if the files fix a layout; False for tools that search for a layout themselves."""
    precision: str | None = None
    world_size: int | None = None
    local_world_size: int | None = None
    device: str | None = None
    device_memory_gib: float | None = None
    global_batch_size: int | None = None
    max_global_batch_size: int | None = None
    flags: tuple[GivenFlag, ...] = ()
    """All given flags, in order. A key of a file is a flag whose name is the key's path, such as
    `parallel_config.data_parallel`."""
    files: Mapping[str, str] = field(default_factory=dict)
    """The file of each flag that is not in `file`."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The flags or keys of the software by their field of `Layout` or `ModelSpec`."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Names of flags or keys in this file, by their names in exported plans for the same software."""
    training: Mapping[str, str] = field(default_factory=dict)
    """Settings of training and data as flags of Megatron-LM, which the runtime also accepts, with their
    values; a switch has an empty text."""
    assumed: tuple[str, ...] = ()
    """Assumptions about facts that no file states."""
    problems: tuple[ConfigProblem, ...] = ()
    engine_constants: Mapping[str, Any] = field(default_factory=dict)
    """Constants of the engine that the files decide, by names such as `overlap.expert_parallel`."""
    memory_is_bound: bool = False
    """True if the job needs less memory than the priced layout, so it may fit even if the layout does not."""
    activations_are_bound: bool = False
    """True if this is so for activations and logits alone, not for model states."""

    @property
    def by_role(self) -> Mapping[str, tuple[str, ...]]:
        """Names of the flags by their effect on the answer (`flag_catalogue.Role`)."""
        found: dict[str, list[str]] = {}
        for flag in self.flags:
            found.setdefault(flag.known.role, []).append(flag.name)
        return {role: tuple(dict.fromkeys(names)) for role, names in found.items()}


def in_own_words(reading: Reading, own: Mapping[str, str]) -> Reading:
    """A reading with the file's own names of keys instead of the present names."""
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
    """The legality of a job and the problems that count; None where a fact of the job is unknown.

    All readers use this function. While a fact is unknown, only values that are wrong by themselves make a
    job illegal, as other problems depend on the value assumed for that fact.
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
    """The problems found while a file is read."""

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
        """Add a problem, by default of this file; equal problems are kept once."""
        problem = ConfigProblem(severity, text, flag, line, remedy, file or self.file, certain, of_price)
        if problem not in self.found:
            self.found.append(problem)

    @property
    def fatal(self) -> bool:
        """True if a problem makes the layout unknown or illegal."""
        return any(
            problem.severity in ("illegal", "unknown") and not problem.of_price for problem in self.found
        )

"""Conversion of configurations of one software to another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from planner.formats.check import (
    CheckKeywords,
    name_what_is_missing,
    plan_as_it_stands,
    problem_of_reading,
)
from planner.formats.facts.flag_catalogue import known_flags
from planner.formats.facts.reading import Problems, Reading, verdict
from planner.formats.files import read_files
from planner.formats.targets import export
from planner.formats.writing.export import Export, flag_lines
from planner.inputs.keywords import keywords
from planner.plan import Plan

if TYPE_CHECKING:
    from typing_extensions import Unpack

MEGATRONS = ("megatron", "mindspeed")
"""Software with Megatron-LM's flags of training."""


@dataclass(frozen=True)
class Conversion:
    """The result of the conversion of a configuration."""

    reading: Reading
    plan: Plan
    """The job of the files as a plan."""
    export: Export
    """The plan as flags or a file of the other software."""
    text: str
    """The text of the new file: the export, with the flags of training that the software supports."""
    unconverted: tuple[str, ...]
    """Flags of training and data that the new text lacks, as flags of Megatron-LM."""


@keywords(CheckKeywords)
def convert_config(
    files: Sequence[str | Path] | str | Path, *, to: str, **given: Unpack[CheckKeywords]
) -> Conversion:
    """Convert the job in `files` to flags or a file of other software. Nothing in them is run.

    Keyword arguments are those of `planner.check`. Raises `InputError` for files that cannot be read, for
    files without a layout or with an illegal one, and for software that is not supported.
    """
    several = [files] if isinstance(files, (str, Path)) else list(files)
    reading = read_files(
        several,
        world_size=given.get("world_size"),
        local_world_size=given.get("local_world_size"),
        define=given.get("define"),
    )
    plan = plan_of_reading(reading, given)
    written = export(plan, to=to)
    said = [name for name in reading.training if to in MEGATRONS and name in known_flags()]
    learned = {name: reading.training[name] for name in said}
    rest = {name: value for name, value in reading.training.items() if name not in learned}
    text = written.text + (flag_lines(learned) if learned else "")
    unconverted = tuple(flag_lines(rest).splitlines()) if rest else ()
    return Conversion(reading, plan, written, text, unconverted)


def plan_of_reading(reading: Reading, given: CheckKeywords) -> Plan:
    """The job of a reading as a plan; raises `InputError`, with all reasons, where it cannot be a plan."""
    problems = Problems(reading.file, list(reading.problems))
    name_what_is_missing(reading, problems)
    plan = None
    if (
        all(one.severity == "note" for one in problems.found)
        and reading.model is not None
        and reading.world_size is not None
    ):
        problem, _ = problem_of_reading(reading, given)
        if reading.layout is not None and not problems.fatal:
            plan = plan_as_it_stands(reading, reading.layout, problem, problems)
    if plan is None:
        _, kept = verdict(problems.found)
        fatal = [one.describe() for one in kept if one.severity in ("illegal", "unknown")]
        reasons = "; ".join(fatal) or f"{reading.file} leaves the layout to a search"
        raise InputError(f"no layout in {reading.file}: {reasons}")
    return plan

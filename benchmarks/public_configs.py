"""Checks the facts that `planner check` reads from public scripts and configurations.

    python -m benchmarks.public_configs FOLDER
    python -m benchmarks.public_configs FOLDER --fuzz 1000 --seed 1

FOLDER holds the files that public_configs.yaml names, each at OWNER/NAME/PATH as of its commit. Facts of that
list are compared with the read ones, field by field: right, not known, or wrong. `--fuzz` removes or changes
lines that decide facts, and lists each verdict that does not change. Exit code 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from costmodels.catalogue.yaml_files import yaml_loader
from costmodels.errors import InputError, on_one_line
from costmodels.spec.layout import Layout
from costmodels.spec.model_parts import Lora
from planner import check
from planner.formats.check import Check
from planner.formats.facts.reading import Reading
from planner.formats.recognised import NotReadError

LIST = Path(__file__).with_name("public_configs.yaml")

USUAL: Mapping[str, object] = {
    **dict.fromkeys(("tp", "pp", "vpp", "cp", "ep"), 1),
    "recompute": "none",
    "adapters": "none",
    "objective": "next token",
}
"""Usual values of fields, which a list of facts may leave out."""

FIELDS = (
    *("framework", "tp", "pp", "vpp", "cp", "ep", "dp", "mbs", "gbs", "seq"),
    *("precision", "recompute", "adapters", "objective", "parameters"),
)

NEAR = 0.01
"""Largest relative difference of parameter counts that count as equal."""

Outcome = Literal["right", "not known", "wrong"]


@dataclass(frozen=True)
class Job:
    """One entry of the list."""

    repository: str
    commit: str
    path: str
    beside: tuple[str, ...]
    given: Mapping[str, Any]
    facts: Mapping[str, object]
    """Facts that a person read from the files; facts that no file states are missing."""

    @property
    def name(self) -> str:
        """Repository, path, and the recipe of a file with several."""
        recipe = self.given.get("define", {}).get("recipe")
        return f"{self.repository} {self.path}" + (f" ({recipe})" if recipe else "")

    def files(self, folder: Path) -> list[Path]:
        """The job's files below `folder`."""
        return [folder / self.repository / path for path in (self.path, *self.beside)]


@dataclass(frozen=True)
class Field:
    """One fact of a job beside the read value."""

    name: str
    fact: object
    read: object
    outcome: Outcome


@dataclass(frozen=True)
class Row:
    """The result of checking one job."""

    job: Job
    answer: Check | str
    """Answer of `planner check`, or its message if the files are refused."""
    fields: tuple[Field, ...]

    @property
    def is_known(self) -> bool:
        """True if the files were read far enough for a verdict."""
        return not isinstance(self.answer, str) and self.answer.legal is not None


def jobs() -> Iterator[Job]:
    """The entries of the list, in order."""
    for group in yaml.load(LIST.read_text(encoding="utf-8"), yaml_loader()):
        for entry in group["files"]:
            facts = {name: fact for name, fact in {**USUAL, **entry["facts"]}.items() if fact is not None}
            yield Job(
                repository=group["repo"],
                commit=str(group["commit"]),
                path=entry["path"],
                beside=tuple(entry.get("with", ())),
                given=entry.get("given", {}),
                facts=facts,
            )


def facts_of_reading(reading: Reading) -> dict[str, object]:
    """The read values of `FIELDS`; None for values that were not read."""
    layout, model = reading.layout, reading.model
    found: dict[str, object] = dict.fromkeys(FIELDS)
    found["framework"] = reading.framework
    found["gbs"] = reading.global_batch_size
    found["precision"] = reading.precision
    found["objective"] = reading.objective
    if layout is not None:
        found |= {
            "tp": layout.tensor_parallel,
            "pp": layout.pipeline_parallel,
            "vpp": layout.virtual_pipeline_parallel,
            "cp": layout.context_parallel,
            "ep": layout.expert_parallel,
            "dp": layout.data_parallel,
            "mbs": layout.micro_batch_size,
            "gbs": layout.global_batch_size,
            "precision": reading.precision or layout.precision,
            "recompute": _recompute(reading.framework, layout),
        }
    if model is not None:
        lora = model.lora
        found |= {
            "seq": model.seq,
            "parameters": model.parameters,
            "adapters": "none" if lora is None else _adapters(lora),
        }
    return found


def _recompute(framework: str, layout: Layout) -> str:
    """The recomputation of a layout: torchtitan calls it `selective` if only some layers are recomputed."""
    some = framework == "torchtitan" and layout.recompute_method == "block"
    return "selective" if some else layout.recompute


def _adapters(lora: Lora) -> str:
    return f"{'qlora' if lora.quantize_base else 'lora'} {lora.rank}"


def compared(job: Job, answer: Check | str, software: str = "") -> tuple[Field, ...]:
    """The facts of a job beside the read values, or beside the name of refused software.

    If a fact is not known, the read value counts as not known too.
    """
    refused = {"framework": software or None}
    read: Mapping[str, object] = refused if isinstance(answer, str) else facts_of_reading(answer.reading)
    known = not isinstance(answer, str) and answer.legal is not None
    fields = []
    for name in FIELDS:
        if name not in job.facts:
            continue
        fact, value = job.facts[name], read.get(name)
        outcome: Outcome = "right"
        if value is None or not same(name, fact, value):
            outcome = "wrong" if value is not None and (known or name == "framework") else "not known"
        fields.append(Field(name, fact, value, outcome))
    return tuple(fields)


def same(name: str, fact: object, value: object) -> bool:
    """Return whether a value equals a fact, parameters to one per cent."""
    if name == "parameters":
        assert isinstance(fact, (int, float)) and isinstance(value, (int, float))
        return abs(value - fact) <= NEAR * fact
    return str(fact).lower() == str(value).lower()


def judged(job: Job, folder: Path) -> Row:
    """One job, read and compared."""
    answer: Check | str
    software = ""
    try:
        answer = check(job.files(folder), **job.given)
    except InputError as error:
        answer = on_one_line(error)
        software = error.software if isinstance(error, NotReadError) else ""
    return Row(job, answer, compared(job, answer, software))


def by_framework(rows: Sequence[Row]) -> list[list[str]]:
    """Cells of a table with a row for each software."""
    groups: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[str(row.job.facts.get("framework", "others"))].append(row)
    return [_counts(name, group) for name, group in sorted(groups.items())] + [_counts("all", rows)]


def _counts(name: str, rows: Sequence[Row]) -> list[str]:
    answers = [row.answer for row in rows if not isinstance(row.answer, str)]
    outcomes = Counter(field.outcome for row in rows for field in row.fields)
    return [
        name,
        *(str(number) for number in (len(rows), sum(not row.is_known for row in rows))),
        *(str(outcomes[outcome]) for outcome in ("right", "not known", "wrong")),
        *(str(sum(answer.legal is holds for answer in answers)) for holds in (True, False)),
        *(str(sum(answer.fits is holds for answer in answers)) for holds in (True, False)),
    ]


def by_field(rows: Sequence[Row]) -> list[list[str]]:
    """Cells of a table with a row for each field."""
    outcomes = Counter((field.name, field.outcome) for row in rows for field in row.fields)
    return [
        [name, *(str(outcomes[name, outcome]) for outcome in ("right", "not known", "wrong"))]
        for name in FIELDS
    ]


def complaints(row: Row, folder: Path) -> Iterator[str]:
    """Lines about one job: its wrong fields, and the reason of a missing or wrong verdict."""
    name, answer = row.job.name, row.answer
    for field in row.fields:
        if field.outcome == "wrong":
            yield f"wrong: {name}: {field.name} is {field.fact}, read as {field.read}"
    if isinstance(answer, str):
        yield f"refused: {name}: {_short(answer, folder)}"
    elif answer.legal is not True:
        severities = ("illegal",) if answer.legal is False else ("unknown",)
        found = [problem for problem in answer.problems if problem.severity in severities]
        more = f"; and {len(found) - 1} more" if len(found) > 1 else ""
        kind = "illegal" if answer.legal is False else "not known"
        yield f"{kind}: {name}: {_short(f'{found[0].flag}: {found[0].text}', folder)}{more}"


def _short(text: str, folder: Path) -> str:
    text = text.replace(f"{folder}/", "").removeprefix(": ")
    return text if len(text) <= 140 else f"{text[:137]}..."


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(folder: Path) -> int:
    """Print the tables and all wrong or unknown fields; returns the exit code."""
    rows = []
    for job in jobs():
        rows.append(judged(job, folder))
        print(f"{len(rows)} {job.name}", file=sys.stderr)
    fields = ("right", "not known", "wrong")
    print(
        table(
            ("software", "files", "files not known", *fields, "legal", "illegal", "fit", "do not fit"),
            by_framework(rows),
        )
    )
    print(f"\n{table(('field', *fields), by_field(rows))}\n")
    for row in rows:
        for line in complaints(row, folder):
            print(line)
    return int(any(field.outcome == "wrong" for row in rows for field in row.fields))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fuzz", type=int, metavar="N", help="lines to remove or change")
    parser.add_argument("--seed", type=int, default=1, help="of the draw of these lines")
    asked = parser.parse_args()
    if asked.fuzz is None:
        sys.exit(main(asked.folder))
    from benchmarks.public_configs_fuzz import fuzz

    sys.exit(fuzz(asked.folder, asked.fuzz, asked.seed))

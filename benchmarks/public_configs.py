"""Public scripts and configurations, read and judged: legal? fits? what does the best plan gain?

    python -m benchmarks.public_configs FOLDER

FOLDER holds the files that public_configs.yaml names, each at OWNER/NAME/PATH as of its commit. Prints a
table; what a file does not say is in its last column. Exit code 1 where a file cannot be read at all.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from costmodels.catalogue.yaml_files import yaml_loader
from costmodels.errors import InputError, on_one_line
from planner import check
from planner.formats.check import Check

LIST = Path(__file__).with_name("public_configs.yaml")


@dataclass(frozen=True)
class Job:
    """One entry of the list."""

    repository: str
    commit: str
    path: str
    beside: tuple[str, ...]
    given: dict[str, Any]

    def files(self, folder: Path) -> list[Path]:
        """Its files below `folder`."""
        return [folder / self.repository / path for path in (self.path, *self.beside)]


def jobs() -> Iterator[Job]:
    """The entries of the list, in order."""
    for group in yaml.load(LIST.read_text(encoding="utf-8"), yaml_loader()):
        for entry in group["files"]:
            beside = tuple(entry.get("with", ()))
            yield Job(group["repo"], str(group["commit"]), entry["path"], beside, entry.get("given", {}))


def row(job: Job, answer: Check | str) -> list[str]:
    """Cells of the table for one job; `answer` is a message where it cannot be read."""
    name = f"{job.repository} {job.commit} {job.path}"
    if "recipe" in job.given.get("define", {}):
        name += f" ({job.given['define']['recipe']})"
    if isinstance(answer, str):
        return [name, "", "", "", "", "", answer]
    plan, best = answer.plan, answer.best
    wrong = [one for one in answer.problems if one.severity in ("illegal", "unknown")]
    said = "; ".join(f"{one.flag}: {one.text}" if one.flag else one.text for one in wrong[:2])
    if len(wrong) > 2:
        said += f"; and {len(wrong) - 2} more"
    if plan is not None and not plan.fits:
        needs = next(one.text for one in answer.problems if " GiB of " in one.text)
        said += ("; " if said else "") + needs.partition(": lacks")[0]
    unknown = answer.reading.by_role.get("unknown", ())
    if unknown:
        said += ("; " if said else "") + f"{len(unknown)} flags or keys not known"
    return [
        name,
        answer.reading.framework,
        _yes(answer.legal),
        _yes(answer.fits),
        "" if plan is None else f"{plan.estimate.tokens_per_s:,.0f}",
        _gain(answer, best is not None),
        said,
    ]


def _gain(answer: Check, planned: bool) -> str:
    if answer.gain is not None:
        return f"{answer.gain:.2f} x"
    return "a plan" if planned else ""


def _yes(holds: bool | None) -> str:
    return "not said" if holds is None else ("yes" if holds else "no")


HEADINGS = ("file", "framework", "legal", "fits", "tokens/s", "best plan", "what is wrong or not said")


def main(folder: Path) -> int:
    """Print the table; the exit code."""
    print("| " + " | ".join(HEADINGS) + " |")
    print("| " + " | ".join("---" for _ in HEADINGS) + " |")
    outcomes: Counter[str] = Counter()
    for job in jobs():
        answer: Check | str
        try:
            answer = check(job.files(folder), **job.given)
        except InputError as error:
            answer = on_one_line(error)
        print(
            "| "
            + " | ".join(cell.replace("|", "\\|").replace(f"{folder}/", "") for cell in row(job, answer))
            + " |"
        )
        sys.stdout.flush()
        if isinstance(answer, str):
            outcomes["not read"] += 1
            continue
        outcomes[f"legal {_yes(answer.legal)}"] += 1
        outcomes[f"fits {_yes(answer.fits)}"] += 1
        outcomes["with a better plan"] += answer.gain is not None and answer.gain > 1.005
    print()
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())))
    return int(outcomes["not read"] > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    sys.exit(main(parser.parse_args().folder))

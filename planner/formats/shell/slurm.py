"""Variables that Slurm sets for a job, from the `#SBATCH` comments (sbatch(1))."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from planner.formats.shell.text import Word

_SHORT = {
    "-N": "--nodes",
    "-n": "--ntasks",
    "-G": "--gpus",
    "-c": "--cpus-per-task",
    "-J": "--job-name",
    "-p": "--partition",
}

_AS_GIVEN = {
    "--gpus-per-node": ("SLURM_GPUS_PER_NODE",),
    "--gpus-per-task": ("SLURM_GPUS_PER_TASK",),
    "--gpus": ("SLURM_GPUS",),
    "--ntasks-per-node": ("SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    "--cpus-per-task": ("SLURM_CPUS_PER_TASK",),
    "--job-name": ("SLURM_JOB_NAME",),
    "--partition": ("SLURM_JOB_PARTITION",),
}
"""Variables with the unchanged value of an option."""


def slurm_variables(directives: Iterable[Sequence[Word]]) -> dict[str, tuple[str, int]]:
    """The value and the line of each variable that Slurm sets."""
    given = _options(directives)
    if not given:
        return {}
    found: dict[str, tuple[str, int]] = {}
    for option, names in _AS_GIVEN.items():
        if option in given:
            found |= dict.fromkeys(names, given[option])
    line = next(iter(given.values()))[1]
    nodes = _number(given.get("--nodes"))
    each = _number(given.get("--ntasks-per-node"))
    tasks = _number(given.get("--ntasks"))
    if nodes is None and "--nodes" not in given and tasks is None:
        nodes = 1
    if tasks is None and nodes is not None and each is not None:
        tasks = nodes * each
    counted = {
        "SLURM_NNODES": nodes,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_NTASKS": tasks,
        "SLURM_NPROCS": tasks,
    }
    counted["SLURM_GPUS_ON_NODE"] = _number(given.get("--gpus-per-node")) or _of_gres(given.get("--gres"))
    found |= {name: (str(count), line) for name, count in counted.items() if count is not None}
    return found


def _options(directives: Iterable[Sequence[Word]]) -> Mapping[str, tuple[str, int]]:
    """Values and lines by the long name of an option; the last occurrence counts."""
    found: dict[str, tuple[str, int]] = {}
    for directive in directives:
        words = [word for word in directive if not word.unknown]
        if not words or words[0].text != "SBATCH":
            continue
        for at, word in enumerate(words[1:], 1):
            name, equals, value = word.text.partition("=")
            if name[:1] != "-":
                continue
            if re.fullmatch(r"-[a-zA-Z][0-9]+", name):
                name, equals, value = name[:2], "=", name[2:]
            if not equals and at + 1 < len(words):
                value = words[at + 1].text
            found[_SHORT.get(name, name)] = value, word.line
    return found


def _number(given: tuple[str, int] | None) -> int | None:
    """The number in `4`, `a100:4` or `4-4`; None for other texts."""
    text = "" if given is None else given[0].rpartition(":")[2]
    same = re.fullmatch(r"([0-9]{1,6})-\1", text)
    text = same.group(1) if same else text
    return int(text) if re.fullmatch(r"[0-9]{1,6}", text) else None


def _of_gres(given: tuple[str, int] | None) -> int | None:
    match = re.search(r"\bgpu(?::[\w-]+)?:([0-9]{1,4})\b", "" if given is None else given[0])
    return int(match.group(1)) if match else None

"""The command that runs a plan, and the file that starts it on a cluster or in other software."""

from __future__ import annotations

from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.spelling import nearest
from planner.inputs.engine import DEFAULT_ENGINE
from planner.plan import Plan

PROGRAMS = {"megatron": "pretrain_gpt.py", "mindspeed": "pretrain_gpt.py"}
"""The training program of other software, where all its jobs start the same program."""

SUFFIXES = {"slurm": "sbatch", "kubernetes": "yaml", "dlc": "sh", "mpi": "sh", "shell": "sh", "msrun": "sh"}
"""File name suffixes for schedulers and launchers."""


@dataclass(frozen=True)
class WrittenFile:
    """A file written from a plan."""

    name: str
    text: str
    notes: tuple[str, ...]
    """Parts of the job that the file could not state."""


def run_command(plan: Plan, file: str) -> str:
    """The command that runs a saved plan, or that writes it for the software that runs it."""
    if plan.engine.name == DEFAULT_ENGINE:
        return f"planner launch --plan {file}"
    # They write many formats, and most plans are trained here.
    from planner.formats.targets import TARGETS, export, target_of

    target = target_of(plan.engine.name)
    if target is None:
        return f"planner export {file} --to NAME, one of {', '.join(TARGETS)}"
    nearest = " --nearest" if export(plan, to=target).inexpressible else ""
    program = PROGRAMS.get(plan.engine.name)
    if program is not None:
        return f"planner script {file} --to slurm --program {program}{nearest}"
    return f"planner export {file} --to {target}{nearest}"


def usual_target(plan: Plan) -> str:
    """The default form in which a plan is written: Slurm's, or the form of the plan's engine."""
    from planner.formats.targets import target_of

    if plan.engine.name == DEFAULT_ENGINE or plan.engine.name in PROGRAMS:
        return "slurm"
    return target_of(plan.engine.name) or "slurm"


def targets() -> tuple[str, ...]:
    """Schedulers, launchers and software for which plans can be written."""
    from planner.formats.targets import TARGETS
    from planner.scripts.schedulers import SCHEDULERS

    return (*SCHEDULERS, *TARGETS)


def written_plan(plan: Plan, to: str, file: str = "plan.json") -> WrittenFile:
    """The file that starts a plan on a cluster, or that configures other software for the plan.

    Raises `InputError` for a form that is not in `targets`, and for a plan that it cannot start.
    """
    from planner.formats.targets import TARGETS, export
    from planner.scripts.job import JobScript
    from planner.scripts.schedulers import SCHEDULERS

    if to in SCHEDULERS:
        program = None if plan.engine.name == DEFAULT_ENGINE else PROGRAMS.get(plan.engine.name)
        kind = None if to == "kubernetes" else to
        job = JobScript(plan=plan, plan_file=file, program=program, kind=kind)
        text = SCHEDULERS[to](job)
        notes = [*job.notes, *(() if job.exported is None else job.exported.inexpressible)]
        return WrittenFile(f"{job.job_name}.{SUFFIXES[to]}", text, tuple(notes))
    if to in TARGETS:
        found = export(plan, to=to)
        suffix = {"{": "json", "[": "toml"}.get(found.text.lstrip()[:1], "yaml")
        suffix = "txt" if found.text.startswith("--") else suffix
        return WrittenFile(
            f"{to}.{suffix}", found.text, (*found.inexpressible, *found.in_script, *found.notes)
        )
    raise InputError(f"script {to}: {nearest(to, targets()) or 'expected ' + ', '.join(targets())}")

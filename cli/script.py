"""`planner script`: write the file that starts a plan on a cluster."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, ClassVar

from cli.written_plans import print_notes
from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.files import write_whole
from planner.formats.nearest import check_expressible
from planner.options.flags import argument, arguments, flag, flag_groups
from planner.plan import Plan
from planner.scripts.job import JobScript
from planner.scripts.kubernetes import KINDS
from planner.scripts.schedulers import SCHEDULERS, check_scheduler
from runtime.faults.fault_options import FaultOptions
from runtime.settings.training_options import DataOptions, OutputOptions, TrainingOptions

USERS = {
    "kind": ("kubernetes",),
    "time_limit": ("slurm",),
    "partition": ("slurm",),
    "account": ("slurm",),
    "image": ("kubernetes", "dlc"),
    "volume_claim": ("kubernetes",),
}
"""Options that only some kinds of files support, and these kinds."""


@dataclass(frozen=True)
class ScriptOptions:
    """The file to write and the scheduler that reads it."""

    SECTIONS: ClassVar[dict[str, str]] = {"to": "Job file"}

    plan: str = argument("Plan file that --save wrote.", metavar="PLAN")
    to: str = flag("", f"Scheduler or launcher: {', '.join(SCHEDULERS)}.", metavar="NAME")
    out: str | None = flag(None, "File to write; standard output unless given.", metavar="FILE")
    kind: str | None = flag(None, f"With --to kubernetes: {', '.join(KINDS)}.", metavar="KIND")
    job_name: str = flag("", "Name of the job; the model's unless given.")
    time_limit: str | None = flag(None, "Time limit of Slurm, such as 24:00:00.", metavar="TIME")
    partition: str | None = flag(None, "Partition of Slurm.")
    account: str | None = flag(None, "Account of Slurm.")
    image: str | None = flag(None, "Image of the nodes' containers.")
    volume_claim: str | None = flag(
        None, "Claim of a volume that all pods share, mounted at /workspace.", metavar="NAME"
    )
    setup: str | None = flag(
        None, "Line of shell before the job, such as 'source .venv/bin/activate'.", metavar="LINE"
    )
    program: str | None = flag(
        None,
        "Training program of the plan's engine, such as pretrain_gpt.py, if the engine is not this package.",
        metavar="FILE",
    )
    nearest: bool = flag(
        False, "With --program: start the nearest job where its software does not support a part of the plan."
    )


@flag_groups(
    options=ScriptOptions,
    training=TrainingOptions,
    data=DataOptions,
    output=OutputOptions,
    faults=FaultOptions,
)
def script(options: ScriptOptions, **groups: Any) -> None:
    """Write the file that starts a plan on a cluster, with the flags of training that are given."""
    if not options.to:
        raise InputError(f"--to is missing: name one of {', '.join(SCHEDULERS)}")
    check_scheduler(options.to)
    for name, users in USERS.items():
        if getattr(options, name) is not None and options.to not in users:
            raise InputError(
                f"--{name.replace('_', '-')} {getattr(options, name)} is for --to {' and '.join(users)}; "
                "leave it out"
            )
    output = groups["output"]
    if options.program is None and output.load is None:
        # Schedulers start jobs again, which are to go on then; the first time there is nothing there.
        groups["output"] = replace(output, load=output.save)
    job = JobScript(
        plan=Plan.load(options.plan),
        plan_file=options.plan,
        arguments=[word for group in groups.values() for word in arguments(group)],
        name=options.job_name,
        time_limit=options.time_limit,
        partition=options.partition,
        account=options.account,
        image=options.image,
        volume_claim=options.volume_claim,
        program=options.program,
        setup=options.setup,
        kind=options.kind if options.to == "kubernetes" else options.to,
    )
    if job.exported is not None:
        check_expressible(job.exported, options.nearest)
    text = SCHEDULERS[options.to](job)
    if options.out is None:
        print(text, end="")
    else:
        write_whole("script", options.out, text)
        print(f"planner: saved {options.out}", file=sys.stderr)
    for note in job.notes:
        print(f"planner: {note}", file=sys.stderr)
    if job.exported is not None:
        print_notes(job.plan, replace(job.exported, environment={}))

"""Batch scripts of Slurm."""

from __future__ import annotations

import re

from costmodels.errors import InputError
from planner.formats.writing.written import written
from planner.scripts.job import (
    PORT,
    SCHEDULER_NAMES,
    JobScript,
    command_lines,
    comments,
    header,
    on_restart,
    on_signals,
    pairs,
)

GRACE_S = 180
"""Seconds before the time limit at which the job is asked to save and end."""


def slurm_script(job: JobScript) -> str:
    """A batch script: one task for each node, which starts the ranks of the node; for another program, one
    task for each rank.

    Ranks of another program are separate tasks so that signals reach them: torchrun ends its ranks 30 s after
    a signal, even during a save.
    """
    tasks = 1 if job.is_bundled() else job.devices
    lines = ["#!/bin/bash", *header(job), f"#SBATCH --job-name={job.job_name}"]
    lines += [f"#SBATCH --nodes={job.nodes}", f"#SBATCH --ntasks-per-node={tasks}"]
    if job.device_kind in SCHEDULER_NAMES:
        lines.append(f"#SBATCH --gres={SCHEDULER_NAMES[job.device_kind]}:{job.devices}")
        lines.append("#SBATCH --exclusive")
    else:
        lines.append(f"#SBATCH --cpus-per-task={job.devices // tasks}")
    for name in ("partition", "account"):
        value = getattr(job, name)
        if value is not None:
            lines.append(f"#SBATCH --{name}={written(value, 'value', f'--{name}')}")
    if job.time_limit is not None:
        lines.append(f"#SBATCH --time={time_limit(job.time_limit)}")
    lines += [
        *comments([on_signals(job, f"{GRACE_S} s before the time limit")]),
        f"#SBATCH --signal=TERM@{GRACE_S}",
        *comments([f"A node that fails ends the job, which Slurm starts again, {on_restart(job)}."]),
        "#SBATCH --requeue",
        f"#SBATCH --output={job.job_name}-%j.out",
        "",
        "set -euo pipefail",
        *job.before(),
        "# The nodes meet on the first one; its port follows from the number of the job.",
        'MASTER_ADDR=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)}',
        f"MASTER_PORT=${{MASTER_PORT:-$(({PORT} + SLURM_JOB_ID % 1000))}}",
        "export MASTER_ADDR MASTER_PORT",
        "",
    ]
    srun = ["srun", f"--ntasks-per-node={tasks}", "--kill-on-bad-exit=1", "--label"]
    if job.is_bundled():
        lines += command_lines([" ".join(srun), "planner launch", *pairs(job.launch()[2:])])
    else:
        # Each rank may use all cores of its node, as under torchrun.
        srun.append("--cpu-bind=none")
        lines += [
            "rank() {",
            '    export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID"',
            f"    export WORLD_SIZE={job.nodes * job.devices} LOCAL_WORLD_SIZE={job.devices}",
            *(f"    {line}" for line in job.rank_lines()),
            "}",
            "export -f rank",
            f"{' '.join(srun)} bash -c rank",
        ]
    return "\n".join(lines) + "\n"


_TIMES = re.compile(r"[0-9]{1,7}(:[0-9]{1,2}){0,2}|[0-9]{1,5}-[0-9]{1,2}(:[0-9]{1,2}){0,2}")


def time_limit(text: str) -> str:
    """A time limit in a form that Slurm accepts (sbatch's manual page, `--time`); raises `InputError` for
    others."""
    if not _TIMES.fullmatch(text):
        raise InputError(
            f"--time-limit {text[:80]!a}: expected minutes, minutes:seconds, hours:minutes:seconds, "
            "days-hours, days-hours:minutes or days-hours:minutes:seconds, such as 24:00:00 or 7-0"
        )
    return written(text, "value", "--time-limit")

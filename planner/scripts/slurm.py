"""Batch scripts of Slurm."""

from __future__ import annotations

from planner.scripts.job import PORT, SCHEDULER_NAMES, JobScript, command_lines, header, pairs

GRACE_S = 180
"""Seconds before the time limit at which the job is asked to save and end."""


def slurm_script(job: JobScript) -> str:
    """A batch script: one task on each node, which starts the ranks of its node."""
    lines = ["#!/bin/bash", *header(job), f"#SBATCH --job-name={job.job_name}"]
    lines += [f"#SBATCH --nodes={job.nodes}", "#SBATCH --ntasks-per-node=1"]
    if job.device_kind in SCHEDULER_NAMES:
        lines.append(f"#SBATCH --gres={SCHEDULER_NAMES[job.device_kind]}:{job.devices}")
        lines.append("#SBATCH --exclusive")
    else:
        lines.append(f"#SBATCH --cpus-per-task={job.devices}")
    for name in ("partition", "account"):
        value = getattr(job, name)
        lines += [f"#SBATCH --{name}={value}"] if value else []
    if job.time_limit:
        lines += [f"#SBATCH --time={job.time_limit}"]
    lines += [
        f"# {GRACE_S} seconds before the time limit: the job saves after the running step and ends with 0.",
        f"#SBATCH --signal=TERM@{GRACE_S}",
        "# A node that fails ends the job, which Slurm starts again: from what it has saved, with --save.",
        "#SBATCH --requeue",
        f"#SBATCH --output={job.job_name}-%j.out",
        "",
        "set -euo pipefail",
        *([job.setup] if job.setup else []),
        "# The nodes meet on the first one; its port follows from the number of the job.",
        'MASTER_ADDR=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)}',
        f"MASTER_PORT=${{MASTER_PORT:-$(({PORT} + SLURM_JOB_ID % 1000))}}",
        "export MASTER_ADDR MASTER_PORT",
        "",
    ]
    srun = ["srun", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--label"]
    if job.is_bundled():
        lines += command_lines([" ".join(srun), "planner launch", *pairs(job.launch()[2:])])
    else:
        lines += [
            "node() {",
            *(
                f"    {line}"
                for line in job.node_lines('"$SLURM_NODEID"', '"$MASTER_ADDR"', '"$MASTER_PORT"')
            ),
        ]
        lines += ["}", "export -f node", f"{' '.join(srun)} bash -c node"]
    return "\n".join(lines) + "\n"

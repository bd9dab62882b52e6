"""Jobs of PAI DLC: a parameter file for DLC's command line, with the command that every node runs.

Source: PAI, "Commands used to submit jobs": `dlc submit pytorchjob --job_file=FILE`, a line KEY=VALUE each.
"""

from __future__ import annotations

from planner.formats.writing.written import written
from planner.scripts.job import JobScript, comments, header, on_signals, shell_word


def dlc_script(job: JobScript) -> str:
    """A parameter file; DLC gives every node the address of the first node and its own number."""
    if job.is_bundled():
        # DLC's WORLD_SIZE and RANK count nodes, which planner launch knows.
        command = " ".join(map(shell_word, job.launch()))
    else:
        lines = job.node_lines("$RANK", "$MASTER_ADDR", "$MASTER_PORT")
        command = " ".join(line.strip().removesuffix("\\").strip() for line in lines)
    command = " && ".join([*job.before(), command])
    values = {
        "name": job.job_name,
        "workers": str(job.nodes),
        "worker_image": job.image or "<image with the planner>",
        "worker_gpu": str(job.devices) if job.device_kind == "gpu" else None,
        "worker_cpu": str(job.devices) if job.device_kind == "cpu" else None,
        "command": command,
    }
    intro = [
        "# grep -v '^#' <this file> > job.params",
        "# dlc submit pytorchjob --workspace_id=<workspace> --resource_id=<quota> --job_file=job.params",
        "# In the console: the command is that of the last line, for every node.",
    ]
    lines = [f"{name}={written(value, 'text', name)}" for name, value in values.items() if value is not None]
    when = "where DLC stops the job" + ("" if job.is_bundled() else ", 30 s before torchrun ends its ranks")
    ends = comments([on_signals(job, when)])
    return "\n".join([*header(job), *intro, *ends, *lines]) + "\n"

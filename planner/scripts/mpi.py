"""Shell scripts around Open MPI's mpirun, which starts every rank itself."""

from __future__ import annotations

from costmodels.errors import InputError
from planner.scripts.job import PORT, JobScript, command_lines, header, pairs


def mpi_script(job: JobScript) -> str:
    """A script that starts one process for each rank."""
    if not job.is_bundled():
        raise InputError("--program with --to mpi: its ranks would need torchrun's variables; use --to shell")
    command = [
        "exec mpirun",
        f"-np {job.nodes * job.devices}",
        f"--map-by ppr:{job.devices}:node",
        "--bind-to none",
        *(['--hostfile "$HOSTFILE"'] if job.nodes > 1 else []),
        "-x MASTER_ADDR",
        "-x MASTER_PORT",
        '"${MPIRUN_ARGS[@]}"',
        "python -m runtime.pretrain",
        *pairs(["--plan", job.plan_file, *job.arguments]),
    ]
    hosts = ["# Hosts, one a line, the first of which is where the ranks meet."]
    hosts += ["HOSTFILE=${HOSTFILE:?name the file of hosts in HOSTFILE}"]
    hosts += ["MASTER_ADDR=${MASTER_ADDR:-$(awk 'NF && !/^#/ {print $1; exit}' \"$HOSTFILE\")}"]
    lines = [
        "#!/bin/bash",
        *header(job),
        "set -euo pipefail",
        *job.before(),
        *(hosts if job.nodes > 1 else ["MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}"]),
        f"MASTER_PORT=${{MASTER_PORT:-{PORT}}}",
        "export MASTER_ADDR MASTER_PORT",
        *(
            [
                "# A signal to mpirun ends the ranks a second later, before they have saved: send it SIGUSR1 "
                "first, which saves."
            ]
            if job.resumes
            else []
        ),
        "# More flags of mpirun, such as --allow-run-as-root, are the arguments of this script.",
        'MPIRUN_ARGS=("$@")',
        "",
        *command_lines(command),
    ]
    return "\n".join(lines) + "\n"

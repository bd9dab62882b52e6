"""Shell scripts around MindSpore's msrun, for Ascend.

Source: MindSpore, "msrun Launching": parameters of the command line.
"""

from __future__ import annotations

from costmodels.errors import InputError
from planner.formats.writing.written import words_of
from planner.scripts.job import JobScript, command_lines, header, shell_word

PORT = 8118
"""Default port of msrun."""


def msrun_script(job: JobScript) -> str:
    """A script that is started on every node, like that of `shell_script`."""
    if job.program is None:
        raise InputError(
            "--to msrun starts a program of MindSpore: name it with --program, such as "
            "'run_mindformer.py --config pretrain.yaml'"
        )
    total = job.nodes * job.devices
    first = "127.0.0.1" if job.nodes == 1 else "?give the address of the first node"
    command = [
        "exec msrun",
        *(f"--worker_num={total}", f"--local_worker_num={job.devices}"),
        *('--master_addr="$MASTER_ADDR"', '--master_port="$MASTER_PORT"', '--node_rank="$NODE_RANK"'),
        *('--log_dir="$LOG_DIR"', "--join=True", "--cluster_time_out=600"),
        " ".join(
            [
                *(shell_word(word, "--program") for word in words_of(job.program, "--program")),
                *map(shell_word, job.arguments),
            ]
        ),
    ]
    lines = [
        "#!/bin/bash",
        *header(job),
        f"# On every node: {job.job_name}.sh NUMBER ADDRESS, with numbers from 0 to {job.nodes - 1}.",
        "# The degrees of the plan are those of parallel_config in the program's own file.",
        "set -euo pipefail",
        *job.before(),
        "NODE_RANK=${1:-${NODE_RANK:-0}}",
        "MASTER_ADDR=${2:-${MASTER_ADDR:" + ("-" if job.nodes == 1 else "") + first + "}}",
        f"MASTER_PORT=${{MASTER_PORT:-{PORT}}}",
        "LOG_DIR=${LOG_DIR:-msrun_log}",
        "# Only where HCCL is to use a table of ranks (`planner ranktable merge`):",
        "# export RANK_TABLE_FILE=rank_table.json",
        "",
        *command_lines(command),
    ]
    return "\n".join(lines) + "\n"

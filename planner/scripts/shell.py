"""Shell scripts that are started by hand on every node."""

from __future__ import annotations

from planner.scripts.job import PORT, JobScript, comments, header


def shell_script(job: JobScript) -> str:
    """A script for each node: its number and the first node are its arguments."""
    lines = ["#!/bin/bash", *header(job)]
    if job.nodes > 1:
        lines += comments(
            [f"On every node: {job.job_name}.sh NUMBER FIRST_NODE, with numbers from 0 to {job.nodes - 1}."]
        )
    parts = job.plan.cluster.parts
    if parts:
        first = parts[0].nodes
        lines += comments(
            [
                f"Numbers 0 to {first - 1} are nodes of {parts[0].device.name}, "
                f"{first} to {job.nodes - 1} of {parts[1].device.name}."
            ]
        )
    lines += ["set -euo pipefail", *job.before()]
    if job.nodes > 1 or not job.is_bundled():
        lines += [
            "NODE_RANK=${1:-${NODE_RANK:-"
            + ("0" if job.nodes == 1 else "?give the number of this node")
            + "}}",
            "MASTER_ADDR=${2:-${MASTER_ADDR:-"
            + ("127.0.0.1" if job.nodes == 1 else "?give the first node")
            + "}}",
            f"MASTER_PORT=${{MASTER_PORT:-{PORT}}}",
        ]
        lines = [line.replace(":-?", ":?") for line in lines]
    return "\n".join([*lines, "", *job.node_lines("$NODE_RANK", "$MASTER_ADDR", "$MASTER_PORT")]) + "\n"

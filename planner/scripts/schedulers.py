"""The schedulers and launchers for which files can be written."""

from __future__ import annotations

from collections.abc import Callable

from costmodels.errors import InputError
from costmodels.spelling import nearest
from planner.scripts.dlc import dlc_script
from planner.scripts.job import JobScript
from planner.scripts.kubernetes import kubernetes_script
from planner.scripts.mpi import mpi_script
from planner.scripts.msrun import msrun_script
from planner.scripts.shell import shell_script
from planner.scripts.slurm import slurm_script

SCHEDULERS: dict[str, Callable[[JobScript], str]] = {
    "slurm": slurm_script,
    "kubernetes": kubernetes_script,
    "dlc": dlc_script,
    "mpi": mpi_script,
    "shell": shell_script,
    "msrun": msrun_script,
}
"""Writers of the file of a job, by the name of its scheduler."""


def check_scheduler(name: str) -> None:
    """Raise `InputError` for an unknown scheduler."""
    if name not in SCHEDULERS:
        raise InputError(f"--to {name}: {nearest(name, SCHEDULERS) or 'expected ' + ', '.join(SCHEDULERS)}")

"""Whether a cluster's scheduler, or mpirun, has started this command several times.

Each would take itself for the whole job: it would train alone, and write where the others write.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from costmodels.errors import InputError

SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "FLUX_JOB_SIZE", "JSM_NAMESPACE_SIZE")
"""Variables in which launchers of MPI state how many processes they have started: those of Open MPI, MPICH
and Intel MPI, MVAPICH, Flux, and IBM's jsrun."""

RANKS = ("PMIX_RANK", "PALS_RANKID")
"""Variables of launchers that state the number of a process only."""

FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""From here on Slurm's steps are none of srun: the batch script, and the shell that salloc opens."""


def check_one_task(environment: Mapping[str, str], joins: bool = False) -> None:
    """Raise `InputError` when this process is one of several that do not know of each other.

    Args:
        joins: the process joins others where `environment` says how, as a rank of torchrun does.
    """
    ranks, agents = _number(environment, "WORLD_SIZE"), _number(environment, "GROUP_WORLD_SIZE")
    given = "RANK" in environment and "MASTER_ADDR" in environment
    if given and ranks > 1 and not joins:
        raise InputError(
            f"WORLD_SIZE={ranks}, RANK={environment['RANK']}: this is one of several processes that were "
            "started for one job, and planner launch starts all ranks itself; run one, or start torchrun on "
            "every node with -m runtime.pretrain"
        )
    # Several torchruns that found each other are one job; one that found none may have lost the others,
    # but only if it was to look for them.
    if joins and given and (agents > 1 or (ranks > 1 and not agents) or _looked_for_others(environment)):
        return
    found = _tasks(environment)
    if found is not None:
        name, tasks = found
        raise InputError(
            f"{name}: the scheduler has started this {tasks} times, and each would train alone and write the "
            "same files; start torchrun once on each node (srun --ntasks-per-node=1 torchrun --nnodes ... -m "
            f"runtime.pretrain), run one task, or unset {name.partition('=')[0]} where this is the only one"
        )


def _tasks(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """The variable which says that there are several tasks, with its value, and how many."""
    for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"):
        tasks = _number(environment, name)
        if tasks > 1 and _is_slurm_step(environment):
            return f"{name}={tasks}", str(tasks)
        if name in environment and _is_slurm_step(environment):
            break  # That of the step is right; the other one may be the whole allocation's.
    for name in SIZES:
        tasks = _number(environment, name)
        if tasks > 1:
            return f"{name}={tasks}", str(tasks)
    for name in RANKS:
        rank = _number(environment, name)
        if rank > 0:
            return f"{name}={rank}", f"at least {rank + 1}"
    return None


def _is_slurm_step(environment: Mapping[str, str]) -> bool:
    """Whether srun started this: a batch script and the shell of salloc have variables of Slurm too.

    Slurm numbers the tasks of srun (SLURM_PROCID) and the batch script, which it marks as such and which
    belongs to no step; what salloc runs has no number, or that of a special step. Of `srun --pty bash`, with
    as many tasks as GPUs are to be had, the first task alone is a shell, and the others end at once.
    """
    if "SLURM_PROCID" not in environment:
        return False
    if "SLURM_PTY_PORT" in environment and environment["SLURM_PROCID"] == "0":
        return False
    for name in ("SLURM_STEP_ID", "SLURM_STEPID"):
        if name in environment:
            return _number(environment, name) < FIRST_SPECIAL_STEP
    return environment.get("ENVIRONMENT") != "BATCH"


def _looked_for_others(environment: Mapping[str, str]) -> bool:
    """Whether the torchrun of this rank was to meet others, though it found none, or no longer does.

    It has the id of a job then, which people choose; torchrun's own are "none", and random with --standalone.
    """
    name = environment.get("TORCHELASTIC_RUN_ID", "none")
    try:
        return uuid.UUID(name).version != 4
    except ValueError:
        return name not in ("", "none")


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else 0

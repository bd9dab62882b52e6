"""Processes of launchers of MPI: Open MPI, MPICH and Intel MPI, MVAPICH, Flux, PALS and IBM's jsrun."""

from __future__ import annotations

from typing import NamedTuple

from costmodels.errors import InputError
from runtime.world.task import LOOPBACK, Environment, Task, common_number, master_port, number


class Names(NamedTuple):
    """The variables of one launcher."""

    size: str
    rank: str
    local_size: str
    local_rank: str
    job: str
    """The variable whose value identifies the job."""


LAUNCHERS = (
    Names(
        *("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        *("OMPI_COMM_WORLD_LOCAL_RANK", "PMIX_NAMESPACE"),
    ),
    Names(
        *("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
        *("MV2_COMM_WORLD_LOCAL_RANK", "MPISPAWN_ID"),
    ),
    Names("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID", "HYDI_CONTROL_FD"),
    Names("PALS_SIZE", "PALS_RANKID", "PALS_LOCAL_SIZE", "PALS_LOCAL_RANKID", "PALS_APID"),
    Names("FLUX_JOB_SIZE", "FLUX_TASK_RANK", "FLUX_TASK_LOCAL_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_ID"),
    Names(
        *("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),
        *("JSM_NAMESPACE_LOCAL_RANK", "LSB_JOBID"),
    ),
)


def mpi_task(environment: Environment) -> Task | None:
    """This process's place among mpirun's processes; None if it is not one of them, or the only one.

    Also None if the launcher does not give the number of processes on this node; these cases are handled by
    Slurm's reader, as Slurm sets such variables too, or by `check_lonely`.
    """
    for names in LAUNCHERS:
        count = number(environment, names.size)
        if count is not None and count > 1 and {names.local_size, names.local_rank} <= environment.keys():
            return _task(environment, names, count)
    return None


def check_lonely(environment: Environment) -> None:
    """Raise `InputError` where a launcher has started several processes without giving their places."""
    why = "each would train alone; start torchrun on every node with -m runtime.pretrain"
    for names in LAUNCHERS:
        count = number(environment, names.size)
        if count is not None and count > 1:
            raise InputError(
                f"{names.size}={count}: the scheduler has started this {count} times, and without "
                f"{names.local_size} and {names.local_rank} nothing says how many on this node, so {why}"
            )
    rank = number(environment, "PMIX_RANK") or number(environment, "PALS_RANKID")
    if rank and not any(names.size in environment for names in LAUNCHERS):
        raise InputError(
            f"{'PMIX_RANK' if number(environment, 'PMIX_RANK') else 'PALS_RANKID'}={rank}: the scheduler has "
            f"started this at least {rank + 1} times, and nothing says how many times, so {why}"
        )


def _task(environment: Environment, names: Names, count: int) -> Task:
    source = f"{names.size}={count}"
    own = (names.rank, "PMIX_RANK") if names.size.startswith("OMPI") else (names.rank,)
    rank = common_number(environment, *own)
    if rank is None:
        raise InputError(
            f"{source} without {names.rank}: mpirun sets both; start this with it, or unset the first"
        )
    local_count, local_rank = number(environment, names.local_size), number(environment, names.local_rank)
    assert local_count is not None and local_rank is not None
    nodes = -(-count // max(1, local_count))
    address = environment.get("MASTER_ADDR") or (LOOPBACK if local_count == count else None)
    return Task(
        source=source,
        count=count,
        number=rank,
        local_count=local_count,
        local_number=local_rank,
        nodes=nodes,
        node=min(rank // max(1, local_count), nodes - 1),
        address=address,
        port=master_port(environment, f"mpi {environment.get(names.job, '')}"),
        how_to_say_address="give mpirun -x MASTER_ADDR=HOST, the host of rank 0",
    ).check()

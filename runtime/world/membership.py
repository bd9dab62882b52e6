"""The job of this process, from the variables of its launcher.

Each of several tasks that know of each other is a rank. Tasks that do not know of each other would each act
as the whole job, train alone, and write into the same files.
"""

from __future__ import annotations

import uuid

from costmodels.errors import InputError
from runtime.world.interface import interface_towards
from runtime.world.mpi import check_lonely, mpi_task
from runtime.world.pods import pod_task
from runtime.world.slurm import slurm_task
from runtime.world.task import LOOPBACK, Environment, Task, number

RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
"""Variables with the number of a process in its job; the first set one counts."""

START_ON_EVERY_NODE = (
    "start one task on each node: planner launch, or torchrun --nnodes ... -m runtime.pretrain"
)


def task_of(environment: Environment) -> Task | None:
    """This process's scheduler task or pod; None where it is the only one.

    Raises `InputError` where variables contradict each other.
    """
    # From the innermost launcher outwards: mpirun runs in a job of Slurm, and that may run in pods.
    task = mpi_task(environment) or slurm_task(environment)
    if task is None:
        check_lonely(environment)
        task = pod_task(environment)
    return task


def node_of(environment: Environment) -> Task | None:
    """This process's task, if it must start all ranks of its node among several; None for a single node.

    Raises `InputError` in a process that is a rank already, with several tasks on the same node, and where
    variables contradict each other.
    """
    if "LOCAL_RANK" in environment and (number(environment, "WORLD_SIZE") or 0) > 1:
        raise InputError(
            f"WORLD_SIZE={environment['WORLD_SIZE']}, LOCAL_RANK={environment['LOCAL_RANK']}: this is one of "
            "several ranks, and planner launch starts all ranks of a node itself; run one on each node, or "
            "start "
            "torchrun on every node with -m runtime.pretrain"
        )
    task = task_of(environment)
    if task is not None and task.local_count > 1:
        raise InputError(
            f"{task.source}: the scheduler has started this {task.local_count} times on this node, and "
            f"planner "
            "launch starts all ranks of a node itself; run one on each node (srun --ntasks-per-node=1, "
            "mpirun "
            "--map-by ppr:1:node), or start -m runtime.pretrain as every rank"
        )
    return task


def rank_variables(environment: Environment) -> dict[str, str]:
    """Variables with which this process joins the others like a torchrun rank, if it is not one already.

    Raises `InputError` where several processes do not know of each other, or contradict each other.
    """
    if "RANK" in environment and "MASTER_ADDR" in environment and _is_joined(environment):
        return {}
    task = task_of(environment)
    if task is None:
        return {}
    if "TORCHELASTIC_RUN_ID" in environment:
        raise InputError(
            f"{task.source}: the scheduler has started this {task.count} times, and each torchrun would "
            f"train alone "
            "and write the same files; give each --nnodes and --rdzv-endpoint, or start planner launch "
            "instead"
        )
    if task.local_count == 1 and (task.devices or 1) > 1:
        raise InputError(
            f"{task.source}: one task on a node of {task.devices} devices, which would train on the first "
            f"alone; " + START_ON_EVERY_NODE
        )
    address, port = task.endpoint()
    variables = {
        "RANK": str(task.number),
        "LOCAL_RANK": str(task.local_number),
        "WORLD_SIZE": str(task.count),
        "LOCAL_WORLD_SIZE": str(task.local_count),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
    return {**variables, **network_variables(environment, address)}


def network_variables(environment: Environment, address: str) -> dict[str, str]:
    """Variables with the interface towards `address` for gloo, which by default uses that of the host's
    name."""
    if "GLOO_SOCKET_IFNAME" in environment or address in (LOOPBACK, "localhost"):
        return {}
    name = interface_towards(address)
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name}


def _is_joined(environment: Environment) -> bool:
    """Return whether the ranks given by the environment variables of torchrun, or of the user, are the whole
    job.

    Several torchruns that found each other are one job. A torchrun that found no others may have lost them,
    but only if it had to look for others.
    """
    _check_ranks(environment)
    ranks, agents = (number(environment, name) or 0 for name in ("WORLD_SIZE", "GROUP_WORLD_SIZE"))
    if "LOCAL_RANK" not in environment and not agents:
        return False  # As one pod of several, say.
    return agents > 1 or (ranks > 1 and not agents) or _looked_for_others(environment)


def _check_ranks(environment: Environment) -> None:
    """Raise `InputError` where torchrun's variables contradict each other."""
    values = {}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        if environment.get(name) and not environment[name].isdecimal():
            raise InputError(f"{name}={environment[name]}: must be a whole number, as torchrun sets it")
        values[name] = number(environment, name)
    for name, of in (
        ("RANK", "WORLD_SIZE"),
        ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        ("LOCAL_WORLD_SIZE", "WORLD_SIZE"),
    ):
        value, size = values[name], values[of]
        if value is None or size is None:
            continue
        if value > size or (value == size and name != "LOCAL_WORLD_SIZE"):
            raise InputError(f"{name}={value} with {of}={size}: must be below it, as torchrun sets it")


def _looked_for_others(environment: Environment) -> bool:
    """Return whether this rank's torchrun had to find other torchruns.

    The job then has an id chosen by the user; torchrun's own ids are "none", or random with --standalone.
    """
    name = environment.get("TORCHELASTIC_RUN_ID", "none")
    try:
        return uuid.UUID(name).version != 4
    except ValueError:
        return name not in ("", "none")

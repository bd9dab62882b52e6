"""Pods of Kubernetes and nodes of PAI DLC: one process in each, which starts the ranks of its node.

Kubeflow's operator for PyTorchJob and PAI DLC set WORLD_SIZE to the number of pods and RANK to the pod's
number. torchrun's variables of these names have other meanings. Kubeflow's trainer, and its operator if
devices are given, set torchrun's PET_* variables. For a plain indexed Job, and for a JobSet, Kubernetes only
sets JOB_COMPLETION_INDEX; the manifest sets NNODES and MASTER_ADDR.

Sources: kubeflow/training-operator, pkg/controller.v1/pytorch/envvar.go and elastic.go; PAI, "Built-in
environment variables".
"""

from __future__ import annotations

from costmodels.errors import InputError
from runtime.world.task import LOOPBACK, Environment, Task, common_number, master_port, number

PER_NODE = ("PET_NPROC_PER_NODE", "PET_N_PROC_PER_NODE", "NPROC_PER_NODE")
"""Variables with the number of devices of a node, or a word such as `auto`."""

MASTER_PORT = 29500
"""The default port of torchrun."""


def pod_task(environment: Environment) -> Task | None:
    """This process's pod in a job of several pods; None for a single pod, or outside of pods."""
    if "LOCAL_RANK" in environment:
        return None  # A rank of torchrun.
    devices = _devices(environment)
    if "PET_NNODES" in environment and ":" not in environment["PET_NNODES"]:
        return _task(environment, "PET_NNODES", ("PET_NODE_RANK",), devices)
    if "WORLD_SIZE" in environment and "RANK" in environment:
        return _task(environment, "WORLD_SIZE", ("RANK",), devices)
    if "JOB_COMPLETION_INDEX" in environment:
        if "NNODES" not in environment:
            raise InputError(
                f"JOB_COMPLETION_INDEX={environment['JOB_COMPLETION_INDEX']}: this is a pod of an indexed "
                f"Job, and "
                "nothing says of how many, so each would train alone and write the same files; set NNODES "
                "to its "
                "completions and MASTER_ADDR to the name of the first pod (`planner script --to kubernetes`)"
            )
        return _task(environment, "NNODES", ("NODE_RANK",), devices)
    return None


def _task(environment: Environment, size: str, ranks: tuple[str, ...], devices: int | None) -> Task | None:
    count = number(environment, size)
    if count is None or count < 2:
        return None
    rank = common_number(environment, *ranks, "JOB_COMPLETION_INDEX")
    if rank is None:
        raise InputError(f"{size}={count} without {ranks[0]}: nothing says which of the nodes this is")
    if size != "WORLD_SIZE":
        _check_world(environment, size, count, devices)
    address = environment.get("PET_MASTER_ADDR") or environment.get("MASTER_ADDR")
    # Ranks that somebody starts by hand on one machine, as no pods are.
    here = size == "WORLD_SIZE" and address in (LOOPBACK, "localhost")
    port = number(environment, "PET_MASTER_PORT")
    return Task(
        source=f"{size}={count}",
        count=count,
        number=rank,
        local_count=count if here else 1,
        local_number=rank if here else 0,
        nodes=1 if here else count,
        node=0 if here else rank,
        address=address,
        port=(master_port(environment, "") if "MASTER_PORT" in environment else MASTER_PORT)
        if port is None
        else port,
        how_to_say_address="set MASTER_ADDR to the name of the first pod",
        devices=devices,
    ).check()


def _check_world(environment: Environment, size: str, count: int, devices: int | None) -> None:
    """Raise `InputError` where WORLD_SIZE is neither the number of nodes nor of devices."""
    world = number(environment, "WORLD_SIZE")
    if world is not None and world not in (count, count * (devices or 1)):
        raise InputError(
            f"WORLD_SIZE={world} beside {size}={count}"
            + (f" of {devices} devices" if devices else "")
            + ": it counts neither the nodes nor their devices; unset the one that is wrong"
        )


def _devices(environment: Environment) -> int | None:
    given = [name for name in PER_NODE if environment.get(name, "").isdecimal()]
    return common_number(environment, *given)

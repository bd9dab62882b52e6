"""A job on several nodes: the nodes, and the torchrun command for this node's ranks.

After the rendezvous the first rank plans and sends its plan to all others, so every node runs the same plan.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from costmodels.catalogue.local_machine import available_cores
from costmodels.errors import InputError
from runtime import entry
from runtime.job.job import Job
from runtime.launch.launch_options import LaunchOptions
from runtime.launch.local_plans import MOST_CPU_RANKS
from runtime.launch.torchrun import AGENT
from runtime.processes.start_variables import ELASTIC_VARIABLE, SUMMARY_VARIABLE
from runtime.world.interface import address_towards, is_this_machine
from runtime.world.membership import network_variables, node_of
from runtime.world.slurm import check_batch_script
from runtime.world.task import Task, common_number

DEFAULT_PORT = 29400
"""Torchrun's port of a rendezvous."""


@dataclass(frozen=True)
class Nodes:
    """The nodes of a job."""

    least: int
    most: int
    node: int | None
    """The number of this node; None where the rendezvous gives it one."""
    host: str
    port: int
    """Port of the rendezvous."""
    run_id: str
    source: str
    """The name of the launcher that gave these numbers."""
    devices: int | None = None
    """Devices of each node, if a variable gives them."""

    @property
    def is_elastic(self) -> bool:
        """True if nodes may come and go."""
        return self.least != self.most

    def describe(self) -> str:
        """The nodes in words, for a line."""
        count = f"{self.least} to {self.most} nodes" if self.is_elastic else f"{self.most} nodes"
        this = "" if self.node is None else f"node {self.node} of "
        return f"{this}{count} that meet at {self.host}:{self.port}"


def nodes_of_job(options: LaunchOptions, environment: Mapping[str, str]) -> Nodes | None:
    """The nodes from flags or environment variables; None for a single node.

    Raises `InputError` where these contradict each other, or are not enough to find the other nodes.
    """
    if options.nnodes is None:
        for name in ("node_rank", "rdzv_endpoint", "rdzv_id", "rdzv_conf"):
            if getattr(options, name) is not None:
                flag = f"--{name.replace('_', '-')} {getattr(options, name)}"
                raise InputError(f"{flag} needs --nnodes, the number of nodes, such as 2 or 1:4")
        elastic = environment.get("PET_NNODES", "")
        if ":" in elastic:
            return _of_flags(options, elastic, environment, None)
        task = node_of(environment)
        if task is None:
            check_batch_script(environment)
            return None
        return _of_task(task, environment)
    return _of_flags(options, options.nnodes, environment, node_of(environment))


def _of_task(task: Task, environment: Mapping[str, str]) -> Nodes:
    host, port = task.endpoint()
    return Nodes(
        *(task.nodes, task.nodes, task.node, host, port),
        run_id=environment.get("SLURM_JOB_ID") or "job",
        source=task.source,
        devices=task.devices,
    )


def _of_flags(
    options: LaunchOptions, nnodes: str, environment: Mapping[str, str], task: Task | None
) -> Nodes | None:
    source = f"--nnodes {nnodes}" if options.nnodes is not None else f"PET_NNODES={nnodes}"
    least, most = _range(nnodes, source)
    if task is not None and not least <= task.nodes <= most:
        raise InputError(
            f"{source}, but {task.source}: the scheduler has started {task.nodes} nodes; leave the flag out"
        )
    if most == 1:
        return None
    node = options.node_rank if options.node_rank is not None else None if task is None else task.node
    if task is not None and node != task.node:
        raise InputError(
            f"--node-rank {node}, but {task.source} and this is node {task.node}; leave the flag out"
        )
    if node is not None and node >= most:
        raise InputError(f"--node-rank {node}: nodes are numbered from 0 to {most - 1} with {source}")
    host, port = _endpoint(options, environment, task, source)
    return Nodes(
        *(least, most, node, host, port),
        run_id=options.rdzv_id or environment.get("PET_RDZV_ID") or environment.get("SLURM_JOB_ID") or "job",
        source=source,
        devices=None if task is None else task.devices,
    )


def _endpoint(
    options: LaunchOptions, environment: Mapping[str, str], task: Task | None, source: str
) -> tuple[str, int]:
    text = options.rdzv_endpoint or environment.get("PET_RDZV_ENDPOINT")
    said = "--rdzv-endpoint " if options.rdzv_endpoint else "PET_RDZV_ENDPOINT="
    if text is None:
        if task is not None:
            return task.endpoint()
        if environment.get("MASTER_ADDR"):
            return environment["MASTER_ADDR"], common_number(environment, "MASTER_PORT") or DEFAULT_PORT
        raise InputError(
            f"{source} needs --rdzv-endpoint HOST:PORT, the same on every node: the first node, where they "
            f"meet"
        )
    host, _, port = text.rpartition(":") if re.search(r":\d+$", text) else (text, "", str(DEFAULT_PORT))
    host = host.strip("[]")
    if not host or not 0 < int(port) < 1 << 16:
        raise InputError(f"{said}{text}: expected HOST:PORT, such as 10.0.0.1:{DEFAULT_PORT}")
    return host, int(port)


def _range(text: str, source: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", text.strip())
    least, most = (0, 0) if match is None else (int(match[1]), int(match[2] or match[1]))
    if not 1 <= least <= most:
        raise InputError(f"{source}: expected a number of nodes such as 2, or a range such as 1:4")
    return least, most


def ranks_of_node(nodes: Nodes, job: Job, planned: int | None) -> int:
    """Ranks to start on this node.

    Args:
        planned: ranks of the job's plan, if it has one.

    Raises:
        InputError: flags, variables and the devices of this node contradict each other.
    """
    cluster = job.cluster
    gpus = 0
    if cluster.device != "cpu":
        from runtime.job.devices import local_device_count

        gpus = local_device_count()
    total = cluster.world_size if cluster.world_size is not None else planned
    each = total // nodes.most if total is not None and not nodes.is_elastic else None
    ranks = cluster.local_world_size or each or nodes.devices or gpus
    ranks = ranks or min(MOST_CPU_RANKS, available_cores())
    if nodes.devices not in (None, ranks) and cluster.device != "cpu":
        raise InputError(
            f"{ranks} ranks on each node, but {nodes.source} has {nodes.devices} devices on each; leave "
            "--local-world-size and --world-size out"
        )
    if total is not None and not nodes.is_elastic and total != ranks * nodes.most:
        raise InputError(
            f"world size {total}: {nodes.most} nodes of {ranks} ranks are {nodes.most * ranks}; give a "
            f"multiple "
            "of the nodes, or --local-world-size"
        )
    if gpus and ranks > gpus:
        raise InputError(f"{ranks} ranks on a node of {gpus} GPUs; give --local-world-size {gpus}")
    return ranks


def node_command(
    nodes: Nodes, ranks: int, arguments: Sequence[str], restarts: int, rdzv_conf: str | None = None
) -> list[str]:
    """The torchrun that starts this node's ranks.

    If nodes have fixed numbers, ranks follow these. Otherwise, and if nodes may restart, nodes are numbered
    at the rendezvous.
    """
    words = [f"--nproc-per-node={ranks}", f"--max-restarts={restarts}", f"--rdzv-id={nodes.run_id}"]
    if nodes.is_elastic or nodes.node is None or restarts:
        hosts_it = is_this_machine(nodes.host)
        conf = f"is_host={str(hosts_it).lower()}" + (f",{rdzv_conf}" if rdzv_conf else "")
        words += [f"--nnodes={nodes.least}:{nodes.most}", "--rdzv-backend=c10d", f"--rdzv-conf={conf}"]
        words += [f"--rdzv-endpoint={nodes.host}:{nodes.port}"]
    else:
        words += [f"--nnodes={nodes.most}", f"--node-rank={nodes.node}"]
        words += [f"--master-addr={nodes.host}", f"--master-port={nodes.port}"]
        words += [f"--rdzv-conf={rdzv_conf}"] if rdzv_conf else []
    own = address_towards(nodes.host)
    if own is not None:
        words.append(f"--local-addr={own}")
    command = entry.command(AGENT, *words)
    return [*command, entry.ENTRY, "runtime.pretrain", *arguments]


def node_environment(nodes: Nodes, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables for the ranks of this node."""
    variables = network_variables(environment, nodes.host)
    # Else ranks that start again find in torchrun's store the addresses of those that have ended.
    variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    variables[SUMMARY_VARIABLE] = ""  # The first rank tells, on whichever node it is.
    if nodes.is_elastic:
        variables[ELASTIC_VARIABLE] = "1"
    return variables

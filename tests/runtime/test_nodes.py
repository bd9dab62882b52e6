"""Jobs on several nodes: which nodes flags and variables name, and the torchrun of each."""

from __future__ import annotations

import pytest

from costmodels.errors import InputError
from planner.options.cluster import ClusterOptions
from runtime.job.job import Job
from runtime.launch.launch_options import LaunchOptions
from runtime.launch.nodes import Nodes, node_command, node_environment, nodes_of_job, ranks_of_node
from tests.runtime.test_world import DLC, INDEXED, NODE

TWO = Nodes(2, 2, 1, "127.0.0.1", 29500, "job", "--nnodes 2")

CPU = ClusterOptions(device="cpu", local_world_size=2)


def test_the_nodes_of_flags_and_of_variables_are_found() -> None:
    assert nodes_of_job(LaunchOptions(), {}) is None
    slurm = nodes_of_job(LaunchOptions(), NODE)
    assert slurm is not None and (slurm.most, slurm.node, slurm.host, slurm.run_id) == (2, 1, "gpu07", "9")
    by_hand = LaunchOptions(nnodes="1:4", rdzv_endpoint="10.0.0.1:777", rdzv_id="mine")
    assert nodes_of_job(by_hand, {}) == Nodes(1, 4, None, "10.0.0.1", 777, "mine", "--nnodes 1:4")
    torch = {"PET_NNODES": "1:2", "PET_RDZV_ENDPOINT": "job-worker-0:23456", "PET_RDZV_BACKEND": "c10d"}
    elastic = nodes_of_job(LaunchOptions(), torch)
    assert elastic is not None and elastic.is_elastic and elastic.host == "job-worker-0"
    # Flags may say what variables leave open, and what they say too.
    assert nodes_of_job(LaunchOptions(nnodes="2"), DLC).devices == 8
    assert nodes_of_job(LaunchOptions(nnodes="1"), {}) is None


@pytest.mark.parametrize(
    ("options", "environment", "named"),
    [
        (LaunchOptions(nnodes="3"), DLC, "--nnodes 3, but WORLD_SIZE=2: the scheduler has started 2 nodes"),
        (LaunchOptions(nnodes="1"), NODE, "--nnodes 1, but SLURM_STEP_NUM_TASKS=2"),
        (LaunchOptions(nnodes="2", node_rank=0), INDEXED, "--node-rank 0, but NNODES=2 and this is node 1"),
        (LaunchOptions(nnodes="2"), {}, "--nnodes 2 needs --rdzv-endpoint HOST:PORT"),
        (LaunchOptions(nnodes="2", rdzv_endpoint="a:0"), {}, "--rdzv-endpoint a:0: expected HOST:PORT"),
        (LaunchOptions(nnodes="4:2"), {}, "--nnodes 4:2: expected a number of nodes"),
        (LaunchOptions(nnodes="2", node_rank=2, rdzv_endpoint="a"), {}, "numbered from 0 to 1"),
        (LaunchOptions(node_rank=0), {}, "--node-rank 0 needs --nnodes"),
    ],
)
def test_contradicting_nodes_are_refused(
    options: LaunchOptions, environment: dict[str, str], named: str
) -> None:
    with pytest.raises(InputError) as refusal:
        nodes_of_job(options, environment)
    assert named in str(refusal.value)


def test_each_node_starts_its_share_of_the_ranks() -> None:
    assert ranks_of_node(TWO, Job(cluster=CPU), None) == 2
    assert ranks_of_node(TWO, Job(cluster=ClusterOptions(device="cpu")), 6) == 3
    with pytest.raises(InputError, match="world size 5: 2 nodes of 2 ranks are 4"):
        ranks_of_node(TWO, Job(cluster=CPU), 5)


def test_the_command_of_a_node_is_torchruns() -> None:
    fixed = node_command(TWO, 2, ["--lr", "1e-3"], 0)
    for word in ("--nnodes=2", "--node-rank=1", "--master-port=29500", "--max-restarts=0", "--rdzv-id=job"):
        assert word in fixed
    elastic = node_command(Nodes(1, 2, None, "127.0.0.1", 29400, "job", ""), 2, [], 3, "last_call_timeout=5")
    assert "--nnodes=1:2" in elastic and "--rdzv-endpoint=127.0.0.1:29400" in elastic
    assert "--rdzv-conf=is_host=true,last_call_timeout=5" in elastic and "--local-addr=127.0.0.1" in elastic
    away = node_command(Nodes(1, 2, None, "192.0.2.77", 29400, "job", ""), 2, [], 0)
    assert "--rdzv-conf=is_host=false" in away
    variables = node_environment(Nodes(1, 2, None, "127.0.0.1", 1, "job", ""), {})
    assert variables["PLANNER_ELASTIC"] == "1" and "GLOO_SOCKET_IFNAME" not in variables

"""The job of a process, by the variables that launchers and schedulers set."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.errors import InputError
from runtime.world import interface
from runtime.world.membership import network_variables, node_of, rank_variables, task_of
from runtime.world.slurm import check_batch_script, host_names

STEP = {"SLURM_JOB_ID": "9", "SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
STEP |= {
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
STEP |= {"SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_NTASKS": "4"}
"""Variables that srun sets for the second of four tasks on two nodes."""

NODE = STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_NODEID": "1"}
NODE |= {"SLURM_LOCALID": "0", "SLURM_GPUS_ON_NODE": "8"}
"""The second of two tasks, each with a node of its own."""

MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
MPI |= {"OMPI_COMM_WORLD_LOCAL_RANK": "2", "PMIX_RANK": "2", "PMIX_NAMESPACE": "1360855041"}

HYDRA = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}

DLC = {
    "WORLD_SIZE": "2",
    "RANK": "1",
    "MASTER_ADDR": "dlc-master-0",
    "MASTER_PORT": "23456",
    "NPROC_PER_NODE": "8",
}

PYTORCHJOB = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "8",
    "PET_MASTER_ADDR": "job-master-0",
}
PYTORCHJOB |= {"PET_MASTER_PORT": "23456", "WORLD_SIZE": "16", "RANK": "1", "MASTER_ADDR": "job-master-0"}

INDEXED = {"JOB_COMPLETION_INDEX": "1", "NNODES": "2", "MASTER_ADDR": "job-0.job"}
"""Variables of a plain indexed Job, and of a JobSet."""

AGENT = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
"""Variables that torchrun sets, but for numbers of ranks."""


@pytest.mark.parametrize(
    ("environment", "rank", "local", "address"),
    [
        (STEP, ("1", "4"), ("1", "2"), "gpu07"),
        (STEP | {"MASTER_ADDR": "10.0.0.7"}, ("1", "4"), ("1", "2"), "10.0.0.7"),
        (STEP | {"PMIX_RANK": "1"}, ("1", "4"), ("1", "2"), "gpu07"),  # srun --mpi=pmix
        (STEP | {"PMI_SIZE": "4", "PMI_RANK": "1"}, ("1", "4"), ("1", "2"), "gpu07"),  # --mpi=pmi2
        (MPI, ("2", "4"), ("2", "4"), "127.0.0.1"),
        # mpirun in a job of Slurm, whose daemon is a task of srun.
        (STEP | {"SLURM_PROCID": "0"} | MPI, ("2", "4"), ("2", "4"), "127.0.0.1"),
        (MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "3", "MASTER_ADDR": "a"}, ("2", "4"), ("2", "3"), "a"),
        (HYDRA, ("1", "2"), ("1", "2"), "127.0.0.1"),
        (INDEXED, ("1", "2"), ("0", "1"), "job-0.job"),
        # By hand, one rank on each of two machines, and two on this one.
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, ("1", "2"), ("0", "1"), "a"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, ("1", "2"), ("1", "2"), "localhost"),
    ],
)
def test_tasks_that_know_of_each_other_are_ranks_of_one_job(
    environment: dict[str, str], rank: tuple[str, str], local: tuple[str, str], address: str
) -> None:
    told = rank_variables(environment)
    assert (told["RANK"], told["WORLD_SIZE"]) == rank
    assert (told["LOCAL_RANK"], told["LOCAL_WORLD_SIZE"]) == local
    assert told["MASTER_ADDR"] == address
    # All tasks meet at the same port without asking each other.
    of_another = (
        environment | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1"} if "SLURM_PROCID" in environment else {}
    )
    assert told["MASTER_PORT"] == rank_variables(of_another or environment)["MASTER_PORT"]


@pytest.mark.parametrize(
    ("environment", "node", "devices", "endpoint"),
    [
        (NODE, (1, 2), 8, ("gpu07", None)),
        (DLC, (1, 2), 8, ("dlc-master-0", 23456)),
        (PYTORCHJOB, (1, 2), 8, ("job-master-0", 23456)),
        (INDEXED, (1, 2), None, ("job-0.job", 29500)),
        (
            MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "MASTER_ADDR": "a"},
            (2, 4),
            None,
            ("a", None),
        ),
    ],
    ids=["slurm", "dlc", "pytorchjob", "indexed job", "mpi"],
)
def test_one_task_a_node_starts_the_ranks_of_its_node(
    environment: dict[str, str], node: tuple[int, int], devices: int | None, endpoint: tuple[str, int | None]
) -> None:
    task = node_of(environment)
    assert task is not None and (task.node, task.nodes) == node and task.devices == devices
    address, port = task.endpoint()
    assert address == endpoint[0] and endpoint[1] in (None, port)


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        (STEP | {"SLURM_PROCID": "4"}, "task number 4 of 4"),
        (STEP | {"SLURM_NODEID": "2"}, "node number 2 of 2"),
        (STEP | {"SLURM_STEP_NODELIST": "gpu[07-09]"}, "its list of nodes names 3"),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "2,1"}, "is 3 on 2"),
        (STEP | {"PMIX_RANK": "2"}, "SLURM_PROCID=1, PMIX_RANK=2"),
        (STEP | {"PMI_SIZE": "3", "PMI_RANK": "1"}, "PMI_SIZE=3, but Slurm has started 4"),
        (MPI | {"PMIX_RANK": "1"}, "OMPI_COMM_WORLD_RANK=2, PMIX_RANK=1"),
        (MPI | {"OMPI_COMM_WORLD_RANK": "4", "PMIX_RANK": "4"}, "task number 4 of 4"),
        (MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, "give mpirun -x MASTER_ADDR=HOST"),
        (MPI | {"OMPI_COMM_WORLD_SIZE": "four"}, "OMPI_COMM_WORLD_SIZE=four: must be a whole number"),
        ({"PMI_SIZE": "8", "PMI_RANK": "0"}, "PMI_SIZE=8: the scheduler has started this 8 times"),
        ({"PMIX_RANK": "3"}, "PMIX_RANK=3: the scheduler has started this at least 4 times"),
        (DLC, "one task on a node of 8 devices"),
        (DLC | {"RANK": "2"}, "RANK=2 with WORLD_SIZE=2"),
        (PYTORCHJOB | {"WORLD_SIZE": "12"}, "WORLD_SIZE=12 beside PET_NNODES=2 of 8 devices"),
        (INDEXED | {"NODE_RANK": "0"}, "NODE_RANK=0, JOB_COMPLETION_INDEX=1"),
        ({"JOB_COMPLETION_INDEX": "1"}, "JOB_COMPLETION_INDEX=1: this is a pod of an indexed Job"),
        (AGENT | {"WORLD_SIZE": "2", "RANK": "2"}, "RANK=2 with WORLD_SIZE=2: must be below it"),
        (AGENT | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE=4 with WORLD_SIZE=2"),
    ],
)
def test_what_contradicts_itself_is_refused(environment: dict[str, str], named: str) -> None:
    with pytest.raises(InputError) as refusal:
        rank_variables(environment)
    assert named in str(refusal.value)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_JOB_ID": "9", "SLURM_NTASKS": "2"},  # The shell of salloc.
        {"SLURM_JOB_ID": "9", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "ENVIRONMENT": "BATCH"},
        STEP | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "2"},  # The same as a step.
        STEP | {"SLURM_STEP_NUM_TASKS": "1"},
        STEP | {"SLURM_PROCID": "0", "SLURM_PTY_PORT": "7"},  # srun --pty bash.
        {"OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"},
        {
            "WORLD_SIZE": "1",
            "RANK": "0",
            "MASTER_ADDR": "localhost",
            "NPROC_PER_NODE": "8",
        },  # One node of DLC.
        AGENT | {"WORLD_SIZE": "1"},
    ],
)
def test_a_task_of_its_own_is_the_whole_job(environment: dict[str, str]) -> None:
    assert task_of(environment) is None and rank_variables(environment) == {} and node_of(environment) is None


@pytest.mark.parametrize(
    "ranks",
    [
        {"WORLD_SIZE": "16", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"},
        # The last of several nodes: the others were lost.
        {"WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "job-9"},
        {"WORLD_SIZE": "2"},
    ],
)
def test_ranks_of_torchruns_that_found_each_other_are_one_job(ranks: dict[str, str]) -> None:
    assert rank_variables(NODE | AGENT | ranks) == {}


@pytest.mark.parametrize("run", ["none", "0b3e6f6a-53a8-4d3b-8e0e-3c7f0f3c9d11"])
def test_several_torchruns_that_do_not_know_of_each_other_are_refused(run: str) -> None:
    alone = {"WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": run}
    with pytest.raises(InputError, match=r"SLURM_STEP_NUM_TASKS=2: .* each torchrun would train alone"):
        rank_variables(NODE | AGENT | alone)


def test_a_launcher_is_no_rank_and_has_its_node_for_itself() -> None:
    with pytest.raises(InputError, match="WORLD_SIZE=2, LOCAL_RANK=0: this is one of several ranks"):
        node_of(AGENT | {"WORLD_SIZE": "2"})
    for several in (STEP, MPI, HYDRA):
        with pytest.raises(InputError, match=r"has started this . times on this node"):
            node_of(several)


def test_a_batch_script_of_several_nodes_needs_srun() -> None:
    batch = {"SLURM_JOB_ID": "9", "SLURM_PROCID": "0", "ENVIRONMENT": "BATCH", "SLURM_JOB_NUM_NODES": "2"}
    with pytest.raises(
        InputError, match="SLURM_JOB_NUM_NODES=2: the batch script runs on the first node only"
    ):
        check_batch_script(batch)
    check_batch_script(batch | {"SLURM_JOB_NUM_NODES": "1"})
    check_batch_script(NODE)


def test_lists_of_hosts_are_read() -> None:
    assert host_names("gpu[01-03,7],login") == ["gpu01", "gpu02", "gpu03", "gpu7", "login"]
    assert host_names("r[1-2]n[0-1]x") == ["r1n0x", "r1n1x", "r2n0x", "r2n1x"]
    assert host_names("") == []
    with pytest.raises(InputError, match="are no numbers"):
        host_names("gpu[a-b]")


@given(st.integers(0, 90), st.integers(1, 20), st.integers(1, 4))
def test_a_range_of_hosts_has_every_host_once(first: int, count: int, digits: int) -> None:
    low, high = str(first).zfill(digits), str(first + count - 1).zfill(digits)
    names = host_names(f"n[{low}-{high}]")
    assert len(set(names)) == len(names) == count and names[0] == f"n{low}"


def test_gloo_is_told_the_interface_of_the_first_task(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interface.is_this_machine("127.0.0.1") and not interface.is_this_machine("192.0.2.77")
    assert network_variables({}, "127.0.0.1") == {}
    assert network_variables({"GLOO_SOCKET_IFNAME": "ib0"}, "10.0.0.1") == {}
    monkeypatch.setattr("runtime.world.membership.interface_towards", lambda host: "ib1")
    assert network_variables({}, "10.0.0.1") == {"GLOO_SOCKET_IFNAME": "ib1"}

"""`planner launch` under each launcher and scheduler: one job, or a refusal before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from cli import proof
from costmodels import Layout
from costmodels.catalogue import load_model
from planner import search
from runtime import checkpoint
from runtime.dryrun.memory_trace import CATEGORIES, MemoryTrace, Moment
from tests.runtime.test_world import DLC, HYDRA, INDEXED, MPI, NODE, PYTORCHJOB, STEP
from tests.support.commands import Command
from tests.support.jobs import LAYOUT, TINY

JOB = (*TINY, *LAYOUT[:4], "--local-world-size", "2", "--save", "saved")

ONE_EACH = {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "MASTER_ADDR": "node-a"}


def without_devices(environment: dict[str, str]) -> dict[str, str]:
    """The environment of a node whose devices nobody counts."""
    return {name: value for name, value in environment.items() if "NPROC" not in name}


@pytest.mark.parametrize(
    ("environment", "words", "expected"),
    [
        (NODE, (), ("--nnodes=2", "--node-rank=1", "--master-addr=gpu07", "--rdzv-id=9")),
        (MPI | ONE_EACH, (), ("--nnodes=4", "--node-rank=2", "--master-addr=node-a")),
        (DLC, (), ("--nnodes=2", "--node-rank=1", "--master-addr=dlc-master-0", "--master-port=23456")),
        (PYTORCHJOB | {"WORLD_SIZE": "2"}, (), ("--nnodes=2", "--node-rank=1", "--master-addr=job-master-0")),
        (INDEXED, (), ("--nnodes=2", "--node-rank=1", "--master-addr=job-0.job", "--master-port=29500")),
        (
            {"PET_NNODES": "1:4", "PET_RDZV_ENDPOINT": "127.0.0.1:7000"},
            ("--max-restarts", "3"),
            ("--nnodes=1:4", "--rdzv-endpoint=127.0.0.1:7000", "--max-restarts=3", "--rdzv-backend=c10d"),
        ),
        (
            {},
            ("--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "127.0.0.1:7000"),
            ("--nnodes=2", "--node-rank=0", "--master-addr=127.0.0.1", "--master-port=7000"),
        ),
    ],
    ids=["slurm", "mpirun", "dlc", "pytorchjob", "indexed job", "elastic pod", "by hand"],
)
def test_every_node_is_started_as_a_part_of_one_job(
    planner_command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    words: tuple[str, ...],
    expected: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in without_devices(environment).items():
        monkeypatch.setenv(name, value)
    code, out, err = planner_command("launch", *JOB, *words, "--print-command")
    assert (code, err) == (0, "")
    assert set(expected) <= set(out.split(" -m runtime.pretrain ")[0].split())
    assert "--nproc-per-node=2" in out and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("environment", "words", "named"),
    [
        (NODE | {"SLURM_PROCID": "2"}, (), "task number 2 of 2"),
        (STEP, (), "SLURM_STEP_NUM_TASKS=4: the scheduler has started this 2 times on this node"),
        (
            {"SLURM_JOB_ID": "9", "SLURM_PROCID": "0", "ENVIRONMENT": "BATCH", "SLURM_JOB_NUM_NODES": "2"},
            (),
            "SLURM_JOB_NUM_NODES=2: the batch script runs on the first node only",
        ),
        (MPI | ONE_EACH | {"PMIX_RANK": "3"}, (), "OMPI_COMM_WORLD_RANK=2, PMIX_RANK=3"),
        (DLC | {"RANK": "2"}, (), "task number 2 of 2"),
        (DLC, ("--nnodes", "4"), "--nnodes 4, but WORLD_SIZE=2"),
        (PYTORCHJOB | {"WORLD_SIZE": "12"}, (), "WORLD_SIZE=12 beside PET_NNODES=2 of 8 devices"),
        ({"JOB_COMPLETION_INDEX": "0"}, (), "nothing says of how many, so each would train alone"),
        (INDEXED | {"NODE_RANK": "0"}, (), "NODE_RANK=0, JOB_COMPLETION_INDEX=1"),
        (HYDRA | {"PMI_RANK": "2"}, (), "task number 2 of 2"),
        ({"PET_NNODES": "1:4"}, (), "PET_NNODES=1:4 needs --rdzv-endpoint HOST:PORT"),
        ({"PET_NNODES": "1:4", "PET_RDZV_ENDPOINT": ":1"}, (), "PET_RDZV_ENDPOINT=:1: expected HOST:PORT"),
        ({"PET_NNODES": "4:1", "PET_RDZV_ENDPOINT": "a"}, (), "PET_NNODES=4:1: expected a number of nodes"),
        (
            {},
            ("--nnodes", "2", "--node-rank", "2", "--rdzv-endpoint", "a"),
            "--node-rank 2: nodes are numbered from 0 to 1 with --nnodes 2",
        ),
        ({}, ("--nnodes", "2"), "--nnodes 2 needs --rdzv-endpoint HOST:PORT"),
        ({}, ("--nnodes", "2", "--rdzv-endpoint", "a", "--world-size", "5"), "world size 5: 2 nodes of 2"),
        (
            {},
            ("--nnodes", "2", "--rdzv-endpoint", "a", "--try", "2"),
            "--try 2: plans are tried on one machine",
        ),
        (
            {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"},
            (),
            "WORLD_SIZE=2, LOCAL_RANK=1: this is one of several ranks",
        ),
    ],
)
def test_what_contradicts_itself_is_refused_before_anything_is_written(
    planner_command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    words: tuple[str, ...],
    named: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    code, out, err = planner_command("launch", *JOB, *words)
    assert (code, out) == (2, "") and err.count("\n") == 1 and named in err
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_slurm_starts_again_goes_on(
    planner_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = (
        "launch",
        "--model",
        "gpt2-nano",
        *LAYOUT,
        "--world-size",
        "2",
        "--save",
        "saved",
        "--print-command",
    )
    alone = STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_PROCID": "0"}
    for name, value in alone.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    code, out, _ = planner_command(*words)
    assert code == 0 and "--load" not in out  # The job was ended before it had saved.
    checkpoint.partial_folder(Path("saved"), 5).mkdir(parents=True)
    checkpoint.publish(
        "saved", 5, {"iteration": 5, "model": load_model("gpt2-nano").model_dump(mode="json")}, {}
    )
    for load in ((), ("--load", "base", "--finetune")):
        code, out, err = planner_command(*words, *load)
        assert code == 0, err
        assert "--load saved" in out and "--finetune" not in out
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    assert "--load" not in planner_command(*words)[1]


def test_the_memory_of_a_plan_is_proven_on_every_node_before_ranks_start(
    planner_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = search("gpt2-124m", world_size=4, device="h100", local_world_size=2, global_batch_size=16).plan(0)
    plan.save("plan.json")
    asked = []

    def traced(spec: object, layout: Layout, ranks: Sequence[int], **_: object) -> list[MemoryTrace]:
        asked.append(layout)
        held = dict.fromkeys(CATEGORIES, 0) | {"activations": 90 << 30}
        moment = Moment("backward", held, held, {})
        return [MemoryTrace(rank, stage, "cuda", True, moment, {}, 0, 1) for stage, rank in enumerate(ranks)]

    monkeypatch.setattr(proof, "trace_ranks", traced)
    nodes = ("--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "127.0.0.1:7000")
    words = ("launch", "--plan", "plan.json", "--local-world-size", "2", *nodes, "--dry-run")
    code, _, err = planner_command(*words, "--print-command")
    assert code == 0 and not asked, err
    code, _, err = planner_command(*words)
    assert code == 2 and "of 79.10 GiB by its dry run" in err
    assert asked == [plan.layout]
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_a_dry_run_on_several_nodes_needs_a_plan(
    planner_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in without_devices(NODE).items():
        monkeypatch.setenv(name, value)
    code, _, err = planner_command("launch", *JOB, "--dry-run")
    assert code == 2 and "--dry-run on several nodes needs --plan" in err
    assert list(tmp_path.iterdir()) == []

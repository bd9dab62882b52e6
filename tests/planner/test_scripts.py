"""Files that start a plan: what they say, and the one job that each starts."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import planner
from costmodels.errors import InputError
from planner.formats.script_arguments import SCRIPT_STARTS
from planner.formats.targets import export as export_plan
from planner.options.flags import arguments
from planner.plan import Plan
from planner.scripts.job import JobScript
from planner.scripts.schedulers import SCHEDULERS
from runtime.launch.launch_options import LaunchOptions
from runtime.launch.nodes import nodes_of_job
from runtime.processes.start_variables import RESTARTS_VARIABLES
from runtime.settings.training_options import OutputOptions, TrainingOptions
from tests.planner.test_exports import plans
from tests.support.commands import Command
from tests.support.kubernetes import faults, schema

FLAGS = [*arguments(TrainingOptions(train_iters=7)), *arguments(OutputOptions(save="my checkpoints"))]

STUB = """#!/bin/bash
printf '%s\\0' "$(basename "$0")" "$@" >> "$CALLS"
printf '\\n' >> "$CALLS"
env | grep -E '^(MASTER_|NODE_RANK)' >> "$CALLS.env" || true
"""
"""Stands for a command: notes how it was called."""


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planner.suggest("llama2-7b", world_size=16, device="a100-80g", global_batch_size=32)


def script_of(plan: Plan, to: str, **values: object) -> str:
    job = JobScript(plan=plan, plan_file="my plan.json", arguments=FLAGS, **values)  # type: ignore[arg-type]
    return SCHEDULERS[to](job)


def called(folder: Path, text: str, *words: str, **variables: str) -> list[list[str]]:
    """Calls by which a script starts ranks, noted by programs that stand in for the launchers."""
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    for name in ("planner", "srun", "mpirun", "msrun", "torchrun"):
        (commands / name).write_text(STUB)
        (commands / name).chmod(0o755)
    (commands / "scontrol").write_text("#!/bin/bash\nprintf 'gpu07\\ngpu08\\n'\n")
    (commands / "scontrol").chmod(0o755)
    file, calls = folder / "job.sh", folder / "calls"
    file.write_text(text)
    calls.unlink(missing_ok=True)
    path = f"{commands}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(file), *words],
        env={"PATH": path, "CALLS": str(calls), **variables},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [line.split("\0")[:-1] for line in calls.read_text().splitlines()]


def test_slurm_starts_one_task_on_each_node(plan: Plan, tmp_path: Path) -> None:
    text = script_of(plan, "slurm", partition="gpus", time_limit="1:00:00", setup="set -o pipefail")
    for line in ("--nodes=2", "--ntasks-per-node=1", "--gres=gpu:8", "--partition=gpus", "--signal=TERM@180"):
        assert f"#SBATCH {line}\n" in text
    [call] = called(tmp_path, text, SLURM_JOB_NODELIST="gpu[07-08]", SLURM_JOB_ID="1042")
    command = ["planner", "launch", "--plan", "my plan.json", *FLAGS]
    assert call[0] == "srun" and "--ntasks-per-node=1" in call and call[-len(command) :] == command
    assert {"MASTER_ADDR=gpu07", "MASTER_PORT=29442"} <= set((tmp_path / "calls.env").read_text().split())


def test_shell_starts_the_node_whose_number_it_is_given(plan: Plan, tmp_path: Path) -> None:
    text = script_of(plan, "shell")
    [call] = called(tmp_path, text, "1", "10.0.0.1")
    flags = dict(zip(call[2::2], call[3::2], strict=True))
    options = LaunchOptions(
        nnodes=flags["--nnodes"],
        node_rank=int(flags["--node-rank"]),
        rdzv_endpoint=flags["--rdzv-endpoint"],
    )
    nodes = nodes_of_job(options, {})
    assert nodes is not None and (nodes.most, nodes.node, nodes.host) == (2, 1, "10.0.0.1")
    assert flags["--plan"] == "my plan.json" and flags["--save"] == "my checkpoints"


def test_mpirun_starts_every_rank(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# ours\nnode-a slots=8\nnode-b slots=8\n")
    [call] = called(tmp_path, script_of(plan, "mpi"), "--allow-run-as-root", HOSTFILE="hosts")
    assert call[: call.index("--bind-to")] == ["mpirun", "-np", "16", "--map-by", "ppr:8:node"]
    assert call[call.index("--allow-run-as-root") + 1 :][:3] == ["python", "-m", "runtime.pretrain"]
    assert "MASTER_ADDR=node-a" in (tmp_path / "calls.env").read_text()


def test_dlc_gives_every_node_the_same_command(plan: Plan) -> None:
    lines = [line for line in script_of(plan, "dlc").splitlines() if not line.startswith("#")]
    values = dict(line.split("=", 1) for line in lines)
    assert values["workers"] == "2" and values["worker_gpu"] == "8"
    assert shlex.split(values["command"]) == ["planner", "launch", "--plan", "my plan.json", *FLAGS]


def test_msrun_starts_a_program_of_mindspore(tmp_path: Path) -> None:
    ascend = planner.suggest("llama2-7b", world_size=16, device="ascend-910b3", global_batch_size=32)
    with pytest.raises(InputError, match=r"engine mindspeed, .* name the file that trains with --program"):
        script_of(ascend, "slurm")
    text = script_of(ascend, "msrun", program="run_mindformer.py --config pretrain.yaml")
    [call] = called(tmp_path, text, "1", "10.0.0.1")
    assert {"--worker_num=16", "--local_worker_num=8", "--node_rank=1", "--master_addr=10.0.0.1"} <= set(call)
    assert call[call.index("run_mindformer.py") + 1 :] == ["--config", "pretrain.yaml", *FLAGS]


def test_programs_of_other_engines_get_the_plan_as_flags(tmp_path: Path) -> None:
    megatron = planner.suggest(
        "llama2-7b", engine="megatron", world_size=16, device="a100-80g", global_batch_size=32
    )
    [call] = called(tmp_path, script_of(megatron, "shell", program="pretrain_gpt.py"), "0", "a")
    assert call[:3] == ["torchrun", "--nnodes", "2"]
    at = call.index("--tensor-model-parallel-size")
    assert call[at + 1] == str(megatron.layout.tensor_parallel) and call.index("pretrain_gpt.py") < at


@pytest.fixture(scope="module")
def megatron() -> Plan:
    """A plan for Megatron-LM."""
    return planner.suggest(
        "llama2-7b", engine="megatron", world_size=16, device="a100-80g", global_batch_size=32
    )


SAVING = ["--train-iters", "7", "--save", "my checkpoints", "--data-path", "corpus"]


@pytest.mark.parametrize("to", ["slurm", "shell", "kubernetes", "dlc"])
def test_megatrons_jobs_save_and_go_on_as_their_files_promise(
    megatron: Plan, tmp_path: Path, to: str
) -> None:
    job = JobScript(plan=megatron, plan_file="p", arguments=SAVING, program="pretrain_gpt.py")
    text = SCHEDULERS[to](job)
    assert to == "shell" or "saves after the running step" in text
    if to == "kubernetes":
        document = list(yaml.safe_load_all(text))[-1]
        spec = document["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        text = spec["containers"][0]["command"][2]
    elif to == "dlc":
        text = next(line.partition("=")[2] for line in text.splitlines() if line.startswith("command="))
    stub = tmp_path / "bin"
    stub.mkdir()
    (stub / "srun").write_text('#!/bin/bash\nexec "${@: -3}"\n')
    (stub / "srun").chmod(0o755)
    (stub / "python").write_text(STUB)
    (stub / "python").chmod(0o755)
    (stub / "torchrun").write_text(STUB.replace("MASTER_", "CUDA_|MASTER_"))
    (stub / "torchrun").chmod(0o755)
    (stub / "python").write_text(STUB.replace("MASTER_", "CUDA_|RANK|LOCAL_|WORLD_|MASTER_"))
    (stub / "scontrol").write_text("#!/bin/bash\necho gpu07\n")
    (stub / "scontrol").chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", text],
        env={
            "PATH": f"{stub}:{os.environ['PATH']}",
            "CALLS": str(tmp_path / "calls"),
            "SLURM_JOB_NODELIST": "gpu[07-08]",
            "SLURM_JOB_ID": "1",
            "SLURM_PROCID": "9",
            "SLURM_LOCALID": "1",
            "NODE_RANK": "0",
            "RANK": "0",
            "MASTER_ADDR": "a",
            "MASTER_PORT": "1",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    words = (tmp_path / "calls").read_text().split("\0")
    assert words[words.index("--save") + 1] == words[words.index("--load") + 1] == "my checkpoints"
    assert "--exit-signal-handler" in words and "--save-interval" in words
    assert {"--overlap-grad-reduce", "--overlap-param-gather"} <= set(words)
    variables = (tmp_path / "calls.env").read_text().split("\n")
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in variables
    if to == "slurm":  # A task for each rank: torchrun would end one that saves for more than 30 s.
        assert {"RANK=9", "LOCAL_RANK=1", "WORLD_SIZE=16", "LOCAL_WORLD_SIZE=8"} <= set(variables)


def test_nothing_is_promised_of_jobs_that_do_not_save(plan: Plan, megatron: Plan) -> None:
    unsaved = SCHEDULERS["slurm"](JobScript(plan=plan, plan_file="p"))
    assert "nothing is kept" in unsaved and "from the beginning" in unsaved
    assert "saves after" in SCHEDULERS["slurm"](JobScript(plan=plan, plan_file="p", arguments=FLAGS))
    base = [*SAVING, "--load", "base"]
    other = JobScript(plan=megatron, plan_file="p", arguments=base, program="pretrain_gpt.py")
    assert "saves after" not in SCHEDULERS["slurm"](other)
    assert any(note.startswith("--load base: ") for note in other.notes)
    torchtitan = planner.suggest(
        "llama3-8b", engine="torchtitan", world_size=16, device="h100", global_batch_size=32
    )
    theirs = JobScript(plan=torchtitan, plan_file="p", arguments=SAVING, program="train.py")
    text = SCHEDULERS["slurm"](theirs)
    assert "train.py decides whether" in text and "--exit-signal-handler" not in text


@given(data=st.data())
@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_a_check_has_no_complaint_of_a_generated_script(data: st.DataObject, tmp_path: Path) -> None:
    plan = data.draw(plans("megatron"))
    export = export_plan(plan, to="megatron")
    if export.inexpressible:
        return
    job = JobScript(plan=plan, plan_file="p", arguments=SAVING, program="pretrain_gpt.py")
    for to in ("slurm", "shell"):
        file = tmp_path / f"job.{to}"
        file.write_text(SCHEDULERS[to](job))
        found = planner.check([file], device="a100-80g")
        assert found.legal and found.problems == (), found.problems
        assert found.plan is not None and found.plan.layout == plan.layout


def test_a_check_proposes_nothing_that_a_script_has(tmp_path: Path) -> None:
    """`--use-distributed-optimizer` has no effect where a model has one replica, and still stands there."""
    flags = (
        "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 "
        "--max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 64 --bf16 "
        "--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 2 "
        "--use-distributed-optimizer"
    )
    file = tmp_path / "train.sh"
    file.write_text(f"torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py {flags}\n")
    found = planner.check([file], device="h100")
    assert found.best is not None and found.best.layout.zero_stage == 1
    assert "--use-distributed-optimizer" not in {change.flag for change in found.changes}


@pytest.mark.parametrize("engine", ["deepspeed", "nanotron"])
def test_programs_that_read_a_file_get_one(tmp_path: Path, engine: str) -> None:
    plan = planner.suggest("llama2-7b", engine=engine, world_size=8, device="h100", global_batch_size=32)
    [call] = called(tmp_path, script_of(plan, "shell", program="train.py"), "0", "a")
    start = SCRIPT_STARTS[engine]
    file = tmp_path / call[call.index(start.file_flag) + 1]
    assert file.read_text() == export_plan(plan, to=start.target).text


@pytest.mark.parametrize(
    ("kind", "variables"),
    [
        ("jobset", {"JOB_COMPLETION_INDEX": "1"}),
        ("job", {"JOB_COMPLETION_INDEX": "1"}),
        # Variables that the operator of PyTorchJob sets.
        (
            "pytorchjob",
            {"WORLD_SIZE": "16", "RANK": "1", "MASTER_ADDR": "llama2-7b-master-0", "MASTER_PORT": "29400"}
            | {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "8"},
        ),
    ],
)
def test_kubernetes_files_are_as_published_and_start_one_job(
    plan: Plan, tmp_path: Path, kind: str, variables: dict[str, str]
) -> None:
    text = script_of(plan, "kubernetes", kind=kind, volume_claim="shared", image="registry/planner:1")
    documents = {document["kind"]: document for document in yaml.safe_load_all(text)}
    manifest = documents[{"jobset": "JobSet", "job": "Job", "pytorchjob": "PyTorchJob"}[kind]]
    # Each document says what it is for, and what a pod runs can be read.
    assert all(part.lstrip().startswith("# ") for part in text.split("---\n"))
    assert "exec planner launch \\\n" in text
    assert list(faults(manifest, schema(kind))) == []
    manifest["spec"]["surprise"] = True
    assert list(faults(manifest, schema(kind))) == [".spec: unknown field surprise"]
    (tmp_path / "plan.json").write_text(documents["ConfigMap"]["data"]["plan.json"])
    assert Plan.load(tmp_path / "plan.json").layout == plan.layout
    spec = manifest["spec"]
    if kind == "jobset":
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    if kind == "pytorchjob":
        assert [role["replicas"] for role in spec["pytorchReplicaSpecs"].values()] == [1, 1]
        spec = spec["pytorchReplicaSpecs"]["Worker"]
    else:
        assert spec["completions"] == spec["parallelism"] == 2
    container = spec["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    [call] = called(tmp_path, container["command"][2])
    assert call == ["planner", "launch", "--plan", "/etc/planner/plan.json", *FLAGS]
    # The pod's variables make the launcher see one job of two nodes.
    told = {item["name"]: item["value"] for item in container.get("env", []) if "value" in item}
    nodes = nodes_of_job(LaunchOptions(), variables | told)
    assert nodes is not None and (nodes.most, nodes.node) == (2, 1)
    assert nodes.host.startswith("llama2-7b-")
    attempts = [item["valueFrom"] for item in container.get("env", []) if item["name"] in RESTARTS_VARIABLES]
    assert len(attempts) == (kind == "jobset")


def test_the_command_writes_a_file(planner_command: Command, plan: Plan, tmp_path: Path) -> None:
    file, out = tmp_path / "plan.json", tmp_path / "job.sbatch"
    plan.save(file)
    code, shown, err = planner_command("script", file, "--to", "slurm", "--out", out, "--lr", "1e-3")
    assert (code, shown, err) == (0, "", f"planner: saved {out}\n") and "--lr 0.001" in out.read_text()
    assert "--load" not in out.read_text()
    # A job that a scheduler starts again goes on, unless flags tell it to begin from something else.
    _, shown, _ = planner_command("script", file, "--to", "slurm", "--save", "kept")
    assert "--save kept" in shown and "--load kept" in shown
    _, shown, _ = planner_command("script", file, "--to", "slurm", "--save", "kept", "--load", "base")
    assert "--load base" in shown and "--load kept" not in shown
    for words, named in (
        (("--to", "slum"), "--to slum: did you mean slurm?"),
        ((), "--to is missing"),
        (("--to", "slurm", "--kind", "job"), "--kind job is for --to kubernetes"),
        (("--to", "mpi", "--time-limit", "1:00"), "--time-limit 1:00 is for --to slurm; leave it out"),
        (("--to", "shell", "--image", "a"), "--image a is for --to kubernetes and dlc; leave it out"),
        (("--to", "kubernetes", "--kind", "pod"), "--kind pod: "),
        (("--to", "msrun"), "--to msrun starts a program of MindSpore"),
    ):
        code, shown, err = planner_command("script", file, *words)
        assert (code, shown) == (2, "") and named in err and err.count("\n") == 1

"""Jobs on what this machine can make of a cluster: two hosts, a real Slurm, a real mpirun.

Each is skipped, and says why, where the system has not what it takes.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import planner
from benchmarks import slurm_job, two_hosts
from planner.scripts.job import JobScript
from planner.scripts.kubernetes import kubernetes_script
from planner.scripts.mpi import mpi_script
from runtime.entry import command
from runtime.processes.children import children
from tests.support import ROOT
from tests.support.jobs import losses

pytestmark = pytest.mark.ranks

WITHOUT_HOSTS = two_hosts.can_make_hosts()
WITHOUT_SLURM = slurm_job.missing()


def shared_memory() -> set[str]:
    """Segments of MPI, NCCL and gloo; Python's own come and go with other tests."""
    return {
        path.name for name in ("vader", "nccl", "gloo", "ucx") for path in Path("/dev/shm").glob(f"{name}*")
    }


@pytest.mark.skipif(bool(WITHOUT_HOSTS), reason=WITHOUT_HOSTS or "-")
def test_two_hosts_train_one_job(tmp_path: Path) -> None:
    before = shared_memory()
    with two_hosts.Hosts() as hosts:
        assert two_hosts.end_to_end(hosts, tmp_path / "job", 4) == [0, 0]
        assert hosts.left_over() == []
    assert [path.name for path in (tmp_path / "job" / "saved").glob("iter_*")] == ["iter_0000004"]
    # The first rank has planned for both hosts, and each rank has a folder on its own.
    plan = planner.Plan.load(tmp_path / "job" / "host0" / "plan.json")
    assert (plan.cluster.world_size, plan.cluster.devices_per_node) == (4, 2)
    for host in range(2):
        folders = {path.name for path in (tmp_path / "job" / f"host{host}").glob("rank_*")}
        assert folders == {f"rank_{2 * host}", f"rank_{2 * host + 1}"}
    assert "predicted / measured" in (tmp_path / "job" / "0.txt").read_text()
    assert shared_memory() <= before


@pytest.mark.skipif(bool(WITHOUT_SLURM), reason=WITHOUT_SLURM or "-")
def test_slurm_runs_a_generated_script_as_one_job(tmp_path: Path) -> None:
    outcomes = list(slurm_job.run_both(tmp_path))
    (_, _, nodes), (_, code, output), (_, refused, why) = outcomes
    assert "node1" in nodes and "node2" in nodes
    assert code == 0, output
    assert (
        "training gpt2-nano" in output and output.count("saved checkpoint") == 1 and " on 4 x cpu " in output
    )
    assert [path.name for path in (tmp_path / "saved").glob("iter_*")] == ["iter_0000010"]
    assert refused != 0 and "has started this 2 times on this node" in why
    assert not (tmp_path / "never").exists()
    assert not [pid for pid in children(os.getpid()) if "slurm" in Path(f"/proc/{pid}/comm").read_text()]


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")
def test_mpirun_starts_the_ranks_of_one_job(tmp_path: Path) -> None:
    before = shared_memory()
    plan = planner.suggest(
        "gpt2-nano", world_size=4, local_world_size=4, device="cpu", global_batch_size=8, precision="fp32"
    )
    plan.save(tmp_path / "plan.json")
    flags = ["--train-iters", "4", "--eval-iters", "0", "--log-interval", "1", "--log-dir", str(tmp_path)]
    job = JobScript(plan=plan, plan_file=str(tmp_path / "plan.json"), arguments=flags)
    (tmp_path / "job.sh").write_text(mpi_script(job))
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout
    if "Open MPI" not in version:
        pytest.skip("another MPI than Open MPI")
    done = subprocess.run(
        ["bash", str(tmp_path / "job.sh"), "--allow-run-as-root", "--oversubscribe"],
        cwd=ROOT,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("training gpt2-nano") == 1 and " on 4 x cpu " in done.stdout
    assert list(losses(tmp_path)) == [1, 2, 3, 4]
    assert {path.name for path in tmp_path.glob("rank_*")} == {f"rank_{rank}" for rank in range(4)}
    assert shared_memory() <= before


def test_pods_of_a_generated_file_train_one_job(tmp_path: Path) -> None:
    plan = planner.suggest(
        "gpt2-nano", world_size=2, local_world_size=1, device="cpu", global_batch_size=4, precision="fp32"
    )
    flags = ["--train-iters", "2", "--eval-iters", "0", "--log-interval", "1", "--save", "saved"]
    job = JobScript(plan=plan, plan_file="plan.json", arguments=flags, kind="pytorchjob", mount=str(tmp_path))
    documents = {document["kind"]: document for document in yaml.safe_load_all(kubernetes_script(job))}
    plan_file = tmp_path / "plan.json"
    plan_file.write_text(documents["ConfigMap"]["data"]["plan.json"])
    (tmp_path / "planner").write_text(f'#!/bin/sh\nexec {shlex.join(command("planner"))} "$@"\n')
    (tmp_path / "planner").chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    pods = []
    roles = documents["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]
    for node, name in enumerate(("Master", "Worker")):
        # Variables that the operator sets, but for the name of the first pod, which nobody here knows.
        told = {"WORLD_SIZE": "2", "RANK": str(node), "PET_NNODES": "2", "PET_NODE_RANK": str(node)}
        told |= {"PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
        [container] = roles[name]["template"]["spec"]["containers"]
        words = container["command"]
        pods.append(
            subprocess.Popen(
                [*words[:-1], words[-1].replace("/etc/planner/plan.json", str(plan_file))],
                cwd=tmp_path,
                env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"} | told,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    told_by = [pod.communicate()[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], told_by
    assert "".join(told_by).count("training gpt2-nano") == 1 and " on 2 x cpu " in "".join(told_by)
    assert [path.name for path in (tmp_path / "saved").glob("iter_*")] == ["iter_0000002"]

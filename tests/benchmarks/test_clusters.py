"""Jobs on what this machine can make of a cluster: two hosts, a real Slurm, a real mpirun.

Each is skipped, and says why, where the system has not what it takes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import planner
from benchmarks import slurm_job, two_hosts
from planner.scripts.job import JobScript
from planner.scripts.mpi import mpi_script
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

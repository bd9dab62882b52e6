"""A real Slurm with two node names on one machine runs a generated script: one job of two tasks.

`python -m benchmarks.slurm_job` needs root and the distribution's packages (slurm-wlm, munge). It starts
munged, slurmctld and two slurmd in a temporary folder, and submits the script of `planner script --to slurm`.
It prints the output of the job, and ends all processes. A second submission, of two tasks on one node, must
be refused.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import typer

import planner
from planner.plan import Plan
from planner.scripts.job import JobScript
from planner.scripts.slurm import slurm_script
from runtime.processes.children import children

ROOT = Path(__file__).resolve().parents[1]

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "sinfo")

CONFIGURATION = """ClusterName=planner
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort=27817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmctldTimeout=60
SlurmdTimeout=60
NodeName=node[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[27821-27822] CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """The reason why Slurm cannot run here; empty if it can."""
    absent = [name for name in PROGRAMS if _program(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (packages slurm-wlm and munge)"
    return "" if os.geteuid() == 0 else "needs root"


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


class Slurm:
    """munged, slurmctld and two slurmd, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> Slurm:
        folder = self.folder
        host = os.uname().nodename.split(".")[0]
        text = CONFIGURATION.format(host=host, folder=folder, cpus=os.cpu_count())
        (folder / "slurm.conf").write_text(text)
        for name in ("state", "spool-node1", "spool-node2"):
            (folder / name).mkdir()
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)
        folder.chmod(0o755)
        files = [f"--{name}-file={folder}/munged.{name}" for name in ("pid", "log", "seed")]
        munged = [
            "--foreground",
            "--force",
            f"--key-file={folder}/munge.key",
            f"--socket={folder}/munge.socket",
        ]
        self._start("munged", *munged, *files)
        while not (folder / "munge.socket").exists():
            time.sleep(0.1)
        self._start("slurmctld", "-D")
        for name in ("node1", "node2"):
            self._start("slurmd", "-D", "-N", name)
        while self.run("sinfo", "-h", "-o", "%T").stdout.split() != ["idle"]:
            for process in self.processes:
                if process.poll() is not None:
                    raise SystemExit(self.logs())
            time.sleep(0.5)
        return self

    def __exit__(self, *_: object) -> None:
        self.run("scancel", "--state=RUNNING")
        for process in reversed(self.processes):
            process.terminate()
        for process in reversed(self.processes):
            process.wait()

    def _start(self, name: str, *words: str) -> None:
        program = _program(name)
        assert program is not None
        log = (self.folder / f"{name}-{len(self.processes)}.out").open("wb")
        self.processes.append(
            subprocess.Popen([program, *words], env=self.environment, stdout=log, stderr=subprocess.STDOUT)
        )

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm and return its result."""
        return subprocess.run(words, env=self.environment, capture_output=True, text=True)

    def logs(self) -> str:
        """The output of the daemons."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.out")))

    def submit(self, script: str, **variables: str) -> tuple[int, str]:
        """Submit a batch script and wait for its end; returns its exit code and output."""
        file = self.folder / "job.sbatch"
        file.write_text(script)
        done = subprocess.run(
            ["sbatch", "--parsable", "--wait", f"--output={self.folder}/job.out", str(file)],
            env={**self.environment, **variables},
            cwd=self.folder,
            capture_output=True,
            text=True,
        )
        output = self.folder / "job.out"
        return done.returncode, (output.read_text() if output.exists() else "") + done.stderr


def small_plan() -> Plan:
    """Two nodes of two CPU ranks."""
    model = {"model": "gpt2-nano", "world_size": 4, "local_world_size": 2, "device": "cpu"}
    return planner.suggest(**model, global_batch_size=8, precision="fp32")  # type: ignore[arg-type]


def scripts(folder: Path, plan: Plan) -> tuple[str, str]:
    """The generated script, and one that starts two tasks of `planner launch` on one node."""
    plan.save(folder / "plan.json")
    flags = ["--train-iters", "10", "--eval-iters", "0", "--log-interval", "5"]
    job = JobScript(
        plan=plan,
        plan_file=str(folder / "plan.json"),
        arguments=[*flags, "--save", str(folder / "saved"), "--log-dir", str(folder / "logs")],
        setup=f"export PATH={Path(sys.executable).parent}:$PATH PYTHONPATH={ROOT}",
    )
    text = slurm_script(job).replace(f"--cpus-per-task={job.devices}", "--cpus-per-task=1")
    wrong = text.replace("--nodes=2", "--nodes=1").replace("--ntasks-per-node=1", "--ntasks-per-node=2")
    return text, wrong.replace(str(folder / "saved"), str(folder / "never"))


def run_both(folder: Path) -> Iterator[tuple[str, int, str]]:
    """The description of each submission, its exit code and its output."""
    right, wrong = scripts(folder, small_plan())
    with Slurm(folder) as slurm:
        # Both names are of this machine, which does not resolve them.
        here = {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        yield "slurm nodes", 0, slurm.run("sinfo", "-N", "-l").stdout
        yield "two nodes, a task on each, as generated", *slurm.submit(right, **here)
        yield "two tasks of planner launch on one node", *slurm.submit(wrong, **here)


def main() -> None:
    """Print the transcript."""
    # So that what is cut short leaves no host and no daemon behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    why_not = missing()
    if why_not:
        print(f"skipped: {why_not}")
        raise typer.Exit(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for what, code, output in run_both(folder):
            print(f"== {what}: exit code {code}")
            print(output.rstrip())
        checkpoints = sorted(path.name for path in (folder / "saved").glob("iter_*"))
        refused = not (folder / "never").exists()
        print(
            f"== checkpoints: {checkpoints}; the refused job has written {'nothing' if refused else 'files'}"
        )
    with contextlib.suppress(ProcessLookupError):
        print(f"processes left: {len(children(os.getpid()))}")


if __name__ == "__main__":
    typer.run(main)

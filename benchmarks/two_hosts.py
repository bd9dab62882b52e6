"""Two hosts on one machine: network namespaces with their own addresses and a link of adjustable bandwidth.

`python -m benchmarks.two_hosts` needs root and the command ip. It runs a job of two ranks on each host to its
end, kills one host and brings it back, and slows the link between them 100 times. The best plan for the
measured slow link is then compared with the best plan for the fast one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import typer

from planner.plan import Plan
from runtime import entry
from runtime.processes.children import children

ROOT = Path(__file__).resolve().parents[1]

NORMAL_MBIT, SLOWED = 2000, 100
"""Megabits a second of the link, and the factor by which it is slowed."""

PORT = 29480

TINY = (
    *("--model", "gpt2-nano", "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2"),
    *("--seq-length", "16", "--global-batch-size", "8"),
)

LARGER = (
    *("--model", "gpt2-nano", "--num-layers", "16", "--hidden-size", "128", "--num-attention-heads", "4"),
    *("--seq-length", "1024", "--global-batch-size", "4", "--fp32"),
    # Between replicas and a plain pipeline, whose costs on a CPU are known best.
    *("--pin", "tp=1", "--pin", "cp=1", "--forbid", "schedule=interleaved,interleaved_zb,zbv,dualpipev"),
)


class Hosts:
    """Two network namespaces, joined by one link."""

    def __init__(self) -> None:
        self.names = [f"planner{os.getpid()}{letter}" for letter in "ab"]
        self.links = [f"pl{os.getpid() % 100_000}{letter}" for letter in "ab"]
        self.addresses = ["10.78.0.1", "10.78.0.2"]

    def __enter__(self) -> Hosts:
        for name in self.names:
            _ip("netns", "add", name)
        _ip("link", "add", self.links[0], "type", "veth", "peer", "name", self.links[1])
        for name, link, address in zip(self.names, self.links, self.addresses, strict=True):
            _ip("link", "set", link, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", link, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for host in range(2):
            self.kill(host)
        for name in self.names:
            _ip("netns", "del", name, check=False)

    def command(self, host: int, *words: str) -> list[str]:
        """The command `words`, run on a host."""
        return ["ip", "netns", "exec", self.names[host], *words]

    def kill(self, host: int) -> None:
        """End every process of a host at once, as a loss of power does."""
        listing = subprocess.run(["ip", "netns", "pids", self.names[host]], capture_output=True, text=True)
        for pid in listing.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def shape(self, mbit: int) -> None:
        """Limit the rate at which each host sends, in megabits a second."""
        for name, link in zip(self.names, self.links, strict=True):
            shaping = ("rate", f"{mbit}mbit", "burst", "64kb", "latency", "400ms")
            subprocess.run(
                ["ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", link, "root", "tbf", *shaping],
                check=True,
            )

    def left_over(self) -> list[str]:
        """Processes that still run on either host."""
        listing = [
            subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
            for name in self.names
        ]
        return [pid for pids in listing for pid in pids]


def _ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=not check)


def can_make_hosts() -> str:
    """The reason why this machine cannot have namespaces; empty if it can."""
    if sys.platform != "linux" or not shutil.which("ip") or not shutil.which("tc"):
        return "needs Linux and iproute2"
    if os.geteuid() != 0:
        return "needs root"
    name = f"plannertry{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"no network namespaces here: {tried.stderr.strip()}"
    _ip("netns", "del", name)
    return ""


class NodeJob:
    """`planner launch` on one host."""

    def __init__(self, hosts: Hosts, host: int, words: Sequence[str], out: Path) -> None:
        self.out = out
        with out.open("wb") as file:
            self.process = subprocess.Popen(
                hosts.command(host, *entry.command("planner", "launch", *words)),
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def text(self) -> str:
        """The output of the process so far."""
        return self.out.read_text(errors="replace")

    def wait_for(self, words: str) -> None:
        """Wait until it has printed `words`."""
        while words not in self.text():
            if self.process.poll() is not None:
                raise SystemExit(f"{self.out.name} ended before it said {words!r}:\n{self.text()}")
            time.sleep(0.2)


def two_nodes(
    hosts: Hosts, folder: Path, words: Sequence[str], nnodes: str = "2", port: int = PORT
) -> list[NodeJob]:
    """The job of `words` on both hosts."""
    started = []
    for host in range(2):
        started.append(
            NodeJob(hosts, host, node_words(hosts, folder, words, host, nnodes, port), folder / f"{host}.txt")
        )
    return started


def node_words(
    hosts: Hosts, folder: Path, words: Sequence[str], host: int, nnodes: str, port: int
) -> list[str]:
    """Flags of one host."""
    meeting = ["--nnodes", nnodes, "--rdzv-endpoint", f"{hosts.addresses[0]}:{port}"]
    fixed = [] if ":" in nnodes else ["--node-rank", str(host)]
    cpu = ["--device", "cpu", "--local-world-size", "2"]
    return [*words, *cpu, *meeting, *fixed, "--log-dir", str(folder / f"host{host}")]


def ended(jobs: Sequence[NodeJob]) -> list[int]:
    """Exit codes of all hosts."""
    return [job.process.wait() for job in jobs]


def end_to_end(hosts: Hosts, folder: Path, iterations: int = 10) -> list[int]:
    """Run a job of 2 x 2 ranks; the exit codes of both hosts."""
    folder.mkdir(parents=True)
    words = [*TINY, "--train-iters", str(iterations), "--eval-iters", "0", "--save", str(folder / "saved")]
    jobs = two_nodes(hosts, folder, words)
    codes = ended(jobs)
    for line in jobs[0].text().splitlines():
        if line.startswith(("training ", "saved ", " [")):
            print(f"  {line[:150]}")
    return codes


def lose_and_return(hosts: Hosts, folder: Path) -> list[int]:
    """Kill the second host of an elastic job and start it again; the exit codes at the end."""
    folder.mkdir(parents=True)
    words = [
        *TINY,
        "--train-iters",
        "1200",
        "--log-interval",
        "50",
        "--eval-iters",
        "0",
        "--save-interval",
        "50",
    ]
    words += ["--save", str(folder / "saved"), "--keep-last", "3"]
    words += ["--max-restarts", "5", "--rdzv-conf", "last_call_timeout=5"]
    first, second = two_nodes(hosts, folder, words, "1:2", PORT + 1)
    while "saved checkpoint" not in first.text() + second.text():
        time.sleep(0.2)
    print("  killing the second host")
    hosts.kill(1)
    second.process.wait()
    first.wait_for("going on with 2 ranks")
    first.wait_for("resumed from")
    print("  starting it again")
    again = node_words(hosts, folder, words, 1, "1:2", PORT + 1)
    second = NodeJob(hosts, 1, again, folder / "1-again.txt")
    codes = ended([first, second])
    for text in (first.text(), second.text()):
        for line in text.splitlines():
            if line.startswith(("training ", "going on with", "resumed ", "runtime.pretrain: rank")):
                print(f"  {line[:170]}")
    return codes


def planned(hosts: Hosts, folder: Path, mbit: int, port: int) -> Plan:
    """The plan of a job for the links that its preflight measures."""
    hosts.shape(mbit)
    folder.mkdir(parents=True)
    words = [*LARGER, "--train-iters", "2", "--log-interval", "1", "--eval-iters", "0"]
    jobs = two_nodes(hosts, folder, [*words, "--preflight", "measure", "--replan"], port=port)
    codes = ended(jobs)
    if codes != [0, 0]:
        raise SystemExit(jobs[0].text() + jobs[1].text())
    for line in jobs[0].text().splitlines():
        if line.startswith("preflight: "):
            print(f"  {line}")
    return Plan.load(folder / "host0" / "plan.json")


def step_time(hosts: Hosts, folder: Path, plan: Plan, port: int, steps: int = 4) -> float:
    """Measured seconds of a step of a plan on both hosts, the first step left out."""
    folder.mkdir(parents=True)
    plan.save(folder / "plan.json")
    words = ["--plan", str(folder / "plan.json"), "--train-iters", str(steps), "--log-interval", "1"]
    flags = node_words(hosts, folder, [*words, "--eval-iters", "0"], 0, "2", port)
    drop = flags.index("--device")
    jobs = []
    for host in range(2):
        flags = node_words(hosts, folder, [*words, "--eval-iters", "0"], host, "2", port)
        jobs.append(NodeJob(hosts, host, [*flags[:drop], *flags[drop + 4 :]], folder / f"{host}.txt"))
    codes = ended(jobs)
    if codes != [0, 0]:
        raise SystemExit(jobs[0].text() + jobs[1].text())
    lines = (folder / "host0" / "metrics.jsonl").read_text().splitlines()
    steps_s = [record["step_time_s"] for record in map(json.loads, lines) if "step_time_s" in record]
    return float(statistics.median(steps_s[1:]))


@contextlib.contextmanager
def _nothing_left() -> Iterator[None]:
    """Check that no processes or shared memory are left, and print it."""
    before = set(Path("/dev/shm").iterdir())
    yield
    left = children(os.getpid())
    shared = [path.name for path in set(Path("/dev/shm").iterdir()) - before]
    print(f"left behind: {len(left)} processes, {len(shared)} segments of shared memory")


def main() -> None:
    """Run the three parts, and print what happened."""
    # So that what is cut short leaves no host and no daemon behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    why_not = can_make_hosts()
    if why_not:
        print(f"skipped: {why_not}")
        raise typer.Exit(0)
    with tempfile.TemporaryDirectory() as name, _nothing_left():
        folder = Path(name)
        with Hosts() as hosts:
            hosts.shape(NORMAL_MBIT)
            print(f"two hosts, 2 ranks on each, a link of {NORMAL_MBIT} Mbit/s: a job end to end")
            print(f"  exit codes {end_to_end(hosts, folder / 'whole')}")
            print("an elastic job (--nnodes 1:2) that loses a host and gets it back")
            print(f"  exit codes {lose_and_return(hosts, folder / 'elastic')}")
            print("a plan from the measured link")
            fast = planned(hosts, folder / "fast", NORMAL_MBIT, PORT + 2)
            print(f"  chosen: {fast.layout.describe()}")
            slow_mbit = NORMAL_MBIT // SLOWED
            print(f"the same with the link slowed {SLOWED} times, to {slow_mbit} Mbit/s")
            slow = planned(hosts, folder / "slow", slow_mbit, PORT + 3)
            print(f"  chosen: {slow.layout.describe()}")
            before = step_time(hosts, folder / "before", fast, PORT + 4)
            after = step_time(hosts, folder / "after", slow, PORT + 5)
            print(
                f"on the slow link a step takes {before:.3f} s as chosen before, {after:.3f} s as chosen now"
            )
            print(f"the new choice is {before / after:.2f} times as fast there")
            left = hosts.left_over()
        print(f"processes left on the hosts: {len(left)}")


if __name__ == "__main__":
    typer.run(main)

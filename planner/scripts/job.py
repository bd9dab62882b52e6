"""A job as files of all schedulers describe it: nodes, devices of each, and the command of a node."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path

from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from planner.formats.targets import TARGETS, export
from planner.inputs.engine import DEFAULT_ENGINE
from planner.plan import Plan

PORT = 29400
"""Port of the first node at which the nodes meet."""

DEVICE_RESOURCES = {"gpu": "nvidia.com/gpu", "npu": "huawei.com/Ascend910"}
"""What Kubernetes calls the devices of a node, by their kind; AMD's have a name of their own."""

SCHEDULER_NAMES = {"gpu": "gpu", "npu": "npu"}
"""What Slurm's generic resources are usually called."""


@dataclass(frozen=True)
class JobScript:
    """What is to be started, and on what."""

    plan: Plan
    plan_file: str
    """Where the nodes find the plan."""
    arguments: Sequence[str] = ()
    """Flags of training, for `planner launch` or `program`."""
    name: str = ""
    time_limit: str | None = None
    """Hours, minutes and seconds after which the scheduler ends the job."""
    partition: str | None = None
    account: str | None = None
    image: str | None = None
    """Container that has the planner, or `program`."""
    volume_claim: str | None = None
    mount: str = "/workspace"
    """Where nodes find the volume, which all of them share."""
    program: str | None = None
    """What trains where that is not this package: a file such as pretrain_gpt.py, with words of its own."""
    setup: str | None = None
    """A line of shell before it, such as `source .venv/bin/activate`."""
    kind: str | None = None
    """Kind of a Kubernetes object."""
    notes: list[str] = field(default_factory=list)
    """What a file could not say."""

    def __post_init__(self) -> None:
        if self.plan.cluster.parts and self.kind != "shell":
            names = " and ".join(part.device.name for part in self.plan.cluster.parts)
            raise InputError(
                f"{self.plan_file} is for nodes of two kinds ({names}), and their order counts: start its "
                f"nodes "
                "by hand, with the file of --to shell"
            )
        if self.program is None and self.plan.engine.name != DEFAULT_ENGINE:
            raise InputError(
                f"{self.plan_file} was made for engine {self.plan.engine.name}, which planner launch does "
                f"not run; "
                "name the file that trains with --program, such as pretrain_gpt.py"
            )

    @property
    def nodes(self) -> int:
        """Nodes of the job."""
        return self.plan.cluster.nodes

    @property
    def devices(self) -> int:
        """Devices of each node, each with a rank."""
        cluster = self.plan.cluster
        return min(cluster.devices_per_node, cluster.world_size)

    @property
    def device_kind(self) -> str:
        """gpu, npu or cpu."""
        return self.plan.cluster.device.kind

    @property
    def job_name(self) -> str:
        """A name that every scheduler takes: small letters, digits and dashes."""
        text = self.name or Path(self.plan.model.name).name
        words = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-")
        return words if words[:1].isalpha() else f"job-{words}".rstrip("-")

    @property
    def resource(self) -> str | None:
        """What Kubernetes calls the devices of a node; None of CPUs."""
        if self.plan.cluster.device.vendor.lower().startswith("amd"):
            return "amd.com/gpu"
        return DEVICE_RESOURCES.get(self.device_kind)

    def is_bundled(self) -> bool:
        """Whether `planner launch` trains the plan."""
        return self.program is None

    def layout_arguments(self) -> list[str]:
        """The plan in the flags of the program that trains it."""
        target = self.plan.engine.name if self.plan.engine.name in TARGETS else "megatron"
        written = export(self.plan, to=target)
        self.notes.extend(f"not expressible in {target}: {part}" for part in written.inexpressible)
        return shlex.split(written.text)

    def launch(self) -> list[str]:
        """The words that start the ranks of one node, of a job whose nodes the environment names."""
        return ["planner", "launch", "--plan", self.plan_file, *self.arguments]

    def node_lines(self, node: str, address: str, port: str) -> list[str]:
        """The command of one node as lines of shell.

        Args:
            node, address, port: words of shell that stand for the number of the node, the first node and its
                port.
        """
        if self.is_bundled():
            flags = ["--nnodes", str(self.nodes)] if self.nodes > 1 else []
            flags += ["--node-rank", node, "--rdzv-endpoint", f"{address}:{port}"] if flags else []
            return command_lines(
                ["exec planner launch", *pairs(["--plan", self.plan_file, *flags, *self.arguments])]
            )
        torchrun = [
            "exec torchrun",
            *(f"--nnodes {self.nodes}", f"--nproc-per-node {self.devices}", f"--node-rank {node}"),
            *(f"--master-addr {address}", f"--master-port {port}"),
        ]
        words = shlex.split(self.program or "")
        rest = [*self.layout_arguments(), *self.arguments]
        return command_lines([*torchrun, shlex.join(words), *pairs(rest)])


def pairs(words: Sequence[str]) -> list[str]:
    """Flags with their values, as they are typed, one for each line; variables of shell stay such."""
    lines: list[str] = []
    for word in words:
        if word.startswith("--") or not lines:
            lines.append(shell_word(word))
        else:
            lines[-1] += f" {shell_word(word)}"
    return lines


def shell_word(word: str) -> str:
    """A word as it is typed: a variable in double quotes, anything else as shlex has it."""
    return f'"{word}"' if re.search(r"\$[{A-Z(]", word) else shlex.quote(word)


def command_lines(words: Sequence[str], indent: str = "    ") -> list[str]:
    """A command of several lines."""
    lines = [f"{indent if at else ''}{word}" for at, word in enumerate(words)]
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def header(job: JobScript, comment: str = "#") -> list[str]:
    """What the file is of, in lines of comment."""
    plan = job.plan
    return [
        f"{comment} {plan.model.name} on {plan.cluster.world_size} x {plan.cluster.device.name}: "
        f"{job.nodes} nodes of {job.devices}.",
        f"{comment} {plan.layout.describe()}",
        f"{comment} {plan.estimate.step_time_s:.3g} s a step predicted "
        f"({plan.estimate.step_time_low_s:.3g} to {plan.estimate.step_time_high_s:.3g}).",
    ]

"""A job in the form that files of all schedulers need: nodes, devices of each node, and the command of a
node."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import field
from functools import cached_property
from pathlib import Path

from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from planner.formats.script_arguments import SCRIPT_STARTS, ScriptStart, passed_on, resuming_flags
from planner.formats.targets import TARGETS, export
from planner.formats.writing.export import Export
from planner.formats.writing.written import Shell, words_of, written
from planner.inputs.engine import DEFAULT_ENGINE
from planner.plan import Plan

PORT = 29400
"""Port of the first node at which the nodes meet."""

DEVICE_RESOURCES = {"gpu": "nvidia.com/gpu", "npu": "huawei.com/Ascend910"}
"""Names of Kubernetes for the devices of a node, by kind; AMD's devices have another name.
"""

SCHEDULER_NAMES = {"gpu": "gpu", "npu": "npu"}
"""Usual names of Slurm's generic resources, by the kind of device."""


@dataclass(frozen=True)
class JobScript:
    """A job to start, with its nodes and the settings of the scheduler."""

    plan: Plan
    plan_file: str
    """Path of the plan file on the nodes."""
    arguments: Sequence[str] = ()
    """Flags of training, for `planner launch` or `program`."""
    name: str = ""
    time_limit: str | None = None
    """Hours, minutes and seconds after which the scheduler ends the job."""
    partition: str | None = None
    account: str | None = None
    image: str | None = None
    """Container image with the planner, or with `program`."""
    volume_claim: str | None = None
    mount: str = "/workspace"
    """Path of the volume that all nodes share."""
    program: str | None = None
    """The training program if it is not this package: a file such as pretrain_gpt.py, with its arguments."""
    setup: str | None = None
    """A line of shell before the job, such as `source .venv/bin/activate`."""
    kind: str | None = None
    """Kind of the Kubernetes object to write."""
    notes: list[str] = field(default_factory=list)
    """Parts of the job that a file could not state."""

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
        """A name that every scheduler accepts: small letters, digits and dashes."""
        text = self.name or Path(self.plan.model.name).name
        words = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-")
        return words if words[:1].isalpha() else f"job-{words}".rstrip("-")

    @property
    def resource(self) -> str | None:
        """The name that Kubernetes has for the devices of a node; None for CPUs."""
        if self.plan.cluster.device.vendor.lower().startswith("amd"):
            return "amd.com/gpu"
        return DEVICE_RESOURCES.get(self.device_kind)

    def is_bundled(self) -> bool:
        """True if `planner launch` trains the plan."""
        return self.program is None

    @cached_property
    def start(self) -> ScriptStart | None:
        """The arguments with which the program receives a plan; None for this package, and for unknown
        programs.

        If the plan's engine has no known program, Megatron-LM's is assumed.
        """
        engine = self.plan.engine.name
        if self.is_bundled() or (engine in TARGETS and engine not in SCRIPT_STARTS):
            return None
        return SCRIPT_STARTS.get(engine, SCRIPT_STARTS["megatron"])

    @cached_property
    def exported(self) -> Export | None:
        """The plan as flags or a file of the program that trains it."""
        return None if self.start is None else export(self.plan, to=self.start.target)

    @cached_property
    def config_file(self) -> str | None:
        """The plan's configuration file that the program reads; None where flags give the plan."""
        start = self.start
        return f"{self.job_name}{start.suffix}" if start is not None and start.file_flag else None

    @cached_property
    def training(self) -> list[str]:
        """Flags of training that the program accepts; the others are noted."""
        if self.is_bundled():
            return list(self.arguments)
        engine, start = self.plan.engine.name, self.start
        if start is None:
            self.notes.append(f"the plan is not passed on to {self.program}: no flags of {engine} are known")
            return list(self.arguments)
        passed, kept = passed_on(self.arguments, start)
        if kept:
            self.notes.append(f"not passed on to {self.program}: {' '.join(kept)}")
        further, notes = resuming_flags(passed, start)
        self.notes.extend(notes)
        return [*passed, *further]

    @property
    def resumes(self) -> bool:
        """True if the job saves a checkpoint when it is asked to end, and resumes from it when it is started
        again."""
        words = self.training
        if "--save" not in words:
            return False
        if self.is_bundled():
            return True
        at = words.index("--load") + 1 if "--load" in words else 0
        return "--exit-signal-handler" in words and words[at] == words[words.index("--save") + 1]

    def program_arguments(self) -> list[str]:
        """The plan and the flags of training, for the program that trains."""
        found = self.exported
        if found is None or self.start is None:
            return self.training
        if self.config_file is not None:
            return [self.start.file_flag, self.config_file, *self.training]
        return [*words_of(found.text, "the plan's flags"), *self.training]

    def before(self) -> list[str]:
        """Commands of each node before the training command, one per line."""
        found = self.exported
        lines = [] if self.setup is None else [written(self.setup, "line", "--setup")]
        if found is not None:
            lines += [f"export {name}={shell_word(value)}" for name, value in found.environment.items()]
        if found is not None and self.config_file is not None:
            text = " ".join(shell_word(line) for line in found.text.splitlines())
            lines.append(f"printf '%s\\n' {text} > {shell_word(self.config_file)}")
        return lines

    def launch(self) -> list[str]:
        """The words that start the ranks of one node; the environment names the nodes."""
        return ["planner", "launch", "--plan", self.plan_file, *self.arguments]

    def node_lines(self, node: str, address: str, port: str) -> list[str]:
        """The command of one node as lines of shell.

        Args:
            node, address, port: shell expansions for the number of the node, the first node and its port,
                such as `$NODE_RANK`.
        """
        if self.is_bundled():
            flags = ["--nnodes", str(self.nodes)] if self.nodes > 1 else []
            meeting = [Shell(f'"{node}"'), "--rdzv-endpoint", Shell(f'"{address}:{port}"')]
            flags += ["--node-rank", *meeting] if flags else []
            return command_lines(
                ["exec planner launch", *pairs(["--plan", self.plan_file, *flags, *self.arguments])]
            )
        torchrun = [
            "exec torchrun",
            *(f"--nnodes {self.nodes}", f"--nproc-per-node {self.devices}", f'--node-rank "{node}"'),
            *(f'--master-addr "{address}"', f'--master-port "{port}"'),
        ]
        return self._program_lines(torchrun)

    def rank_lines(self) -> list[str]:
        """The command of one rank of a program; the environment gives the rank's number."""
        return self._program_lines(["exec python"])

    def _program_lines(self, launcher: list[str]) -> list[str]:
        words = " ".join(shell_word(word, "--program") for word in words_of(self.program or "", "--program"))
        return command_lines([*launcher, words, *pairs(self.program_arguments())])


def pairs(words: Sequence[str]) -> list[str]:
    """Flags with their values, quoted for the shell, one per line; shell variables stay unquoted."""
    lines: list[str] = []
    for word in words:
        if word.startswith("--") or not lines:
            lines.append(shell_word(word))
        else:
            lines[-1] += f" {shell_word(word)}"
    return lines


def shell_word(word: str, what: str = "the command") -> str:
    """A word quoted so that the shell passes it on unchanged."""
    return written(word, "word", what)


def command_lines(words: Sequence[str], indent: str = "    ") -> list[str]:
    """A command of several lines."""
    lines = [f"{indent if at else ''}{word}" for at, word in enumerate(words)]
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def comments(lines: Sequence[str]) -> list[str]:
    """Comment lines; special characters of names are made harmless."""
    return [f"# {written(line, 'comment', 'a comment')}" for line in lines]


def header(job: JobScript) -> list[str]:
    """Comment lines that describe the file."""
    plan = job.plan
    return comments(
        [
            f"{plan.model.name} on {plan.cluster.world_size} x {plan.cluster.device.name}: "
            f"{job.nodes} nodes of {job.devices}.",
            plan.layout.describe(),
            f"{plan.estimate.step_time_s:.3g} s a step predicted "
            f"({plan.estimate.step_time_low_s:.3g} to {plan.estimate.step_time_high_s:.3g}).",
        ]
    )


def on_signals(job: JobScript, seconds: str) -> str:
    """A sentence on the behaviour of a job that the scheduler asks to end.

    Args:
        seconds: the time that the job is given, such as `180 s before the time limit`.
    """
    if job.resumes:
        return f"SIGTERM comes {seconds}: the job saves after the running step and ends with 0."
    if job.is_bundled() or "--exit-signal-handler" in job.training:
        return f"SIGTERM comes {seconds}: nothing is kept, for no --save is given."
    return f"SIGTERM comes {seconds}: {job.program} decides whether the job saves."


def on_restart(job: JobScript) -> str:
    """The end of a sentence on the point from which a restarted job goes on."""
    if job.resumes:
        return "from what it has saved"
    if job.is_bundled():
        return "from the beginning, for no --save is given"
    return f"and goes on as {job.program} does"

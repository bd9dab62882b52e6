"""Flags of `planner launch` for starting a job on this machine, and for trying plans before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from costmodels.errors import InputError
from planner.options.flags import flag
from planner.options.limits import MOST_STEPS, Bounds, check_bounds
from runtime.job.job import RunOptions
from runtime.settings.checks import RESTARTS
from runtime.settings.training_options import OutputOptions

FEWEST_ITERS = 2
"""Fewest steps of a trial; the first one warms up and does not count."""

NODE_RANK = Bounds("a whole number of at least 0", 0, 1 << 20)

DEFAULT_ITERS = 5
"""Default steps of a trial."""


@dataclass(frozen=True)
class LaunchOptions(RunOptions):
    """Flags of `planner launch`: the plan or configuration to train, and the start of its ranks."""

    SECTIONS: ClassVar[dict[str, str]] = {"plan": "Job", "nnodes": "Nodes"}

    plan: str | None = flag(None, "Plan file to run instead of planning.", metavar="FILE")
    config: list[str] = flag(
        [],
        "Train the job of a script or configuration that `planner check` reads, or of a page with one; "
        "repeatable, for the file of its model. Settings that this package cannot follow are listed "
        "first.",
        metavar="FILE",
    )
    define: list[str] = flag(
        [],
        "With --config: environment variable of the script, or the value of a key; repeatable.",
        metavar="NAME=VALUE",
    )
    scale_down: int | None = flag(
        None,
        "With --config: train a small version of the job on at most this many ranks. Layers, widths, "
        "sequences and degrees shrink; the form of the layout stays.",
        metavar="RANKS",
        within=Bounds("a number of ranks of at least 1", 1, 1024),
    )
    script: str | None = flag(
        None,
        "With --engine megatron, mindspeed, nemo, torchtitan, deepspeed or nanotron: run this script "
        "of your own installation, with the plan as its flags or file.",
        metavar="FILE",
    )
    script_args: str | None = flag(None, "Further words for the program of --script.", metavar="WORDS")
    nearest: bool = flag(
        False, "With --script: run the nearest job where its software does not support a part of the plan."
    )
    print_command: bool = flag(False, "Print the torchrun command and stop.")
    dry_run: bool = flag(
        False,
        "Trace the memory of the plan before its ranks start; the default if the estimate is above 80 % "
        "of a device's memory.",
    )
    no_dry_run: bool = flag(False, "Start the ranks without tracing memory first.")
    max_restarts: int = flag(
        0,
        "Restart the job from its last checkpoint after a failure, such as a killed rank, at most this "
        "many times.",
        within=RESTARTS,
    )
    nnodes: str | None = flag(
        None,
        "Nodes of the job, on each of which this command is started; a range such as 1:4 lets nodes join "
        "and leave. Not needed under Slurm, mpirun, Kubernetes or PAI DLC.",
        metavar="N",
    )
    node_rank: int | None = flag(
        None,
        "Number of this node, from 0; unless given, nodes are numbered in the order in which they join.",
        within=NODE_RANK,
    )
    rdzv_endpoint: str | None = flag(
        None,
        "Address at which the nodes meet: a port of the first node, the same on every node.",
        metavar="HOST:PORT",
    )
    rdzv_id: str | None = flag(
        None, "Name of the job, which tells several jobs at one endpoint apart.", metavar="NAME"
    )
    rdzv_conf: str | None = flag(
        None, "Settings of torchrun's rendezvous, such as last_call_timeout=5.", metavar="KEY=VALUE,..."
    )

    def check(self, output: OutputOptions) -> None:
        """Raise `InputError` for values that make no sense."""
        check_bounds(self)
        if self.dry_run and self.no_dry_run:
            raise InputError("--dry-run and --no-dry-run exclude each other; give one")
        if self.max_restarts and output.save is None:
            raise InputError("--max-restarts needs --save FOLDER, whose last checkpoint is gone on from")
        if self.config and self.plan is not None:
            raise InputError(
                f"--config {self.config[0]} and --plan {self.plan} both say the layout; give one"
            )
        if self.script_args and self.script is None:
            raise InputError("--script-args is for the script of --script; give one, or leave it out")
        if self.nearest and self.script is None:
            raise InputError("--nearest is for the script of --script; give one, or leave it out")
        if self.script is not None and self.config:
            raise InputError(
                f"--script {self.script} takes a plan, and --config {self.config[0]} is none; save one with "
                "planner check --save, and give it with --plan"
            )
        for name, given in (("--define", self.define), ("--scale-down", self.scale_down)):
            if given and not self.config:
                raise InputError(f"{name} is about the files of --config; give some, or leave it out")

    @property
    def traces_memory(self) -> bool | None:
        """True if memory is traced before ranks start; None where that depends on the plan."""
        return self.dry_run if self.dry_run or self.no_dry_run else None


@dataclass(frozen=True)
class TrialOptions:
    """Flags for measuring plans before the job starts."""

    SECTIONS: ClassVar[dict[str, str]] = {"plans_to_try": "Job"}

    plans_to_try: int | None = flag(
        None,
        "Measure up to N plans for a few steps each on this machine, then train with the best one by "
        "--objective. The measurements so far decide which plan is measured next.",
        "--try",
        metavar="N",
        within=Bounds("a number of plans of at least 1", 1),
    )
    try_iters: int | None = flag(
        None,
        f"With --try: steps of each plan, the first of which is a warm-up; {DEFAULT_ITERS}.",
        within=Bounds(f"at least {FEWEST_ITERS} steps", FEWEST_ITERS, MOST_STEPS),
    )

    def check(self, plan: str | None, print_command: bool) -> None:
        """Raise `InputError` for impossible numbers, and with flags that leave nothing to try."""
        check_bounds(self)
        if self.plans_to_try is None:
            if self.try_iters is not None:
                raise InputError(f"--try-iters {self.try_iters} needs --try, the number of plans to measure")
            return
        if plan is not None:
            raise InputError(
                f"--try {self.plans_to_try} chooses among plans, and --plan {plan} is one; give either"
            )
        if print_command:
            raise InputError(
                f"--try {self.plans_to_try} runs plans, and --print-command runs none; give either"
            )

    @property
    def iterations(self) -> int:
        """Steps of each trial."""
        return DEFAULT_ITERS if self.try_iters is None else self.try_iters

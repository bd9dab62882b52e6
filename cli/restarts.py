"""Starting a job again after a failure, from its last checkpoint and with the devices that are left."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from planner.flags import arguments
from planner.plan import Plan
from runtime import entry
from runtime.launch.torchrun import Outcome, run_job, torchrun_command
from runtime.launch.warm_ranks import WarmRanks
from runtime.settings.options import OutputOptions


class Display(Protocol):
    """Who shows what a job says."""

    def line(self, text: str) -> None:
        """Show a line of the job."""

    def metrics(self, record: dict[str, Any]) -> None:
        """Show a record of its metrics."""


def usable_ranks(plan: Plan) -> int:
    """Ranks of `plan` that this machine has devices for."""
    wanted = plan.layout.world_size
    if plan.cluster.device.kind == "cpu":
        return wanted
    # In a process of its own: this one counts once, and a device may have been lost since.
    counted = subprocess.run(entry.command("runtime.job.devices"), capture_output=True, text=True)
    text = counted.stdout.strip()
    return min(wanted, int(text)) if text.isdigit() and int(text) else wanted


def run_with_restarts(
    ranks: int,
    settings: Sequence[str],
    output: OutputOptions,
    restarts: int,
    display: Display,
    warm: WarmRanks | None = None,
) -> Outcome:
    """Run a job to its end, and again from its last checkpoint while failures may be passing ones.

    Not torchrun's own restarts: those repeat a refusal of input, and always with as many ranks.

    Args:
        settings: arguments of `runtime.pretrain` but for those of `output`; the first two name a plan.
        restarts: at most.
        warm: forks the ranks, where they are on a CPU.
    """
    assert output.log_dir is not None
    for done in range(restarts + 1):
        command = torchrun_command(ranks, [*settings, *arguments(output)])
        saves = output.save is not None
        shown = display.line, display.metrics
        outcome = run_job(command, ranks, Path(output.log_dir), *shown, restarts=done, saves=saves, warm=warm)
        if not outcome.restart or done == restarts:
            break
        output = going_on(output)
        ranks = usable_ranks(Plan.load(settings[1]))
        display.line(f"planner: {outcome.message}; restart {done + 1} of {restarts} with {ranks} ranks")
    return outcome


def going_on(output: OutputOptions) -> OutputOptions:
    """The flags of a job that goes on where this one was, from what it has saved if that is anything."""
    from runtime import checkpoint

    assert output.save is not None
    if checkpoint.latest_iteration(output.save) is None:
        return output
    return dataclasses.replace(output, load=output.save, ckpt_step=None, finetune=False)

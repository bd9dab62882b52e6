"""Flags of a training command that planning commands accept too, so that a training command can be pasted."""

from __future__ import annotations

from costmodels.dataclass import dataclass
from planner.options.flags import flag, hidden_flags
from runtime.settings.checks import RESTARTS, TIMEOUT


@dataclass(frozen=True)
class JobFlags:
    """Flags that only a running job needs."""

    distributed_timeout_minutes: float | None = flag(
        None, "Minutes after which a collective is an error.", within=TIMEOUT
    )
    max_restarts: int | None = flag(None, "Restarts of a failed job.", within=RESTARTS)


def training_flags(but: type | tuple[type, ...], trains: bool = False) -> type:
    """A dataclass of the flags of training, for a command that accepts them without using them.

    Args:
        but: flags of the command itself, which are left out.
        trains: the command has the flags of the training step itself.
    """
    # Only here: most commands that plan are given none of these flags.
    from runtime.faults.fault_options import FaultOptions
    from runtime.preflight.preflight_options import PreflightOptions
    from runtime.settings.training_options import DataOptions, OutputOptions, TrainingOptions

    groups = (DataOptions, OutputOptions, FaultOptions, PreflightOptions, JobFlags)
    return hidden_flags(*(groups if trains else (TrainingOptions, *groups)), but=but)

"""Flags of a training command that commands which only plan accept, so that one can be pasted."""

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
    """A dataclass of the flags of training that a command without use for them takes.

    Args:
        but: flags of the command itself, which it keeps.
        trains: the command has the flags of the training step itself.
    """
    # Only here: most commands that plan are given none of these flags.
    from runtime.faults.fault_options import FaultOptions
    from runtime.preflight.preflight_options import PreflightOptions
    from runtime.settings.training_options import DataOptions, OutputOptions, TrainingOptions

    groups = (DataOptions, OutputOptions, FaultOptions, PreflightOptions, JobFlags)
    return hidden_flags(*(groups if trains else (TrainingOptions, *groups)), but=but)

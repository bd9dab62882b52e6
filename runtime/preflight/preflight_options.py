"""Flags of the check of a job's ranks before training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from costmodels.errors import InputError
from costmodels.spelling import nearest
from planner.options.flags import flag

LEVELS = ("off", "report", "measure")


@dataclass(frozen=True)
class PreflightOptions:
    """Flags of the check of a job's ranks before training."""

    SECTIONS: ClassVar[dict[str, str]] = {"preflight": "Faults"}

    preflight: str = flag(
        "report",
        "Before training: report compares devices, memory, software and flags of all ranks; measure also "
        "times a GEMM on each, and collectives of their groups; off.",
        metavar="|".join(LEVELS),
    )
    replan: bool = flag(
        False, "Plan with the bandwidths that --preflight measure found, when the job plans its own layout."
    )

    def check(self, plan: str | None) -> None:
        """Raise `InputError` for impossible values, and for replanning together with a given plan."""
        if self.preflight not in LEVELS:
            near = nearest(self.preflight, LEVELS) or f"expected {', '.join(LEVELS)}"
            raise InputError(f"--preflight {self.preflight}: {near}")
        if self.replan and self.preflight != "measure":
            raise InputError("--replan needs --preflight measure, which measures what is planned with")
        if self.replan and plan is not None:
            raise InputError(
                f"--replan plans on the ranks themselves, and --plan {plan} is a plan; give either"
            )

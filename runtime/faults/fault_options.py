"""Flags for the handling of faults in a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from costmodels.errors import InputError
from planner.options.flags import flag
from planner.options.limits import AT_LEAST_1, OFF_OR_POSITIVE, Bounds, check_bounds

SHARE_OF_TIMEOUT = 0.8
"""Share of the collectives' time limit after which a hang is reported, before the libraries give up."""


@dataclass(frozen=True)
class FaultOptions:
    """Limits for skipped steps and for slow or stuck ranks, and logs of the causes."""

    SECTIONS: ClassVar[dict[str, str]] = {"no_check_for_nan_in_loss_and_grad": "Faults"}

    no_check_for_nan_in_loss_and_grad: bool = flag(
        False, "Update the weights even if the loss or the gradient norm is not a number."
    )
    skip_grad_norm_above: float | None = flag(
        None,
        "Skip steps whose gradient norm is more than this many times the median of the last ones; off "
        "unless given.",
        metavar="FACTOR",
        within=Bounds("above 1, such as 10", 1, above=True),
    )
    max_skipped_steps: int = flag(
        10,
        "Stop after this many skipped steps in a row.",
        within=AT_LEAST_1,
    )
    hang_timeout_seconds: float | None = flag(
        None,
        "End the job when a rank has been in one operation for this long, and name the rank, its host "
        f"and the operation; {SHARE_OF_TIMEOUT:.0%} of --distributed-timeout-minutes unless given; 0 for "
        "never.",
        within=OFF_OR_POSITIVE,
    )
    straggler_factor: float = flag(
        2.0,
        "Name the slowest rank in the log if its own work takes this many times the median of the "
        "others; 0 for never.",
        within=OFF_OR_POSITIVE,
    )
    log_samples: bool = flag(
        False,
        "Write the indices of the samples of each step into --log-dir, one file for each data-parallel rank.",
    )

    def check(self, log_dir: str | None, timeout_minutes: float) -> None:
        """Raise `InputError` for impossible values."""
        check_bounds(self)
        if 0 < self.straggler_factor <= 1:
            raise InputError(f"--straggler-factor {self.straggler_factor}: must be above 1, such as 10")
        limit, given = timeout_minutes * 60, self.hang_timeout_seconds
        if given is not None and not 0 <= given < limit:
            raise InputError(
                f"--hang-timeout-seconds {given}: must be 0 (never) or below the {limit:g} s of "
                "--distributed-timeout-minutes, after which collectives fail anyway"
            )
        if self.log_samples and log_dir is None:
            raise InputError("--log-samples needs --log-dir, the folder to write them in")

    @property
    def judges_steps(self) -> bool:
        """True if steps are judged by their loss and gradient norm; reading these waits for the device."""
        return not self.no_check_for_nan_in_loss_and_grad or self.skip_grad_norm_above is not None

    def hang_timeout(self, timeout_minutes: float) -> float:
        """Seconds after which a rank counts as stuck; 0 for never."""
        if self.hang_timeout_seconds is None:
            return SHARE_OF_TIMEOUT * timeout_minutes * 60
        return self.hang_timeout_seconds

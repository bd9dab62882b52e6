"""The flags of a whole run: its days, its money and its failures."""

from __future__ import annotations

from typing import ClassVar

from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from planner.budget.goodput import NODE_GBPS, RESTART_SECONDS, Failures
from planner.options.flags import flag


@dataclass(frozen=True)
class BudgetOptions:
    """What a training run is to take, in days, money and failures."""

    SECTIONS: ClassVar[dict[str, str]] = {"tokens": "Days, money and failures"}

    tokens: str | None = flag(
        None, "Tokens to train on, such as 300B, 15T or 1e12: adds the days that it takes.", metavar="N"
    )
    price_per_hour: float | None = flag(None, "Money for one device and hour: adds what the run costs.")
    mtbf_hours: float | None = flag(
        None,
        "Mean hours between two failures of one device, such as 50000: adds expected goodput and the best "
        "checkpoint interval.",
    )
    checkpoint_gbps: float | None = flag(
        None,
        "With --mtbf-hours: gigabits per second (8 x GB/s) that checkpoint storage takes in from the whole "
        f"job; {NODE_GBPS:g} for each node unless given.",
    )
    restart_seconds: float | None = flag(
        None,
        "With --mtbf-hours: seconds from a failure until the job reads its last checkpoint; "
        f"{RESTART_SECONDS:g} unless given.",
    )

    @property
    def is_given(self) -> bool:
        """Whether the answer is to hold a run."""
        return any(value is not None for value in (self.tokens, self.price_per_hour, self.mtbf_hours))

    def failures(self) -> Failures | None:
        """Failures where they are asked for; raises `InputError` for what cannot be."""
        details = (("checkpoint-gbps", self.checkpoint_gbps), ("restart-seconds", self.restart_seconds))
        if self.mtbf_hours is None:
            for name, value in details:
                if value is not None:
                    raise InputError(f"--{name} {value:g} needs --mtbf-hours, the hours between failures")
            return None
        restart = RESTART_SECONDS if self.restart_seconds is None else self.restart_seconds
        return Failures(self.mtbf_hours, self.checkpoint_gbps, restart)

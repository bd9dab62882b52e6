"""The flags of a whole run: its days, its money and its failures."""

from __future__ import annotations

from typing import ClassVar

from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from planner.budget.goal import Goal, parse_goal
from planner.budget.goodput import NODE_GBPS, RESTART_SECONDS, Failures
from planner.budget.question import RunQuestion, run_question
from planner.budget.run import parse_price, parse_tokens
from planner.options.flags import flag


@dataclass(frozen=True)
class BudgetOptions:
    """What a training run is to take, in days, money and failures."""

    SECTIONS: ClassVar[dict[str, str]] = {"tokens": "Days, money and failures"}

    tokens: str | None = flag(
        None, "Tokens to train on, such as 300B, 15T or 1e12: adds the days that it takes.", metavar="N"
    )
    price_per_hour: str | None = flag(
        None,
        "Money for one device and hour, such as 2.5, '$2.5' (quoted: shells replace $2) or '2.5 EUR': adds "
        "what the run costs.",
        metavar="MONEY",
    )
    deadline_days: float | None = flag(
        None,
        "With --tokens: days that the run may take. Of several world sizes the cheapest that is in time is "
        "recommended.",
    )
    budget: str | None = flag(
        None,
        "With --tokens and --price-per-hour: money that the run may cost, such as 200000 or '$200k'. Of "
        "several world sizes the fastest that it pays for is recommended; with --deadline-days the cheapest.",
        metavar="MONEY",
    )
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

    def notes(self) -> list[str]:
        """Sums of which a shell may have taken the front."""
        given = (("price-per-hour", self.price_per_hour), ("budget", self.budget))
        return [
            f"--{name} is {text}: of $2{text} without quotes a shell leaves that"
            for name, text in given
            if text is not None and text.startswith(".")
        ]

    def goal(self) -> Goal:
        """The deadline and the budget; raises `InputError` for what is none, or lacks tokens or a price."""
        return parse_goal(self.deadline_days, self.budget, self.tokens, parse_price(self.price_per_hour))

    def question(self) -> RunQuestion | None:
        """What is asked of the run of one size; raises `InputError` for what is wrong in it."""
        tokens = None if self.tokens is None else parse_tokens(self.tokens)
        return run_question(tokens, parse_price(self.price_per_hour), self.goal(), self.failures())

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

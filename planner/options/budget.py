"""The flags of a whole run: its days, its money and its failures."""

from __future__ import annotations

from typing import ClassVar

from costmodels.dataclass import dataclass
from planner.budget.goal import Goal, parse_goal
from planner.budget.goodput import EVAL_ITERS, MTBF_HOURS, NODE_GBPS, RESTART_SECONDS, Failures
from planner.budget.question import RunQuestion, run_question
from planner.budget.run import parse_price, parse_tokens
from planner.options.flags import flag


@dataclass(frozen=True)
class BudgetOptions:
    """Limits and rates of a training run: days, money and failures."""

    SECTIONS: ClassVar[dict[str, str]] = {"tokens": "Days, money and failures"}

    tokens: str | None = flag(
        None, "Tokens to train on, such as 300B, 15T or 1e12: adds the days of the run.", metavar="N"
    )
    price_per_hour: str | None = flag(
        None,
        "Money for one device and hour, such as 2.5, '$2.5' (quoted: shells replace $2) or '2.5 EUR': adds "
        "the cost of the run.",
        metavar="MONEY",
    )
    deadline_days: float | None = flag(
        None,
        "With --tokens: days that the run may take. Of several world sizes, the cheapest one that meets "
        "the deadline is recommended.",
    )
    budget: str | None = flag(
        None,
        "With --tokens and --price-per-hour: money that the run may cost, such as 200000 or '$200k'. Of "
        "several world sizes, the fastest one within the budget is recommended; with --deadline-days the "
        "cheapest.",
        metavar="MONEY",
    )
    mtbf_hours: float | None = flag(
        None,
        "Mean hours between two failures of one device, such as 50000: adds the time of failures, restarts "
        f"and checkpoints, and the best checkpoint interval. {MTBF_HOURS:g} is assumed unless given.",
    )
    checkpoint_gbps: float | None = flag(
        None,
        "Gigabits per second (8 x GB/s) that checkpoint storage takes in from the whole "
        f"job; {NODE_GBPS:g} for each node unless given.",
    )
    restart_seconds: float | None = flag(
        None,
        f"Seconds from a failure until the job reads its last checkpoint; {RESTART_SECONDS:g} unless given.",
    )
    save_interval: int | None = flag(
        None, "Steps between two checkpoints of the run; the best number unless given."
    )
    async_save: bool = flag(
        False,
        "Checkpoints are written while training continues; a step waits only for the copy to host memory.",
    )
    eval_interval: int | None = flag(
        None, "Steps between two evaluations of the run; no evaluation is counted unless given."
    )
    eval_iters: int | None = flag(
        None, f"Global batches of one evaluation of the run; {EVAL_ITERS} with --eval-interval unless given."
    )
    data_gbps: float | None = flag(
        None,
        "Gigabits per second at which the whole job reads its tokens; reading costs no time unless given.",
    )

    @property
    def is_given(self) -> bool:
        """True if a flag asks for the run's days, money or failures."""
        asked = (self.tokens, self.price_per_hour, self.mtbf_hours, self.checkpoint_gbps)
        return any(value is not None for value in (*asked, self.restart_seconds, self.data_gbps))

    def notes(self) -> list[str]:
        """Warnings about amounts of money whose `$` and first digit a shell may have removed."""
        given = (("price-per-hour", self.price_per_hour), ("budget", self.budget))
        return [
            f"--{name} is {text}: of $2{text} without quotes a shell leaves that"
            for name, text in given
            if text is not None and text.startswith(".")
        ]

    def goal(self) -> Goal:
        """The deadline and the budget; raises `InputError` for a wrong value, or where tokens or a price are
        missing."""
        return parse_goal(self.deadline_days, self.budget, self.tokens, parse_price(self.price_per_hour))

    def question(self) -> RunQuestion | None:
        """The question about the run of one size; raises `InputError` for a wrong flag."""
        tokens = None if self.tokens is None else parse_tokens(self.tokens)
        return run_question(tokens, parse_price(self.price_per_hour), self.goal(), self.failures())

    def failures(self) -> Failures | None:
        """Failures and pauses of the job, if a flag asks for them; raises `InputError` for impossible
        values."""
        asked = Failures(
            self.mtbf_hours,
            self.checkpoint_gbps,
            self.restart_seconds,
            self.save_interval,
            self.async_save,
            self.eval_interval if self.eval_iters != 0 else None,
            self.eval_iters or None,
            self.data_gbps,
        )
        return asked if self.is_given and asked != Failures() else None

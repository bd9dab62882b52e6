"""Goals of a run: the days and the money that it may take at most."""

from __future__ import annotations

from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from planner.budget.money import Money, money_text, parse_money
from planner.budget.run import Run
from planner.budget.words import DAY, duration
from planner.inputs.numbers import real_number

LEAST_DAYS, MOST_DAYS = 1e-6, 1e6

LEAST_BUDGET, MOST_BUDGET = 1e-9, 1e18


@dataclass(frozen=True)
class Goal:
    """The most days and the most money of a run; None for no limit."""

    deadline_days: float | None = None
    budget: Money | None = None

    @property
    def is_given(self) -> bool:
        """True if a goal was given."""
        return self.deadline_days is not None or self.budget is not None

    def is_in_time(self, run: Run) -> bool:
        """Return whether a run takes no more days than it may."""
        return self.deadline_days is None or run.days <= self.deadline_days

    def is_paid_for(self, run: Run) -> bool:
        """Return whether a run costs no more than it may."""
        return self.budget is None or (run.money is not None and run.money <= self.budget.amount)

    def is_kept(self, run: Run) -> bool:
        """Return whether a run is in time and paid for."""
        return self.is_in_time(run) and self.is_paid_for(run)

    def describe(self, verbs: tuple[str, str] = ("take", "cost")) -> str:
        """The goal, such as `take at most 30 days and cost at most $200,000`."""
        parts = []
        if self.deadline_days is not None:
            parts.append(f"{verbs[0]} at most {duration(self.deadline_days * DAY)}")
        if self.budget is not None:
            parts.append(f"{verbs[1]} at most {self.budget}")
        return " and ".join(parts)


def parse_goal(
    deadline_days: float | None,
    budget: str | float | None,
    tokens: object | None,
    price: Money | None,
) -> Goal:
    """The goal that arguments state; raises `InputError` for a wrong goal, or for one without tokens or a
    price.

    Args:
        tokens: tokens of the run; None where none were given.
        price: price of one device for an hour; a budget without a currency is in the price's currency.
    """
    days = None
    if deadline_days is not None:
        expected = "days above 0, such as 30"
        days = real_number("deadline_days", deadline_days, LEAST_DAYS, MOST_DAYS, expected)
        if tokens is None:
            raise InputError(
                f"deadline_days {days:g}: also give tokens, such as 2T, of a run of so many days"
            )
    if budget is None:
        return Goal(days)
    sum_ = parse_money("budget", budget, LEAST_BUDGET, MOST_BUDGET, "for the whole run")
    if tokens is None:
        raise InputError(f"budget {budget}: also give tokens, such as 2T, of a run of that cost")
    if price is None:
        raise InputError(f"budget {budget}: also give price_per_hour, the money for one device and hour")
    if sum_.currency and price.currency and sum_.currency != price.currency:
        raise InputError(
            f"budget {budget}: in {sum_.currency}, and price_per_hour is in {price.currency}; give both in "
            "one currency"
        )
    return Goal(days, Money(sum_.amount, sum_.currency or price.currency))


def verdict_line(goal: Goal, run: Run) -> str | None:
    """A line on the goal of a run: kept, or missed with the difference; None without a goal."""
    if not goal.is_given:
        return None
    if goal.is_kept(run):
        late = goal.deadline_days is not None and run.days_high > goal.deadline_days
        stopped = _stopped_text(goal, run)
        return f"goal: kept, to {goal.describe()}{'; ' + late_text(run) if late else ''}{stopped}"
    missed = []
    if goal.deadline_days is not None and not goal.is_in_time(run):
        missed.append(f"{duration((run.days - goal.deadline_days) * DAY)} too long")
    if goal.budget is not None and run.money is not None and not goal.is_paid_for(run):
        more = money_text(run.money - goal.budget.amount, goal.budget.currency)
        missed.append(f"{more} too dear")
    return (
        f"goal: missed, to {goal.describe()}: {' and '.join(missed)}; a range such as --world-size 64..512 "
        "finds the size that keeps it"
    )


def late_text(run: Run) -> str:
    """A warning with the upper end of a run's 80 % prediction interval."""
    return f"one such run in ten takes more than {duration(run.days_high * DAY)}"


def _stopped_text(goal: Goal, run: Run) -> str:
    """The words for a run that is late only with checkpoints and failures counted; empty for other runs."""
    whole = run.whole
    if goal.deadline_days is None or whole is None or whole.days <= goal.deadline_days:
        return ""
    return (
        f"; missed with checkpoints and failures as assumed, which make the run {duration(whole.days * DAY)}"
    )

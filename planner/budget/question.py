"""`RunQuestion`: the question about the run of a plan; the plan file keeps it for the report."""

from dataclasses import fields

from pydantic import Field

from costmodels.spec.record import Count, Devices, Name, NonNegative, Positive, Record, Sentence
from planner.budget.goal import Goal
from planner.budget.goodput import Failures
from planner.budget.money import Money
from planner.budget.run import UNIT_TOKENS

OF_FAILURES = tuple(field.name for field in fields(Failures))
"""Fields of `Failures` that a question has under the same names."""


class SizeRun(Record):
    """The run of one number of devices by its best plan."""

    world_size: Devices
    layout: Sentence | None = None
    """The layout of the best plan; None where no layout is legal, or none fits."""
    problem: Sentence | None = None
    """The reason why there is no plan."""
    days: NonNegative | None = None
    days_low: NonNegative | None = None
    days_high: NonNegative | None = None
    device_hours: NonNegative | None = None
    money: NonNegative | None = None
    on_front: bool = False
    """Pareto-optimal: no other size is both faster and cheaper."""


class RunQuestion(Record):
    """Tokens, price, goal and failures of a run, and the sizes that were compared."""

    tokens: int | None = Field(None, ge=1)
    """Tokens of the run; None where none were asked for: runs are over `UNIT_TOKENS` then."""
    price_per_hour: Positive | None = None
    """Money for one device and hour."""
    currency: Name = ""
    deadline_days: Positive | None = None
    budget: Positive | None = None
    """Money for the whole run, in the currency of the price."""
    mtbf_hours: Positive | None = None
    """Mean hours between two failures of a device, as in `Failures`; None where they were not given."""
    checkpoint_gbps: Positive | None = None
    restart_seconds: NonNegative | None = None
    save_interval: Count | None = None
    """Steps between two checkpoints; None where the best number is taken."""
    async_save: bool = False
    eval_interval: Count | None = None
    eval_iters: Count | None = None
    data_gbps: Positive | None = None
    sizes: tuple[SizeRun, ...] = ()
    """The world sizes that were asked for, ascending; empty for a single one."""
    recommended: Devices | None = None
    """The size to take."""
    why: Sentence = ""
    """The reason for that size."""

    @property
    def run_tokens(self) -> int:
        """Tokens of the runs."""
        return UNIT_TOKENS if self.tokens is None else self.tokens

    @property
    def price(self) -> Money | None:
        """The price of one device for an hour, as `Plan.run` takes it."""
        return None if self.price_per_hour is None else Money(self.price_per_hour, self.currency)

    @property
    def goal(self) -> Goal:
        """The deadline and the budget."""
        budget = None if self.budget is None else Money(self.budget, self.currency)
        return Goal(self.deadline_days, budget)

    @property
    def failures(self) -> Failures | None:
        """The causes of time without training steps, if the question asked for any of them."""
        given = Failures(**{name: getattr(self, name) for name in OF_FAILURES})
        return None if given == Failures() else given


def run_question(
    tokens: int | None,
    price: Money | None,
    goal: Goal,
    failures: Failures | None,
    sizes: tuple[SizeRun, ...] = (),
    recommended: int | None = None,
    why: str = "",
) -> RunQuestion | None:
    """The question about a run; None where none was asked."""
    if not sizes and tokens is None and price is None and failures is None:
        return None
    return RunQuestion(
        tokens=tokens,
        price_per_hour=None if price is None else price.amount,
        currency="" if price is None else price.currency,
        deadline_days=goal.deadline_days,
        budget=None if goal.budget is None else goal.budget.amount,
        **({} if failures is None else {name: getattr(failures, name) for name in OF_FAILURES}),
        sizes=sizes,
        recommended=recommended,
        why=why,
    )

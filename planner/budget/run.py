"""Budget: the days and the money of a training run."""

from __future__ import annotations

import math
from collections.abc import Iterator

from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.spec.engine import Engine
from costmodels.spec.estimate import Estimate
from costmodels.spec.hardware import Cluster
from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from planner.budget.goodput import Failures, Goodput, checkpoint_bytes, goodput
from planner.budget.money import Money, money_text, parse_money
from planner.budget.words import DAY, duration, scaled_number, short_number

SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}

MOST_TOKENS = 1e18
"""A thousand times what anyone has trained on."""

LEAST_PRICE, MOST_PRICE = 1e-9, 1e9
"""Money for a device and hour, in any currency."""

UNIT_TOKENS = 10**9
"""Tokens of the runs that are compared where no number of tokens is given."""


@dataclass(frozen=True)
class Run:
    """Days, device-hours and money to train on some tokens; low and high are of the step's range (80 %)."""

    tokens: int
    steps: int
    """Steps, the last one perhaps not full."""
    days: float
    """Days of the run, with the time that failures take where they were asked for."""
    days_low: float
    days_high: float
    device_hours: float
    """Hours of all devices together."""
    money: float | None
    """In the unit of the price; None without one."""
    money_low: float | None
    money_high: float | None
    price_per_hour: float | None
    """The price of one device for an hour; None where none was given."""
    currency: str
    """Sign or code of the price's currency, such as `$` or `EUR`; empty where it had none."""
    goodput: Goodput | None
    """None where failures were not asked for."""


def parse_tokens(text: str | float) -> int:
    """A number of tokens such as 15T, 300B or 1e12; raises `InputError` for anything else."""
    word = str(text).strip()
    scale = SUFFIXES.get(word[-1:].lower(), 1.0)
    try:
        count: float = float(word[:-1] if scale > 1 else word) * scale
    except ValueError:
        count = math.nan
    if word.isascii() and word.isdigit() and count <= MOST_TOKENS:
        count = int(word)  # Exactly; floating-point numbers are not beyond 2^53.
    if not 1 <= count <= MOST_TOKENS:
        raise InputError(
            f"tokens {word}: expected a number such as 1e12, 300B or 15T, at most {MOST_TOKENS:g}"
        )
    return round(count)


def parse_price(price_per_hour: str | float | Money | None) -> Money | None:
    """The price of one device for an hour: a number, or text such as `$2.5`, `2.5 EUR` or `2.5`.

    Raises `InputError` for anything else.
    """
    if price_per_hour is None or isinstance(price_per_hour, Money):
        return price_per_hour
    what = "for a device and hour"
    return parse_money("price_per_hour", price_per_hour, LEAST_PRICE, MOST_PRICE, what)


def run(
    model: ModelSpec,
    cluster: Cluster,
    engine: Engine,
    layout: Layout,
    estimate: Estimate,
    tokens: str | float,
    price_per_hour: str | float | Money | None = None,
    failures: Failures | None = None,
) -> Run:
    """Days and money that a layout takes to train on some tokens.

    Args:
        estimate: of the layout.
        tokens: a number, or text as `parse_tokens` reads it.
        price_per_hour: money for one device and hour, as `parse_price` reads it.
        failures: adds the time that checkpoints, restarts and lost steps take.

    Raises:
        InputError: a number is none, or failures leave the job no time to train.
    """
    price = parse_price(price_per_hour)
    count = parse_tokens(tokens)
    kept = None
    if failures is not None:
        held = checkpoint_bytes(model, cluster, engine, layout)
        kept = goodput(cluster, estimate.step_time_s, held, failures)
    share = 1.0 if kept is None else kept.share
    days = count / estimate.tokens_per_s / share / DAY
    low, high = (
        days * step / estimate.step_time_s for step in (estimate.step_time_low_s, estimate.step_time_high_s)
    )
    daily = None if price is None else price.amount * 24 * cluster.world_size
    return Run(
        tokens=count,
        steps=-(-count // (layout.global_batch_size * model.seq)),
        days=days,
        days_low=low,
        days_high=high,
        device_hours=days * 24 * cluster.world_size,
        money=None if daily is None else days * daily,
        money_low=None if daily is None else low * daily,
        money_high=None if daily is None else high * daily,
        price_per_hour=None if price is None else price.amount,
        currency="" if price is None else price.currency,
        goodput=kept,
    )


def cost_text(run: Run) -> str | None:
    """The cost of a run, with its range; None where no price was given.

    A sum without a currency says of what it is, as a bare number could be device-hours.
    """
    if run.money is None or run.money_low is None or run.money_high is None or run.price_per_hour is None:
        return None
    cost, low, high = (money_text(each, run.currency) for each in (run.money, run.money_low, run.money_high))
    price = money_text(run.price_per_hour, run.currency)
    where = "at" if run.currency else "in the unit of your price,"
    return f"cost {cost} ({low} to {high}; {where} {price} a device-hour)"


def spent_text(run: Run) -> str:
    """The time and the device-hours of a run, and what it costs where a price was given."""
    time, low, high = (duration(count * DAY) for count in (run.days, run.days_low, run.days_high))
    spent = f"{time} ({low} to {high}), {scaled_number(run.device_hours)} device-hours"
    cost = cost_text(run)
    return spent if cost is None else f"{spent}, {cost}"


def run_lines(run: Run) -> Iterator[str]:
    """A run, and what failures do to it, for people."""
    yield f"run of {scaled_number(run.tokens)} tokens: {spent_text(run)}"
    kept = run.goodput
    if kept is not None:
        size = short_number(kept.checkpoint_bytes / 1e9)
        yield (
            f"goodput {100 * kept.share:.1f} %, counted in: the job fails every {duration(kept.failure_s)}, "
            f"restarts in {duration(kept.restart_s)}; checkpoints of {size} GB "
            f"take {duration(kept.checkpoint_s)}, best every {kept.interval_steps:,} steps "
            f"({duration(kept.interval_s)})"
        )

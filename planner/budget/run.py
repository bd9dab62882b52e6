"""Budget: the days and the money of a training run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.spec.engine import Engine
from costmodels.spec.estimate import Estimate
from costmodels.spec.hardware import Cluster
from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from costmodels.spec.record import GIB
from planner.budget.goodput import Failures, Goodput
from planner.budget.money import Money, money_text, parse_money
from planner.budget.whole import WholeRun, whole_run
from planner.budget.words import DAY, duration, scaled_number, short_number

SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}

MOST_TOKENS = 1e18
"""The most tokens of a run: a thousand times the largest published training."""

LEAST_PRICE, MOST_PRICE = 1e-9, 1e9
"""Bounds of the price of one device for an hour, in any currency."""

UNIT_TOKENS = 10**9
"""Tokens of the runs that are compared where no number of tokens is given."""


@dataclass(frozen=True)
class Run:
    """Days, device-hours and money to train on some tokens; low and high come from the step's 80 % prediction
    interval."""

    tokens: int
    steps: int
    """Number of steps; the last one may be incomplete."""
    training_days: float
    """Days of the steps alone."""
    days: float
    """Days of the run: those of `whole` if it was asked for, otherwise those of the steps alone."""
    days_low: float
    days_high: float
    device_hours: float
    """Hours of all devices together."""
    money: float | None
    """The cost in the unit of the price; None without one."""
    money_low: float | None
    money_high: float | None
    price_per_hour: float | None
    """The price of one device for an hour; None where none was given."""
    currency: str
    """Sign or code of the price's currency, such as `$` or `EUR`; empty where it had none."""
    goodput: Goodput | None
    """Goodput of the run; None where failures were not asked for."""
    whole: WholeRun | None
    """The run with checkpoints, failures and all other given or assumed pauses; None where they leave no time
    to train."""


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
        estimate: estimate of the layout.
        tokens: a number, or text as `parse_tokens` reads it.
        price_per_hour: money for one device and hour, as `parse_price` reads it.
        failures: adds the time that checkpoints, restarts, lost steps, evaluation and data take.

    Raises:
        InputError: a number is wrong, or failures leave the job no time to train.
    """
    price = parse_price(price_per_hour)
    count = parse_tokens(tokens)
    training = count / estimate.tokens_per_s / DAY
    ends = estimate.step_time_low_s, estimate.step_time_high_s
    low, high = (training * step / estimate.step_time_s for step in ends)
    where = model, cluster, engine, layout, estimate, (training, low, high)
    whole = _assumed(*where) if failures is None else whole_run(*where, failures)
    kept = None if failures is None or whole is None else whole.goodput
    share = 1.0 if kept is None else kept.share
    days, low, high = (each / share for each in (training, low, high))
    daily = None if price is None else price.amount * 24 * cluster.world_size
    return Run(
        tokens=count,
        steps=-(-count // (layout.global_batch_size * model.seq)),
        training_days=training,
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
        whole=whole,
    )


def _assumed(
    model: ModelSpec,
    cluster: Cluster,
    engine: Engine,
    layout: Layout,
    estimate: Estimate,
    days: tuple[float, float, float],
) -> WholeRun | None:
    """The whole run by the assumed rates; None where they leave no time to train."""
    try:
        return whole_run(model, cluster, engine, layout, estimate, days, Failures())
    except InputError:
        return None


def cost_text(run: Run) -> str | None:
    """The cost of a run, with its range; None where no price was given.

    A sum without a currency names its unit, as a bare number could be device-hours.
    """
    if run.money is None or run.money_low is None or run.money_high is None or run.price_per_hour is None:
        return None
    cost, low, high = (money_text(each, run.currency) for each in (run.money, run.money_low, run.money_high))
    price = money_text(run.price_per_hour, run.currency)
    where = "at" if run.currency else "in the unit of your price,"
    return f"cost {cost} ({low} to {high}; {where} {price} a device-hour)"


def spent_text(run: Run) -> str:
    """The time and the device-hours of a run, and its cost if a price was given."""
    time, low, high = (duration(count * DAY) for count in (run.days, run.days_low, run.days_high))
    spent = f"{time} ({low} to {high}), {scaled_number(run.device_hours)} device-hours"
    cost = cost_text(run)
    return spent if cost is None else f"{spent}, {cost}"


def run_lines(run: Run, spell: Callable[[str], str] = str) -> Iterator[str]:
    """Lines for people on a run and on its time without training steps.

    Args:
        spell: replaces names of `Failures` by their spelling on the command line.
    """
    yield f"run of {scaled_number(run.tokens)} tokens: {spent_text(run)}"
    for name, text in whole_facts(run).items():
        yield f"{name}: {spell(text)}"


def whole_facts(run: Run) -> dict[str, str]:
    """Texts on the causes of time without training steps, by subject."""
    whole, with_all = run.whole, "with checkpoints and failures"
    if whole is None:
        return {with_all: "as assumed they leave no time to train; give mtbf_hours"}
    kept = whole.goodput
    facts = {}
    if run.goodput is None:
        high = "no end" if whole.days_high is None else duration(whole.days_high * DAY)
        time, low = duration(whole.days * DAY), duration(whole.days_low * DAY)
        facts[with_all] = f"{time} ({low} to {high}), {100 * kept.share:.1f} % of it training"
    else:
        time = duration(run.training_days * DAY)
        facts["training alone"] = f"{time}; goodput {100 * kept.share:.1f} %, counted in"
    facts["failures"] = f"one every {duration(kept.failure_s)}, restart in {duration(kept.restart_s)}"
    aside = f" (training waits {duration(kept.waits_s)})" if kept.waits_s < kept.checkpoint_s else ""
    facts["checkpoints"] = (
        f"{short_number(kept.checkpoint_bytes / 1e9)} GB in {duration(kept.checkpoint_s)}{aside}, "
        f"{'' if whole.save_interval_given else 'best '}every {kept.interval_steps:,} steps "
        f"({duration(kept.interval_s)}); {_memory_text(whole)}"
    )
    for name, seconds in (("evaluation", kept.evaluation_s), ("waiting for data", kept.data_s)):
        if seconds:
            facts[name] = f"{100 * seconds * kept.interval_steps / kept.interval_s:.1f} % of a step"
    facts["data"] = f"{short_number(whole.data_bytes_per_s / 1e6)} MB/s of tokens"
    if whole.assumed:
        facts["assumed"] = "; ".join(whole.assumed)
    return facts


def _memory_text(whole: WholeRun) -> str:
    """A text on the memory of a save and of a resume, and on a resume that does not fit."""
    memory = whole.memory
    text = f"a save writes {memory.device_bytes / GIB:.1f} GiB from a device"
    if memory.node_host_bytes is None:
        text += "; its use of host memory with this engine is not known"
    elif memory.node_host_bytes:
        text += f" and takes {memory.node_host_bytes / GIB:.1f} GiB of a node's host memory"
    else:
        text += ", tensor by tensor"
    if memory.resume_bytes is None:
        return text
    lacks = (
        f", {whole.resume_lacks_bytes / GIB:.1f} GiB more than the device has"
        if whole.resume_lacks_bytes
        else ""
    )
    return f"{text}; a resume needs {memory.resume_bytes / GIB:.1f} GiB of a device{lacks}"

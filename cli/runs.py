"""What the commands say of a training run: days, money and failures."""

from __future__ import annotations

from collections.abc import Iterator

from planner.budget.run import DAY, Run

SCALES = ((1e12, "T"), (1e9, "B"), (1e6, "M"))
"""Suffixes of large numbers, as `--tokens` takes them."""

UNITS = (("days", DAY), ("hours", 3600.0), ("minutes", 60.0))


def scaled_number(number: float) -> str:
    """A count or a sum of money such as `15.6T`, `33.8M` or `4,096`."""
    for scale, suffix in SCALES:
        if number >= scale:
            return f"{short_number(number / scale)}{suffix}"
    return short_number(number)


def short_number(number: float) -> str:
    """A number of three digits, or with all those before the point."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def duration(seconds: float) -> str:
    """Seconds in the unit that people would use."""
    for unit, length in UNITS:
        if seconds >= 2 * length:
            return f"{short_number(seconds / length)} {unit}"
    return f"{seconds:.3g} s"


def run_lines(run: Run) -> Iterator[str]:
    """A run, and what failures do to it, for people."""
    time, low, high = (duration(count * DAY) for count in (run.days, run.days_low, run.days_high))
    spent = f"{time} ({low} to {high}), {scaled_number(run.device_hours)} device-hours"
    if run.money is not None and run.money_low is not None and run.money_high is not None:
        money, low, high = map(scaled_number, (run.money, run.money_low, run.money_high))
        spent += f", money {money} ({low} to {high})"
    yield f"run of {scaled_number(run.tokens)} tokens: {spent}"
    kept = run.goodput
    if kept is not None:
        size = short_number(kept.checkpoint_bytes / 1e9)
        yield (
            f"goodput {100 * kept.share:.1f} %, counted in: the job fails every {duration(kept.failure_s)}, "
            f"restarts in {duration(kept.restart_s)}; checkpoints of {size} GB "
            f"take {duration(kept.checkpoint_s)}, best every {kept.interval_steps:,} steps "
            f"({duration(kept.interval_s)})"
        )

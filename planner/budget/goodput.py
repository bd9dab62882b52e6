"""Goodput: the share of a job's time that failures, checkpoints and evaluation leave for training.

Devices fail at random, each after `mtbf_hours` in the mean, and any one stops the job. The job waits while a
checkpoint is written, and goes on from the last checkpoint after a failure. A failure may come at any time,
also during a restart.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.spec.hardware import Cluster
from costmodels.spec.record import in_seconds
from planner.inputs.numbers import real_number

NODE_GBPS = 8.0
"""Gigabits per second that storage takes in from each node by default.

Llama 3 was trained on up to 2,048 nodes with storage that sustains 2 TB/s (arXiv:2407.21783, section 3.3.1).
"""

GBPS_RANGE = 2.0, 28.0
"""Gigabits per second that storage may take in from a node where no rate is given: the low and the high end.

The high end is the peak of Llama 3's storage, 7 TB/s; the low end is assumed, a quarter of the usual rate. A
rack of 64 GB200 on 16 nodes wrote 5.36 TB in 374 s, 7 Gb/s a node (marin-community/marin pull 8469).
"""

MTBF_HOURS = 50_700.0
"""Default mean hours between two failures of one device.

Llama 3 ran into 419 in 54 days of 16,384 H100 (arXiv:2407.21783, section 3.3.4).
"""

MTBF_RANGE = 29_500.0, 82_000.0
"""Hours between two failures of one device where none are given: the low and the high end.

Meta's two research clusters had 6.50 and 2.34 failures in 1,000 days of a node of 8 A100 (arXiv:2410.21680).
By the first rate 16,384 devices fail every 1.8 hours, as the paper projects. The paper's jobs of 1,024
devices failed every 7.9 hours, 3.6 times as often as by that rate.
"""

RESTART_SECONDS = 600.0
"""Default seconds from a failure until the job runs again, without reading the checkpoint.

Finding a failure and its cause took MegaScale under 10 minutes in the mean (arXiv:2402.15627).
"""

EVAL_INTERVAL, EVAL_ITERS = 100, 10
"""Steps between two evaluations, and global batches of one evaluation: the defaults of `planner launch`, used
where only one of the two is given."""

LEAST_GOODPUT = 1e-3
"""The least share of its time that a job must train; with less it makes no progress."""

LEAST, MOST = 1e-9, 1e9
"""Bounds of hours between failures, gigabits per second and seconds of a restart."""

HALVINGS = 50
"""Halvings of an interval from 0 to 1 in a bisection; the interval is then as narrow as floating-point
numbers allow."""


@dataclass(frozen=True)
class Failures:
    """The causes of time without training steps: failures, checkpoints, evaluation and data.

    A field that is None has an assumed value, and the answer names the assumption. Raises `InputError` for
    numbers out of their range.
    """

    mtbf_hours: float | None = None
    """Mean hours between two failures of one device and its surroundings; `MTBF_HOURS` if None."""
    checkpoint_gbps: float | None = None
    """Gigabits per second (8 x GB/s) of checkpoint storage, for the whole job; `NODE_GBPS` for each node if
    None."""
    restart_seconds: float | None = None
    """Seconds from a failure until the job reads its last checkpoint; `RESTART_SECONDS` if None."""
    save_interval: int | None = None
    """Steps between two checkpoints; the best number if None."""
    async_save: bool = False
    """If True, the job only waits for a copy in host memory; files are written beside training."""
    eval_interval: int | None = None
    """Steps between two evaluations; `EVAL_INTERVAL` if None, and no evaluation if both are."""
    eval_iters: int | None = None
    """Global batches of one evaluation; `EVAL_ITERS` if None."""
    data_gbps: float | None = None
    """Gigabits per second at which the whole job reads tokens; fast enough for every step if None."""

    def __post_init__(self) -> None:
        gigabits = "gigabits per second (8 x GB/s) above 0, such as 800"
        seconds = "seconds of at least 0, such as 600"
        steps, batches = "a whole number of steps, such as 500", "a whole number of batches, such as 100"
        for name, least, expected in (
            ("mtbf_hours", LEAST, "hours above 0, such as 50000"),
            ("checkpoint_gbps", LEAST, gigabits),
            ("restart_seconds", 0, seconds),
            ("data_gbps", LEAST, gigabits),
            ("save_interval", 1, steps),
            ("eval_interval", 1, steps),
            ("eval_iters", 1, batches),
        ):
            value = getattr(self, name)
            if value is None:
                continue
            number = real_number(name, value, least, MOST, expected)
            if expected in (steps, batches) and number != int(number):
                raise InputError(f"{name} {value}: expected {expected}")

    @property
    def eval_batches_per_step(self) -> float:
        """Global batches of evaluation for each step, in the mean."""
        if self.eval_interval is self.eval_iters is None:
            return 0.0
        batches = EVAL_ITERS if self.eval_iters is None else self.eval_iters
        return batches / (EVAL_INTERVAL if self.eval_interval is None else self.eval_interval)

    @property
    def usual(self) -> Rates:
        """The rates to count with: the given ones, and usual values for the others."""
        return self._rates(MTBF_HOURS, NODE_GBPS)

    @property
    def ends(self) -> tuple[Rates, Rates]:
        """The best and the worst rates: the given ones, and the ends of the ranges of the assumed ones."""
        worst, best = ((MTBF_RANGE[end], GBPS_RANGE[end]) for end in (0, 1))
        return self._rates(*best), self._rates(*worst)

    def _rates(self, hours: float, node_gbps: float) -> Rates:
        return Rates(
            hours if self.mtbf_hours is None else self.mtbf_hours,
            self.checkpoint_gbps,
            node_gbps,
            RESTART_SECONDS if self.restart_seconds is None else self.restart_seconds,
        )

    def assumed(self) -> tuple[str, ...]:
        """The assumptions, each with its range and the argument that replaces it."""
        found = []
        if self.mtbf_hours is None:
            low, high = MTBF_RANGE
            found.append(
                f"a device fails every {MTBF_HOURS:,.0f} hours ({low:,.0f} to {high:,.0f}; mtbf_hours)"
            )
        if self.checkpoint_gbps is None:
            low, high = GBPS_RANGE
            found.append(
                f"storage takes {NODE_GBPS:g} Gb/s from each node ({low:g} to {high:g}; checkpoint_gbps)"
            )
        if self.restart_seconds is None:
            found.append(f"a restart takes {RESTART_SECONDS / 60:g} minutes (restart_seconds)")
        if self.eval_interval is self.eval_iters is None:
            found.append("no evaluation (eval_interval)")
        elif self.eval_interval is None:
            found.append(f"an evaluation comes every {EVAL_INTERVAL} steps (eval_interval)")
        elif self.eval_iters is None:
            found.append(f"an evaluation takes {EVAL_ITERS} global batches (eval_iters)")
        if self.data_gbps is None:
            found.append("steps do not wait for data (data_gbps)")
        return tuple(found)


class Rates(NamedTuple):
    """Rates of failures, of checkpoint storage and of restarts."""

    mtbf_hours: float
    checkpoint_gbps: float | None
    node_gbps: float
    """Gigabits per second of storage for each node, where `checkpoint_gbps` is None."""
    restart_seconds: float

    def bytes_per_s(self, cluster: Cluster) -> float:
        """Bytes per second of checkpoint storage, for the whole job."""
        return (self.checkpoint_gbps or self.node_gbps * cluster.nodes) * 1e9 / 8


class Stored(NamedTuple):
    """Bytes of one checkpoint, and the seconds of the copy that an asynchronous save waits for."""

    written: float
    """Weights and optimizer state of the whole model."""
    read: float
    """Bytes that all devices read together to resume."""
    copy_s: float


class Beside(NamedTuple):
    """Seconds that each step waits for evaluation and for data."""

    evaluation_s: float = 0.0
    data_s: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of evaluation and of waiting for data together."""
        return self.evaluation_s + self.data_s


@dataclass(frozen=True)
class Goodput:
    """The share of its time that a job trains, with the best interval between checkpoints."""

    share: float
    """Expected seconds of training in a second of the job, 0 to 1."""
    failure_s: float
    """Mean seconds between two failures of the job."""
    checkpoint_bytes: float
    """Weights and optimizer state of the whole model."""
    checkpoint_s: float
    """Seconds to write a checkpoint."""
    waits_s: float
    """Seconds that training waits for a checkpoint: less than `checkpoint_s` where saves are asynchronous."""
    load_s: float
    """Seconds to read a checkpoint."""
    restart_s: float
    """Seconds from a failure until training goes on, including the reading of the checkpoint."""
    interval_steps: int
    """Steps between two checkpoints."""
    interval_s: float
    """Seconds of the steps between two checkpoints."""
    evaluation_s: float
    """Seconds of evaluation for each step, in the mean."""
    data_s: float
    """Seconds that each step waits for its tokens."""


def expected_share(interval_s: float, checkpoint_s: float, restart_s: float, failure_s: float) -> float:
    """Expected share of time spent on training that is not lost, 0 to 1.

    `interval_s` seconds of training and their checkpoint last
    M e^(restart / M) (e^((interval + checkpoint) / M) - 1) in the mean, with M = `failure_s`: the complete
    model of J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    Future Generation Computer Systems 22 (2006).
    """
    exponent = (interval_s + checkpoint_s) / failure_s
    try:
        lasts = failure_s * math.exp(restart_s / failure_s) * math.expm1(exponent)
    except OverflowError:
        return 0.0
    return interval_s / lasts


def best_interval(checkpoint_s: float, failure_s: float) -> float:
    """Seconds of training between checkpoints at which `expected_share` is greatest.

    With x and d the interval and the checkpoint in units of `failure_s`, the derivative is zero where
    (1 - x) e^(x + d) = 1; the restart does not move it. For short checkpoints that is the square root of
    2 checkpoint_s failure_s (J. W. Young, "A first order approximation to the optimum checkpoint interval",
    CACM 17, 1974), and Daly's closed form (2006, equation 37) is its expansion of a higher order.
    """
    dump = checkpoint_s / failure_s
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if middle + dump + math.log1p(-middle) > 0:
            low = middle
        else:
            high = middle
    return low * failure_s


def goodput(
    cluster: Cluster,
    step: float,
    stored: Stored,
    failures: Failures,
    rates: Rates | None = None,
    beside: Beside = Beside(),  # noqa: B008 - a tuple
) -> Goodput:
    """The goodput of a job, with the best whole number of steps to a checkpoint unless one is given.

    An asynchronous save ends before the next one begins.

    Args:
        step: seconds of a step.
        rates: those of `failures` unless given.

    Raises:
        InputError: the job would hardly ever reach its next checkpoint.
    """
    rates = failures.usual if rates is None else rates
    failure_s = rates.mtbf_hours * 3600 / cluster.world_size
    writes, reads = (held / rates.bytes_per_s(cluster) for held in (stored.written, stored.read))
    waits = min(stored.copy_s, writes) if failures.async_save else writes
    restart = rates.restart_seconds + reads
    lasts = step + beside.total

    def share(steps: int) -> float:
        return expected_share(steps * lasts, waits, restart, failure_s) * step / lasts

    if failures.save_interval is not None:
        steps = int(failures.save_interval)
    else:
        fewer = max(1, int(best_interval(waits, failure_s) / lasts))
        if failures.async_save:
            fewer = max(fewer, math.ceil(writes / lasts))
        steps = max((fewer, fewer + 1), key=share)
    if share(steps) < LEAST_GOODPUT:
        raise InputError(
            f"mtbf_hours {rates.mtbf_hours:g} of {cluster.world_size} devices: one fails every "
            f"{in_seconds(failure_s)}, but a step takes {in_seconds(step)}, a checkpoint "
            f"{in_seconds(writes)} and a restart {in_seconds(restart)}, so that the job would not get on; "
            "expected more hours"
        )
    return Goodput(
        share=share(steps),
        failure_s=failure_s,
        checkpoint_bytes=stored.written,
        checkpoint_s=writes,
        waits_s=waits,
        load_s=reads,
        restart_s=restart,
        interval_steps=steps,
        interval_s=steps * step,
        evaluation_s=beside.evaluation_s,
        data_s=beside.data_s,
    )

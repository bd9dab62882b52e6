"""Goodput: the share of a job's time that failures and checkpoints leave for training.

Devices fail at random, each after `mtbf_hours` in the mean, and any one stops the job. The job waits while a
checkpoint is written, and goes on from the last one after a failure, which may come at any time, also while
it restarts.
"""

from __future__ import annotations

import math

from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.layers.optimizer import ADAM_STATE, UPDATES
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Cluster
from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from costmodels.spec.record import in_seconds
from planner.inputs.numbers import real_number

NODE_GBPS = 8.0
"""Gigabits per second that storage takes in from each node, unless given.

Llama 3 was trained on up to 2,048 nodes with storage that sustains 2 TB/s (arXiv:2407.21783, section 3.3.1).
"""

RESTART_SECONDS = 600.0
"""Until a job runs again after a failure, without reading the checkpoint, unless given.

Finding a failure and its cause took MegaScale under 10 minutes in the mean (arXiv:2402.15627).
"""

MASTER = 4.0
"""Bytes of an fp32 master copy of a parameter."""

LEAST_GOODPUT = 1e-3
"""A job that trains for a smaller share of its time does not get anywhere."""

LEAST, MOST = 1e-9, 1e9
"""Hours between failures, gigabits per second and seconds of a restart that can be counted with."""

HALVINGS = 50
"""Halvings of a bracket between 0 and 1, which is then nearly as narrow as floating-point numbers are."""


@dataclass(frozen=True)
class Failures:
    """The rate of failures, and the time that one takes; raises `InputError` for what cannot be."""

    mtbf_hours: float
    """Mean hours between two failures of one device and what is around it.

    Llama 3 ran into 419 in 54 days of 16,384 H100: 50,700 hours (arXiv:2407.21783, section 3.3.4).
    """
    checkpoint_gbps: float | None = None
    """Gigabits per second (8 x GB/s) of checkpoint storage, for the whole job; `NODE_GBPS` a node if None."""
    restart_seconds: float = RESTART_SECONDS
    """From a failure until the job reads its last checkpoint."""

    def __post_init__(self) -> None:
        gigabits = "gigabits per second (8 x GB/s) above 0, such as 800"
        real_number("mtbf_hours", self.mtbf_hours, LEAST, MOST, "hours above 0, such as 50000")
        if self.checkpoint_gbps is not None:
            real_number("checkpoint_gbps", self.checkpoint_gbps, LEAST, MOST, gigabits)
        seconds = "seconds of at least 0, such as 600"
        real_number("restart_seconds", self.restart_seconds, 0, MOST, seconds)


@dataclass(frozen=True)
class Goodput:
    """The share of its time that a job trains, if its checkpoints are as far apart as is best."""

    share: float
    """Expected seconds of training in a second of the job, 0 to 1."""
    failure_s: float
    """Mean seconds between two failures of the job."""
    checkpoint_bytes: float
    """Weights and optimizer state of the whole model."""
    checkpoint_s: float
    """Seconds to write a checkpoint, or to read it."""
    restart_s: float
    """Seconds from a failure until training goes on, the checkpoint read."""
    interval_steps: int
    """Steps between two checkpoints."""
    interval_s: float
    """Seconds of these steps."""


def expected_share(interval_s: float, checkpoint_s: float, restart_s: float, failure_s: float) -> float:
    """Expected share of time that is training kept, 0 to 1.

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


def checkpoint_bytes(model: ModelSpec, cluster: Cluster, engine: Engine, layout: Layout) -> float:
    """Bytes of the weights and the optimizer's state of the whole model, each parameter once.

    An engine whose master copy of the weights is what it trains (FSDP2) does not store them twice.
    """
    optimizer = UPDATES[layout.optimizer]
    policy = engine.for_device(cluster.device).memory_policy(layout.precision)
    # More than a master copy is gradients, which no checkpoint holds.
    master = min(max(policy.optimizer - ADAM_STATE, 0.0), MASTER)
    weights = master if engine.sharding.fully_sharded and master > 0 else policy.parameters + master
    ends = model.embedding_parameters + (0 if model.tied else model.vocab * model.hidden)
    layers = model.parameters - ends
    return layers * (weights + optimizer.layers) + ends * (weights + optimizer.ends)


def goodput(cluster: Cluster, step: float, held: float, failures: Failures) -> Goodput:
    """The goodput of a job under `failures`, with the best whole number of steps to a checkpoint.

    Args:
        step: seconds of a step.
        held: bytes of a checkpoint.

    Raises:
        InputError: the job would hardly ever reach its next checkpoint.
    """
    failure_s = failures.mtbf_hours * 3600 / cluster.world_size
    gbps = failures.checkpoint_gbps or NODE_GBPS * cluster.nodes
    writes = held * 8 / (gbps * 1e9)
    restart = failures.restart_seconds + writes

    def share(steps: int) -> float:
        return expected_share(steps * step, writes, restart, failure_s)

    fewer = max(1, int(best_interval(writes, failure_s) / step))
    steps = max((fewer, fewer + 1), key=share)
    if share(steps) < LEAST_GOODPUT:
        raise InputError(
            f"mtbf_hours {failures.mtbf_hours:g} of {cluster.world_size} devices: one fails every "
            f"{in_seconds(failure_s)}, but a step takes {in_seconds(step)}, a checkpoint "
            f"{in_seconds(writes)} and a restart {in_seconds(restart)}, so that the job would not get on; "
            "expected more hours"
        )
    return Goodput(
        share=share(steps),
        failure_s=failure_s,
        checkpoint_bytes=held,
        checkpoint_s=writes,
        restart_s=restart,
        interval_steps=steps,
        interval_s=steps * step,
    )

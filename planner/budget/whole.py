"""A whole run: training steps, and all other time by given and assumed rates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.spec.engine import Engine
from costmodels.spec.estimate import Estimate
from costmodels.spec.hardware import Cluster
from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from planner.budget.goodput import Beside, Failures, Goodput, Rates, Stored, goodput

if TYPE_CHECKING:
    from costmodels.memory.checkpoints import CheckpointMemory

FORWARD = 1 / 3
"""Share of a step's passes that is forward; backward has two GEMMs for each GEMM of forward."""

SHORT_TOKENS = 65_500
"""Vocabularies below this have tokens of 2 bytes in Megatron's `.bin` files, others of 4 bytes."""


@dataclass(frozen=True)
class WholeRun:
    """A run with its checkpoints, failures, restarts, evaluation and data."""

    days: float
    """Days by the given rates and the assumed ones."""
    days_low: float
    """Days with the shortest step (lower end of the 80 % prediction interval) at the best assumed rates."""
    days_high: float | None
    """Days with the longest step at the worst assumed rates; None where they leave no time to train."""
    goodput: Goodput
    memory: CheckpointMemory
    resume_lacks_bytes: float
    """Bytes that a device lacks for a resume; 0 where it fits, or where this was not checked."""
    data_bytes_per_s: float
    """Bytes of tokens that the whole job reads in a second."""
    save_interval_given: bool
    """True if the user gave the steps between two checkpoints; otherwise they are the best number."""
    assumed: tuple[str, ...]
    """The assumed values, each with its range and the argument that replaces it."""


def step_forward_s(estimate: Estimate) -> float:
    """Seconds of the forward passes of a step: a third of the time of passes without recomputation."""
    time = estimate.time
    once = time.recompute + time.offload + time.data_parallel + time.accumulation + time.optimizer
    return FORWARD * max(estimate.step_time_s - once, 0.0)


def token_bytes(model: ModelSpec) -> int:
    """Bytes of a token in a data file."""
    return 2 if model.vocab < SHORT_TOKENS else 4


def beside_steps(model: ModelSpec, layout: Layout, estimate: Estimate, failures: Failures) -> Beside:
    """Seconds of evaluation, and of waiting for tokens, that are added to each step."""
    evaluation = step_forward_s(estimate) * failures.eval_batches_per_step
    data = 0.0
    if failures.data_gbps is not None:
        read = layout.global_batch_size * model.seq * token_bytes(model)
        data = max(read * 8 / (failures.data_gbps * 1e9) - estimate.step_time_s, 0.0)
    return Beside(evaluation, data)


def whole_run(
    model: ModelSpec,
    cluster: Cluster,
    engine: Engine,
    layout: Layout,
    estimate: Estimate,
    days: tuple[float, float, float],
    failures: Failures,
) -> WholeRun:
    """A whole run, from its days of training and their low and high ends.

    Raises:
        InputError: failures leave the job no time to train.
    """
    # Ranks read plans, and never price them.
    from costmodels.memory.checkpoints import checkpoint_bytes, checkpoint_memory

    memory = checkpoint_memory(model, cluster, engine, layout, estimate, failures.async_save)
    written = checkpoint_bytes(model, cluster, engine, layout)
    copy = memory.device_bytes / cluster.device.host_bandwidth
    stored = Stored(written, memory.read_bytes, copy)
    beside = beside_steps(model, layout, estimate, failures)

    def kept(rates: Rates) -> Goodput:
        return goodput(cluster, estimate.step_time_s, stored, failures, rates, beside)

    middle, low, high = days
    best, worst = failures.ends
    usual = kept(failures.usual)
    try:
        longest = high / kept(worst).share
    except InputError:
        longest = None
    return WholeRun(
        days=middle / usual.share,
        days_low=low / kept(best).share,
        days_high=longest,
        goodput=usual,
        memory=memory,
        resume_lacks_bytes=max((memory.resume_bytes or 0.0) - cluster.memory_bytes, 0.0),
        data_bytes_per_s=estimate.tokens_per_s * token_bytes(model),
        save_interval_given=failures.save_interval is not None,
        assumed=failures.assumed(),
    )

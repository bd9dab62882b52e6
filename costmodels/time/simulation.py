"""The duration of a pipeline schedule, by simulation of every pass of every microbatch.

Passes are the nodes of a graph. A pass starts when its rank has finished the pass before it and its input has
arrived. A forward pass needs the activations of the stage before, a backward pass the gradients of the stage
behind; both take message time. A rank sends its messages one after the other, as they share its outgoing
link. The end of the last pass is the length of the critical path.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from costmodels.dataclass import dataclass
from costmodels.spec.layout import IN_ROUNDS, SCHEDULE_TRAITS, V_SCHEDULES, Schedule
from costmodels.spec.schedules import BACKWARD, FORWARD, INPUTS, WEIGHTS, orders, schedule_exists
from costmodels.spec.table import Bools, Floats, Ints

BLOCKING: tuple[Schedule, ...] = ("1f1b",)
"""Schedules whose ranks wait for their sends.

PyTorch's Schedule1F1B waits for each fused send and receive before it computes (`_step_microbatches`), and
Megatron-LM's 1F1B exchanges with `send_forward_recv_backward` and `send_backward_recv_forward`, which do
the same; the other schedules of both send while they compute.
"""

TOLERANCE = 1e-12
"""Relative difference below which two moments of a pipeline are equal, despite rounding errors of sums."""

MOST_PASSES = 65_536
"""Most passes that `pipeline_seconds` simulates, in some 20 ms; longer pipelines keep their closed forms."""

STEADY_BATCHES = 4
"""Least microbatches for each rank with which a steady state is searched."""


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of one microbatch on each stage. Arrays of shape [stages], but for `send`."""

    forward: Floats
    inputs: Floats
    """Seconds of input gradients, with recomputation."""
    weights: Floats
    """Seconds of weight gradients; a whole backward pass takes `inputs` and `weights`."""
    send: Floats
    """Seconds of one message between a stage and the next one, in either direction, [stages - 1]."""
    waits: bool = False
    """True if ranks wait for their sends under every schedule."""

    def without_sends(self) -> StageSeconds:
        """These stages with messages that take no time."""
        return replace(self, send=np.zeros_like(self.send))

    def slowest_rank(self, schedule: Schedule, pipeline: int) -> float:
        """Seconds that the slowest rank computes for one microbatch, over all its chunks."""
        chunks = (self.forward + self.inputs + self.weights).reshape(-1, pipeline).copy()
        if schedule in V_SCHEDULES:
            chunks[1] = chunks[1, ::-1].copy()
        return float(chunks.sum(axis=0).max())


@dataclass(frozen=True, eq=False)
class Graph:
    """The passes of a schedule, each after all passes that it needs. Arrays of shape [passes], except those
    of `cut`."""

    rank: Ints
    kind: Ints
    stage: Ints
    micro_batch: Ints
    needs: Ints
    """Place of the pass of another rank whose output it needs, counted from 1; 0 without one."""
    sent: Ints
    """The boundary that the pass's output crosses to another rank, counted from 1; 0 without one."""
    before: Ints
    """Places of the passes of the last steady period, rank by rank, [cut]."""
    after: Ints
    """Places of the same passes one period later, [cut]."""


@dataclass(frozen=True, eq=False)
class Simulation:
    """Start and end of each pass. Arrays of shape [passes], in an order in which the passes could start."""

    graph: Graph
    start: Floats
    end: Floats
    arrive: Floats
    """Seconds at which the output of each pass reaches the rank that needs it."""
    ranks: int

    @property
    def seconds(self) -> float:
        """Seconds from the first to the last pass."""
        return float(self.end.max(initial=0.0))

    @property
    def busy(self) -> Floats:
        """Seconds that each pipeline rank computes, [ranks]."""
        took = self.end - self.start
        return np.bincount(self.graph.rank, took, minlength=self.ranks).astype(np.float64)

    @property
    def idle(self) -> Floats:
        """Seconds that each pipeline rank waits between the first and the last pass of all, [ranks]."""
        return self.seconds - self.busy


def steady_period(schedule: Schedule, pipeline: int) -> int:
    """Microbatches after which the order of a long schedule repeats itself."""
    return pipeline if schedule in IN_ROUNDS else 1


@lru_cache(maxsize=32)
def graph(schedule: Schedule, pipeline: int, chunks: int, micro_batches: int) -> Graph:
    """The passes of a schedule and their dependencies.

    Raises:
        InputError: there is no such schedule.
    """
    every = orders(schedule, pipeline, chunks, micro_batches)
    lengths = [len(order.kind) for order in every]
    rank = np.repeat(np.arange(pipeline), lengths)
    kind, stage, micro_batch = (
        np.concatenate([getattr(order, name) for order in every]) for name in ("kind", "stage", "micro_batch")
    )
    stages, node = pipeline * chunks, np.arange(len(kind))
    forward, backward = kind == FORWARD, (kind == BACKWARD) | (kind == INPUTS)
    # Places of the forward and the backward pass of each stage and microbatch.
    place = np.zeros((2, stages, micro_batches), dtype=np.int64)
    place[0, stage[forward], micro_batch[forward]] = node[forward]
    place[1, stage[backward], micro_batch[backward]] = node[backward]
    rank_of = np.zeros(stages, dtype=np.int64)
    rank_of[stage] = rank
    later, sooner = forward & (stage > 0), backward & (stage < stages - 1)
    needed = np.full(len(node), -1)
    needed[later] = place[0, stage[later] - 1, micro_batch[later]]
    needed[sooner] = place[1, stage[sooner] + 1, micro_batch[sooner]]
    # An input that its own rank computed is there: the orders see to it.
    needed[(needed >= 0) & (rank[needed] == rank)] = -1
    target = np.where(forward, np.minimum(stage + 1, stages - 1), np.maximum(stage - 1, 0))
    leaves = (forward | backward) & (rank_of[target] != rank)
    before, after = _steady(schedule, pipeline, chunks, rank, kind, stage, micro_batch)
    sequence = _sequence(lengths, needed)
    position = np.empty_like(sequence)
    position[sequence] = node
    needs = np.where(needed >= 0, position[needed] + 1, 0)
    return Graph(
        rank=rank[sequence],
        kind=kind[sequence],
        stage=stage[sequence],
        micro_batch=micro_batch[sequence],
        needs=needs[sequence],
        sent=np.where(leaves, np.where(forward, stage + 1, stage), 0)[sequence],
        before=position[before],
        after=position[after],
    )


def _sequence(lengths: list[int], needed: Ints) -> Ints:
    """Passes in an order in which each comes after the earlier ones of its rank and after the one that it
    needs."""
    needs = needed.tolist()
    done = bytearray(len(needs) + 1)
    done[-1] = 1  # That of passes that need nothing, whose place is -1.
    ends = np.cumsum(lengths).tolist()
    position = [end - length for end, length in zip(ends, lengths, strict=True)]
    sequence: list[int] = []
    waiting = list(range(len(lengths)))
    while waiting:
        found = len(sequence)
        for rank in waiting:
            node, end = position[rank], ends[rank]
            while node < end and done[needs[node]]:
                done[node] = 1
                sequence.append(node)
                node += 1
            position[rank] = node
        waiting = [rank for rank in waiting if position[rank] < ends[rank]]
        if waiting and len(sequence) == found:
            raise AssertionError("the passes of the schedule wait for each other")
    return np.array(sequence, dtype=np.int64)


def _steady(
    schedule: Schedule, pipeline: int, chunks: int, rank: Ints, kind: Ints, stage: Ints, micro_batch: Ints
) -> tuple[Ints, Ints]:
    """The last period of each rank's steady state before the pipeline drains, and the period after it.

    Both are empty where a rank has no steady state.
    """
    period = steady_period(schedule, pipeline)
    passes = SCHEDULE_TRAITS[schedule].steady_passes * chunks * period
    before = []
    same: Bools = np.zeros(len(kind), dtype=bool)
    if len(kind) > passes:
        same[:-passes] = (
            (rank[:-passes] == rank[passes:])
            & (kind[:-passes] == kind[passes:])
            & (stage[:-passes] == stage[passes:])
            & (micro_batch[:-passes] + period == micro_batch[passes:])
        )
    for each in range(pipeline):
        own = np.flatnonzero(same & (rank == each))
        # Single passes may be like others by chance while the pipeline drains.
        steady = max(np.split(own, np.flatnonzero(np.diff(own) > 1) + 1), key=len)
        if len(steady) < passes:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        before.append(steady[-passes:])
    found = np.concatenate(before)
    return found, found + passes


def simulate(
    schedule: Schedule, pipeline: int, chunks: int, micro_batches: int, seconds: StageSeconds
) -> Simulation:
    """Simulate a schedule.

    Args:
        chunks: model chunks on each pipeline rank.
        seconds: seconds of the pipeline x chunks stages.

    Raises:
        InputError: the schedule does not run this number of chunks or of microbatches.
    """
    passes = graph(schedule, pipeline, chunks, micro_batches)
    took = _pass_seconds(passes, seconds)
    end, arrive = map(np.array, _play(schedule, pipeline, passes, took, seconds))
    return Simulation(graph=passes, start=end - took, end=end, arrive=arrive, ranks=pipeline)


def _pass_seconds(passes: Graph, seconds: StageSeconds) -> Floats:
    kinds = np.empty((4, len(seconds.forward)))
    kinds[FORWARD], kinds[INPUTS], kinds[WEIGHTS] = seconds.forward, seconds.inputs, seconds.weights
    kinds[BACKWARD] = seconds.inputs + seconds.weights
    took: Floats = kinds[passes.kind, passes.stage]
    return took


def _play(
    schedule: Schedule, pipeline: int, passes: Graph, took: Floats, seconds: StageSeconds
) -> tuple[list[float], list[float]]:
    """Seconds at which each pass ends, and at which its output arrives."""
    # The first one stands for passes that need nothing of another rank.
    ends, free = [0.0], [0.0] * pipeline
    add = ends.append
    rows = zip(passes.rank.tolist(), passes.needs.tolist(), took.tolist(), strict=True)
    if not seconds.send.any():
        for rank, need, time in rows:
            start, arrived = free[rank], ends[need]
            end = free[rank] = (arrived if arrived > start else start) + time
            add(end)
        return ends[1:], ends[1:]
    arrivals, way_out = [0.0], [0.0] * pipeline
    blocking = seconds.waits or schedule in BLOCKING
    travels = np.append(0.0, seconds.send)[passes.sent].tolist()
    for (rank, need, time), travel in zip(rows, travels, strict=True):
        start, arrived = free[rank], arrivals[need]
        end = arrives = free[rank] = (arrived if arrived > start else start) + time
        if travel:
            arrives = way_out[rank] = max(end, way_out[rank]) + travel
            if blocking:
                free[rank] = arrives
        add(end)
        arrivals.append(arrives)
    return ends[1:], arrivals[1:]


def pipeline_seconds(
    schedule: Schedule, pipeline: int, chunks: int, micro_batches: int, seconds: StageSeconds
) -> float | None:
    """The seconds of `simulate`, for a long schedule without simulating all of it.

    None for a schedule that does not run these numbers, and where more than `MOST_PASSES` passes would have
    to be simulated. Once all ranks take the same time for a period of their steady state, and so do their
    messages, this continues until the pipeline drains. The reason: the start of a pass is a maximum of sums
    of earlier moments and constants, so a common shift of all moments is preserved. Passes after a period
    depend on nothing before it, and more microbatches only add whole periods. So schedules of fewer
    microbatches are simulated until two periods are equal, and the other periods are added.
    """
    if not schedule_exists(schedule, pipeline, chunks, micro_batches):
        return None
    passes_each = SCHEDULE_TRAITS[schedule].steady_passes * pipeline * chunks
    period = steady_period(schedule, pipeline)
    count = STEADY_BATCHES * pipeline
    while micro_batches % period == 0 and 2 * count <= micro_batches and count * passes_each <= MOST_PASSES:
        passes = graph(schedule, pipeline, chunks, count)
        took = _pass_seconds(passes, seconds)
        moments = np.array(_play(schedule, pipeline, passes, took, seconds))
        gained, last = moments[:, passes.after] - moments[:, passes.before], moments[0].max()
        if gained.size and np.ptp(gained) <= TOLERANCE * last:
            return float(last + (micro_batches - count) // period * gained.mean())
        count *= 2
    if micro_batches * passes_each > MOST_PASSES:
        return None
    passes = graph(schedule, pipeline, chunks, micro_batches)
    return max(_play(schedule, pipeline, passes, _pass_seconds(passes, seconds), seconds)[0])

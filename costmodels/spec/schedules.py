"""The orders in which pipeline ranks run forward and backward passes of their stages.

They are those of `torch.distributed.pipelining`, which the runtime executes; Megatron-LM's 1F1B and
interleaved schedules (`megatron/core/pipeline_parallel/schedules.py`) run in the same order.
"""

from __future__ import annotations

import numpy as np

from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.spec.layout import (
    CHUNKS_OF_SCHEDULES,
    SCHEDULE_TRAITS,
    SPLIT_BACKWARD,
    V_SCHEDULES,
    Schedule,
    schedule_takes,
)
from costmodels.spec.table import Ints

FORWARD, BACKWARD, INPUTS, WEIGHTS = range(4)
"""Kinds of passes: forward, whole backward, input gradients, and weight gradients."""

GATHERED_STAGES = 3
"""Number of a rank's stages whose parameters are gathered at the same time, for ranks with several stages
(`_add_unshard_reshard`)."""

Pass = tuple[int, int]
"""Kind and chunk of a pass."""


@dataclass(frozen=True, eq=False)
class Order:
    """The passes of one pipeline rank in their order; arrays of shape [passes]."""

    kind: Ints
    stage: Ints
    micro_batch: Ints


def schedule_exists(schedule: Schedule, pipeline: int, chunks: int, micro_batches: int) -> bool:
    """True where a schedule exists for these numbers; schedules that PyTorch refuses do not exist."""
    if not schedule_takes(schedule, chunks) or min(pipeline, micro_batches) < 1:
        return False
    traits = SCHEDULE_TRAITS[schedule]
    if micro_batches < traits.least_micro_batches * pipeline:
        return False
    return not traits.in_rounds or micro_batches % max(1, micro_batches // pipeline) == 0


def orders(schedule: Schedule, pipeline: int, chunks: int, micro_batches: int) -> tuple[Order, ...]:
    """The order of each pipeline rank.

    Raises:
        InputError: the schedule does not run this number of chunks or of microbatches.
    """
    if not schedule_exists(schedule, pipeline, chunks, micro_batches):
        raise InputError(
            f"schedule {schedule} does not run {micro_batches} microbatches on {pipeline} pipeline ranks of "
            f"{chunks} chunks; {CHUNKS_OF_SCHEDULES}; interleaved ones take a multiple of the ranks, "
            "dualpipev at least twice the ranks"
        )
    every = []
    for rank in range(pipeline):
        kind, chunk, stage = _passes(schedule, rank, pipeline, chunks, micro_batches)
        number = _numbered(kind, chunk)
        kept = number < micro_batches
        every.append(Order(kind[kept], stage[kept], number[kept]))
    return tuple(every)


def passes_of_rank(
    schedule: Schedule, rank: int, pipeline: int, chunks: int, micro_batches: int
) -> tuple[Ints, Ints]:
    """Kinds and stages of the passes of one pipeline rank, in the order of `orders`."""
    kind, chunk, stage = _passes(schedule, rank, pipeline, chunks, micro_batches)
    if schedule in V_SCHEDULES:
        kept = _numbered(kind, chunk) < micro_batches
        return kind[kept], stage[kept]
    return kind, stage


def _passes(
    schedule: Schedule, rank: int, pipeline: int, chunks: int, micro_batches: int
) -> tuple[Ints, Ints, Ints]:
    """Kinds, chunks and stages of passes; passes of microbatches that do not exist are to be removed."""
    if schedule in V_SCHEDULES:
        make = _zero_bubble_v if schedule == "zbv" else _dual_pipe_v
        kind, chunk = np.array(make(rank, pipeline, micro_batches), dtype=np.int64).reshape(-1, 2).T
        return kind, chunk, np.where(chunk == 0, rank, 2 * pipeline - 1 - rank)
    kind, chunk = _in_rounds(schedule, rank, pipeline, chunks, micro_batches)
    return kind, chunk, chunk * pipeline + rank


def _numbered(kind: Ints, chunk: Ints) -> Ints:
    """The microbatch of each pass: every chunk processes microbatches in order, for each kind of pass."""
    number = np.empty_like(kind)
    backward = (kind == BACKWARD) | (kind == INPUTS)
    for each in range(int(chunk.max(initial=-1)) + 1):
        own = chunk == each
        for passes in (own & (kind == FORWARD), own & backward):
            number[passes] = np.arange(np.count_nonzero(passes))
        # Weights follow the inputs of the same chunk; whole backward passes leave none to do.
        number[own & (kind == WEIGHTS)] = number[own & (kind == INPUTS)]
    return number


def _in_rounds(
    schedule: Schedule, rank: int, pipeline: int, chunks: int, micro_batches: int
) -> tuple[Ints, Ints]:
    """Kinds and chunks of 1F1B, of its interleaved form and of interleaved ZB-H1.

    After a warm-up of forward passes, forward and backward alternate (arXiv:2104.04473, section 2.2); chunks
    take turns of one round of microbatches. ZB-H1 (arXiv:2401.10241, section 2.3) needs the shorter warm-up
    of 1F1B, and rank r runs weight gradients r passes after input gradients.
    """
    split = schedule in SPLIT_BACKWARD
    round_size = micro_batches // max(1, micro_batches // pipeline) if chunks > 1 else micro_batches
    hop = 1 if split or chunks == 1 else 2
    warm_up = min((chunks - 1) * round_size + hop * (pipeline - 1 - rank), micro_batches * chunks)
    slot = np.arange(micro_batches * chunks)
    chunk = slot // round_size % chunks
    # The slot at which each pass is due: in the steady state a forward, a backward and perhaps weights take
    # turns.
    forward = np.where(slot < warm_up, slot, warm_up + 3 * (slot - warm_up))
    due = [forward, warm_up + 3 * slot + 1]
    kinds, chunk_of = [FORWARD, INPUTS if split else BACKWARD], [chunk, chunks - 1 - chunk]
    if split:
        due.append(warm_up + 3 * (slot + rank) + 2)
        kinds.append(WEIGHTS)
        chunk_of.append(chunks - 1 - chunk)
    order = np.argsort(np.concatenate(due), kind="stable")
    return np.repeat(kinds, len(slot))[order], np.concatenate(chunk_of)[order]


F0, F1 = (FORWARD, 0), (FORWARD, 1)
B0, B1 = (BACKWARD, 0), (BACKWARD, 1)
I0, I1 = (INPUTS, 0), (INPUTS, 1)
W0, W1 = (WEIGHTS, 0), (WEIGHTS, 1)


def _zero_bubble_v(rank: int, pipeline: int, micro_batches: int) -> list[Pass]:
    """ZB-V (arXiv:2401.10241, section 6), made for at least 2 pp - 1 microbatches; `orders` drops superfluous
    ones."""
    filled = max(2 * pipeline - 1, micro_batches)
    rest = pipeline - rank
    return [
        *[F0] * (2 * rest - 1),
        *[F1, F0] * rank,
        *[F1, I1, W1] * rest,
        *[F0, I0, W0, F1, I1, W1] * (filled - 2 * pipeline + rank + 1),
        *[I0, W0, F1, I1, W1] * (rest - 1),
        *[I0, I1] * rank,
        *[I0, W0] * rest,
        *[W1] * rank,
        *[W0] * rank,
    ]


def _dual_pipe_v(rank: int, pipeline: int, micro_batches: int) -> list[Pass]:
    """DualPipeV, which is DualPipe cut in half (arXiv:2412.19437, section 3.2.1;
    github.com/deepseek-ai/DualPipe).

    The second half of the last backward passes runs its weight gradients at the end.
    """
    after = pipeline - rank - 1
    order = [
        *[F0] * (2 * after),
        *[F0, F1] * (rank + 1),
        *[I1, W1, F1] * after,
        *[F0, B1, F1, B0] * (micro_batches - 2 * pipeline + rank + 1),
        *[B1, F1, B0] * after,
    ]
    whole = rank + 1 if rank % 2 else 2 * (rank // 2) + 1
    tail = [B1, B0] * (rank + 1)
    halves = [I1 if each == B1 else I0 for each in tail[whole:]]
    order += [*tail[:whole], *halves]
    # Weights in the order of their inputs, the first of which the last backward passes alternate with.
    halves += [I0] * after
    weights = [W1 if each == I1 else W0 for each in halves]
    for each in weights[:after]:
        order += [each, I0]
    return order + weights[after:]

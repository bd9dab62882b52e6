"""Closed forms of idle and send seconds of pipelines, which rank all layouts before a few are simulated.

The sources are Narayanan et al. (arXiv:2104.04473, section 2.2) and the zero-bubble papers; the forms here
allow unequal stages. For equal stages they agree with `costmodels.time.simulation`; tests compare unequal
stages with it too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from costmodels.layers.shapes import element_bytes, tokens
from costmodels.network.collectives import send
from costmodels.ranks.rank_layers import Ranks
from costmodels.ranks.reductions import row_maximum
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Cluster
from costmodels.spec.layout import SPLIT_BACKWARD
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import Floats, Ints, LayoutTable


def _of(slowest: Ints, each: Floats | Ints) -> Any:
    """The entry of the slowest rank, [n]."""
    return np.take_along_axis(each, slowest[:, None], axis=1)[:, 0]


def bubble_seconds(
    rank_seconds: Floats, count: Floats, chunks: Floats, slowest: Ints | None = None
) -> Floats:
    """Idle time of the slowest rank of each row, while all other ranks fill and drain, one chunk deep.

    (sum of t - t of the slowest) / vpp, which for equal ranks is Narayanan et al.'s (pp - 1) t / vpp.

    Args:
        rank_seconds: [n, k], seconds of one microbatch on each rank while the pipeline fills and drains:
            forward and backward, or less where weight gradients fill the bubble.
        count: [n, k], number of ranks that the entry represents.
        chunks: [n], model chunks on each rank.
        slowest: [n], the slowest rank; the one with the largest `rank_seconds` when not given.
    """
    slow = rank_seconds.argmax(axis=1) if slowest is None else slowest
    result: Floats = ((rank_seconds * count).sum(axis=1) - _of(slow, rank_seconds)) / chunks
    return np.maximum(result, 0.0)


def shared_bubble(bubble: Floats, busy: Floats | float, sharers: float) -> Floats:
    """The bubble where `sharers` ranks share a core, [n]: ranks that compute use the core while others wait.

    The slowest rank's `busy` seconds are those of a share of a core. With one core for each rank, the
    pipeline would take 1 / sharers of the time. It takes at least the time of the cores for all ranks
    together.
    """
    if sharers <= 1:
        return bubble
    return np.maximum(bubble / sharers - busy * (1 - 1 / sharers), 0.0)


def uneven_bubble_seconds(
    rank_seconds: Floats, forward: Floats, ranks: Ranks, place: Floats | Ints, slowest: Ints
) -> Floats:
    """The bubble of 1F1B, [n], where faster ranks follow the slowest one in the pipeline.

    Rank r waits twice for the ranks behind it: for its first gradient while it has W = pp - 1 - r forward
    passes to do, and for its last gradient while it has W backward passes. If a microbatch takes S seconds
    behind it, it idles max(S, W f) - W f and max(S, W b) - W b. The ranks before it are filled once more. All
    other ranks are behind the first rank, and none is behind the last one.

    Args:
        rank_seconds: [n, k], forward and backward of one microbatch on each rank.
        forward: [n], forward seconds of the slowest rank.
        place: [n, k], a number that increases along the pipeline.
    """
    own = _of(slowest, rank_seconds)
    others = ranks.count - (np.arange(ranks.count.shape[1]) == slowest[:, None])
    first, last = _of(slowest, ranks.first)[:, None] > 0, _of(slowest, ranks.last)[:, None] > 0
    later = (place > _of(slowest, place)[:, None]) | (ranks.last > 0)
    behind = np.where((first | later) & ~last, others, 0.0)
    after, waiting = (rank_seconds * behind).sum(axis=1), behind.sum(axis=1)
    before = (rank_seconds * (others - behind)).sum(axis=1)
    idle = np.maximum(after, waiting * forward) + np.maximum(after, waiting * (own - forward))
    result: Floats = before + idle - waiting * own
    return np.maximum(result, 0.0)


def split_bubble_seconds(
    table: LayoutTable, forward: Floats, inputs: Floats, weights: Floats, count: Floats
) -> tuple[Floats, Floats]:
    """The bubble of split-backward schedules, [n], and spare seconds, [n].

    Let f, i and w be the seconds of forward, input gradients and weight gradients of a rank. In ZB-H1 every
    other rank adds f + max(i - w, 0) (arXiv:2401.10241, table 1: pp - 1 times f + i - w). The same holds in
    DualPipeV, whose two directions also wait for each other if i > f. In ZB-V it is max(f, i, 2 (i - w))
    (section 6, for times that differ). A rank of a V that is slower than all others, such as the one with the
    head, makes up for most of this, as its inputs arrive early. What remains of each other rank is max(i - w,
    0) (DualPipeV), or w of all but one, minus the excess of the slowest rank's own w (ZB-V). The time that it
    could still make up is spare: messages of that duration are hidden. In ZB-H1 the spare time is the slowest
    rank's excess of f and i over the microbatches in flight. The forms are fitted to the orders of PyTorch's
    schedules.

    Args:
        forward, inputs, weights: [n, k], seconds of one microbatch on each rank.
        count: [n, k], number of ranks that the entry represents.
    """
    total = forward + inputs + weights
    slowest = total.argmax(axis=1)
    chunks = table.virtual_pipeline_parallel.astype(np.float64)
    uneven = bubble_seconds(inputs - forward, count, chunks, slowest) - _of(slowest, forward) / chunks
    beyond = np.maximum(inputs - weights, 0.0)
    both = np.maximum(np.maximum(forward, inputs), 2.0 * (inputs - weights))
    both = both + np.maximum(forward - inputs, 0.0)
    zbv, dual = table.runs("zbv"), table.runs("dualpipev")
    each = np.where(zbv[:, None], both, forward + beyond)
    bubble = bubble_seconds(each, count, chunks, slowest)
    bubble = bubble + np.where(dual, np.maximum(uneven, 0.0), 0.0)
    others = count - (np.arange(count.shape[1]) == slowest[:, None])
    lead = np.maximum(_of(slowest, total) - (total * (others > 0)).max(axis=1), 0.0)
    behind = lead * (1 - _of(slowest, weights) / _of(slowest, total)) * (table.pipeline_parallel - 0.5)
    if not (zbv | dual).any():
        return bubble, behind
    made_up = lead * (table.micro_batches - 1)
    number, own = np.maximum(others.sum(axis=1), 1.0), _of(slowest, weights)
    typical = (weights * others).sum(axis=1) / number
    in_zbv = np.maximum((number - 1) * typical / chunks - (own - typical), 0.0)
    left = np.where(zbv, in_zbv, (beyond * others).sum(axis=1) / chunks)
    spare = np.maximum(made_up - np.maximum(bubble - left, 0.0), 0.0)
    in_v = zbv | dual
    return (
        np.where(in_v, np.maximum(bubble - made_up, np.minimum(bubble, left)), bubble),
        np.where(in_v, spare, behind),
    )


def message_seconds(model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable) -> Floats:
    """Seconds of one message between stages: activations of a microbatch, or their gradients, [n].

    With sequence parallelism a rank sends only its part of the sequence. Without it, an engine may let every
    tensor-parallel rank send a part, which the receivers gather over their own links (arXiv:2104.04473,
    section 4.1). The slowest pair of neighbours counts. Only in 1F1B do ranks wait for their sends.
    """
    split = np.where(table.sequence_parallel | engine.network.scatters_messages, table.tensor_parallel, 1)
    payload = element_bytes(table.precision) * tokens(model, table) * model.hidden / split
    payload = payload * model.residual_streams
    stride = table.tensor_parallel * table.context_parallel * table.data_parallel
    meanwhile: Floats = np.where(table.runs("1f1b"), 0.0, engine.network.meanwhile_latency)
    result: Floats = send(cluster, engine, payload, table.pipeline_parallel, stride)
    return result + meanwhile * (table.pipeline_parallel > 1)


def message_wait_seconds(
    table: LayoutTable, rank_seconds: Floats, ranks: Ranks, message: Floats, waits: bool
) -> Floats:
    """Seconds by which waiting for its own messages makes the slowest rank slower, [n].

    A rank sends two messages for each microbatch and chunk; the first and the last rank send one less. Ranks
    wait in 1F1B, and with `waits` in interleaved schedules.
    """
    slower, chunks = np.zeros(len(table)), table.virtual_pipeline_parallel
    rows = (table.runs("1f1b") | (waits & table.runs("interleaved"))) & (table.pipeline_parallel > 1)
    some, own = ranks.each(lambda held: held[rows]), rank_seconds[rows]
    sent = np.where(some.layers > 0, 2.0 * chunks[rows, None] - some.first - some.last, 0.0)
    slower[rows] = row_maximum(own + sent * message[rows, None]) - row_maximum(own)
    return slower


def send_seconds(
    table: LayoutTable,
    message: Floats,
    held: Floats,
    spare: Floats,
    forward: Floats,
    backward: Floats,
    weights: Floats,
    waits: bool,
) -> Floats:
    """Seconds that messages between stages add to one step, [n].

    The first and the last microbatch wait for their messages through all stages; spare seconds hide some of
    them. In the steady state the ranks of 1F1B wait for every message. Ranks of other schedules compute
    meanwhile. There a message only adds time beyond the slack between sending and use. The slack is a forward
    pass of a chunk or half of both passes (interleaved), half of the weight gradients (ZB-H1), weight
    gradients and a forward pass (ZB-V), or a forward pass (DualPipeV). Also, all messages of a microbatch
    share the rank's outgoing link. The forms agree with the simulation for equal stages.

    Args:
        message: [n], seconds of one message.
        held: [n], `message_wait_seconds`.
        spare: [n], from `split_bubble_seconds`; 0 for other schedules.
        forward, backward, weights: [n], seconds of the slowest rank for one microbatch, all of its chunks.
        waits: True if ranks of interleaved schedules wait for every message too.
    """
    pp, vpp = table.pipeline_parallel, table.virtual_pipeline_parallel
    micro_batches, hops = table.micro_batches, (pp - 1) / pp
    ahead, both, gradients = forward / vpp, (forward + backward) / vpp, weights / vpp
    zbv, dual = table.runs("zbv"), table.runs("dualpipev")
    zb = table.runs(*SPLIT_BACKWARD) & ~(zbv | dual)
    through = least = 2.0 * (vpp * pp - 1)
    late = np.maximum(message - ahead, 0.0) * (vpp - 1) + np.maximum(2 * message - both, 0.0) * hops / 2
    if (zb | zbv | dual).any():
        split = [zb, zbv, dual]
        through = np.select(split, [pp * (vpp + 3.0) - 4, 6.0 * pp - 8, 6.0 * (pp - 1)], through)
        least = np.select(split, [pp * (vpp + 1.0) - 2, 3.0 * (pp - 1), 4.0 * (pp - 1)], least)
        shown = [2 * message - gradients, message - ahead - gradients, message - ahead]
        late = np.select(split, [np.maximum(wait, 0.0) * hops * vpp for wait in shown], late)
    # Each chunk sends activations and gradients; of two ranks only one has messages at an end to keep.
    sent = np.where(pp > 2, 2 * vpp, np.where(zbv | dual, vpp, 2 * vpp - 1))
    late = np.maximum(late, sent * message - (forward + backward))
    alone = table.runs("1f1b")
    through = np.where(alone, 2.0 * (pp - 1) - np.where(pp == 2, 1, 3), through)
    filling = np.maximum(through * message - spare, np.minimum(least, through) * message)
    result: Floats = filling + micro_batches * np.where(alone, held, late)
    if waits:
        # Ranks between the ends send one message more, and have the passes of one chunk to spare.
        least = micro_batches * (2 * vpp - 1) * message
        every = (2 * pp - 3) * message + least + np.maximum(micro_batches * held - least - both, 0.0)
        result = np.where(table.runs("interleaved"), every, result)
    return np.where(pp > 1, result, 0.0)

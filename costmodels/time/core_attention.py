"""Seconds of core attention on one device, and of its context-parallel exchange."""

from __future__ import annotations

import numpy as np

from costmodels.layers.operators import BACKWARD_FLASH, BACKWARD_GEMM, Operators
from costmodels.layers.shapes import element_bytes
from costmodels.network.collectives import Group, all_gather, all_to_all
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Device
from costmodels.spec.table import RING, Floats, LayoutTable, by_context_form

CAUSAL_SHARE = 0.5
"""Share of the score matrix below the diagonal; flash attention computes only this part."""


BATCHED_GEMM_RATE = 0.7
"""Rate of the small batched GEMMs of unfused attention, relative to large GEMMs."""


ALIGNED, UNALIGNED_RATE = 8, 0.25
"""Tensor cores compute 16-bit GEMMs of unfused attention if the head size is a multiple of the first number.
The second is the rate of other units relative to tensor cores: 78 of 312 TFLOP/s on an A100 in fp16 (NVIDIA's
data sheet)."""


QUERY_BLOCK = 128
"""Queries in a block of flash attention."""


def padded_head(size: int) -> int:
    """Padded head size in the kernels of flash attention, in elements.

    It is a multiple of 32, above 128 of 64 (`round_multiple` in FlashAttention's
    csrc/flash_attn/flash_api.cpp).
    """
    step = 32 if size <= 128 else 64
    return -(-size // step) * step


def attention_seconds(
    work: Operators,
    device: Device,
    engine: Engine,
    table: LayoutTable,
    flops: float,
    bandwidth: float,
    element: int,
) -> tuple[Floats, Floats]:
    """Seconds of core attention, forward and backward, at a peak of `flops`.

    Flash attention reaches s / (s + half) of its rate on sequences of s tokens, and d / (d + half) with heads
    of d elements. It reaches less where heads times tokens give too few blocks of 128 queries for the
    multiprocessors. The formula is fitted to 214 published figures of arXiv:2307.08691 and arXiv:2407.08608,
    to 120 measurements on an H100, and to 88 figures of SimuMax's profiles (median error 1 to 6 %). The
    kernels of a ring process the tokens of one rank at a time.
    """
    constants = engine.attention
    if constants.flash:
        ring = (table.context_parallel_form == RING) & (table.context_parallel > 1)
        seq = work.seq / np.where(ring, table.context_parallel, 1)
        wave = constants.wave * device.cores * QUERY_BLOCK * work.seq
        flop = work.attention_flops * (1 + wave / np.maximum(work.scores, 1.0)) * CAUSAL_SHARE
        head = padded_head(work.head_dim) if device.kind == "gpu" else work.head_dim
        flop = flop * head / work.head_dim
        rate = flops * constants.efficiency * constants.scale / (1 + constants.half_head / head)
        forward = flop / rate * (1 + constants.half_seq / seq)
        slower = 1 + constants.backward_half_seq * constants.half_seq / seq
        return forward, flop / rate * slower * BACKWARD_FLASH / constants.backward_rate
    unaligned = device.kind == "gpu" and element == 2 and work.head_dim % ALIGNED > 0
    rate = BATCHED_GEMM_RATE * (UNALIGNED_RATE if unaligned else 1.0)
    products = work.attention_flops / (flops * engine.gemm.efficiency * rate)
    dropout = engine.activations.dropout * (2 * element + 1)
    forward, backward = (
        work.scores * (count * element * constants.softmax_passes + dropout) / bandwidth
        for count in (constants.score_passes, constants.score_passes_backward)
    )
    return products + forward, BACKWARD_GEMM * products + backward


def context_seconds(
    work: Operators, table: LayoutTable, cp: Group, attention: Floats, attention_back: Floats
) -> tuple[Floats, Floats]:
    """Seconds of context parallelism in forward and backward that computation does not hide. all_gather:
    gathered keys and values are kept, and their gradients are reduce-scattered. ring: keys and values travel
    while attention works on the previous ones (arXiv:2310.01889, section 3); in backward with their fp32
    gradients, whose last hop is not hidden. all_to_all: one exchange for queries, keys and values, and one
    for the output; the same for their gradients (arXiv:2309.14509, section 3.2).
    """
    if not (table.context_parallel > 1).any():
        return np.zeros(len(table)), np.zeros(len(table))
    shared = work.ring_bytes > 0
    gathered = np.where(shared, all_gather(cp, cp.size * work.ring_bytes), 0.0)
    # One neighbour sends to one other: where the ring leaves a node, through a single device's network card.
    neighbour = np.where(cp.local >= cp.size, cp.intra_bandwidth, cp.inter_bandwidth)
    hop = np.where(shared, work.ring_bytes / neighbour, 0.0)
    ring = (cp.size - 1) * hop + np.where(shared, cp.latency, 0.0)
    gradient_hop = 4 / element_bytes(table.precision) * hop
    exchanged = np.where(shared, all_to_all(cp, work.exchange_bytes) + cp.latency, 0.0)
    ring_back = np.maximum(ring + (cp.size - 1) * gradient_hop - attention_back, 0.0) + gradient_hop
    waits = np.where(shared, cp.placement.engine.network.context_latency, 0.0)
    forward = by_context_form(table, gathered, exchanged, np.maximum(ring - attention, 0.0))
    return forward + waits, by_context_form(table, gathered, exchanged, ring_back) + waits

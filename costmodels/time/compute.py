"""Seconds of the operators of a layer on one device: roofline rates, and the host's launch floor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from costmodels.errors import InputError
from costmodels.layers.operators import BACKWARD_FLASH, BACKWARD_GEMM, Gemm, Operators
from costmodels.layers.shapes import element_bytes
from costmodels.network.collectives import Group, all_gather, all_to_all
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Device, Precision
from costmodels.spec.layout import SPLIT_BACKWARD
from costmodels.spec.table import RECOMPUTE_KINDS, RECOMPUTE_METHODS, Bools, Floats, LayoutTable

FULL = RECOMPUTE_KINDS.index("full")
UNIFORM = RECOMPUTE_METHODS.index("uniform")

CAUSAL_SHARE = 0.5
"""Part of the score matrix under the diagonal, which is all that flash attention computes."""

FLASH_BACKWARD_RATE = 63 / 73
"""Backward over forward FLOP/s of flash attention: 63 % and 73 % of an A100's peak (arXiv:2307.08691)."""

BATCHED_GEMM_RATE = 0.7
"""Small batched products of unfused attention, relative to large ones."""

SCORE_PASSES = (4, 7)
"""Reads and writes of the score matrix, forward and backward, when no kernel fuses product, softmax and
product. Dropout reads and writes it once more each way, and one byte of mask."""

QUERY_BLOCK = 128
"""Queries that a block of flash attention takes at a time."""

TILE = 128 * 128
"""Elements of the output that one multiprocessor computes at a time."""


@dataclass(frozen=True)
class Passes:
    """Seconds of forward and backward of one unit for one micro batch; arrays of shape [n]."""

    compute: Floats
    attention: Floats
    elementwise: Floats
    recompute: Floats
    launch: Floats
    tensor_parallel: Floats
    context_parallel: Floats
    expert_parallel: Floats
    offload: Floats
    backward: Floats
    """Part of the sum that is backward, what it recomputes included."""
    weights: Floats
    """Part of backward that is gradients of weights, which split backward runs apart."""

    @property
    def total(self) -> Floats:
        """Forward and backward."""
        return sum((getattr(self, part) for part in PARTS), np.zeros(()))


PARTS = tuple(name for name in Passes.__dataclass_fields__ if name not in ("backward", "weights"))
"""The parts that add up to a unit's time; named as the fields of `StepTime`."""


def peak_flops(device: Device, precision: Precision) -> float:
    """Data-sheet FLOP/s of matrix products in `precision`.

    Raises:
        InputError: the device does not compute in that format.
    """
    if precision not in device.peak_flops:
        raise InputError(
            f"precision {precision}: device {device.name} has no peak for it; "
            f"use {', '.join(device.peak_flops)}"
        )
    return device.peak_flops[precision]


def _wide_peak(device: Device, precision: Precision) -> float:
    """Peak of what an fp8 recipe leaves in 16 bits: attention and the head."""
    if precision != "fp8":
        return peak_flops(device, precision)
    wide: tuple[Precision, ...] = ("bf16", "fp16")
    return max(device.peak_flops.get(name, 0.0) for name in wide) or peak_flops(device, precision)


class GemmRates(NamedTuple):
    """What decides the time of a matrix product on one device."""

    flops: float
    """FLOP/s that a large product reaches."""
    wide_flops: float
    """The same of those that an fp8 recipe leaves in 16 bits."""
    bandwidth: float
    """Bytes per second of memory."""
    element: int
    """Bytes of an element."""
    launch: float = 0.0
    """Seconds that a kernel takes however small it is."""
    wave: float = 0.0
    """Elements of the output that are computed for nothing in the last wave of tiles."""
    half_width: float = 0.0
    """Inner width k at which the rate is half of that of a wide product."""
    grouped: bool = False
    """Several products of one shape, those of experts, are one kernel."""


def gemm_seconds(gemms: tuple[Gemm, ...], rates: GemmRates) -> Floats | float:
    """Seconds of matrix products.

    sqrt(arithmetic^2 + traffic^2) + launch: products that are bound by neither alone are slower than the
    longer of both. Fitted to 44,000 kernels on A100 and H100 (Vidur's profiles, arXiv:2405.05465): median
    error 4 to 6 % for m of 256 and more, where the same shape measured twice differs by 4.6 %.
    """
    total: Floats | float = 0.0
    for m, k, n, times, wide in gemms:
        flops = rates.wide_flops if wide else rates.flops
        # Tiles of one kernel fill the same waves, whichever of its products they are of.
        kernels = 1.0 if rates.grouped else times
        arithmetic = 2.0 * (k + rates.half_width) * (times * m * n + kernels * rates.wave) / flops
        traffic = times * rates.element * (m * k + k * n + m * n) / rates.bandwidth
        # Neither is so large or small that its square is not a number, which `np.hypot` takes time to see to.
        total = total + np.sqrt(arithmetic * arithmetic + traffic * traffic) + kernels * rates.launch
    return total


def cast_elements(gemms: tuple[Gemm, ...]) -> tuple[Floats | float, Floats | float]:
    """Operands of matrix products in elements: of the forward ones, and of the two backward ones of each."""
    forward: Floats | float = 0.0
    backward: Floats | float = 0.0
    for m, k, n, times in (gemm[:4] for gemm in gemms if not gemm.wide):
        forward = forward + times * (m * k + k * n)
        backward = backward + times * (2 * m * n + k * n + m * k)
    return forward, backward


def attention_seconds(
    work: Operators, device: Device, engine: Engine, flops: float, bandwidth: float, element: int
) -> tuple[Floats, Floats]:
    """Seconds of core attention, forward and backward, at a peak of `flops`.

    Flash attention reaches s / (s + half) of its rate on sequences of s tokens, d / (d + half) with heads of
    d elements, and less where heads times tokens are few for the multiprocessors, each of which takes a
    block of 128 queries (fits to 214 published figures of arXiv:2307.08691 and arXiv:2407.08608, and 88 of
    SimuMax's profiles: median error 1 to 6 %).
    """
    if engine.attention.flash:
        slower = (1 + engine.attention.half_seq / work.seq) * (1 + engine.attention.half_head / work.head_dim)
        wave = engine.attention.wave * device.cores * QUERY_BLOCK * work.seq
        rate = flops * engine.attention.efficiency * engine.attention.scale / slower
        forward = (
            (work.attention_flops + wave * work.attention_flops / np.maximum(work.scores, 1.0))
            * CAUSAL_SHARE
            / rate
        )
        return forward, forward * BACKWARD_FLASH / FLASH_BACKWARD_RATE
    products = work.attention_flops / (flops * engine.gemm.efficiency * BATCHED_GEMM_RATE)
    dropout = engine.activations.dropout * (2 * element + 1)
    forward, backward = (
        work.scores * (count * element * engine.attention.softmax_passes + dropout) / bandwidth
        for count in SCORE_PASSES
    )
    return products + forward, BACKWARD_GEMM * products + backward


def _copies_by_node(ep: Group, top_k: int) -> Floats:
    """Nodes that a token travels to, over the experts that it travels to, with balanced experts.

    A token goes to a node once and is forwarded there (DeepSeek-V3, arXiv:2412.19437, section 3.2.2).
    """
    nodes = ep.size / ep.local
    result: Floats = np.where(nodes > 1, nodes * (1.0 - (1.0 - 1.0 / nodes) ** top_k) / top_k, 1.0)
    return result


def _unfused(work: Operators, engine: Engine) -> Bools | bool:
    """Whether the fused softmax kernel does not take the sequences times heads of a device, [n]."""
    if engine.attention.flash or not engine.attention.softmax_batch:
        return False
    unfused: Bools = (work.scores / work.seq**2) % engine.attention.softmax_batch > 0
    return unfused


def _launch_seconds(work: Operators, engine: Engine, table: LayoutTable, tp: Group) -> Floats:
    """Host seconds of a layer's forward pass, whatever its size.

    Every doubling of tensor parallelism in a node multiplies it, and so do the nodes (islands) that a group
    spans, whose rings wait for each other. A softmax that no kernel fuses is several launches instead of one.
    """
    split = np.where(table.sequence_parallel, engine.host.sequence_parallel, engine.host.tensor_parallel)
    steps = engine.host.tensor_parallel_step * np.where(tp.size > 1, tp.local, 0)
    result = engine.host.layer_overhead * split ** np.log2(tp.local) + steps
    result = result * tp.islands**engine.host.nodes
    result = result * np.where(_unfused(work, engine), engine.host.unfused_softmax, 1.0)
    return result * np.where(table.runs(*SPLIT_BACKWARD), engine.host.split_backward, 1.0)


def launch_floor(seconds: Floats, floor: Floats | float, sharpness: float = 8.0) -> Floats:
    """Idle seconds of a device that works for `seconds` on what a host launches in `floor` seconds.

    Both together take their p-norm, whose exponent is `sharpness`.
    """
    scale = np.maximum(seconds, floor)
    scale = np.where(scale > 0, scale, 1.0)
    norm = ((seconds / scale) ** sharpness + (floor / scale) ** sharpness) ** (1 / sharpness)
    return norm * scale - seconds


def passes(
    work: Operators,
    device: Device,
    engine: Engine,
    table: LayoutTable,
    groups: dict[str, Group],
    *,
    repeats: bool,
    wide: bool = False,
) -> Passes:
    """Seconds of one unit, forward and backward.

    Args:
        work: its operators.
        groups: process groups `tp`, `cp`, `ep` and `etp` of each row.
        repeats: the unit is a layer: recomputation and the launch floor apply.
        wide: an fp8 recipe computes the unit in 16 bits.
    """
    e = element_bytes(table.precision)
    bandwidth = device.memory_bandwidth * engine.elementwise.efficiency
    wide_peak = _wide_peak(device, table.precision)
    peak = wide_peak if wide else peak_flops(device, table.precision)
    zero = np.zeros(len(table))

    narrow = table.precision == "fp8" and not wide
    own = engine.gemm.fp8_efficiency if narrow else None
    if table.precision in ("fp32", "tf32"):
        own = engine.gemm.fp32_efficiency
    rates = GemmRates(
        flops=peak * (engine.gemm.efficiency if own is None else own),
        wide_flops=wide_peak * engine.gemm.efficiency,
        bandwidth=bandwidth,
        element=e,
        launch=engine.gemm.launch,
        wave=engine.gemm.wave * device.cores * TILE,
        half_width=engine.gemm.fp8_half_width if narrow else 0.0,
        grouped=engine.experts.grouped,
    )

    def products(gemms: tuple[Gemm, ...]) -> Floats | float:
        return gemm_seconds(gemms, rates)

    gemm = zero + products(work.gemms)
    if not repeats and engine.gemm.whole_head_efficiency != 1:
        gemm = gemm / np.where(table.tensor_parallel == 1, engine.gemm.whole_head_efficiency, 1.0)
    attention, attention_back = attention_seconds(work, device, engine, wide_peak, bandwidth, e)
    apart = table.runs(*SPLIT_BACKWARD)
    passes = engine.elementwise.passes * np.where(apart, engine.elementwise.split_backward, 1.0) / bandwidth
    elementwise, elementwise_back = work.elementwise_forward * passes, work.elementwise_backward * passes
    casts = table.precision == "fp8" and not wide
    cast = engine.gemm.fp8_cast_bytes / bandwidth if casts else 0.0
    if cast:
        cast_forward, cast_backward = cast_elements(work.gemms)
        elementwise, elementwise_back = (
            elementwise + cast * cast_forward,
            elementwise_back + cast * cast_backward,
        )

    tp, cp = groups["tp"], groups["cp"]
    gather = all_gather(tp, work.sequence_bytes)
    gather = (1 - engine.overlap.tensor_parallel) * gather
    gather = gather + engine.network.ring_step * np.where(tp.size > tp.local, tp.size, 0)
    tensor, tensor_back = work.gathers_forward * gather, work.gathers_backward * gather
    context, context_back = _context_seconds(work, table, cp, attention, attention_back)
    # Each rank adds its attention to that of the ranks before it, in fp32.
    merges = (cp.size - 1) * work.merge_bytes * passes
    # What is gathered is put in the order of the sequence, and its gradients back in that of the ranks.
    merges = merges + 2 * work.gathered_bytes / bandwidth
    elementwise, elementwise_back = elementwise + merges, elementwise_back + merges
    # To the experts and back; shared experts compute while tokens travel to other ranks.
    exchange = np.where(work.routed_bytes > 0, all_to_all(groups["ep"], work.routed_bytes), 0.0)
    if engine.experts.dispatches_by_node and work.top_k:
        exchange = exchange * _copies_by_node(groups["ep"], work.top_k)
    meanwhile = 0.0 if device.kind == "cpu" else products(work.shared_gemms)
    gathered = all_gather(groups["etp"], work.expert_gather_bytes)
    expert_back = 2 * (exchange + np.where(work.expert_gather_bytes > 0, gathered, 0.0))
    expert = expert_back - np.minimum(exchange, meanwhile)

    full = (table.recompute == FULL) & repeats
    stops = engine.activations.recompute_stops_early and bool(work.last_gemms)
    # Of several layers that are repeated from one input, the last one ends early.
    ends = stops / np.where(table.recompute_method == UNIFORM, table.recompute_num_layers, 1)
    last_gemm = last_cast = 0.0 * zero
    if stops:
        last_gemm = last_gemm + products(work.last_gemms)
        last_cast = last_cast + cast * cast_elements(work.last_gemms)[0]
    whole = gemm + attention + elementwise - ends * (last_gemm + last_cast)
    again = np.where(full, whole, table.recomputes("core_attention") * attention)
    mlp = table.recomputes("mlp") & repeats
    mlp_gemm = products(work.mlp_gemms) - last_gemm
    mlp_gemm = mlp_gemm + cast * cast_elements(work.mlp_gemms)[0] - last_cast
    activation = mlp | table.recomputes("activation")
    lighter = mlp * mlp_gemm + activation * work.activation_bytes * passes
    lighter = lighter + table.recomputes("norm") * work.norm_bytes * passes
    again = again + lighter * repeats
    # What holds weights is computed for the gradients of its inputs, and once more for those of weights.
    again = again + apart * np.where(full, again, lighter * repeats)
    # The collectives in what is computed again: all of a layer's, or the MLP's. The last one of a dense layer
    # is a reduce-scatter, a quarter of the layer's, or an all-reduce, half of them.
    last = np.where(table.sequence_parallel, 0.25, 0.5)
    every = np.maximum(work.gathers_forward, 1.0)
    repeated = np.where(full, 1.0 - ends * last, (work.mlp_gathers / every - stops * last) * mlp)
    repeated = repeated * (1 + apart)
    # Sequence parallelism keeps the gathered outputs of norms, unless it gathers them again anyway.
    regathers = (
        table.recomputes("norm") & table.sequence_parallel & (not engine.activations.regathers_sequence)
    )
    inputs = np.where(mlp, 1.0, 1.0 + work.mlp_gathers / 2) / every
    repeated = repeated + regathers * repeats * inputs * (1 + apart)
    repeated_all = full * (1.0 + apart)
    repeated_experts = repeated_all + mlp * (1.0 + apart)
    repeated_context = repeated_all + table.recomputes("core_attention") * repeats
    offload = offload_back = zero
    if table.offload_activations.any():
        # A layer that is recomputed as a whole keeps nothing that could leave.
        moved = table.offload_activations * repeats * ~full * work.attention_bytes
        seconds = moved / (device.host_bandwidth * engine.network.efficiency)
        hides, hides_back = gemm + attention + elementwise, BACKWARD_GEMM * gemm + attention_back
        offload = np.maximum(seconds - hides, 0.0)
        offload_back = np.maximum(seconds - hides_back - elementwise_back, 0.0)
    gaps = engine.host.kernel_gaps * repeats
    forward = gemm + attention + elementwise + tensor + context + expert + gaps
    backward = BACKWARD_GEMM * gemm + attention_back + elementwise_back + tensor_back + context_back
    backward = backward + expert_back + BACKWARD_GEMM * gaps
    floor = _launch_seconds(work, engine, table, tp) * repeats
    if device.kind == "cpu":
        # The cores that launch are the ones that compute: nothing hides behind anything.
        idle = idle_back = floor
    else:
        sharpness = engine.host.sharpness
        idle = launch_floor(forward + offload, floor, sharpness)
        idle_back = launch_floor(backward + offload_back, floor * engine.host.backward, sharpness)
    idle, idle_back = idle + gaps, idle_back + BACKWARD_GEMM * gaps
    backward = backward - BACKWARD_GEMM * gaps
    return Passes(
        compute=(1 + BACKWARD_GEMM) * gemm,
        attention=attention + attention_back,
        elementwise=elementwise + elementwise_back,
        recompute=again,
        launch=idle + idle_back + repeated_all * idle,
        tensor_parallel=tensor + tensor_back + repeated * tensor,
        context_parallel=context + context_back + repeated_context * context,
        expert_parallel=expert + expert_back + repeated_experts * expert,
        offload=offload + offload_back,
        backward=backward
        + idle_back
        + again
        + offload_back
        + repeated * tensor
        + repeated_experts * expert
        + repeated_context * context
        + repeated_all * idle,
        weights=(BACKWARD_GEMM - 1) * gemm,
    )


def _context_seconds(
    work: Operators, table: LayoutTable, cp: Group, attention: Floats, attention_back: Floats
) -> tuple[Floats, Floats]:
    """Seconds of context parallelism in forward and backward that nothing hides.

    Gathered keys and values are kept, and their gradients are reduce-scattered. In a ring they travel
    while attention works on the last ones (arXiv:2310.01889, section 3), in backward with their fp32
    gradients, whose last hop nothing hides. Queries, keys and values change hands in one exchange, the
    output in another one, and so do their gradients (arXiv:2309.14509, section 3.2).
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
    forms = [gathered, exchanged, np.maximum(ring - attention, 0.0)]
    back = [gathered, exchanged, ring_back]
    return np.choose(table.context_parallel_form, forms), np.choose(table.context_parallel_form, back)

"""Seconds of the forward and backward pass of one unit (a layer, the embedding or the head) on one device."""

from functools import cached_property
from typing import NamedTuple

import numpy as np

from costmodels.dataclass import dataclass
from costmodels.layers.operators import BACKWARD_GEMM, Gemm, Operators
from costmodels.layers.shapes import casts_weights_once
from costmodels.network.collectives import Group, all_gather, all_reduce, all_to_all, reduce_scatter
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import NARROW, Device
from costmodels.spec.layout import SPLIT_BACKWARD, WIDE_WEIGHT_GRADIENTS
from costmodels.spec.table import FULL, SELECTIVE, UNIFORM, Bools, Floats, LayoutTable, code_of
from costmodels.time.core_attention import attention_seconds, context_seconds
from costmodels.time.gemms import (
    GemmRates,
    accumulation_bytes,
    cast_bytes,
    gemm_rates,
    gemm_seconds,
    wide_peak_flops,
)
from costmodels.time.host_launch import launch_floor, launch_seconds


@dataclass(frozen=True)
class Passes:
    """Seconds of forward and backward of one unit for one microbatch; arrays of shape [n]."""

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
    """Seconds of backward, including recomputation."""
    weights: Floats
    """Seconds of weight gradients within backward; split backward runs them in separate passes."""

    @property
    def total(self) -> Floats:
        """Seconds of forward and backward."""
        return sum((getattr(self, part) for part in PARTS), np.zeros(()))


PARTS = tuple(name for name in Passes.__dataclass_fields__ if name not in ("backward", "weights"))
"""The parts that add up to a unit's time, by the names of fields of `StepTime`."""


def mean_passes(every: list[tuple[float, Passes]]) -> Passes:
    """The mean of the seconds of several units, each weighted with its share."""
    return Passes(
        **{
            name: sum((share * getattr(unit, name) for share, unit in every), np.zeros(()))
            for name in Passes.__dataclass_fields__
        }
    )


def _copies_by_node(ep: Group, top_k: int, open_share: float) -> Floats:
    """Number of nodes to which a token is sent, over its number of experts, with balanced experts.

    A token goes to a node once and is forwarded there (DeepSeek-V3, arXiv:2412.19437, section 3.2.2).

    Args:
        open_share: share of the groups of experts that a token may use. Groups are placed on nodes in order,
            so this limits nodes too (section 2.1.2 there).
    """
    nodes = ep.size / ep.local
    reached = np.maximum(nodes * open_share, 1.0)
    result: Floats = np.where(nodes > 1, reached * (1.0 - (1.0 - 1.0 / reached) ** top_k) / top_k, 1.0)
    return result


def _overlaps_experts(table: LayoutTable) -> Bools:
    """Rows in which passes of another microbatch may hide dispatch.

    Megatron-Core (`transformer_config.py`, overlap_moe_expert_parallel_comm) requires interleaved chunks in a
    pipeline, and no full recomputation of layers or experts. DualPipe hides dispatch by its schedule.
    """
    chunks = (table.pipeline_parallel == 1) | (table.virtual_pipeline_parallel > 1)
    whole = (table.recompute == FULL) | table.recomputes("mlp")
    result: Bools = (chunks | table.runs("dualpipev")) & ~whole
    return result


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
        work: the unit's operators.
        groups: process groups `tp`, `cp`, `ep` and `etp` of each row.
        repeats: True if the unit is a layer, so that recomputation and the launch floor apply.
        wide: True if an fp8 recipe computes the unit in 16 bits.
    """
    unit = _Unit(work, device, engine, table, groups, repeats, wide)
    tensor, context, expert, idle = unit.tensor, unit.context, unit.expert, unit.idle
    again = _repetition(unit)
    repeated = unit.repeated_idle(
        again.seconds
        + again.tensor * tensor.forward
        + again.experts * expert.forward
        + again.context * context.forward,
        again.whole,
    )
    return Passes(
        compute=unit.gemm + unit.gemm_backward,
        attention=unit.attention.forward + unit.attention.backward,
        elementwise=unit.elementwise.forward + unit.elementwise.backward,
        recompute=again.seconds,
        launch=idle.forward + idle.backward + repeated,
        tensor_parallel=tensor.forward + tensor.backward + again.tensor * tensor.forward,
        context_parallel=context.forward + context.backward + again.context * context.forward,
        expert_parallel=expert.forward + expert.backward + again.experts * expert.forward,
        offload=unit.offload.forward + unit.offload.backward,
        backward=unit.backward
        + idle.backward
        + again.seconds
        + unit.offload.backward
        + again.tensor * tensor.forward
        + again.experts * expert.forward
        + again.context * context.forward
        + repeated,
        weights=unit.weight_gradients,
    )


class _Pair(NamedTuple):
    """Seconds of the forward and of the backward pass, [n] each."""

    forward: Floats
    backward: Floats


@dataclass(frozen=True)
class _Unit:
    """The arguments of `passes`, and the seconds of each part of the unit's work, [n]."""

    work: Operators
    device: Device
    engine: Engine
    table: LayoutTable
    groups: dict[str, Group]
    repeats: bool
    wide: bool

    @cached_property
    def apart(self) -> Bools:
        """Rows whose schedule splits backward."""
        return self.table.runs(*SPLIT_BACKWARD)

    @cached_property
    def rates(self) -> GemmRates:
        """Rates of the unit's GEMMs."""
        recipe = self.table.fp8_recipe
        return gemm_rates(self.device, self.engine, self.table.precision, self.wide, recipe)

    @property
    def casts(self) -> bool:
        """GEMMs are in 8 bits, whose operands are cast."""
        return self.table.precision in NARROW and not self.wide

    def cast(self, gemms: tuple[Gemm, ...]) -> _Pair:
        """Seconds to cast the operands of some of the unit's GEMMs."""
        if not self.casts:
            return _Pair(*np.zeros((2, len(self.table))))
        recipe = self.table.fp8_recipe
        bytes_ = cast_bytes(gemms, self.engine.gemm.of_recipe(recipe), recipe, self.weight_casts)
        return _Pair(*(np.asarray(each / self.rates.bandwidth) for each in bytes_))

    @cached_property
    def weight_casts(self) -> tuple[Floats, Floats]:
        """Shares of the weights that each forward and each backward pass casts to 8 bits.

        Weights that are gathered in 8 bits are transposed in the backward pass. Frozen weights are cast in
        each pass. Casts once a step are priced with the step (`weight_cast_seconds`): layouts of one shape
        share the prices of a pass, and differ in their microbatches.
        """
        once = casts_weights_once(self.engine, self.table) & ~np.bool_(self.work.is_frozen)
        return np.where(once | self.table.gathers_fp8, 0.0, 1.0), np.where(once, 0.0, 1.0)

    @cached_property
    def stream(self) -> Floats:
        """Seconds of element-wise work for each byte of its minimal traffic."""
        constants = self.engine.elementwise
        return constants.passes * np.where(self.apart, constants.split_backward, 1.0) / self.rates.bandwidth

    def products(self, gemms: tuple[Gemm, ...]) -> Floats | float:
        """Seconds of some of the unit's GEMMs, each counted once."""
        return gemm_seconds(gemms, self.rates)

    @cached_property
    def gemm_backward(self) -> Floats:
        """Seconds of GEMMs for gradients of inputs and of trained weights."""
        return self.gemm + self.weight_gradients

    @cached_property
    def weight_gradients(self) -> Floats:
        """Seconds of GEMMs for gradients of trained weights, and for the sums that they add to."""
        sums, rates = accumulation_bytes(self.engine, self.table), self.rates
        adapters = gemm_seconds(self.work.adapter_gemms, rates, sums)
        if self.work.is_frozen:
            return np.zeros(len(self.table)) + adapters
        if self.table.fp8_recipe in WIDE_WEIGHT_GRADIENTS and not self.wide:
            rates = gemm_rates(self.device, self.engine, self.table.precision, wide=True)
        return self.whole_head(gemm_seconds(self.work.gemms, rates, sums) + adapters)

    @cached_property
    def gemm(self) -> Floats:
        """Seconds of all GEMMs, each counted once."""
        return self.whole_head(self.products(self.work.gemms) + self.products(self.work.adapter_gemms))

    def whole_head(self, seconds: Floats | float) -> Floats:
        """Seconds of the unit's GEMMs, longer for a head that one device holds whole, [n]."""
        seconds = np.zeros(len(self.table)) + seconds
        rate = self.engine.gemm.whole_head_efficiency
        if self.repeats or rate == 1:
            return seconds
        return seconds / np.where(self.table.tensor_parallel == 1, rate, 1.0)

    @cached_property
    def attention(self) -> _Pair:
        """Seconds of core attention."""
        peak = wide_peak_flops(self.device, self.table.precision)
        rates = self.rates
        limits = peak, rates.bandwidth, rates.element
        return _Pair(*attention_seconds(self.work, self.device, self.engine, self.table, *limits))

    @cached_property
    def elementwise(self) -> _Pair:
        """Seconds of bandwidth-bound work: norms, activations, casts, and copies of context parallelism."""
        work = self.work
        forward, backward = work.elementwise_forward * self.stream, work.elementwise_backward * self.stream
        casts = self.cast(work.gemms)
        forward, backward = forward + casts.forward, backward + casts.backward
        # Each rank adds its attention to that of the ranks before it, in fp32.
        merges = (self.groups["cp"].size - 1) * work.merge_bytes * self.stream
        # Gathered keys and values are put in the order of the sequence, and their gradients back in that of
        # the ranks.
        merges = merges + 2 * work.gathered_bytes / self.rates.bandwidth
        forward, backward = forward + merges, backward + merges
        if not self.table.cuda_graphs.any():
            return _Pair(forward, backward)
        # Rates of kernels that are launched one by one hold the gaps between them: half is work at least.
        gaps = self.engine.host.graph_gaps * self.table.cuda_graphs * self.repeats
        return _Pair(
            forward - np.minimum(gaps, forward / 2), backward - np.minimum(BACKWARD_GEMM * gaps, backward / 2)
        )

    @cached_property
    def tensor(self) -> _Pair:
        """Seconds of tensor-parallel collectives that GEMMs do not hide."""
        tp, work = self.groups["tp"], self.work
        shown = 1 - self.engine.overlap.tensor_parallel
        gather = shown * all_gather(tp, work.sequence_bytes)
        step = self.engine.network.ring_step * np.where(tp.size > tp.local, tp.size, 0)
        if not tp.placement.tells_calls:
            gather = gather + step
            return _Pair(work.gathers_forward * gather, work.gathers_backward * gather)
        # Calls that were measured each have a rate and a latency of their own. Half of sequence
        # parallelism's work in a pass gathers, half scatters, and layer inputs are gathered once more.
        scatter = shown * reduce_scatter(tp, work.sequence_bytes) + step
        half_sum = shown * all_reduce(tp, work.sequence_bytes) / 2 + step
        gather, split = gather + step, self.table.sequence_parallel
        scatters = np.minimum(work.gathers_forward, work.gathers_backward) / 2

        def seconds(count: Floats) -> Floats:
            result: Floats = np.where(
                split, scatters * scatter + (count - scatters) * gather, count * half_sum
            )
            return result

        return _Pair(seconds(work.gathers_forward), seconds(work.gathers_backward))

    @cached_property
    def context(self) -> _Pair:
        """Seconds of context-parallel communication that attention does not hide."""
        # The cores of a CPU that attend are the ones that pass keys and values on.
        hides = _Pair(0 * self.gemm, 0 * self.gemm) if self.device.kind == "cpu" else self.attention
        return _Pair(*context_seconds(self.work, self.table, self.groups["cp"], *hides))

    @cached_property
    def expert(self) -> _Pair:
        """Seconds of dispatch to experts and back; shared experts compute meanwhile in the forward pass."""
        work, ep = self.work, self.groups["ep"]
        halves = 1 + self.table.expert_halves
        exchange = np.where(work.routed_bytes > 0, halves * all_to_all(ep, work.routed_bytes / halves), 0.0)
        if not work.limited:
            if self.engine.experts.dispatches_by_node and work.top_k:
                exchange = exchange * _copies_by_node(ep, work.top_k, work.open_share)
            exchange = exchange / self.engine.experts.dispatch_rate
        exchange = exchange + np.where(
            work.routed_bytes > 0, halves * self.engine.network.dispatch_latency, 0.0
        )
        meanwhile = 0.0 if self.device.kind == "cpu" else self.products(work.shared_gemms)
        gathered = all_gather(self.groups["etp"], work.expert_gather_bytes)
        both = 2 * (exchange + np.where(work.expert_gather_bytes > 0, gathered, 0.0))
        forward = both - np.minimum(exchange, meanwhile)
        if self.table.expert_halves.any() and self.device.kind != "cpu":
            # A half on its way to the experts, and one on its way back, hide behind GEMMs of the other.
            routed = self.table.expert_halves * (
                self.products(work.mlp_gemms) - self.products(work.shared_gemms)
            )
            forward = np.maximum(forward - np.minimum(exchange, routed), 0.0)
            both = both - np.minimum(exchange, BACKWARD_GEMM * routed)
        share = self.engine.overlap.expert_parallel * _overlaps_experts(self.table)
        if not share.any() or self.device.kind == "cpu":
            return _Pair(forward, both)
        # Each pass hides behind one of the other direction, of another microbatch.
        hides = self.gemm_backward + self.attention.backward + self.elementwise.backward
        hides_back = self.gemm + self.attention.forward + self.elementwise.forward
        # Hidden dispatch takes its multiprocessors from the GEMMs that it hides behind.
        shown = 1.0 - self.engine.experts.dispatch_cores / self.device.cores
        return _Pair(
            forward - shown * np.minimum(share * forward, hides),
            both - shown * np.minimum(share * both, hides_back),
        )

    @cached_property
    def offload(self) -> _Pair:
        """Seconds of activation transfers to the host and back that computation does not hide."""
        table, zero = self.table, np.zeros(len(self.table))
        if not table.offload_activations.any():
            return _Pair(zero, zero)
        # A layer that is recomputed as a whole keeps nothing that could leave.
        full = (table.recompute == FULL) & self.repeats
        moved = table.offload_activations * self.repeats * ~full * self.work.attention_bytes
        seconds = moved / (self.device.host_bandwidth * self.engine.network.efficiency)
        hides = self.gemm + self.attention.forward + self.elementwise.forward
        hides_back = self.gemm_backward + self.attention.backward
        return _Pair(
            np.maximum(seconds - hides, 0.0),
            np.maximum(seconds - hides_back - self.elementwise.backward, 0.0),
        )

    @property
    def gaps(self) -> float:
        """Idle seconds between the kernels of the forward pass; twice as many in backward."""
        return self.engine.host.kernel_gaps * self.repeats

    @cached_property
    def backward(self) -> Floats:
        """Seconds of the backward pass without recomputation, transfers and waiting."""
        seconds = self.gemm_backward + self.attention.backward + self.elementwise.backward
        return seconds + self.tensor.backward + self.context.backward + self.expert.backward

    @cached_property
    def floor(self) -> Floats:
        """Host seconds to launch the forward pass."""
        return launch_seconds(self.work, self.engine, self.table, self.groups["tp"]) * self.repeats

    def repeated_idle(self, seconds: Floats, wholes: Floats) -> Floats:
        """Idle seconds of `wholes` repeated forward passes with `seconds` of device time.

        The recomputation ends early, so the device waits longer than in the forward pass itself.
        """
        if not wholes.any():
            return wholes
        if self.device.kind == "cpu":
            return wholes * (self.floor + self.gaps)
        each = seconds / np.maximum(wholes, 1.0) + self.gaps
        result: Floats = wholes * (launch_floor(each, self.floor, self.engine.host.sharpness) + self.gaps)
        return result

    @cached_property
    def idle(self) -> _Pair:
        """Seconds of an idle device: gaps between kernels, and waiting for launches."""
        engine, gaps, floor = self.engine, self.gaps, self.floor
        if self.device.kind == "cpu":
            # The cores that launch are the ones that compute: nothing hides behind anything.
            return _Pair(floor + gaps, floor + BACKWARD_GEMM * gaps)
        forward = self.gemm + self.attention.forward + self.elementwise.forward
        forward = forward + self.tensor.forward + self.context.forward + self.expert.forward + gaps
        backward = self.backward + BACKWARD_GEMM * gaps
        sharpness = engine.host.sharpness
        idle = launch_floor(forward + self.offload.forward, floor, sharpness)
        idle_back = launch_floor(backward + self.offload.backward, floor * engine.host.backward, sharpness)
        return _Pair(idle + gaps, idle_back + BACKWARD_GEMM * gaps)


CORE_ATTENTION = code_of("recompute_modules", ("core_attention",))


class _Repetition(NamedTuple):
    """Forward work that backward repeats, [n] each."""

    seconds: Floats
    """Seconds of computation."""
    whole: Floats
    """Number of forward passes of the whole layer; two where backward is split."""
    tensor: Floats
    """Repeated share of the tensor-parallel collectives."""
    experts: Floats
    """Repeated share of dispatch."""
    context: Floats
    """Repeated share of context-parallel communication."""


def _repetition(unit: _Unit) -> _Repetition:
    """The recomputed work: all of it for layers that are recomputed as a whole, else that of the named
    modules."""
    work, engine, table, apart = unit.work, unit.engine, unit.table, unit.apart
    attention, elementwise = unit.attention.forward, unit.elementwise.forward
    full = (table.recompute == FULL) & unit.repeats
    mlp = table.recomputes("mlp") & unit.repeats
    stops = engine.activations.recompute_stops_early and bool(work.last_gemms)
    # Of several layers that are repeated from one input, the last one ends early.
    ends = stops / np.where(table.recompute_method == UNIFORM, table.recompute_num_layers, 1)
    last_gemm = last_cast = 0.0 * np.zeros(len(table))
    if stops:
        last_gemm = last_gemm + unit.products(work.last_gemms)
        last_cast = last_cast + unit.cast(work.last_gemms).forward
    whole = unit.gemm + attention + elementwise - ends * (last_gemm + last_cast)
    again = np.where(full, whole, table.recomputes("core_attention") * attention)
    mlp_gemm = unit.products(work.mlp_gemms) - last_gemm
    mlp_gemm = mlp_gemm + unit.cast(work.mlp_gemms).forward - last_cast
    activation = mlp | table.recomputes("activation")
    lighter = mlp * mlp_gemm + activation * work.activation_bytes * unit.stream
    lighter = lighter + table.recomputes("norm") * work.norm_bytes * unit.stream
    again = again + lighter * unit.repeats
    alternates = _alternates(unit)
    if alternates.any():
        second = unit.products(work.alternate_gemms) + unit.cast(work.alternate_gemms).forward
        again = np.where(alternates, second + work.elementwise_forward * unit.stream, again)
    # Operators with weights are computed again for input gradients, and once more for weight gradients.
    again = again + apart * np.where(full | alternates, again, lighter * unit.repeats)
    wholes = full * (1.0 + apart)
    return _Repetition(
        seconds=again,
        whole=wholes,
        tensor=_repeated_collectives(unit, full, mlp, ends, stops),
        experts=wholes + mlp * (1.0 + apart),
        context=wholes + (table.recomputes("core_attention") & ~alternates) * unit.repeats,
    )


def _alternates(unit: _Unit) -> Bools:
    """Rows whose selective recomputation repeats every second GEMM, but not attention."""
    table, saves = unit.table, unit.engine.activations.saves_alternate_products
    if not (saves and unit.repeats and unit.work.alternate_gemms):
        return np.zeros(len(table), dtype=bool)
    usual: Bools = (table.recompute == SELECTIVE) & (table.recompute_modules == CORE_ATTENTION)
    return usual


def _repeated_collectives(unit: _Unit, full: Bools, mlp: Bools, ends: Floats, stops: bool) -> Floats:
    """Share of a layer's tensor-parallel collectives that recomputation repeats: all of them, or those of the
    MLP.

    The last collective of a dense layer is a reduce-scatter (a quarter of the layer's collectives), or an
    all-reduce (half of them).
    """
    work, table, apart = unit.work, unit.table, unit.apart
    last = np.where(table.sequence_parallel, 0.25, 0.5)
    every = np.maximum(work.gathers_forward, 1.0)
    repeated = np.where(full, 1.0 - ends * last, (work.mlp_gathers / every - stops * last) * mlp)
    repeated = repeated * (1 + apart)
    # Sequence parallelism keeps the gathered outputs of norms, unless it gathers them again anyway.
    keeps = table.sequence_parallel & (not unit.engine.activations.regathers_sequence)
    regathers = table.recomputes("norm") & keeps
    inputs = np.where(mlp, 1.0, 1.0 + work.mlp_gathers / 2) / every
    result: Floats = repeated + regathers * unit.repeats * inputs * (1 + apart)
    return result

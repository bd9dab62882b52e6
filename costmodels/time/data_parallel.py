"""Seconds of data-parallel communication, and of the optimizer.

ZeRO's volumes are (Rajbhandari et al., arXiv:1910.02054, section 7): one all-reduce of the gradients, or a
reduce-scatter of gradients and an all-gather of parameters; stage 3 gathers in every forward and backward
pass, or from a second copy among neighbours (ZeRO++, arXiv:2306.10209). With copies of the shards (hybrid
sharding, MiCS, arXiv:2205.00119, section 3) the gradients are also summed over the copies.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from costmodels.layers.optimizer import (
    NEWTON_SCHULZ_STEPS,
    Matrix,
    layer_matrices,
    matrix_flops,
    newton_schulz_flops,
    newton_schulz_rate,
    orthogonal_rows,
    update_traffic,
)
from costmodels.layers.shapes import casts_weights_once, element_bytes, fuses_plain
from costmodels.memory.states import MASTER, copied_rows, reduction_element_bytes, sharded_gradient_rows
from costmodels.network.collectives import Group, all_gather, all_reduce, group, reduce_scatter
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Cluster, Device
from costmodels.spec.layout import MuonMode
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import Floats, Ints, LayoutTable


def _calls(engine: Engine, table: LayoutTable) -> tuple[Ints, Ints]:
    """Numbers of reductions of a layer's gradients, and of all-gathers of its parameters, in one step, [n]
    each."""
    micro_batches = table.micro_batches
    reductions = np.where(sharded_gradient_rows(engine, table), micro_batches, 1)
    gathers = np.where(table.zero_stage == 3, 2 * micro_batches, np.minimum(table.zero_stage, 1))
    return reductions, gathers


def accumulation_seconds(
    engine: Engine, device: Device, table: LayoutTable, has_experts: bool, in_linear: bool = False
) -> tuple[Floats, Floats]:
    """Seconds per parameter to accumulate and copy gradients: for each microbatch, and once a step.

    Let g be the bytes of a gradient after backward, and a those of a sum. An addition has 2a + g bytes of
    memory traffic. A GEMM that adds to a sum has 2a (`fuses_plain`), or includes that in its own time
    (`sums_in_gemms`). FSDP2 (torch/distributed/fsdp/_fully_shard, `_fsdp_param.py` and
    `_fsdp_collectives.py`) casts the first gradient to the format of the sum (g + a), adds the others, and
    copies the sum into the buffer of the reduction (2a, or g + a for the gradient of a single microbatch);
    gathering casts the fp32 shard and copies the received parameters out of a buffer (2g). If it reduces
    every microbatch, only shards are accumulated. The time once a step is negative where the first gradient
    needs no addition. Parameters that FSDP2 does not wrap (`plain_whole`) are cast once a step, and their
    first gradient is written directly into the buffer of the reduction (by the GEMM itself where it
    accumulates: a).

    Args:
        in_linear: True for parameters of layers outside of routed experts.
    """
    policy = engine.memory_policy(table.precision)
    gradient, total = policy.gathered, reduction_element_bytes(engine, table)
    rate = device.memory_bandwidth * engine.elementwise.efficiency
    in_gemm = fuses_plain(engine, table) & in_linear
    mixed = engine.elementwise.accumulation_passes if gradient < total else 1.0
    adding = np.where(in_gemm, 2 * total, mixed * (2 * total + gradient))
    zero = np.zeros(len(table))
    if not engine.sharding.fully_sharded:
        return zero + adding / rate, zero
    copies, several = copied_rows(table), table.micro_batches > 1
    # In fp32, ranks that hold the same parameters copy gradients alone.
    shared = (table.replicas > 1) | (has_experts & (table.expert_replicas > 1))
    reduces = copies | shared
    first = 0.0 if total == gradient else gradient + total
    _, gathers = _calls(engine, table)
    # In fp8 all but embedding and head, which are few.
    arrives = np.where(table.gathers_fp8, FP8, gradient)
    copied_out = 2 * arrives + (MASTER + arrives) / table.zero_shards
    handed_over = np.where(several, 2 * total, gradient + total)
    eager = sharded_gradient_rows(engine, table)
    sharded = gradient + total + several * 3 * MASTER / table.zero_shards
    each: Floats = np.where(eager, sharded, several * adding)
    once: Floats = np.where(eager, 0.0, several * (first - adding) + reduces * handed_over)
    # Stage 3 gathers in every pass, the others in the first one.
    every = table.zero_stage == 3
    each = each + every * copied_out * gathers / table.micro_batches
    once = once + ~every * copies * copied_out
    if engine.sharding.plain_whole:
        begun = np.where(in_gemm, total, (gradient + total) * (shared | (total != gradient)))
        cast = copies * (MASTER + gradient)
        once = np.where(table.keeps_whole, begun - several * adding + cast, once)
    return each / rate, once / rate


def copy_seconds(engine: Engine, device: Device, table: LayoutTable) -> Floats:
    """Seconds of a step for copying one frozen parameter out of FSDP2's all-gather buffers, [n]."""
    _, gathers = _calls(engine, table)
    wrapped = (table.zero_stage > 0) & engine.sharding.fully_sharded
    times = np.where(wrapped, gathers, 0)
    rate = device.memory_bandwidth * engine.elementwise.efficiency
    result: Floats = times * 2 * element_bytes(table.precision) / rate
    return result


def weight_cast_seconds(engine: Engine, device: Device, table: LayoutTable) -> Floats:
    """Seconds of a step for casting one weight to fp8 in both orientations, [n]; 0 where passes cast it."""
    rate = device.memory_bandwidth * engine.elementwise.efficiency
    cast = engine.gemm.of_recipe(table.fp8_recipe).fp8_cast_bytes / rate
    return np.where(casts_weights_once(engine, table), cast, 0.0)


def overlap_seconds(communication: Floats, window: Floats, sharpness: float) -> Floats:
    """Seconds of `communication` that are hidden by `window` seconds of computation.

    Both together take the p-norm of the two. If one is far longer, that is the longer one; if they are
    similar, it is more, as they share memory bandwidth and multiprocessors.
    """
    longer = np.maximum(np.maximum(communication, window), TINY)
    joined = ((communication / longer) ** sharpness + (window / longer) ** sharpness) ** (1 / sharpness)
    return np.minimum(communication + window - joined * longer, communication)


FP8 = 1.0
"""Bytes of an element gathered in fp8."""

MOST_SHARDS = 512
"""Most shards for which the host's time per shard was measured; more shards are not assumed to take
longer."""

TINY = 1e-30
"""Seconds added to a denominator, so that the ratio of two zeros is finite."""


class _Exchange(NamedTuple):
    """Data-parallel communication of gradients and parameters, before overlap."""

    cluster: Cluster
    engine: Engine
    table: LayoutTable
    layers: Floats
    """Number of layers on the device; each is one call."""

    def seconds(
        self,
        ranks: Ints,
        stride: Ints,
        count: Floats,
        still: Floats | float,
        narrow: Floats | None = None,
    ) -> Floats:
        """Seconds of the exchange among `ranks` at a distance of `stride` that hold the same parameters.

        There are `count` trained parameters and `still` frozen ones. `narrow` of them may be gathered in fp8.
        """
        cluster, engine, table, layers = self.cluster, self.engine, self.table, self.layers
        policy, copies, stage = engine.memory_policy(table.precision), table.zero_replicas, table.zero_stage
        reduced = reduction_element_bytes(engine, table)
        reductions, gathers = _calls(engine, table)
        # Parameters whose optimizer state alone is sharded need no gather where they do not change.
        regathered = (stage == 3) | engine.sharding.fully_sharded
        shards = np.maximum(ranks // copies, 1)
        members = group(cluster, engine, shards, stride)
        calls, buckets = layers, layers
        if engine.overlap.gathered is not None:
            # A ring's links stay busy while the parts that travel take longer than a hop.
            calls = np.where(stage == 3, 1.0, layers)
        if engine.network.reduction_bucket:
            calls = np.ones_like(layers)
            buckets = np.ceil(count * policy.gathered / engine.network.reduction_bucket)
        packed = count / engine.network.sharded_efficiency
        scatter = reduce_scatter(members, packed * reduced, calls)
        cuts = np.where(shards > 1, np.minimum(shards, MOST_SHARDS), 0)
        scatter = scatter + engine.host.shard * layers * cuts
        unchanged = regathered * still / engine.network.sharded_efficiency
        sent = (packed + unchanged) * policy.gathered
        if narrow is not None and table.fp8_param_gather:
            less = (policy.gathered - FP8) / engine.network.sharded_efficiency
            sent = sent - table.gathers_fp8 * less * narrow
        gather = gathers * all_gather(members, sent, calls)
        if engine.sharding.secondary_shards:
            # From the first pass on, neighbours have a copy among them.
            near = group(cluster, engine, np.minimum(shards, engine.sharding.secondary_shards), stride)
            later = (gathers - 1) * (all_gather(members, sent, calls) - all_gather(near, sent, calls))
            gather = gather - np.where(stage == 3, later, 0.0)
        if (copies > 1).any():
            # Neighbours share the shards; the copies of a shard lie farther apart and are summed.
            among = group(cluster, engine, np.minimum(ranks, copies), stride * shards)
            scatter = scatter + all_reduce(among, count * reduced / shards, layers)
        # Switches that add up and trees make a plain all-reduce faster than a reduce-scatter and a gathering.
        summed = all_reduce(members, count * reduced, buckets)
        return np.where(stage == 0, summed, reductions * scatter + gather)


def exchange_seconds(
    cluster: Cluster,
    engine: Engine,
    table: LayoutTable,
    shared: Floats,
    experts: Floats,
    layers: Floats,
    forward: Floats,
    backward: Floats,
    frozen: tuple[Floats, Floats] | None = None,
    inner: Floats | None = None,
) -> Floats:
    """Seconds of gradient reduction and parameter gathering that computation does not hide, [n].

    Args:
        shared: parameters on one device outside routed experts.
        experts: parameters of routed experts on one device, which fewer ranks replicate.
        layers: number of layers on the device; each is one call.
        forward: seconds of one microbatch's forward pass on a device.
        backward: seconds of one microbatch's backward pass on a device.
        frozen: gathered parameters without gradients, as a pair like `shared` and `experts`.
        inner: parameters of `shared` that belong to layers; these are gathered in fp8 if any are.

    Reductions are hidden by the backward passes that produce the gradients; in an interleaved pipeline, those
    of all chunks but the last also by later backward passes. An all-gather is hidden by the forward passes
    that need the parameters, and by those before. At most the share `engine.overlap.data_parallel` is hidden
    (with ZeRO `engine.overlap.sharded`, if given).
    """
    exchange = _Exchange(cluster, engine, table, layers)
    still, still_experts = (0.0, 0.0) if frozen is None else frozen
    total = exchange.seconds(table.replicas, table.tensor_parallel, shared, still, inner)
    if table.fp8_param_gather:
        # Of the largest elements of all weights, once a step.
        among = group(
            cluster, engine, np.maximum(table.replicas // table.zero_replicas, 1), table.tensor_parallel
        )
        total = total + table.gathers_fp8 * all_reduce(among, np.zeros(len(table)))
    if experts.any() or np.any(still_experts):
        holders = table.expert_tensor_parallel * table.expert_parallel
        total = total + exchange.seconds(table.expert_replicas, holders, experts, still_experts)
    exposed = _exposed(engine, table, total, forward, backward)
    if engine.network.step_reductions:
        everyone = group(cluster, engine, np.full(len(table), cluster.world_size), 1)
        exposed = exposed + engine.network.step_reductions * all_reduce(everyone, np.zeros(len(table)))
    return exposed


def _exposed(engine: Engine, table: LayoutTable, total: Floats, forward: Floats, backward: Floats) -> Floats:
    """Seconds of an exchange of `total` seconds that the passes of a step do not hide, [n].

    Args:
        forward: seconds of one microbatch's forward pass on a device.
        backward: seconds of its backward pass.
    """
    stage, micro_batches = table.zero_stage, table.micro_batches
    reductions, _ = _calls(engine, table)
    own = engine.overlap.data_parallel
    overlap = own if engine.overlap.sharded is None else np.where(stage > 0, engine.overlap.sharded, own)
    if engine.overlap.gathered is not None:
        overlap = np.where(stage == 3, engine.overlap.gathered, overlap)
    # Gradients of graphs are reduced after the last pass.
    overlap = np.where(table.cuda_graphs, 0.0, overlap)
    # Stage 3 gathers in every pass, the others in the first forward pass.
    once = np.minimum(stage, 1) * forward + reductions * backward
    # Chunks of an interleaved pipeline are done one after the other, each with as many microbatches as there
    # are ranks; only the last one has no more than its own last pass to hide behind.
    chunks = table.virtual_pipeline_parallel
    rounds = np.where(reductions > 1, 1, np.minimum(micro_batches, table.pipeline_parallel))
    behind = once * (1 + (chunks - 1) * rounds) / chunks
    window = np.where(stage == 3, micro_batches * (forward + backward), behind)
    exposed = total - overlap_seconds(overlap * total, window, engine.overlap.sharpness)
    if (chunks > 1).any():
        last = total / chunks
        hidden = overlap_seconds(overlap * last, once / chunks, engine.overlap.sharpness)
        exposed = np.where((chunks > 1) & (stage < 3), np.maximum(exposed, last - hidden), exposed)
    return exposed


def optimizer_seconds(
    engine: Engine, device: Device, table: LayoutTable, shared: Floats, experts: Floats
) -> Floats:
    """Seconds of one step of the optimizer on one device, [n]: bytes through memory.

    Each rank updates its shard (from ZeRO 1 on). Without FSDP2 (see `accumulation_seconds`) it also writes
    the parameters that GEMMs read, and clears the gradients. With the optimizer in host memory, the shard's
    gradients are sent there, its parameters are sent back, and the update runs at the host's bandwidth
    (ZeRO-Offload, arXiv:2101.06840, section 4.1, without its delayed update). FSDP2 moves both in fp32:
    parameters for every all-gather, and gradients for every reduction; it accumulates gradients on the host.
    """
    policy = engine.memory_policy(table.precision)
    traffic: Any = update_traffic(table) * engine.elementwise.update_passes
    whole = 0.0 if engine.sharding.fully_sharded else policy.gathered + policy.gradients
    mine = shared / table.zero_shards + experts / table.expert_shards
    rate = device.memory_bandwidth * engine.elementwise.efficiency
    seconds = (mine * traffic + (shared + experts) * whole) / rate
    if table.offload_optimizer.any():
        host = device.host_memory_bandwidth * engine.elementwise.efficiency
        update = traffic
        sent: Any = policy.gradients + policy.gathered
        if engine.sharding.fully_sharded:
            reductions, gathers = _calls(engine, table)
            update = traffic + (reductions - 1) * 3 * MASTER
            sent = (np.maximum(gathers, 1) + reductions) * MASTER
        wire = sent / (device.host_bandwidth * engine.network.efficiency)
        away = mine * (update / host + wire) + (shared + experts) * whole / rate
        seconds = np.where(table.offload_optimizer, away, seconds)
    result: Floats = seconds
    return result


def orthogonal_seconds(
    model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable, shared: Floats, experts: Floats
) -> Floats:
    """Seconds to orthogonalise Muon's updates on one device, [n]; 0 for other optimizers.

    Tensor-parallel ranks divide the work by `Layout.muon_mode`. If the engine's ZeRO divides whole matrices
    (`MuonConstants.layer_wise`), ranks with the same matrices each take some of them. The rank with the most
    work then has at least its share, and at least one matrix. In other engines, ranks gather the momentum
    over ZeRO's shards, and each does all the work; expert matrices are divided whole where possible.

    Args:
        shared: parameters of layers on one device outside routed experts.
        experts: parameters of routed experts on one device.
    """
    chosen = orthogonal_rows(table)
    if not chosen.any():
        return np.zeros(len(table))
    mode = engine.runs.muon_modes[0] if table.muon_mode == "default" else table.muon_mode
    tp, ep, etp = table.tensor_parallel, table.expert_parallel, table.expert_tensor_parallel
    rate = newton_schulz_rate(cluster.device) * engine.gemm.efficiency
    element = engine.muon.gathered or element_bytes(table.precision)
    matrices = layer_matrices(model)
    seconds = np.zeros(len(table))
    for held, split, shards, stride, held_whole in (
        (shared, tp, table.zero_shards, tp, np.zeros(len(table), dtype=np.bool_)),
        (experts, etp, table.expert_shards, ep * etp, (model.experts // ep) % table.expert_shards == 0),
    ):
        if not held.any():
            continue
        ranks = split.astype(np.float64)
        whole = held * split
        work = whole * newton_schulz_flops(model, mode, ranks) / rate
        own = held / np.where(held_whole | engine.muon.layer_wise, shards, 1)
        if engine.muon.layer_wise:
            largest = np.max([matrix_flops(one, mode, ranks) for one in matrices], axis=0) / rate
            work = np.where(shards > 1, np.maximum(work / shards, np.minimum(largest, work)), work)
        else:
            work = work / np.where(held_whole, shards, 1)
            within = group(cluster, engine, np.where(held_whole, 1, shards), stride)
            work = work + all_gather(within, own * element)
        across = group(cluster, engine, split, 1)
        seconds = seconds + work + _muon_exchange(mode, across, matrices, own, ranks, element)
    return np.where(chosen, seconds, 0.0)


def _muon_exchange(
    mode: MuonMode, across: Group, matrices: list[Matrix], own: Floats, ranks: Floats, element: float
) -> Floats:
    """Seconds of tensor-parallel communication for matrices that one rank updates, [n].

    Args:
        own: parameters of the rank's parts of these matrices, [n].
    """
    if mode == "blockwise":
        return np.zeros(len(own))
    if mode == "duplicated":
        return all_gather(across, own * ranks * element)
    if mode == "layer_sharded":
        # Parts go to the rank that has the matrix, and parts of the update come back.
        return 2 * all_gather(across, own * element)
    each = sum(one.parameters for one in matrices)
    layers = own * ranks / each
    squares = sum(one.number * (one.inputs if one.splits_outputs else one.outputs) ** 2 for one in matrices)
    calls = layers * sum(one.number for one in matrices)
    # Each step sums its square matrix in the format of the products; the norm is a number.
    summed = all_reduce(across, layers * squares * SQUARE * NEWTON_SCHULZ_STEPS, calls * NEWTON_SCHULZ_STEPS)
    return summed + all_reduce(across, np.zeros(len(own)), calls)


SQUARE = 2.0
"""Bytes of an element of the square matrices in Newton-Schulz steps (bf16)."""

"""Bytes on one device of each pipeline rank at the peak of the step.

They are model states, activations times the microbatches in flight, and further allocations: buffers,
workspaces, and memory that the allocator cannot use.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from costmodels.layers.shapes import element_bytes
from costmodels.memory import schedule_moments
from costmodels.memory.moments import (
    Held,
    frees_after_forward,
    fullest_moment,
    least_gradient_share,
    least_stages,
    lets_go,
    passes_in_flight,
)
from costmodels.memory.ranges import row_share
from costmodels.memory.states import (
    ADAM,
    MASTER,
    NARROW,
    copied_rows,
    model_states,
    narrow_rows,
    reduction_element_bytes,
    secondary_share,
    sharded_gradient_rows,
    sharded_parameter_rows,
)
from costmodels.memory.unit_sizes import UnitSizes, end_parameters, frozen_parameters, rank_parameters
from costmodels.ranks.rank_layers import LAYER_KINDS, ZERO, Ranks, in_flight
from costmodels.ranks.reductions import parts_total
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Cluster
from costmodels.spec.layout import SPLIT_BACKWARD, V_SCHEDULES
from costmodels.spec.schedules import GATHERED_STAGES
from costmodels.spec.table import FULL, UNIFORM, Bools, Floats, LayoutTable

Moment = Callable[[LayoutTable, Floats, Held], tuple[Floats, Floats, Floats]]
"""A function of a table, its microbatches in flight and its temporary bytes that returns the bytes of
activations, logits and gradients that exist together."""

FETCHED_LAYERS = 2
"""Number of layers whose offloaded activations are on the device: the one in backward, and the next one in
transfer."""

GATHERED_LAYERS = 2
"""Number of whole layers that ZeRO 3 holds at a time: the current one and the next, prefetched one."""

SUMMED_OUTPUTS = 1
"""Number of a layer's outputs held beside recomputed tensors, where tensor-parallel ranks have whole outputs
(fitted to dry runs of tensor-parallel degrees 2 to 16)."""

DYNAMIC = ("activations", "logits", "communication", "temporaries")
"""Parts of the peak that are allocated and freed within a step."""


FAR = 16
"""Most tensor-parallel ranks for which the host was seen to run ahead of asynchronous reductions; with 32
ranks about half of the outputs are held (the Ultra-Scale Playbook's runs)."""


def reduction_output_bytes(
    engine: Engine, table: LayoutTable, layer_input: Floats, ranks: Ranks, flying: dict[str, Floats]
) -> Floats:
    """Bytes of the outputs of layers that asynchronous reductions still hold, [n, k], or `ZERO`.

    A tensor that another stream reads is freed after that stream has passed it
    (`torch.Tensor.record_stream`). Until then the host, which runs ahead of the device, allocates more. The
    host waits for messages between stages. So the last rank holds the outputs of one microbatch, and other
    ranks those of the warm-up minus two (seen in the runs of the Ultra-Scale Playbook).

    Args:
        layer_input: bytes of a gathered input of a layer, 0 without sequence parallelism, [n].
        flying: layers in flight, by kind, each [n, k].
    """
    if not (engine.allocator.reduction_outputs and layer_input.any()):
        return ZERO
    ahead = sum(flying.values(), np.zeros(())) - 2 * ranks.layers
    layers = np.where(ranks.last > 0, ranks.layers, np.maximum(ahead, 0.0))
    # Over more than two nodes the reductions are what the host waits for, too.
    waits = np.minimum(1.0, FAR / table.tensor_parallel)
    held: Floats = engine.allocator.reduction_outputs * layers * (waits * layer_input)[:, None]
    return held


def update_buffer_bytes(engine: Engine, table: LayoutTable, shared: Floats, experts: Floats) -> Floats:
    """Bytes besides model states during the optimizer step, [n, k].

    Args:
        shared: parameters of each pipeline rank without routed experts, [n, k].
        experts: parameters of the routed experts, [n, k].
    """
    policy, total, zero = engine.memory_policy(table.precision), np.zeros_like(shared), table.zero_stage >= 1
    # An optimizer with moments in 16 bits reads gradients in 16 bits.
    cast = 0.0 if engine.sharding.narrow_moments else policy.stepping_cast
    updated = np.zeros_like(shared)
    for held, replicas, shards in (
        (shared, table.replicas, table.zero_shards),
        (experts, table.expert_replicas, table.expert_shards),
    ):
        per = np.where(zero & (replicas > 1), policy.stepping_whole + policy.stepping_shard / shards, 0.0)
        total = total + per[:, None] * held
        updated = updated + held / shards[:, None]
    if engine.sharding.stepping_group:
        groups = np.where(table.zero_stage == 3, engine.sharding.stepping_group, np.inf)
        updated = np.minimum(updated, groups[:, None])
    return total + cast * updated


def moment_copy_bytes(engine: Engine, table: LayoutTable, shared: Floats, experts: Floats) -> Floats:
    """Bytes of the copy of one moment in Adam's step, [n, k] or `ZERO`.

    Args:
        shared, experts: as for `update_buffer_bytes`.
    """
    if not engine.sharding.copies_moment:
        return ZERO
    narrow = narrow_rows(engine, table) | engine.sharding.narrow_moments
    each = np.where(narrow, NARROW, MASTER) * ((table.optimizer == ADAM) & ~table.offload_optimizer)
    held = shared / table.zero_shards[:, None] + experts / table.expert_shards[:, None]
    result: Floats = each[:, None] * held
    return result


def gathering_reserve_bytes(engine: Engine, table: LayoutTable, shared: Floats, experts: Floats) -> Floats:
    """Bytes that the allocator holds but cannot use after gathering of parameters, [n, k] or `ZERO`.

    Args:
        shared, experts: as for `update_buffer_bytes`.
    """
    each = engine.allocator.gathering_reserve
    if not each:
        return ZERO
    gathers = (table.zero_stage >= 1)[:, None] * each
    several, several_experts = table.replicas > 1, table.expert_replicas > 1
    return gathers * (shared * several[:, None] + experts * several_experts[:, None])


def dynamic_bytes(parts: dict[str, Floats]) -> Floats:
    """Bytes that are allocated and freed within a step, [n, k]."""
    return parts_total({name: parts[name] for name in DYNAMIC})


def take_fuller_moment(parts: dict[str, Floats], step: Floats) -> None:
    """Replace the dynamic `parts` by `step` where the optimizer step needs more bytes than backward."""
    fuller = step > dynamic_bytes(parts)
    for name in DYNAMIC:
        other = step if name == "temporaries" else ZERO
        parts[name] = np.where(fuller, other, parts[name])


def communicator_count(table: LayoutTable, has_experts: bool) -> Floats:
    """Number of a device's process groups with more than one rank, [n]: tp, cp, ep, etp, pp, dp, experts'
    dp."""
    degrees = [
        table.tensor_parallel,
        table.context_parallel,
        table.expert_parallel,
        table.expert_tensor_parallel,
        table.pipeline_parallel,
        table.replicas,
        table.expert_replicas * has_experts,
    ]
    count = np.zeros(len(table))
    for degree in degrees:
        count += degree > 1
    return count


def margin_bytes(
    cluster: Cluster, engine: Engine, table: LayoutTable, lost: Floats, sizes: UnitSizes
) -> dict[str, Floats]:
    """Bytes that a device needs besides tensors: the user's margin, or the three terms that the margin
    replaces.

    The arrays broadcast to [n, k].

    Args:
        lost: bytes that the allocator holds but cannot use, [n, k].
    """
    if cluster.memory_margin_bytes is not None:
        given = ZERO + cluster.memory_margin_bytes
        return {"reserve": ZERO, "context": ZERO, "communicators": ZERO, "margin": given}
    count = communicator_count(table, bool(sizes.experts.any()))
    buffers = count * engine.allocator.communicator_bytes + sizes.dispatch_buffers
    return {
        "reserve": lost,
        "context": ZERO + cluster.device.context_bytes,
        "communicators": buffers[:, None],
        "margin": ZERO,
    }


def permanent_bytes(engine: Engine, sizes: UnitSizes, ranks: Ranks) -> dict[str, Floats]:
    """Bytes that stay allocated besides model states, by the part of the peak that includes them.

    The arrays broadcast to [n, k].
    """
    held = {}
    if engine.allocator.sequence_buffers:
        held["communication"] = engine.allocator.sequence_buffers * sizes.layer_input[:, None]
    if engine.allocator.workspace_bytes or engine.allocator.rotary_tables:
        held["temporaries"] = engine.allocator.workspace_bytes + ranks.layers * sizes.layer_tables[:, None]
    return held


def update_bytes(engine: Engine, table: LayoutTable, sizes: UnitSizes, ranks: Ranks) -> Floats:
    """Bytes of tensors during the optimizer step, [n, k]: the peak after backward."""
    held = rank_parameters(sizes, ranks)
    states = model_states(engine, table, sizes, ranks, held)
    step = update_buffer_bytes(engine, table, *held)
    states.append(frozen_bytes(engine, table, sizes, ranks))
    return sum((*states, *permanent_bytes(engine, sizes, ranks).values()), step)


def gathered_bytes(engine: Engine, table: LayoutTable, sizes: UnitSizes, ranks: Ranks) -> Floats:
    """Bytes of whole parameters that ZeRO 3 has gathered at the peak, [n, k].

    Embedding and head are gathered together, unless an engine wraps them separately, and stay for the
    backward pass, which begins with them. Experts that only one rank holds need no gathering, but FSDP2
    copies them too.
    """
    frees = sharded_parameter_rows(table)
    each = frees * engine.memory_policy(table.precision).gathered
    if engine.sharding.live_parameters:
        every = sum(rank_parameters(sizes, ranks), np.zeros(()))
        live: Floats = np.minimum(engine.sharding.live_parameters, every) * each[:, None]
        return live
    found: Floats = _gathered_layers(engine, table, sizes, ranks)
    ends = ranks.last * sizes.head[:, None] if engine.sharding.ends_apart else end_parameters(sizes, ranks)
    found = found + ends * each[:, None]
    if table.fp8_param_gather:
        # One byte less, but of routed experts.
        own = np.maximum(sizes.dense_layer, sizes.moe_layer)[:, None] * (ranks.layers > 0)
        found = found - (frees & table.gathers_fp8)[:, None] * GATHERED_LAYERS * own
    return found


def _gathered_layers(engine: Engine, table: LayoutTable, sizes: UnitSizes, ranks: Ranks) -> Floats:
    """The part of `gathered_bytes` for layers, [n, k]."""
    copied = engine.sharding.fully_sharded | (table.expert_replicas > 1)
    layer = np.maximum(sizes.dense_layer, sizes.moe_layer + sizes.experts * copied)
    each = sharded_parameter_rows(table) * engine.memory_policy(table.precision).gathered
    layers = GATHERED_LAYERS * layer[:, None] * (ranks.layers > 0)
    result: Floats = layers * each[:, None]
    return result


def frozen_bytes(engine: Engine, table: LayoutTable, sizes: UnitSizes, ranks: Ranks) -> Floats:
    """Bytes of frozen parameters at the peak, [n, k], or `ZERO`: in the format of GEMMs, without master
    weights.

    From ZeRO 1 on, FSDP2 gathers copies of sharded parameters; with ZeRO 3, a layer or two at a time. FSDP2
    does not treat 4-bit matrices as parameters: all ranks hold them whole.
    """
    if not (sizes.frozen_dense_layer.any() or sizes.frozen_moe_layer.any()):
        return ZERO
    shared, experts = frozen_parameters(sizes, ranks)
    element, frees = element_bytes(table.precision), sharded_parameter_rows(table)[:, None]
    copies = (_copies_frozen(table, sizes) & engine.sharding.fully_sharded)[:, None]
    layer = np.maximum(sizes.frozen_dense_layer, sizes.frozen_moe_layer + sizes.frozen_experts)[:, None]
    gathered = GATHERED_LAYERS * layer * (ranks.layers > 0) + _frozen_ends(sizes, ranks)
    parts = shared / table.zero_shards[:, None] + experts / table.expert_shards[:, None]
    second = secondary_share(engine, table, table.replicas)[:, None] * shared
    second = second + secondary_share(engine, table, table.expert_replicas)[:, None] * experts
    held: Floats = np.where(frees, parts + gathered + second, shared + experts + copies * parts)
    packed = ranks.all_dense * sizes.quantised_dense_layer[:, None]
    return element * held + packed + ranks.all_moe * sizes.quantised_moe_layer[:, None]


def _frozen_ends(sizes: UnitSizes, ranks: Ranks) -> Floats:
    """Frozen parameters of embedding and head on one device of each pipeline rank, [n, k]."""
    return ranks.first * sizes.frozen_embedding[:, None] + ranks.last * sizes.frozen_head[:, None]


def _copies_frozen(table: LayoutTable, sizes: UnitSizes) -> Bools:
    """Rows in which FSDP2 copies frozen parameters, [n]."""
    several = (table.replicas > 1) | (bool(sizes.frozen_experts.any()) & (table.expert_replicas > 1))
    result: Bools = several & ~table.keeps_whole
    return result


def recomputation_bytes(table: LayoutTable, sizes: UnitSizes, ranks: Ranks) -> Floats:
    """Bytes that backward recomputes for the current layer, or for all layers repeated from one input, [n,
    k]."""
    layer = _first_recomputation(sizes, ranks)
    if table.recompute_method.any():
        plain, gone = _plain_recomputation(table, sizes, ranks)
        layer = np.maximum(plain, layer - gone)
    if table.recompute_num_layers.max(initial=1) <= 1:
        return layer
    # Uniform recomputation repeats several layers from one input, and holds all of them.
    several = (table.recompute == FULL) & (table.recompute_method == UNIFORM)
    layers = np.where(several, table.recompute_num_layers, 1)[:, None]
    inner = np.maximum(sizes.dense_activations, sizes.moe_activations)[:, None]
    layers = np.clip(layers, 1.0, np.maximum(ranks.layers, 1.0))
    result: Floats = layers * layer + (layers - 1) * inner
    return result


def _of_fullest_layer(dense: Floats, moe: Floats, dense_bytes: Floats, moe_bytes: Floats) -> Floats:
    """The larger of the bytes of two kinds of layers, among the kinds that ranks have, [n, k].

    Args:
        dense, moe: number of layers of each kind, [n, k].
        dense_bytes, moe_bytes: bytes of one layer of each kind, [n].
    """
    found: Floats = np.minimum(dense, 1.0) * dense_bytes[:, None]
    return np.maximum(found, np.minimum(moe, 1.0) * moe_bytes[:, None]) if moe_bytes.any() else found


def _first_recomputation(sizes: UnitSizes, ranks: Ranks) -> Floats:
    """Bytes that backward recomputes for the largest of the layers with recomputation, [n, k]."""
    return _of_fullest_layer(ranks.dense, ranks.moe, sizes.dense_recomputation, sizes.moe_recomputation)


def _plain_recomputation(table: LayoutTable, sizes: UnitSizes, ranks: Ranks) -> tuple[Floats, Floats]:
    """Further bytes during backward of layers without recomputation, and bytes that are freed after it.

    The last layers of a stage go backward first, so their activations of a microbatch are freed when the
    first layers recompute.
    """
    plain = _of_fullest_layer(
        ranks.dense_plain,
        ranks.moe_plain,
        sizes.dense_plain_recomputation,
        sizes.moe_plain_recomputation,
    )
    gone = ranks.dense_plain * sizes.dense_plain_activations[:, None]
    gone = gone + ranks.moe_plain * sizes.moe_plain_activations[:, None]
    return plain, gone / table.virtual_pipeline_parallel[:, None]


def _waiting_bytes(
    table: LayoutTable, sizes: UnitSizes, ranks: Ranks, flying: dict[str, Floats], backlog: Floats
) -> Floats:
    """Bytes of output gradients that wait for weight-gradient passes, [n, k], beyond the microbatches in
    flight.

    DualPipeV has whole backward passes while the most microbatches are in flight; its split passes come when
    half of these are done. In ZB-V one pass of a chunk waits while the most microbatches are in flight. At
    the end of its step rank r has 2 r + 1 waiting passes, and pp + r microbatches of a chunk in flight,
    instead of 2 pp before.
    """
    each = sizes.output_gradients[:, None]
    waits = np.where(table.runs("dualpipev")[:, None], 0.0, backlog * each)
    zbv = table.runs("zbv")[:, None]
    if not zbv.any():
        return waits
    own = np.maximum(ranks.layers, 1.0) / 2
    rank, pipeline = (backlog / own - 1) / 2, table.pipeline_parallel[:, None]
    gone = sum(
        (layers * getattr(sizes, f"{kind}_activations")[:, None] for kind, layers in flying.items()),
        np.zeros(()),
    )
    gone = gone * (1 - (pipeline + rank) / (2 * pipeline))
    result: Floats = np.where(zbv, np.maximum(own * each, waits - gone), waits)
    return result


def activation_and_logit_bytes(
    engine: Engine, table: LayoutTable, sizes: UnitSizes, ranks: Ranks, flying: dict[str, Floats]
) -> tuple[Floats, Floats]:
    """Bytes of activations and of logits at the fullest moment of the backward pass, [n, k] each.

    Args:
        flying: layers in flight, by kind, each [n, k].
    """
    again = recomputation_bytes(table, sizes, ranks)
    activations, fetched = ZERO if engine.loss.apart else again, np.zeros(())
    for kind, layers in flying.items():
        activations = activations + layers * getattr(sizes, f"{kind}_activations")[:, None]
        if (offload := getattr(sizes, f"{kind}_offload")).any():
            fetched = np.maximum(fetched, np.minimum(layers, FETCHED_LAYERS) * offload[:, None])
    activations = activations + fetched
    if sizes.mtp_activations.any():
        activations = activations + ranks.last * sizes.mtp_activations[:, None]
    logits = ranks.last * sizes.logits[:, None]
    if ranks.backlog.any():
        backlog = np.minimum(ranks.backlog, table.micro_batches[:, None] * ranks.layers)
        activations = activations + _waiting_bytes(table, sizes, ranks, flying, backlog)
        # The last stage is on the last rank, which runs as many gradients of inputs ahead as there are
        # ranks; in a V it is on the first rank, and runs one ahead.
        ahead = np.where(table.runs(*V_SCHEDULES), 1, table.pipeline_parallel)
        ahead = np.where(table.runs(*SPLIT_BACKWARD), ahead, 0)
        logits += ranks.last * (ahead * sizes.logit_gradients)[:, None]
    if sizes.dequantised.any():
        # The logits are gone when the first layer goes backward, and its matrices are turned back.
        turned_back = sizes.dequantised[:, None] * (ranks.layers > 0)
        activations = activations + np.maximum(turned_back - logits, 0.0)
    if not engine.loss.apart:
        return activations, logits - np.minimum(passing_logits(engine, sizes, ranks), again)
    # The gradient of the logits is freed before the first layer is recomputed.
    loss = logits >= again
    return activations + np.where(loss, 0.0, again), np.where(loss, logits, 0.0)


def end_reduction_bytes(engine: Engine, table: LayoutTable, sizes: UnitSizes, ranks: Ranks) -> Floats:
    """Temporary bytes during the reduction of the gradients of embedding and head, [n, k], when no
    activations are left.

    FSDP2 wraps both together. Their sums are copied for the collective, and come out as shards; with ZeRO 3
    no layers are gathered then. With one turn of microbatches most stages are reduced before or after.
    """
    wraps = ~table.keeps_whole & (table.replicas > 1)
    wraps = wraps & ((table.virtual_pipeline_parallel == 1) | (table.micro_batches > table.pipeline_parallel))
    if not (engine.sharding.fully_sharded and wraps.any()):
        return ZERO
    each, frees = reduction_element_bytes(engine, table), sharded_parameter_rows(table)
    # Of several stages the one with the head is reduced while those before it have their sums.
    several = (table.virtual_pipeline_parallel > 1)[:, None]
    head = ranks.last * sizes.head[:, None]
    ends = np.where(several, head, end_parameters(sizes, ranks))
    shards = np.where(table.offload_optimizer & (table.zero_stage == 0), table.replicas, table.zero_shards)
    out = np.where(frees, 0.0, each / shards)[:, None] * ends
    absent = _gathered_layers(engine, table, sizes, ranks)
    reduced = np.maximum(each * ends + out - absent, 0.0)
    # Without a pipeline the sums of layers are gone by then. Before, 16-bit gradients come beside all sums.
    gone = (table.pipeline_parallel == 1) & ~sharded_gradient_rows(engine, table)
    fresh = element_bytes(table.precision) * ends
    result: Floats = wraps[:, None] * np.where(gone[:, None], fresh, reduced)
    freed = lets_go(table)
    if freed.any():
        result = np.maximum(result - freed[:, None] * stage_copy_bytes(engine, table, sizes, ranks), 0.0)
    return result


def take_later_moment(parts: dict[str, Floats], gradients: Floats, reduction: Floats) -> None:
    """Replace the dynamic `parts` where a moment after backward needs more bytes than backward.

    These are the reduction of embedding and head, and the optimizer's step.

    Args:
        gradients: bytes of the gradients of all stages, [n, k].
        reduction: the result of `end_reduction_bytes` or of `moment_copy_bytes`.
    """
    if reduction is ZERO:
        return
    fuller = (reduction > 0) & (gradients + reduction > parts["gradients"] + dynamic_bytes(parts))
    for name in ("gradients", *DYNAMIC):
        other = {"gradients": gradients, "temporaries": reduction}.get(name, ZERO)
        parts[name] = np.where(fuller, other, parts[name])


def passing_logits(engine: Engine, sizes: UnitSizes, ranks: Ranks) -> Floats:
    """Bytes of one microbatch's logits that are freed before backward reaches the layers, [n, k].

    For a chunked loss these are all bytes except the gradients of the output matrix and of the last layer's
    output.
    """
    if not engine.loss.chunked:
        return ZERO
    passing = sizes.logits - sizes.logit_gradients - sizes.layer_output
    result: Floats = ranks.last * passing[:, None]
    return result


def reduction_source_bytes(engine: Engine, table: LayoutTable, sizes: UnitSizes, ranks: Ranks) -> Floats:
    """Bytes of a layer's gradients that are reduced to shards during backward of the next layer, [n, k].

    By then the layer's activations and its copies of parameters are freed; but with ZeRO 3 the next layer's
    parameters are gathered.
    """
    rows = sharded_gradient_rows(engine, table)
    if not (engine.sharding.fully_sharded and rows.any()):
        return ZERO
    policy = engine.memory_policy(table.precision)
    frees = sharded_parameter_rows(table)
    each = reduction_element_bytes(engine, table)
    # Copies of experts are gathered and reduced by themselves, and not before they are needed.
    dense = each * sizes.dense_layer - np.where(frees, 0.0, policy.gathered * sizes.dense_layer)
    copies = np.where(frees, 2 * sizes.experts, sizes.experts + sizes.moe_layer)
    moe = each * np.maximum(sizes.moe_layer, sizes.experts) - policy.gathered * copies
    most = np.maximum(dense - sizes.dense_activations, moe - sizes.moe_activations)
    if engine.sharding.joins_experts and sizes.experts.any():
        # The sums of a whole layer travel while those of the next one replace its activations.
        whole = each * (sizes.moe_layer + sizes.experts)
        own = np.maximum(whole - sizes.moe_activations - sizes.moe_recomputation, 0.0)
        most = np.maximum(most, whole + own)
    found: Floats = np.where(rows, np.maximum(most, 0.0), 0.0)[:, None] * (ranks.layers > 1)
    if not table.recompute_method.any():
        return found
    plain, gone = _plain_recomputation(table, sizes, ranks)
    first = _first_recomputation(sizes, ranks) - gone
    beside = first + found
    # Layers that recompute nothing free more, and the next one of them may be reached with all others there.
    # At its end it has gradients instead of activations.
    fresh = element_bytes(table.precision) * sizes.dense_layer - sizes.dense_plain_activations
    kinds = (
        (dense - sizes.dense_plain_activations, np.maximum(plain, fresh[:, None]), ranks.dense_plain),
        (moe - sizes.moe_plain_activations, plain, ranks.moe_plain),
    )
    for source, own, layers in kinds:
        more = np.where(rows, np.maximum(source, 0.0), 0.0)[:, None]
        beside = np.maximum(beside, (own + more) * (layers > 1))
    result: Floats = np.where(rows[:, None], np.maximum(beside - np.maximum(plain, first), 0.0), 0.0)
    return result


def whole_parameter_bytes(
    engine: Engine, table: LayoutTable, sizes: UnitSizes, ranks: Ranks, parameters: Floats
) -> Floats:
    """Bytes of parameters if all stages are gathered, [n, k]: permanent, gathered and frozen ones.

    Args:
        parameters: bytes of parameters in `model_states`, [n, k].
    """
    gathered = gathered_bytes(engine, table, sizes, ranks)
    every: Floats = parameters + gathered + frozen_bytes(engine, table, sizes, ranks)
    return every


def gathering_bytes(engine: Engine, table: LayoutTable, sizes: UnitSizes, ranks: Ranks) -> Floats:
    """Temporary bytes while the largest layer of a stage is gathered, besides its parameters, [n, k].

    The collective writes a buffer. Experts whose number is no multiple of their shards are split along
    another dimension, so that the buffer is put together in a second one.
    """
    layer = np.maximum(sizes.dense_layer, sizes.moe_layer) * (table.replicas > 1)
    if sizes.experts.any():
        buffers = np.where(sizes.local_experts % table.expert_shards != 0, 2, 1)
        layer = np.maximum(layer, buffers * sizes.experts * (table.expert_replicas > 1))
    each = engine.memory_policy(table.precision).gathered * layer
    result: Floats = each[:, None] * (ranks.layers > 0)
    return result


def stage_copy_bytes(engine: Engine, table: LayoutTable, sizes: UnitSizes, ranks: Ranks) -> Floats:
    """Bytes of the copies of one stage's layers that FSDP2 computes with, [n, k]."""
    each = copied_rows(table) * engine.memory_policy(table.precision).gathered
    copies = each[:, None] * _layer_parameters(sizes, ranks)
    if table.fp8_param_gather:
        # One byte less, but of experts.
        shared = rank_parameters(sizes, ranks)[0] - end_parameters(sizes, ranks)
        copies = copies - (copied_rows(table) & table.gathers_fp8)[:, None] * shared
    if sizes.frozen_dense_layer.any() or sizes.frozen_moe_layer.any():
        layers = sum(frozen_parameters(sizes, ranks), np.zeros(())) - _frozen_ends(sizes, ranks)
        copies = copies + element_bytes(table.precision) * _copies_frozen(table, sizes)[:, None] * layers
    result: Floats = copies / table.virtual_pipeline_parallel[:, None]
    return result


def _played_bytes(
    engine: Engine,
    table: LayoutTable,
    sizes: UnitSizes,
    ranks: Ranks,
    parameters: Floats,
    gradients: Floats,
    again: Floats,
) -> tuple[Floats, Floats, Floats, Floats]:
    """Bytes at the fullest moment of ranks with several stages, [n, k]: of activations, logits, gradients and
    parameters.

    Args:
        parameters: bytes of parameters if all stages are gathered, [n, k].
        gradients: bytes of the gradients of all stages, [n, k].
        again: further bytes in the backward pass of a layer, [n, k].
    """
    chunks = table.virtual_pipeline_parallel[:, None]
    # The gradient that comes in, and what ranks sum, are whole where the sequence is not split.
    whole = (table.recompute == FULL) & (table.tensor_parallel > 1) & ~table.sequence_parallel
    again = again + SUMMED_OUTPUTS * (whole * sizes.layer_output)[:, None]
    of_layer = [getattr(sizes, f"{kind}_activations") for kind in LAYER_KINDS]
    kept: Floats = np.zeros(())
    for kind, bytes_ in zip(LAYER_KINDS, of_layer, strict=True):
        if (layers := getattr(ranks, kind)).any():
            kept = kept + layers * bytes_[:, None]
    output = sizes.layer_output[:, None]
    head = ranks.last * (sizes.kept_logits - sizes.layer_output)[:, None]
    every = rank_parameters(sizes, ranks)
    own = np.maximum(every[0] + every[1], 1.0)
    first, last = (
        at * size[:, None] / own * gradients
        for at, size in ((ranks.first, sizes.embedding), (ranks.last, sizes.head))
    )
    element = element_bytes(table.precision)
    fresh = element / chunks * _layer_parameters(sizes, ranks)
    shared = every[0] - end_parameters(sizes, ranks)
    shards = shared / table.zero_shards[:, None] + every[1] / table.expert_shards[:, None]
    each_shard = engine.memory_policy(table.precision).gradients * ~table.offload_optimizer / chunks[:, 0]
    reduced = each_shard[:, None] * shards
    # FSDP2 adds up the gradients of experts before that of the stage's last matrix has come.
    left = element * np.minimum(ranks.all_moe, 1) * (~table.keeps_whole * sizes.last_matrices)[:, None]
    each = schedule_moments.Alive(
        flights=kept / chunks + output,
        waits=ranks.layers / chunks * sizes.output_gradients[:, None],
        head_flights=head,
        sums=(gradients - first - last) / chunks,
        head_sums=last,
        first_sums=first,
        fresh=fresh,
        left=left,
        reduced=reduced,
        added=np.maximum(fresh - again, 0.0),
        whole=stage_copy_bytes(engine, table, sizes, ranks),
        gathers=np.maximum(gathering_bytes(engine, table, sizes, ranks) - again, 0.0),
    )
    later = ~table.keeps_whole & (not sizes.experts.any())
    frees = frees_after_forward(table)
    alive = schedule_moments.fullest(table, ranks, each, of_layer, later, frees)
    activations = alive.flights * each.flights + alive.waits * each.waits + again
    activations = activations - alive.added * np.minimum(fresh, again) + alive.gathers * each.gathers
    chunk = ranks.last * (sizes.logits - sizes.kept_logits)[:, None]
    logits = alive.head_flights * head + chunk - np.minimum(passing_logits(engine, sizes, ranks), again)
    logits = np.maximum(logits, 0.0)
    summed = alive.sums * each.sums + alive.head_sums * last + alive.first_sums * first
    gradients = summed + (alive.fresh + alive.added) * fresh + alive.left * left + alive.reduced * reduced
    whole = alive.whole
    if frees.any():
        # Some layers are gathered for the running pass.
        passing = GATHERED_LAYERS * chunks / np.maximum(ranks.layers, 1.0)
        most = np.minimum(chunks, GATHERED_STAGES)
        whole = np.where(frees[:, None], np.minimum(whole + passing, most), whole)
    return activations, logits, gradients, parameters - (chunks - whole) * each.whole


def _layer_parameters(sizes: UnitSizes, ranks: Ranks) -> Floats:
    """Trained parameters of the layers of each pipeline rank, [n, k]."""
    return sum(rank_parameters(sizes, ranks), np.zeros(())) - end_parameters(sizes, ranks)


def least_state_bytes(
    cluster: Cluster, engine: Engine, table: LayoutTable, sizes: UnitSizes, ranks: Ranks
) -> Floats:
    """Bytes on a device of each pipeline rank that do not depend on microbatch and recomputation, [n, k]."""
    states, gradients = least_states(cluster, engine, table, sizes, ranks)
    return states + gradients


def least_states(
    cluster: Cluster, engine: Engine, table: LayoutTable, sizes: UnitSizes, ranks: Ranks
) -> tuple[Floats, Floats]:
    """Least bytes of each pipeline rank: without gradients, and of gradients, [n, k] each."""
    held = rank_parameters(sizes, ranks)
    parameters, gradients, optimizer = model_states(engine, table, sizes, ranks, held)
    if engine.sharding.fully_sharded:
        gradients = gradients * least_gradient_share(table)[:, None]
        absent = (table.virtual_pipeline_parallel - least_stages(table))[:, None]
        parameters = parameters - absent * stage_copy_bytes(engine, table, sizes, ranks)
    margin = margin_bytes(cluster, engine, table, ZERO, sizes)
    states = whole_parameter_bytes(engine, table, sizes, ranks, parameters) + optimizer
    return states + sum(margin.values(), np.zeros(())), gradients


def stage_memory(
    cluster: Cluster,
    engine: Engine,
    table: LayoutTable,
    sizes: UnitSizes,
    ranks: Ranks,
    moment: Moment | None = None,
) -> dict[str, Floats]:
    """Bytes on a device of each pipeline rank at the peak: the fields of `StageMemory`.

    Arrays of shape [n, k], or such that broadcast to it (`costmodels.ranks.reductions`).

    Args:
        moment: bytes of activations and gradients that exist together; the fullest moment unless given.
    """
    held_parameters = rank_parameters(sizes, ranks)
    parameters, gradients, optimizer = model_states(engine, table, sizes, ranks, held_parameters)
    every_gradient = gradients
    flying = in_flight(ranks, table.micro_batches[:, None].astype(np.float64))
    activations, logits = activation_and_logit_bytes(engine, table, sizes, ranks, flying)
    if engine.sharding.fully_sharded:
        together = activations, logits, gradients, parameters
        activations, logits, gradients, parameters = _sharded_moment(
            engine, table, sizes, ranks, flying, together, moment
        )
    parts = {
        "parameters": whole_parameter_bytes(engine, table, sizes, ranks, parameters),
        "gradients": gradients,
        "optimizer": optimizer,
        "activations": activations,
        "logits": logits,
        "communication": reduction_output_bytes(engine, table, sizes.layer_input, ranks, flying),
        "temporaries": reduction_source_bytes(engine, table, sizes, ranks),
    }
    if moment is None:
        take_later_moment(parts, every_gradient, end_reduction_bytes(engine, table, sizes, ranks))
        take_later_moment(parts, every_gradient, moment_copy_bytes(engine, table, *held_parameters))
    policy = engine.memory_policy(table.precision)
    if policy.stepping_whole or policy.stepping_cast:
        take_fuller_moment(parts, update_buffer_bytes(engine, table, *held_parameters))
    if sizes.orthogonal_step.any():
        take_fuller_moment(parts, sizes.orthogonal_step[:, None] * (ranks.layers > 0))
    lost = _lost_bytes(engine, table, sizes, ranks, parts)
    lost = lost + gathering_reserve_bytes(engine, table, *held_parameters)
    for name, bytes_ in permanent_bytes(engine, sizes, ranks).items():
        parts[name] = parts[name] + bytes_
    margin = margin_bytes(cluster, engine, table, lost, sizes)
    return parts | {"doubt": doubt_bytes(cluster, engine, table, sizes, parts)} | margin


def _sharded_moment(
    engine: Engine,
    table: LayoutTable,
    sizes: UnitSizes,
    ranks: Ranks,
    flying: dict[str, Floats],
    together: tuple[Floats, Floats, Floats, Floats],
    moment: Moment | None,
) -> tuple[Floats, ...]:
    """Bytes of activations, logits, gradients and parameters at a moment of fully sharded ranks.

    Args:
        flying: microbatches in flight.
        together: True for the maximum of each kind separately, even at different moments.
        moment: see `stage_memory`.
    """
    activations, logits, gradients, parameters = together
    every_gradient, flight = gradients, passes_in_flight(table, ranks, flying)
    # Stages hold their outputs until backward, the last one the loss.
    outputs = (table.pipeline_parallel > 1) * sizes.layer_output
    activations = activations + outputs[:, None] * np.where(ranks.last > 0, 0.0, flight)
    # A single backward pass lets go of a layer's copies when it has its gradients.
    copies = lets_go(table)[:, None] * stage_copy_bytes(engine, table, sizes, ranks)
    again = recomputation_bytes(table, sizes, ranks)
    whole = gradients - copies
    one = whole / np.maximum(ranks.layers + ranks.first + ranks.last, 1.0)
    find = fullest_moment if moment is None else moment
    late = ranks.last * (~table.keeps_whole * sizes.logit_gradients)[:, None]
    at_end = again
    if table.recompute_method.any():
        at_end = np.maximum(again, _first_recomputation(sizes, ranks))
    held = Held(activations - again, again, at_end, logits, late, whole, one)
    activations, logits, gradients = find(table, flight, held)
    gone = copies * (gradients != 0)
    found = activations, logits, gradients + gone, parameters - gone
    played = schedule_moments.played(table, ranks) if moment is None else np.zeros(1, dtype=np.bool_)
    if not played.any():
        return found
    own = _played_bytes(engine, table, sizes, ranks, parameters - gone, every_gradient, again)
    return tuple(np.where(played, each, other) for each, other in zip(own, found, strict=True))


def _lost_bytes(
    engine: Engine, table: LayoutTable, sizes: UnitSizes, ranks: Ranks, parts: dict[str, Floats]
) -> Floats:
    """Bytes that the allocator holds between the tensors of a step but cannot use, [n, k]."""
    lost = engine.allocator.fragmentation * dynamic_bytes(parts)
    if engine.allocator.score_reserve:
        lost = lost + sizes.score_reserve[:, None] * (ranks.layers > 0)
    return lost


def doubt_bytes(
    cluster: Cluster, engine: Engine, table: LayoutTable, sizes: UnitSizes, tensors: dict[str, Floats]
) -> Floats:
    """Half the width of the range of all tensors, bytes [n, k]; zero where the user gave a margin."""
    share = np.maximum(sizes.doubt, row_share(engine, table, bool(sizes.experts.any())))
    if cluster.memory_margin_bytes is not None or not share.any():
        return ZERO
    return share[:, None] * parts_total(tensors)

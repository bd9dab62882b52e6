"""Bytes on a device of each pipeline rank of the bundled runtime, at the peak of a step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from costmodels.bundled.accumulation import accumulation_peak
from costmodels.bundled.compiled_tapes import compiled_covers
from costmodels.bundled.groups import (
    Shape,
    embedding_shapes,
    expert_shapes,
    group_of,
    head_shapes,
    layer_shapes,
    summed_of_embedding,
    summed_of_layer,
    without_tensor_parallel,
)
from costmodels.bundled.moments import Bytes, Count, Peak
from costmodels.bundled.pipeline_steps import pipeline_peak
from costmodels.bundled.pytorch import is_before
from costmodels.bundled.replay import ACTIVATIONS, COMMUNICATION, KINDS, LOGITS, PARAMETERS, TEMPORARIES
from costmodels.bundled.schedule_setting import setting_of
from costmodels.bundled.schedule_steps import scheduled_peak
from costmodels.bundled.sizes import tensor_sizes
from costmodels.bundled.stage_sums import Kind, Stage, Sums, Terms
from costmodels.bundled.states import GroupBytes, group_bytes, wraps_parameters
from costmodels.bundled.units import SPLIT, UnitBytes, units_of
from costmodels.ranks.rank_layers import LAYER_KINDS, Entry, all_ranks, ranks_entry
from costmodels.spec.model import ModelSpec
from costmodels.spec.schedules import schedule_exists
from costmodels.spec.table import (
    CONTEXT_FORMS,
    RECOMPUTE_KINDS,
    RECOMPUTE_METHODS,
    SCHEDULES,
    Bools,
    Floats,
    Ints,
    LayoutTable,
    distinct_numbers,
    distinct_rows,
)

FULL = RECOMPUTE_KINDS.index("full")

BLOCK = 8192
"""Rows at a time, so that intermediate arrays stay small however long the table."""


def covers(model: ModelSpec, table: LayoutTable, compiled: bool = False) -> Bools:
    """Rows whose bytes this package knows.

    Args:
        compiled: layers are compiled.
    """
    wide = table.precision in ("fp32", "tf32")
    plain = table.precision != "fp8"
    # What context parallelism makes of fp32 has no fused kernel.
    plain &= model.head_dim % 8 == 0
    result: Bools = np.full(len(table), plain) & ~table.offload_activations
    if model.experts:
        # Not known: what ZeRO 3 gathers for experts that are computed again or of several stages on a rank,
        # and gradients of weights of experts that are computed apart.
        lasting = (table.recompute == FULL) | table.recomputes("mlp") | (table.virtual_pipeline_parallel > 1)
        result &= ~(lasting & (table.zero_stage == 3))
        result &= ~np.isin(table.schedule, SPLIT)
    # Not known: when PyTorch from 2.15 on frees what whole layers compute again for gradients of weights, and
    # any PyTorch beside an optimizer in host memory.
    again = (table.recompute == FULL) & np.isin(table.schedule, SPLIT)
    result &= ~(again & (table.offload_optimizer | (not is_before(2, 15))))
    result &= _runs(table)
    result &= (table.context_parallel == 1) | (not wide)
    rings = table.context_parallel_form == CONTEXT_FORMS.index("ring")
    result &= ~rings | (model.latent_attention is None)
    block = table.recompute_method == RECOMPUTE_METHODS.index("block")
    result &= block | (table.recompute_num_layers == 1)
    return result & compiled_covers(model, table) if compiled else result


def _runs(table: LayoutTable) -> Bools:
    """Rows whose schedule there is."""
    several = ~table.runs("1f1b")
    columns = [
        table.schedule,
        table.pipeline_parallel,
        table.virtual_pipeline_parallel,
        np.where(several, table.micro_batches, 1),
    ]
    first, code = distinct_rows(columns)
    found: Bools = np.array(
        [
            schedule_exists(SCHEDULES[schedule], *rest)
            for schedule, *rest in zip(*(one[first].tolist() for one in columns), strict=True)
        ]
    )
    result: Bools = ~several | found[code]
    return result


def rank_peaks(model: ModelSpec, table: LayoutTable, compiled: bool = False) -> tuple[Floats, Floats]:
    """Bytes of tensors on a device of each pipeline rank at the peak of a step.

    Args:
        table: rows that `covers`.
        compiled: layers are compiled.

    Returns:
        Totals [n, k] and their compositions [kinds, n, k] in the order of `KINDS`, for k pipeline ranks; 0
        for ranks that a row does not have.
    """
    ranks = int(table.pipeline_parallel.max(initial=1))
    totals, compositions = np.zeros((len(table), ranks)), np.zeros((len(KINDS), len(table), ranks))
    units = units_of(model, table, compiled)
    for pipeline, rows in _alike(table):
        moments = moments_of_ranks(model, table.take(rows), _of_rows(units, rows), only_highest=True)
        total, composition = moments.highest()
        totals[rows, :pipeline] = total
        compositions[:, rows, :pipeline] = composition
    return totals, compositions


def peak_bytes(model: ModelSpec, table: LayoutTable, compiled: bool = False) -> Floats:
    """Bytes of tensors on the fullest device of each row, [n], for rows that `covers`.

    Args:
        compiled: layers are compiled.
    """
    peaks, units = np.zeros(len(table)), units_of(model, table, compiled)
    for _, rows in _alike(table):
        for start in range(0, len(rows), BLOCK):
            some = rows[start : start + BLOCK]
            moments = moments_of_ranks(model, table.take(some), _of_rows(units, some), fullest=True)
            peaks[some] = moments.peak().max(axis=1)
    return peaks


def _alike(table: LayoutTable) -> Iterator[tuple[int, Ints]]:
    """Rows that can be computed together, by their number of pipeline ranks: with one stage on each rank, or
    with several."""
    several = ~table.runs("1f1b")
    for pipeline in distinct_numbers(table.pipeline_parallel):
        for which in (several, ~several):
            rows = np.flatnonzero((table.pipeline_parallel == pipeline) & which)
            if len(rows):
                yield int(pipeline), rows


@lru_cache(maxsize=4096)
def _fullest(entry: Entry) -> tuple[tuple[float, ...], ...]:
    """Ranks that can be the fullest: those that hold no less than another one with the same ends, of as many
    micro batches. Of each: rank, first, last, and its layers of each kind."""
    every = all_ranks(*entry)
    rows = zip(*(getattr(every, name).tolist() for name in ("first", "last", *LAYER_KINDS)), strict=True)
    kept: list[tuple[float, ...]] = []
    for rank, row in enumerate(rows):
        if not any(
            other[1:3] == row[:2] and all(a >= b for a, b in zip(other[3:], row[2:], strict=True))
            for other in kept
        ):
            kept.append((float(rank), *row))
    return tuple(kept)


def _held(model: ModelSpec, table: LayoutTable, fullest: bool) -> dict[str, Floats]:
    """Numbers of the ranks of each row, their ends and layers, [n, k] each.

    Args:
        fullest: only of those that can be the fullest.
    """
    columns = [
        table.split,
        table.schedule,
        table.recompute,
        table.recompute_method,
        table.recompute_num_layers,
    ]
    first, code = distinct_rows(columns)
    entries = [ranks_entry(model, table, int(row)) for row in first]
    names = ("rank", "first", "last", *LAYER_KINDS)
    if fullest:
        chosen = [_fullest(entry) for entry in entries]
    else:
        every = [all_ranks(*entry) for entry in entries]
        chosen = [
            tuple(
                zip(range(len(one.first)), *(getattr(one, name).tolist() for name in names[1:]), strict=True)
            )
            for one in every
        ]
    most = max(map(len, chosen))
    # Rows with fewer such ranks repeat one.
    filled = np.array([[*one, *[one[0]] * (most - len(one))] for one in chosen], dtype=np.float64)
    return {name: filled[code, :, index] for index, name in enumerate(names)}


def _of_rows(units: dict[str, UnitBytes], rows: Ints) -> dict[str, UnitBytes]:
    return {name: unit.take(rows) for name, unit in units.items()}


def moments_of_ranks(
    model: ModelSpec,
    table: LayoutTable,
    units: dict[str, UnitBytes] | None = None,
    fullest: bool = False,
    only_highest: bool = False,
    compiled: bool = False,
) -> Peak:
    """Moments of the ranks of rows with the same number of pipeline ranks: [n, k].

    With several stages on a rank, only those that are near its peak.

    Args:
        table: rows with one stage on each rank, or rows with several.
        units: those of the rows, if they are known.
        fullest: only ranks that can be the fullest of their row.
        only_highest: of ranks with several stages no moments but those that can be the highest.
        compiled: layers are compiled, where `units` are not given.
    """
    units = units or units_of(model, table, compiled)
    wraps = wraps_parameters(table, model.experts > 0)
    pipeline, several = int(table.pipeline_parallel.max()), bool((~table.runs("1f1b")).any())
    layers = _held(model, table, fullest and not several)
    is_first, is_last = layers["first"] > 0, layers["last"] > 0
    shards = table.zero_shards.astype(np.float64)
    replicas = table.replicas / shards

    def group(shapes: list[Shape], summed: tuple[Floats, ...] = ()) -> GroupBytes:
        return group_bytes(table, group_of(shapes, shards, summed=summed), wraps, replicas)

    def layer_group(moe: bool) -> GroupBytes:
        shapes, of_whole = (layer_shapes(model, one, moe) for one in (table, whole))
        summed = summed_of_layer(model, table, moe)
        return group_bytes(table, group_of(shapes, shards, summed=summed, of_whole=of_whole), wraps, replicas)

    whole = without_tensor_parallel(table)
    dense = layer_group(moe=False)
    routed = experts = None
    if model.moe_layers:
        own = table.expert_shards.astype(np.float64)
        shapes, of_whole = (expert_shapes(model, one) for one in (table, whole))
        stacked = group_of(shapes, own, any_side=True, of_whole=of_whole)
        experts = group_bytes(table, stacked, wraps, table.expert_replicas / own)
        routed = layer_group(moe=True)
    kinds, kind_names = [], []
    for name in ("dense", "dense_plain", "moe", "moe_plain"):
        if layers[name].any():
            own_group = dense if routed is None or name.startswith("dense") else routed
            own_experts = experts if own_group is routed else None
            kind_names.append(name)
            kinds.append(Kind(layers[name], units[name], own_group, own_experts))
    embedding, head = (
        embedding_shapes(model, table),
        head_shapes(model, table, pipeline > 1 or not model.tied),
    )
    positions = summed_of_embedding(model, table)
    sizes = tensor_sizes(model, table)
    residual, message, saved = (
        Bytes.of_kind(kind, sizes["residual"]) for kind in (TEMPORARIES, COMMUNICATION, ACTIVATIONS)
    )
    logits = Bytes.of_kind(LOGITS, sizes["logits"])
    ends: list[tuple[Count, GroupBytes]] = [
        (is_first * 1.0, group(embedding, positions)),
        (is_last * 1.0, group(head)),
    ]
    if pipeline == 1:
        ends = [(1.0, group([*embedding, *head], positions))]
    stage = Stage(kinds, units["first"], units["last"], ends, residual, message, saved, logits)
    fixed = [*_fixed(model, table, is_first, is_last), *stage.roots("kept"), *stage.roots("state")]
    for kind in kinds:
        for group_of_kind in (kind.group, kind.experts):
            if group_of_kind is not None:
                fixed += [(kind.count, group_of_kind.kept), (kind.count, group_of_kind.state)]
    if pipeline == 1:
        peak = accumulation_peak(table, fixed, stage, wraps)
    elif several:
        setting = setting_of(model, table, stage, kind_names, wraps, pipeline)
        peak = scheduled_peak(setting, fixed, fullest or only_highest)
    else:
        ahead = pipeline - layers["rank"]
        peak = pipeline_peak(table, fixed, stage, is_first, is_last, ahead, wraps)
    if not wraps.all():
        sums = Sums(stage)
        held = [*sums.all("accumulated"), *stage.roots("accumulated")]
        held += [*sums.all("delivered"), *stage.roots("delivered")]
        peak.add("reduce", [*fixed, *held], ~wraps[:, None])
    _add_updates(peak, stage, fixed, wraps)
    return peak


def _add_updates(peak: Peak, stage: Stage, fixed: Terms, wraps: Bools) -> None:
    """The moments of the optimizer's step, one for the parameters of each kind of layer and of each end."""
    groups = [*stage.ends, *((kind.count > 0, kind.group) for kind in stage.kinds)]
    groups += [(kind.count > 0, kind.experts) for kind in stage.kinds if kind.experts is not None]
    if all(group.updating.is_empty for _, group in groups):
        return
    for what, rows in (("gradients", wraps), ("accumulated", ~wraps)):
        start = [*fixed]
        for name in (what, "sums", "delivered"):
            start += [*Sums(stage).all(name), *stage.roots(name)]
        for there, group in groups:
            peak.add("optimizer", [*start, (1.0 * there, group.updating)], rows[:, None])


def _fixed(model: ModelSpec, table: LayoutTable, is_first: Bools, is_last: Bools) -> Terms:
    """Rotary tables, positions, token ids and labels."""
    seq = model.seq / table.context_parallel
    rows = table.micro_batches * table.micro_batch_size
    mla = model.latent_attention
    rotary = (
        (model.position == "rope") * 2 * 4 * seq * (model.head_dim if mla is None else mla.qk_rope_head_dim)
    )
    ids, saves = 8 * rows * seq, table.tensor_parallel == 1
    return [
        (1.0, Bytes.of_kind(PARAMETERS, rotary * table.virtual_pipeline_parallel)),
        (is_first * 1.0, Bytes.of_kind(PARAMETERS, 8 * seq)),
        (is_first * 1.0, Bytes.of_kind(ACTIVATIONS, ids * saves)),
        (is_first * 1.0, Bytes.of_kind(TEMPORARIES, ids * ~saves)),
        (1.0 - is_first, Bytes.of_kind(TEMPORARIES, ids)),
        (1.0, Bytes.of_kind(TEMPORARIES, ids)),
    ]

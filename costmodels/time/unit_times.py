"""Seconds and sizes of the units of pipeline ranks, for the few distinct shapes of layouts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from costmodels.layers.mtp import joining
from costmodels.layers.operators import embedding, head, layer, padded_vocabulary
from costmodels.network.collectives import group
from costmodels.ranks.rank_layers import ZERO, Ranks
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Cluster
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import Floats, Ints, LayoutTable
from costmodels.time.measured_layers import scale_by_measurements
from costmodels.time.passes import Passes, mean_passes, passes


def unit_passes(model: ModelSpec, cluster: Cluster, engine: Engine, table: LayoutTable) -> dict[str, Passes]:
    """Passes of the units of a pipeline rank, by the field of `Ranks` that counts the unit."""
    if not model.may_hide_dispatch:
        engine = engine.with_constants({"overlap.expert_parallel": 0.0})
    tp, cp, ep = table.tensor_parallel, table.context_parallel, table.expert_parallel
    etp = table.expert_tensor_parallel
    sizes_and_strides = {"tp": (tp, 1), "cp": (cp, tp), "etp": (etp, 1), "ep": (ep, etp)}
    groups = {
        name: group(cluster, engine, size, np.asarray(stride))
        for name, (size, stride) in sizes_and_strides.items()
    }
    device = cluster.device
    ends = {
        "first": embedding(model, table),
        "last": head(model, engine, padded_vocabulary(model, table), table),
    }
    layers = {
        held: [
            (share, layer(spec, engine, table, mlp)) for share, spec, mlp in model.variants(held == "dense")
        ]
        for held in ("dense", "moe")[: 1 + (model.routed_layers > 0)]
    }

    def layer_passes(held: str, rows: LayoutTable) -> Passes:
        every = [
            (share, passes(work, device, engine, rows, groups, repeats=True)) for share, work in layers[held]
        ]
        return every[0][1] if len(every) == 1 else mean_passes(every)

    units = {held: layer_passes(held, table) for held in layers}
    units["dense"] = scale_by_measurements(units["dense"], model, engine, table)
    if table.recompute_method.any():
        none = np.zeros_like(table.recompute)
        plain = replace(table, recompute=none, recompute_modules=none)
        for held in layers:
            units[f"{held}_plain"] = layer_passes(held, plain)
        units["dense_plain"] = scale_by_measurements(units["dense_plain"], model, engine, table)
    for held, work in ends.items():
        units[held] = passes(work, device, engine, table, groups, repeats=False, wide=True)
    if model.mtp_depths:
        kind = model.layer_kind(model.layers - 1)
        inner = layer(model.mtp_module, engine, table, kind.mlp)
        mtp = [
            units["last"],
            passes(inner, device, engine, table, groups, repeats=True),
            passes(joining(model, engine, table), device, engine, table, groups, repeats=False, wide=True),
        ]
        # Each depth is a layer, what joins its inputs, and the head once more.
        units["last"] = mean_passes([(1.0, units["last"]), *((float(model.mtp_depths), one) for one in mtp)])
    return units


def part_seconds(units: dict[str, Passes], ranks: Ranks, row: Ints, part: str) -> Floats:
    """Seconds of `part` for one microbatch on each rank; `row` is the index into `units`."""
    total = np.zeros_like(ranks.dense)
    for held, unit in units.items():
        count, seconds = getattr(ranks, held), getattr(unit, part)
        # Most parts that are not zero begin with another number.
        if count is not ZERO and (seconds[:1].any() or seconds.any()):
            total += count * seconds[row].reshape(-1, *(1,) * (total.ndim - 1))
    return total

"""Host seconds to launch a layer, and the device's idle seconds during launches."""

from __future__ import annotations

import numpy as np

from costmodels.layers.operators import Operators
from costmodels.network.collectives import Group
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import NARROW
from costmodels.spec.layout import SPLIT_BACKWARD
from costmodels.spec.table import FULL, RING, UNIFORM, Bools, Floats, LayoutTable


def unfused_rows(work: Operators, engine: Engine) -> Bools | bool:
    """Rows whose sequences times heads of a device do not suit the fused softmax kernel, [n]."""
    if engine.attention.flash or not engine.attention.softmax_batch:
        return False
    unfused: Bools = (work.scores / work.seq**2) % engine.attention.softmax_batch > 0
    return unfused


def launch_seconds(work: Operators, engine: Engine, table: LayoutTable, tp: Group) -> Floats:
    """Host seconds of a layer's forward pass, independent of its size.

    Every doubling of tensor parallelism in a node multiplies them; so do the nodes (islands) of a group,
    whose rings wait for each other. An unfused softmax is several launches instead of one. A CUDA graph is
    one launch of all layers.
    """
    split = np.where(table.sequence_parallel, engine.host.sequence_parallel, engine.host.tensor_parallel)
    steps = engine.host.tensor_parallel_step * np.where(tp.size > 1, tp.local, 0)
    result = work.kernels * engine.host.layer_overhead * split ** np.log2(tp.local) + steps
    if work.top_k:
        result = (result + engine.host.routing) * (1.0 - engine.host.graphed)
    result = result * (not engine.host.graph) * ~table.cuda_graphs * tp.islands**engine.host.nodes
    result = result * np.where(unfused_rows(work, engine), engine.host.unfused_softmax, 1.0)
    if engine.sharding.plain_whole:
        alone = np.where(chained_rows(work, table), engine.host.chained, engine.host.plain)
        result = result * np.where(table.keeps_whole, alone, 1.0)
    return result * np.where(table.runs(*SPLIT_BACKWARD), engine.host.split_backward, 1.0)


def chained_rows(work: Operators, table: LayoutTable) -> Bools:
    """Rows whose unwrapped compiled layers are one graph each and run in chains, [n].

    The first layer of a stage takes longer; this is not modelled separately.
    """
    units = (table.recompute == FULL) & (table.recompute_method == UNIFORM) & (table.recompute_num_layers > 1)
    rings = (table.context_parallel > 1) & (table.context_parallel_form == RING)
    result: Bools = ~(units | rings | table.offload_activations)
    if work.top_k:
        # `costmodels.layers.shapes.experts_are_whole`; in other formats each expert has GEMMs of its own.
        grouped = table.precision in ("bf16", *NARROW)
        result = result & (table.expert_parallel == 1) & (work.whole and grouped)
    return result


def launch_floor(seconds: Floats, floor: Floats | float, sharpness: float = 8.0) -> Floats:
    """Idle seconds of a device that computes for `seconds` while the host launches for `floor` seconds.

    Both together take their p-norm with exponent `sharpness`.
    """
    scale = np.maximum(seconds, floor)
    scale = np.where(scale > 0, scale, 1.0)
    norm = ((seconds / scale) ** sharpness + (floor / scale) ** sharpness) ** (1 / sharpness)
    return norm * scale - seconds

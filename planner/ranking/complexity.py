"""The complexity of layouts, in the points of `planner.preference`, all rows of a table at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from costmodels.order import measured_choices
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Cluster
from costmodels.spec.table import CODES, RECOMPUTE_MODULES, UNIFORM, Bools, Floats, Ints, LayoutTable, code_of
from planner.preference import Complexity

DEGREES = (
    "tensor_parallel",
    "pipeline_parallel",
    "virtual_pipeline_parallel",
    "context_parallel",
    "expert_parallel",
    "expert_tensor_parallel",
    "micro_batch_size",
)
"""Degrees that are usually powers of two."""


def points_of(known: Complexity, table: LayoutTable, cluster: Cluster, engine: Engine) -> Floats:
    """Points of each row, [n].

    Args:
        engine: any engine with the name of the one that runs the layouts.
    """
    points = np.zeros(len(table))
    for name, each in known.kinds.items():
        points += each * (getattr(table, name) > 1)
    for name, each in known.doublings.items():
        points += each * np.log2(getattr(table, name))
    for name in ("schedule", "zero_stage", "recompute"):
        points += _by_code(name, getattr(known, name))[getattr(table, name)]
    points += known.zero_replicas * (table.zero_replicas > 1)
    nodes = table.tensor_parallel * table.replicas / table.zero_replicas / cluster.devices_per_node
    points += known.zero_3_across_nodes * (table.zero_stage == 3) * np.log2(np.maximum(nodes, 1.0))
    for module in RECOMPUTE_MODULES[1:]:
        points += known.recompute_modules * table.recomputes(module)
    some = (table.recompute_method != UNIFORM) | (table.recompute_num_layers > 1)
    points += known.recompute_some_layers * (some & (table.recompute > 0))
    points += known.offload_activations * table.offload_activations
    points += known.offload_optimizer * table.offload_optimizer
    points += known.cuda_graphs * table.cuda_graphs
    points += known.cuda_graphs_of_several_devices * (table.cuda_graphs & (cluster.world_size > 1))
    for name in DEGREES:
        points += known.not_power_of_two * ~_is_power_of_two(getattr(table, name))
    points += known.uneven_stages * np.array([_is_moved(split) for split in table.splits])[table.split]
    experts = table.expert_parallel * table.expert_tensor_parallel
    points += known.outside_node["tensor_parallel"] * (table.tensor_parallel > cluster.joined)
    points += known.outside_node["expert_parallel"] * (experts > cluster.joined)
    for name, values in measured_choices(engine.name, cluster.device.architecture).items():
        seen = np.isin(getattr(table, name), [code_of(name, value) for value in values])
        points += known.unmeasured.get(name, 0.0) * ~seen
    result: Floats = points.round(6)
    return result


def _by_code(name: str, points: Mapping[Any, float]) -> Floats:
    """The points of the values of a column, by their codes."""
    values: Sequence[Any] = CODES.get(name, range(len(points)))
    # Values that the table does not list are not simple.
    most = max(points.values())
    return np.array([points.get(value, most) for value in values])


def _is_power_of_two(column: Ints) -> Bools:
    result: Bools = (column & (column - 1)) == 0
    return result


def _is_moved(split: tuple[int, ...]) -> bool:
    """Return whether stages have less even numbers of layers than they could."""
    return max(split) - min(split) > 1

"""CUDA graphs, solved: no gaps between kernels, where that saves more than is in doubt.

Graphs have run on an H100 and an H200 with dense models in bf16. Other kinds get them by a pin alone, so
that no plan fails on a device for something that nobody has asked for.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from costmodels.errors import InputError
from costmodels.order import apart_at, order_width, order_widths
from costmodels.pricing import Prices, price
from planner.inputs.choice import allowed_values
from planner.objective import slowness
from planner.problem import Problem

WITH_GRAPHS = {
    **dict.fromkeys(("tensor_parallel", "pipeline_parallel", "context_parallel"), 1),
    "zero_stage": 0,
    "cuda_graphs": True,
}
"""Degrees of layouts whose graphs hold no collective: gradients are reduced after the passes of a step."""

LEAST_BYTES = 4
"""Bytes of each parameter that a device holds at least: itself and its gradient, in 16 bits."""


def graph_problem(problem: Problem) -> Problem | None:
    """Pin the degrees of `WITH_GRAPHS`; None where other pins, the engine or the model forbid graphs."""
    engine, cluster, pins = problem.constants, problem.cluster, problem.pins
    if "cuda_graphs" in pins or not engine.runs.cuda_graphs or not engine.host.graph_gaps:
        return None
    if cluster.device.kind != "gpu" or cluster.parts or not _is_measured(problem):
        return None
    if LEAST_BYTES * problem.model.parameters > cluster.memory_bytes:
        return None
    try:
        left = all(value in allowed_values(pins, name, [value]) for name, value in WITH_GRAPHS.items())
        return replace(problem, pins={**pins, **WITH_GRAPHS}) if left else None
    except InputError:
        return None


def with_worthy_graphs(problem: Problem, found: Prices) -> Prices:
    """Layouts of `found`, which all have graphs, that graphs make faster by more than is in doubt."""
    table = replace(found.table, cuda_graphs=np.zeros(len(found), dtype=np.bool_))
    plain = price(problem.model, problem.cluster, problem.constants, table)
    before, after = (
        np.log(slowness(problem.objective, one.table.global_batch_size, one.step_time_s))
        for one in (plain, found)
    )
    weighs = problem.preference.prefer == "simple"
    doubt = weighs * apart_at(order_widths().told_apart) * order_width(plain, found)
    return found.take(before - after > doubt)


def _is_measured(problem: Problem) -> bool:
    """Return whether graphs of such a model have run on a GPU: dense layers of softmax attention in bf16."""
    model = problem.model
    others = (
        model.experts,
        model.linear_attention,
        model.latent_attention,
        model.indexer,
        model.lora,
        model.mtp,
    )
    return problem.precision == "bf16" and not any(others)

"""The choice of CUDA graphs, which remove gaps between kernels, where the gain exceeds the uncertainty.

Graphs were tested on an H100 and an H200 with dense models in bf16. Other models get graphs only by a pin, so
no plan fails because of a feature that nobody asked for.
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
"""Degrees of layouts whose graphs hold no collective, as gradients are reduced after the passes of a step."""

LEAST_BYTES = 4
"""Least bytes for each parameter on a device: the parameter and its gradient in 16 bits."""


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
    """Layouts of `found` whose gain from graphs exceeds the uncertainty; all of `found` have graphs."""
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

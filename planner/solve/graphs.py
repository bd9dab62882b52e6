"""CUDA graphs, solved: no gaps between kernels, where that saves more than is in doubt.

Graphs have run on an H100 and an H200 with dense models in bf16. Other kinds get them by a pin alone, so
that no plan fails on a device for something that nobody has asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from costmodels.order import apart_at, order_width, order_widths
from costmodels.pricing import Prices, peak_memory, price
from costmodels.spec.table import Bools, LayoutTable
from planner.objective import slowness
from planner.problem import Problem
from planner.solve.bounds import Worth
from planner.solve.concatenation import concatenate_prices
from planner.space.graph_rules import GRAPH_RULES


def graph_solutions(problem: Problem, known: Sequence[Prices], worth: Worth) -> Prices | None:
    """Layouts of `known` with graphs, of those that break no rule and fit, where graphs are surely faster.

    A graph of a pass holds no collective here: graphs of several GPUs can be pinned, and nobody has tried
    them. The gradients of data-parallel ranks are reduced after the passes.

    Args:
        known: layouts that fit.
        worth: whether rows that take so many seconds are.
    """
    model, cluster, engine = problem.model, problem.cluster, problem.constants
    if "cuda_graphs" in problem.pins or not engine.runs.cuda_graphs or not engine.host.graph_gaps:
        return None
    if cluster.device.kind != "gpu" or cluster.parts or not _is_measured(problem):
        return None
    plain = concatenate_prices(known)
    table = plain.table
    # All that graphs can take away.
    least = plain.step_time_s - plain.time["launch"] - plain.time["elementwise"]
    rows = np.flatnonzero((table.tensor_parallel == 1) & (table.context_parallel == 1) & worth(table, least))
    plain = plain.take(rows)
    table = replace(plain.table, cuda_graphs=np.ones(len(rows), dtype=np.bool_))
    legal = ~_broken(problem, table)
    plain, table = plain.take(np.flatnonzero(legal)), table.take(np.flatnonzero(legal))
    if not len(table):
        return None
    fits = np.flatnonzero(peak_memory(model, cluster, engine, table) <= cluster.memory_bytes)
    plain, found = plain.take(fits), price(model, cluster, engine, table.take(fits))
    if not len(found):
        return None
    before, after = (
        np.log(slowness(problem.objective, one.table.global_batch_size, one.step_time_s))
        for one in (plain, found)
    )
    weighs = problem.preference.prefer == "simple"
    doubt = weighs * apart_at(order_widths().told_apart) * order_width(plain, found)
    return found.take((before - after > doubt) & worth(found.table, found.step_time_s))


def _is_measured(problem: Problem) -> bool:
    """Whether graphs of such a model have run on a GPU: dense layers of softmax attention in bf16."""
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


def _broken(problem: Problem, table: LayoutTable) -> Bools:
    """Rows that break a rule of graphs, or one of the job, [n]."""
    found = np.zeros(len(table), dtype=np.bool_)
    for rule in (*GRAPH_RULES, *problem.rules):
        found = found | rule.broken(problem.model, table)
    return found

"""The time of layouts beyond the enumerated ones, priced before their memory.

Pricing the time alone takes half as long as pricing time and memory. Solving recomputation takes many times
longer, so that only layouts which are fast enough get that far.
"""

from __future__ import annotations

import numpy as np

from costmodels.pricing import step_time
from costmodels.spec.table import SCHEDULES, Floats
from planner.objective import slowness
from planner.problem import Problem
from planner.solve.bounds import Floor, Worth, least_seconds
from planner.solve.fit import states_that_fit
from planner.solve.replicas import may_have_copies
from planner.space.grid import Space


def least_pace(problem: Problem, space: Space, floor: Floor, worth: Worth) -> Floats:
    """A lower bound of the slowness of each row of a space, [n].

    The bound holds for any recomputation, for any number of replicas and, in 1F1B, for any layers of stages.
    It is infinite for rows that are not worth it, and for rows whose model states do not fit.
    """
    where = problem.model, problem.cluster, problem.constants
    table = space.table
    within, mean = states_that_fit(*where, space)
    pace = np.full(len(table), np.inf)
    rows = floor.rows_below(np.flatnonzero(within), worth.last)
    if len(rows):
        # Copies of ZeRO's shards change the exchange alone.
        seconds = step_time(*where, table, rows, may_have_copies)
        # Layers that recompute move fewer bytes to the host.
        offloads = table.column("offload_activations", rows)
        pace[rows] = slowness(problem.objective, table.column("global_batch_size", rows), seconds)
        pace[rows[offloads]] = floor.of(rows[offloads])
    if "layers_per_stage" not in problem.pins:
        rows = floor.rows_below(np.flatnonzero(mean), worth.last)
        rows = rows[table.column("schedule", rows) == SCHEDULES.index("1f1b")]
        rows = rows[table.column("pipeline_parallel", rows) > 1]
        if len(rows):
            some = table.take(rows)
            pace[rows] = slowness(problem.objective, some.global_batch_size, least_seconds(*where, some))
    return pace

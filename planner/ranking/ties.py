"""Which plans at the top of a ranking cannot be told apart, because their estimates may be off.

Estimates of one problem err together: what makes the products of one plan slower than predicted makes those
of another slower too. Where a step is the sum of parts t of T seconds in all, and each part takes e^x times
as long as predicted, ln T grows by the sum of t / T * x (to first order). What two plans really differ by
lies around the prediction by the sum of (share of the part in the one - share in the other) * x: an error
that all parts have in common cancels, and only what one plan has more of than the other counts. The
half-widths of x are those of `costmodels.spec.engine.Spread`, which make the range of a single plan
(`costmodels/time/uncertainty.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from costmodels.pricing import Prices
from costmodels.spec.table import Floats
from costmodels.time.measured_layers import measurement_share
from costmodels.time.uncertainty import COMMUNICATION, NARROW_HIDDEN

if TYPE_CHECKING:
    from planner.ranking.result import SearchResult

KERNELS = ("compute", "attention", "elementwise", "recompute")
"""Parts of `StepTime` whose kernels have other shapes where a layout cuts layers in another way."""

SHAPE_SPREAD = 0.06
"""Half-width of the error of kernels that layouts which cut layers in another way do not share, at most.

With it 0 to 7 % of the pairs in published sweeps that are told apart were measured in the other order
(vTrain, Hagemann et al., Zero Bubble, MoE Parallel Folding, SimuMax: 3,011 pairs of near places), and up to
30 % of those that are not; a range that holds four of five promises 10 % at most.
"""

SHAPE = ("tensor_parallel", "sequence_parallel", "context_parallel", "expert_parallel", "micro_batch_size")
"""Columns of a table that decide the shapes of kernels."""

NOISE = 0.01
"""Natural logarithm by which the same job takes longer or shorter from run to run: plans that are closer are
not told apart even where they differ in next to nothing."""

MOST = 20
"""Plans at the top of a ranking that are compared with the first."""


def half_width(first: Prices, others: Prices) -> Floats:
    """Half the width of the 80 % range of ln(step time of `others` / that of `first`), [n]; `NOISE` at least.

    Args:
        first: one layout.
        others: layouts of the same model, cluster and engine.
    """
    model, width = first.model, first.engine.spread
    kernel = float(np.hypot(width.base, width.narrow * NARROW_HIDDEN / model.hidden))
    squares, one, other = np.zeros(len(others)), np.zeros(1), np.zeros(len(others))
    for part in first.time:
        share, theirs = first.time[part] / first.step_time_s, others.time[part] / others.step_time_s
        squares += (_width(others, part, kernel) * theirs - _width(first, part, kernel) * share) ** 2
        if part in KERNELS:
            one, other = one + share, other + theirs
    differ = np.zeros(len(others), dtype=bool)
    for name in SHAPE:
        differ |= getattr(others.table, name) != getattr(first.table, name)
    squares += differ * min(SHAPE_SPREAD, kernel) ** 2 * (one**2 + other**2)
    known = [measurement_share(model, first.engine, each.table) for each in (first, others)]
    both = np.minimum(*known)
    # Layers of two shapes that were both measured err independently, and by that much only.
    result: Floats = np.sqrt(squares) * (1.0 - both) + differ * np.sqrt(2.0) * width.measured * both
    return np.maximum(result, NOISE)


def _width(prices: Prices, part: str, kernel: float) -> Floats | float:
    """Half-width of the error of a part of the step, [n] or one for all."""
    width, table = prices.engine.spread, prices.table
    if part not in COMMUNICATION:
        return {"launch": width.launch, "bubble": width.bubble}.get(part, kernel)
    # A node's own links are as the data sheet says; each doubling of nodes adds switches and other jobs.
    nodes: Floats | float = float(prices.cluster.nodes)
    if part in ("tensor_parallel", "context_parallel"):
        devices = table.tensor_parallel * (1 if part == "tensor_parallel" else table.context_parallel)
        nodes = np.clip(devices / prices.cluster.devices_per_node, 1.0, nodes)
    return width.network * (1.0 + np.log2(nodes))


def separation(first: Prices, others: Prices, whole_step: bool = False) -> Floats:
    """The half-widths of that range by which `others` take longer than `first`, [n]: for a token, or a step.

    Of those at 1 or more, no more than one in ten can be expected to be faster in truth.
    """
    slower = np.log(first.tokens_per_s / others.tokens_per_s)
    if whole_step:
        slower = np.log(others.step_time_s / first.step_time_s)
    result: Floats = slower / half_width(first, others)
    return result


def indistinguishable(result: SearchResult) -> tuple[int, ...]:
    """Places, from 1, of the plans that the estimates do not tell apart from the first, itself included.

    Of the first `MOST`; none where nothing fits. Peaks of memory have no range: plans that are ranked by them
    are all told apart.
    """
    if not result.feasible:
        return ()
    objective = result.problem.objective
    if objective == "memory":
        return (1,)
    prices = result.first(MOST)
    first, others = prices.take(slice(0, 1)), prices.take(slice(1, None))
    clear = separation(first, others, whole_step=objective == "step-time") >= 1.0
    return 1, *(int(place) + 2 for place in np.flatnonzero(~clear))


def ties_text(places: tuple[int, ...]) -> str | None:
    """The places that `indistinguishable` found, as a sentence; None where the first plan is alone.

    >>> ties_text((1, 2, 3, 7))
    'plans 1 to 3, 7 cannot be told apart'
    """
    if len(places) < 2:
        return None
    runs: list[list[int]] = []
    for place in places:
        if runs and place == runs[-1][-1] + 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    words = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    which = f"the first {len(places)} plans" if len(runs) == 1 else f"plans {', '.join(words)}"
    return f"{which} cannot be told apart"

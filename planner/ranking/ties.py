"""The plans at the top of a ranking that are within the estimate's error of the first.

`costmodels.order` gives the certainty of the order of two estimates, fitted to published sweeps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from costmodels.order import chance_of, order_width, order_widths
from costmodels.pricing import Prices
from costmodels.spec.table import Floats

if TYPE_CHECKING:
    from planner.ranking.result import SearchResult

MOST = 20
"""Plans at the top of a ranking that are compared with the first."""


def chance_to_be_faster(first: Prices, others: Prices, whole_step: bool = False) -> Floats:
    """The chance of each of `others` to be faster than `first` per token, or per step; [n], 0 to 1.

    Args:
        first: one layout.
        others: layouts of the same model, cluster and engine.
    """
    slower = np.log(first.tokens_per_s / others.tokens_per_s)
    if whole_step:
        slower = np.log(others.step_time_s / first.step_time_s)
    return chance_of(slower / order_width(first, others))


def are_told_apart(first: Prices, others: Prices) -> bool:
    """Return whether the order of two plans in tokens per second is sure enough to tell them apart."""
    chance = float(chance_to_be_faster(first, others)[0])
    return min(chance, 1.0 - chance) < order_widths().told_apart


def chances(result: SearchResult) -> tuple[float, ...]:
    """The chance of each of the first `MOST` plans to be faster than the first plan; for the first plan
    itself one half.

    None where nothing fits, and where plans are ranked by peaks of memory, for which no chance is known.
    """
    objective = result.problem.objective
    if not result.feasible or objective == "memory":
        return ()
    prices = result.first(MOST)
    found = chance_to_be_faster(prices.take(slice(0, 1)), prices, whole_step=objective == "step-time")
    return tuple(found.tolist())


def indistinguishable(result: SearchResult) -> tuple[int, ...]:
    """Places, from 1, of the plans within the estimate's error of the first, itself included.

    Only the first `MOST` places are compared; the result is empty where nothing fits. Peaks of memory have no
    range, so plans that are ranked by them never tie.
    """
    if not result.feasible:
        return ()
    found = chances(result)[1:]
    least = order_widths().told_apart
    return 1, *(place for place, chance in enumerate(found, 2) if chance >= least)


def ties_text(places: tuple[int, ...]) -> str | None:
    """The places that `indistinguishable` found, as a sentence; None where the first plan is alone.

    Examples:
        >>> ties_text((1, 2, 3, 7))
        "plans 1 to 3, 7 are within the estimate's error of each other"
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
    return f"{which} are within the estimate's error of each other"

"""The rank correlation of a model with measured runs: Kendall's tau, and the cost of the model's choice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from costmodels.spec.table import Floats, Ints

SHORTEST = 3
"""Fewest rows of a sweep whose order is compared."""

TIE = 9
"""Decimals to which logarithms of throughputs are rounded before ranking."""


def kendall_tau(first: Floats | Ints, second: Floats | Ints) -> float | None:
    """Kendall's tau-b of two rankings of the same rows; None where one of them ranks all rows equal.

    Concordant minus discordant pairs, over the geometric mean of the numbers of untied pairs of both rankings
    (Kendall, "The treatment of ties in ranking problems", Biometrika 33, 1945).
    """
    above = np.triu_indices(len(first), 1)
    one, other = (np.sign(values[:, None] - values)[above] for values in (first, second))
    pairs = np.sqrt(np.count_nonzero(one) * float(np.count_nonzero(other)))
    return float((one * other).sum() / pairs) if pairs else None


def regret(measured: Floats, predicted: Floats) -> float:
    """Share of the best measured throughput that is lost by choosing the row with the highest `predicted`
    one, 0 to 1.

    If several rows tie for the highest, their mean counts.
    """
    return float(1 - measured[predicted == predicted.max()].mean() / measured.max())


def rank_sweeps(
    sweeps: Sequence[str], measured: Floats, predicted: Floats
) -> tuple[list[float], list[float]]:
    """Kendall's tau, where there is one, and regret of each sweep that has `SHORTEST` rows or more.

    Args:
        sweeps: name of the sweep of each row; rows without a name are in none.
        measured, predicted: throughputs, [n].
    """
    rows_of: defaultdict[str, list[int]] = defaultdict(list)
    for row, sweep in enumerate(sweeps):
        if sweep:
            rows_of[sweep].append(row)
    taus, regrets = [], []
    for rows in rows_of.values():
        if len(rows) < SHORTEST:
            continue
        seen, said = (np.log(speeds[rows]).round(TIE) for speeds in (measured, predicted))
        regrets.append(regret(measured[rows], said))
        if (tau := kendall_tau(seen, said)) is not None:
            taus.append(tau)
    return taus, regrets

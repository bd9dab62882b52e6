"""The moments of a step of pipeline ranks with several stages, and of schedules that split backward.

Each state of `costmodels.bundled.pass_states` is a row of its own here: what other micro batches and stages
hold is known before its pass begins, and the pass adds its moments to that.
"""

from __future__ import annotations

import numpy as np

from costmodels.bundled.moments import Bytes, Moment, Peak
from costmodels.bundled.replay import KINDS
from costmodels.bundled.schedule_moments import passes
from costmodels.bundled.schedule_setting import Setting
from costmodels.bundled.stage_sums import Terms
from costmodels.table import Floats, Ints

NEAR = 0.01
"""Moments this much lower than the highest one may take its place where bytes are rounded."""


def scheduled_peak(setting: Setting, only_highest: bool = False) -> Peak:
    """Moments near the peak of each pipeline rank of a table, [n, k].

    Args:
        only_highest: of each rank the highest one alone.
    """
    places = setting.rows.row * setting.shape[1] + setting.rows.rank
    found = [(places[some], one) for some, peak in passes(setting) for one in peak.moments if one.can_happen]
    totals = [moment.total((len(where), 1))[:, 0] for where, moment in found]
    highest = np.zeros(setting.shape[0] * setting.shape[1])
    for (where, _), total in zip(found, totals, strict=True):
        np.maximum.at(highest, where, total)
    result = Peak(setting.shape)
    held: dict[str, list[Floats]] = {}
    for (where, moment), total in zip(found, totals, strict=True):
        some = np.flatnonzero(total >= highest[where] * (1.0 if only_highest else 1.0 - NEAR))
        if len(some):
            composition = moment.composition(some, np.zeros_like(some))
            _spread(held.setdefault(moment.label, []), where[some], composition, len(highest))
    for label, several in held.items():
        for one in several:
            result.moments.append(_moment(label, one.reshape(len(KINDS), *setting.shape)))
    return result


def _spread(several: list[Floats], where: Ints, composition: Floats, places: int) -> None:
    """Put compositions [kinds, entries] of places into arrays [kinds, places] that have nothing there yet."""
    order = np.argsort(where, kind="stable")
    where, composition = where[order], composition[:, order]
    number = np.arange(len(where)) - np.searchsorted(where, where)
    for layer in range(int(number.max()) + 1):
        own = number == layer
        free = next((one for one in several if not one[:, where[own]].any()), None)
        if free is None:
            free = np.zeros((len(KINDS), places))
            several.append(free)
        free[:, where[own]] = composition[:, own]


def _moment(label: str, composition: Floats) -> Moment:
    """One moment of ranks with these bytes, [kinds, n, k]."""
    ranks = composition.shape[2]
    rows = np.arange(composition.shape[1])
    terms: Terms = [
        ((np.arange(ranks) == rank)[None] * 1.0, Bytes.of_shapes(composition[:, :, rank], rows))
        for rank in range(ranks)
    ]
    return Moment(label, terms, composition.sum(axis=0) > 0)

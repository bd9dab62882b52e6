"""The moments of a step of pipeline ranks with several stages, and of schedules that split backward.

Each state of `costmodels.bundled.pass_states` is a row of its own here: what other micro batches and stages
hold is known before its pass begins, and the pass adds its moments to that, which many states have alike.
"""

from __future__ import annotations

import numpy as np

from costmodels.bundled.moments import Bytes, Moment, Peak
from costmodels.bundled.replay import KINDS
from costmodels.bundled.schedule_background import background
from costmodels.bundled.schedule_moments import passes
from costmodels.bundled.schedule_setting import Setting
from costmodels.bundled.stage_sums import Terms
from costmodels.spec.table import Floats, Ints

NEAR = 0.01
"""Moments this much lower than the highest one may take its place where bytes are rounded."""


def scheduled_peak(setting: Setting, fixed: Terms, only_highest: bool = False) -> Peak:
    """Moments near the peak of each pipeline rank of a table, [n, k].

    Args:
        fixed: what each rank holds from the start of the step to its end, [n, k].
        only_highest: of each rank the highest one alone.
    """
    places = setting.rows.row * setting.shape[1] + setting.rows.rank
    ranks = setting.shape[0] * setting.shape[1]
    around = background(setting, fixed)
    besides = around.total((len(places), 1))[:, 0]
    one_of_each, alike = setting.passes()
    found = [
        (some, moment, _sizes(moment, some, len(one_of_each)))
        for some, peak in passes(setting.take(one_of_each))
        for moment in peak.moments
        if moment.can_happen
    ]
    most = besides + np.maximum.reduce([sizes for *_, sizes in found])[alike]
    highest = np.zeros(ranks)
    np.maximum.at(highest, places, most)
    least = (highest * (1.0 if only_highest else 1.0 - NEAR))[places]
    near = np.flatnonzero(most >= least)
    result = Peak(setting.shape)
    held: dict[str, list[Floats]] = {}
    for some, moment, sizes in found:
        states = near[besides[near] + sizes[alike[near]] >= least[near]]
        if len(states):
            own = np.searchsorted(some, alike[states])
            composition = moment.composition(own, np.zeros_like(own))
            composition += around.composition(states, np.zeros_like(states))
            _spread(held.setdefault(moment.label, []), places[states], composition, ranks)
    for label, several in held.items():
        for one in several:
            result.moments.append(_moment(label, one.reshape(len(KINDS), *setting.shape)))
    return result


def _sizes(moment: Moment, some: Ints, count: int) -> Floats:
    """Bytes of a moment in each of `count` states, which only some have."""
    result = np.full(count, -np.inf)
    shape = len(some), 1
    happens = True if moment.happens is None else moment.happens
    result[some] = np.where(happens, moment.total(shape), -np.inf)[:, 0]
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

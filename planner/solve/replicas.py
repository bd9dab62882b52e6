"""Hybrid sharding, solved: several copies of the states that ZeRO splits, which cost memory and reduce
communication."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from costmodels.pricing import Prices, peak_memory, price
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Cluster
from costmodels.spec.layout import Recompute
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import (
    ARRAY_FIELDS,
    NONE,
    Bools,
    Ints,
    LayoutTable,
    distinct_numbers,
    distinct_rows,
)
from planner.solve.bounds import Worth
from planner.solve.concatenation import concatenate_prices
from planner.solve.recompute import fastest_that_fit, first_of_each, with_recompute
from planner.space.rule import divisors


def hybrid_candidates(prices: Prices, worth: Worth) -> Ints:
    """Rows that would be worth it without data-parallel communication, which is all that copies can save."""
    table = prices.table
    rows = np.flatnonzero(may_have_copies(table))
    seconds = (prices.step_time_s - prices.time["data_parallel"])[rows]
    return rows[worth(table.take(rows), seconds)]


def may_have_copies(table: LayoutTable) -> Bools:
    """Mask of rows in which ZeRO splits states among at least four ranks, enough for two copies of two ranks
    each, [n]."""
    result: Bools = (table.zero_stage > 0) & (table.zero_replicas == 1) & (table.replicas >= 4)
    return result


def hybrid_solutions(
    model: ModelSpec,
    cluster: Cluster,
    engine: Engine,
    prices: Prices,
    kinds: Collection[Recompute],
    worth: Worth,
) -> Prices | None:
    """Rows that become faster with several copies and fit, each with its best number of copies.

    Where copies leave too little memory, more layers recompute, if `kinds` allows it.

    Args:
        prices: prices of layouts that fit, with one copy (`hybrid_candidates`).
        worth: test of whether rows with so many seconds would be among the first.
    """
    hybrid = np.isin(prices.table.zero_stage, engine.runs.hybrid_zero_stages)
    if not hybrid.all():
        prices = prices.take(np.flatnonzero(hybrid))
    base, variants = _variants(prices.table)
    if not len(base):
        return None
    where = model, cluster, engine
    fits = peak_memory(*where, variants) <= cluster.memory_bytes
    found, bases = [price(*where, variants.take(fits))], [base[fits]]
    tight = np.flatnonzero(~fits)
    if kinds and len(tight):
        # Rows that differ in what they recompute become the same.
        plain = with_recompute(variants.take(tight), NONE, 0)
        first = distinct_rows([getattr(plain, name) for name in ARRAY_FIELDS])[0]
        tight, plain = tight[first], plain.take(first)
        good = worth(plain, price(*where, plain).step_time_s)
        row, lighter = fastest_that_fit(*where, plain.take(good), kinds)
        found.append(lighter)
        bases.append(base[tight[good][row]])
    every, base = concatenate_prices(found), np.concatenate(bases)
    seconds = every.step_time_s
    best = first_of_each(base, seconds)
    best = best[seconds[best] < prices.step_time_s[base[best]]]
    chosen = every.take(best)
    return chosen.take(worth(chosen.table, chosen.step_time_s))


def _variants(table: LayoutTable) -> tuple[Ints, LayoutTable]:
    """Rows with every number of copies that leaves at least two ranks each, and the row that each belongs
    to."""
    rows, copies = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for ranks in distinct_numbers(table.replicas):
        some = np.flatnonzero(table.replicas == ranks)
        for number in divisors(ranks)[1:-1]:
            # Ranks that hold the same experts are split as evenly as all.
            experts = table.expert_replicas[some]
            legal = some[experts % np.minimum(number, experts) == 0]
            rows.append(legal)
            copies.append(np.full(len(legal), number))
    base = np.concatenate(rows)
    return base, replace(table.take(base), zero_replicas=np.concatenate(copies))

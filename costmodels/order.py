"""The chance that two estimates are in the wrong order, so that the plan with the slower estimate is the
faster one.

Estimates of one job err together, so the error of their ratio comes from the choices in which the two layouts
differ. The size of that error was fitted to published sweeps: a width for each doubling of a degree, and for
each other choice that differs.

Widths are combined as root-sum-square. They grow with the range of the estimates, as the order is less sure
where an engine was never measured on a device. The distribution is Cauchy's: most pairs are near the
prediction, and a few, from jobs with a slow network, are far from it. `python -m benchmarks.order` fits the
numbers, and prints how often the order was right.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from costmodels.catalogue.yaml_files import catalogue_file
from costmodels.dataclass import dataclass
from costmodels.pricing import Prices
from costmodels.spec.table import Floats, LayoutTable

DOUBLINGS: dict[str, tuple[str, ...]] = {
    "tensor_parallel": ("tensor_parallel",),
    "pipeline_parallel": ("pipeline_parallel",),
    "chunks": ("virtual_pipeline_parallel",),
    "sequences_and_experts": ("context_parallel", "expert_parallel", "expert_tensor_parallel"),
    "micro_batch_size": ("micro_batch_size",),
}
"""Columns whose doublings count, by the name of their width."""

CHOICES: dict[str, tuple[tuple[str, ...], ...]] = {
    "chunks": (("schedule",),),
    "sequences_and_experts": (("context_parallel_form",),),
    "recompute": (
        ("recompute", "recompute_modules", "recompute_method", "recompute_num_layers"),
        ("offload_activations",),
    ),
    "sharding": (
        ("zero_stage",),
        ("sequence_parallel",),
        ("zero_replicas",),
        ("offload_optimizer",),
        ("cuda_graphs",),
    ),
}
"""Groups of columns; a group counts as one doubling where any of its columns differs."""

RUN = "run"
"""Name of the width that two layouts always have, even with equal columns, as runs themselves vary."""

KINDS = (RUN, *dict.fromkeys((*DOUBLINGS, *CHOICES)))

USUAL_RANGE = 0.1
"""Half the width of an estimate's range for which the file's widths hold; a natural logarithm."""


@dataclass(frozen=True)
class OrderWidths:
    """Errors of the order of two estimates, as fitted to published pairs."""

    widths: Mapping[str, float]
    """Width of each of `KINDS` as a natural logarithm, for the first doubling."""
    range_power: float
    """Power of the estimates' range with which all widths grow."""
    told_apart: float
    """The chance that the slower plan is the faster one, below which two plans do not tie."""


@cache
def order_widths() -> OrderWidths:
    """The fitted widths (catalogue/order.yaml)."""
    known = catalogue_file("order.yaml")
    return OrderWidths(known["widths"], known["range_power"], known["told_apart"])


def measured_choices(engine: str, architecture: str | None) -> Mapping[str, tuple[Any, ...]]:
    """The values of columns with which an engine was measured on such devices, by column."""
    found: Mapping[str, tuple[Any, ...]] = (
        catalogue_file("order.yaml")["measured"].get(engine, {}).get(architecture, {})
    )
    return found


def differences(one: LayoutTable, others: LayoutTable) -> Floats:
    """The doublings and choices by which the rows differ, for each of `KINDS`, [kinds, n]."""
    found = dict.fromkeys(KINDS, np.zeros(len(others)))
    found[RUN] = np.ones(len(others))
    for kind, columns in DOUBLINGS.items():
        for name in columns:
            apart = np.log2(getattr(one, name) / getattr(others, name))
            found[kind] = found[kind] + np.abs(apart)
    for kind, groups in CHOICES.items():
        for group in groups:
            differ = np.logical_or.reduce([getattr(one, name) != getattr(others, name) for name in group])
            found[kind] = found[kind] + differ
    return np.stack([found[kind] for kind in KINDS])


def widths_of(differ: Floats, spread: Floats | float, known: OrderWidths) -> Floats:
    """Width of the error of the ratio of two estimates, as a natural logarithm, [n].

    Args:
        differ: `differences` of the rows.
        spread: half the width of the narrower range of the two estimates.
    """
    squares = np.square([known.widths[kind] for kind in KINDS]) @ differ
    result: Floats = np.sqrt(squares) * (np.asarray(spread) / USUAL_RANGE) ** known.range_power
    return result


def order_width(one: Prices, others: Prices) -> Floats:
    """Width of the error of ln(step time of `others` / that of `one`), [n]; `one` has a row, or as many."""
    spread = np.minimum(one.spread, others.spread)
    return widths_of(differences(one.table, others.table), spread, order_widths())


def chance_of(apart: Floats) -> Floats:
    """The chance that a plan that is slower by `apart` widths is the faster one, 0 to 1."""
    result: Floats = 0.5 - np.arctan(apart) / np.pi
    return result


def apart_at(chance: float) -> float:
    """The distance, in widths, for which `chance_of` returns `chance`."""
    return math.tan(math.pi * (0.5 - chance))

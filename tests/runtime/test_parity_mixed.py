"""Layouts that combine many kinds of parallelism, as the planner emits them, train like one rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from torch import Tensor

from costmodels import Layout
from tests.support.gradients import check_gradients
from tests.support.layouts import parse_layout
from tests.support.mixed_layouts import mixed_layouts
from tests.support.models import FORMS, MODELS
from tests.support.ranks.training import curve_and_gradients
from tests.support.worker_pool import WorkerPool

SPECS = MODELS | FORMS

EXTENT = {
    "gpt2": (8, 3),
    "llama": (8, 3),
    "mixtral": (4, 2),
    "qwen": (4, 2),
    "deepseek": (4, 2),
    **dict.fromkeys(FORMS, (4, 2)),
}
"""Sequences of a step, and steps; those of one kind of parallelism take more in `test_parity`."""

SEEDED = (
    ("gpt2", 4, 3, 0),
    ("llama", 4, 3, 1),
    ("gpt2", 8, 3, 2),
    ("llama", 8, 3, 3),
    ("mixtral", 4, 3, 4),
    ("qwen", 8, 2, 5),
    ("deepseek", 4, 3, 6),
    ("deepseek", 8, 2, 7),
    ("around", 4, 4, 8),
    ("after", 4, 4, 9),
    ("sigmoid", 4, 4, 10),
    ("sinks", 4, 3, 11),
    ("sinks", 8, 1, 12),
    ("windows", 4, 4, 13),
    ("chunks", 4, 4, 14),
    ("delta", 4, 4, 15),
    ("capped", 4, 4, 16),
    ("further", 4, 4, 17),
    ("further-tied", 4, 2, 18),
    ("parallel", 4, 3, 19),
)
"""Model, ranks, layouts and the seed of their choice."""

LAYOUTS = [
    (model, layout)
    for model, world_size, count, seed in SEEDED
    for layout in mixed_layouts(SPECS[model], world_size, EXTENT[model][0], count, seed)
]


Reference = tuple[list[float], dict[str, Tensor]]
"""Losses and gradients of one rank."""


@pytest.fixture(scope="module")
def reference_of(pool: WorkerPool) -> Callable[[str], Reference]:
    """The reference of a model, computed once."""

    @cache
    def of(name: str) -> Reference:
        batch, steps = EXTENT[name]
        alone = parse_layout(f"gbs={batch}", SPECS[name])
        [found] = pool.run(curve_and_gradients, 1, SPECS[name], alone, steps)
        return found

    return of


@pytest.mark.parametrize(
    ("model", "layout"), LAYOUTS, ids=[f"{model} {layout.describe()}" for model, layout in LAYOUTS]
)
def test_mixed_layout_trains_like_one_rank(
    pool: WorkerPool, reference_of: Callable[[str], Reference], model: str, layout: Layout
) -> None:
    spec = SPECS[model]
    losses, gradients = reference_of(model)
    _, steps = EXTENT[model]
    by_rank = pool.run(curve_and_gradients, layout.world_size, spec, layout, steps)
    for curve, found in by_rank:
        assert curve == by_rank[0][0]
        assert curve == pytest.approx(losses, rel=1e-5)
        check_gradients(spec, found, gradients)
    held = {name for _, found in by_rank for name in found}
    assert set(gradients) <= held

"""Copies of distributed tensors are split as DTensor itself would split them."""

from __future__ import annotations

import pytest
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from tests.support.layouts import parse_layout
from tests.support.models import MODELS
from tests.support.ranks.placements import results, searches
from tests.support.worker_pool import WorkerPool


@pytest.mark.parametrize(
    "placements",
    [[Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(0), Shard(0)], [Shard(1), Partial()]],
    ids=str,
)
def test_results_are_those_of_dtensors_search(pool: WorkerPool, placements: list[Placement]) -> None:
    for expected, found in pool.run(results, 4, placements):
        assert found == expected


def test_building_a_model_searches_for_nothing(pool: WorkerPool) -> None:
    spec = MODELS["mixtral"].model_copy(update={"layers": 1})
    layout = parse_layout("ep=2,etp=2,tp=2,dp=2", spec)
    assert pool.run(searches, 4, spec, layout) == [[]] * 4

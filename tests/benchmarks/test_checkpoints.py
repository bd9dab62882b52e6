"""The matrix of `benchmarks.checkpoints`, one way through it: every layout loads the one before."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.checkpoints import LAYOUTS, SPEC, layouts_of, losses_between
from tests.support.worker_pool import WorkerPool


def test_a_run_that_changes_its_layout_at_every_checkpoint_trains_as_if_it_never_had(
    pool: WorkerPool, tmp_path: Path
) -> None:
    ways = list(layouts_of(LAYOUTS, SPEC).values())
    [expected] = pool.run(losses_between, 1, SPEC, ways[0], str(tmp_path / "one"), range(len(ways)))
    assert len(set(expected)) == len(ways)
    losses = [
        pool.run(losses_between, way.world_size, SPEC, way, str(tmp_path / "many"), [step])[0][0]
        for step, way in enumerate(ways)
    ]
    assert losses == pytest.approx(expected, rel=1e-6)

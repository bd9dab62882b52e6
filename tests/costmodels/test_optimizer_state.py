"""What optimizers keep for the parameters of a group, and make while they update them."""

from __future__ import annotations

import numpy as np
import pytest

from costmodels import Layout
from costmodels.bundled.groups import Shape, group_of
from costmodels.bundled.optimizer_state import state_bytes, update_bytes
from costmodels.spec.table import LayoutTable

SHAPES: list[Shape] = [(512.0, 64.0), (512.0,)]


def table(**fields: object) -> LayoutTable:
    """Of one layout."""
    return LayoutTable.of(
        [
            Layout.model_validate(
                {"layers_per_stage": (1,), "global_batch_size": 8, "precision": "bf16"} | fields
            )
        ]
    )


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        # A shard is 256 x 64 and 256.
        ("adam", 8 * (256 * 64 + 256)),
        ("sgd", 4 * (256 * 64 + 256)),
        ("muon", 4 * 256 * 64 + 8 * 256),
        ("adafactor", 4 * (256 + 64) + 4 * 256),
        # Vectors of fewer than 4096 elements stay in fp32.
        ("adam8bit", 2 * (256 * 64 + 4 * 64 + 1024) + 8 * 256),
    ],
)
def test_an_optimizer_keeps_what_its_moments_take(optimizer: str, expected: float) -> None:
    group = group_of(SHAPES, np.array([2.0]), of_whole=SHAPES)
    assert state_bytes(table(optimizer=optimizer), group) == [expected]


def test_muon_leaves_embedding_and_head_to_adam() -> None:
    assert state_bytes(table(optimizer="muon"), group_of(SHAPES, np.array([1.0]))) == [8 * (512 * 64 + 512)]


def test_muon_gathers_the_largest_matrix_of_a_layer() -> None:
    group = group_of(SHAPES, np.array([2.0]), of_whole=SHAPES)
    whole, square, update = 2 * 512 * 64, 2 * 64 * 64, 4 * 256 * 64
    assert update_bytes(table(optimizer="muon"), group).total == [update + 3 * whole + 2 * square]
    # On the host there is no update in fp32 of its own.
    offloaded = table(optimizer="muon", offload_optimizer=True, data_parallel=2)
    assert update_bytes(offloaded, group).total == [3 * whole + 2 * square]
    assert update_bytes(table(optimizer="adam"), group).is_empty

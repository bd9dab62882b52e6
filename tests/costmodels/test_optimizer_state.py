"""What optimizers keep for their parameters, and make while they update them."""

from __future__ import annotations

from typing import Any

import pytest

from costmodels import Layout
from costmodels.tapes.player.heap import Heap
from costmodels.tapes.player.optimizer import Updated, state_of, step

MATRIX, VECTOR = (
    Updated("weight", (256, 64), (512, 64), is_layer=True),
    Updated("bias", (256,), (512,), is_layer=True),
)
"""Half of a matrix and of a vector."""


def layout(**fields: Any) -> Layout:
    return Layout.model_validate(
        {"layers_per_stage": (1,), "global_batch_size": 8, "precision": "bf16", **fields}
    )


def state_bytes(optimizer: str, *parameters: Updated) -> int:
    return sum(one.size for one in state_of(layout(optimizer=optimizer), parameters))


def update_bytes(parameters: list[Updated], **fields: Any) -> int:
    """The most that an update makes."""
    heap = Heap()
    step(heap, layout(**fields), [parameters])
    return max((moment.total for moment in heap.moments()), default=0)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        # With a number of steps for each, in a block of its own.
        ("adam", 2 * 512 + 8 * (256 * 64 + 256)),
        ("sgd", 4 * (256 * 64 + 256)),
        ("muon", 4 * 256 * 64 + 512 + 8 * 256),
        # Means of rows and of columns; the latter are less than a block.
        ("adafactor", 4 * 256 + 512 + 4 * 256),
        # A momentum, and these twice; a vector has a momentum and a mean for each element.
        ("came", 4 * 256 * 64 + 2 * (4 * 256 + 512) + 2 * 4 * 256),
        # Vectors of fewer than 4096 elements stay in fp32.
        ("adam8bit", 2 * (256 * 64 + 512 + 1024) + 8 * 256),
    ],
)
def test_an_optimizer_keeps_what_its_moments_take(optimizer: str, expected: int) -> None:
    assert state_bytes(optimizer, MATRIX, VECTOR) == expected


def test_muon_leaves_embedding_and_head_to_adam() -> None:
    assert state_bytes("muon", MATRIX._replace(is_layer=False)) == state_bytes("adam", MATRIX)


@pytest.mark.parametrize(
    ("name", "sides", "whole"),
    [
        ("experts.up_bias", (2, 64), (8, 64)),
        ("inputs.query_conv", (64, 4), (128, 4)),
        ("shared_gate.weight", (1, 64), (1, 64)),
    ],
)
def test_muon_leaves_what_is_no_matrix_to_adam(
    name: str, sides: tuple[int, ...], whole: tuple[int, ...]
) -> None:
    one = Updated(name, sides, whole, is_layer=True)
    assert state_bytes("muon", one) == state_bytes("adam", one)
    assert update_bytes([one], optimizer="muon") == 0
    row = Updated("weight", (1, 64), (8, 64), is_layer=True)
    assert state_bytes("muon", row) < state_bytes("adam", row), "the only row here of a matrix"


def test_muon_gathers_one_matrix_at_a_time() -> None:
    whole, square, update = 2 * 512 * 64, 2 * 64 * 64, 4 * 256 * 64
    every = [MATRIX, MATRIX._replace(name="other"), VECTOR]
    assert update_bytes(every, optimizer="muon") == update + 3 * whole + 2 * square
    # On the host there is no update in fp32 of its own.
    offloaded = update_bytes(every, optimizer="muon", offload_optimizer=True, data_parallel=2)
    assert offloaded == 3 * whole + 2 * square
    assert update_bytes(every, optimizer="adam") == 0

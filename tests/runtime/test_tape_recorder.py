"""The recorder of tapes: what units do, in symbols."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from costmodels import Layout, ModelSpec
from costmodels.tapes.dimensions import dimensions
from costmodels.tapes.structure import Unit, structure_of
from costmodels.tapes.tape import Allocation, Gradient, Tape, elements_of
from runtime.dryrun.tape_recorder import recorded_tape
from runtime.dryrun.unit_recorder import record_unit
from runtime.model.transformer import Block

MODEL = ModelSpec(
    name="small",
    layers=1,
    hidden=256,
    ffn=512,
    heads=8,
    kv_heads=4,
    vocab=1000,
    seq=128,
    gated=True,
    activation="silu",
    norm="rmsnorm",
    position="rope",
    tied=False,
    linear_bias=False,
)

ONE = {"layers_per_stage": (1,), "global_batch_size": 2}


def bytes_of_tape(tape: Tape, model: ModelSpec, layout: Layout) -> list[int]:
    """Bytes of everything that a tape allocates, in order."""
    sizes = dimensions(model, layout)
    events = (*tape.forward, *tape.backward)
    return [elements_of(event.size, sizes) for event in events if isinstance(event, Allocation)]


@pytest.mark.parametrize(
    ("unit", "compiled", "fields"),
    [
        ("embedding", False, {"tensor_parallel": 2, "sequence_parallel": True}),
        ("dense", False, {"micro_batch_size": 2}),
        ("dense", False, {"tensor_parallel": 2, "sequence_parallel": True, "recompute": "full"}),
        ("dense", False, {"recompute": "selective", "recompute_modules": ("norm", "mlp")}),
        ("dense", False, {"tensor_parallel": 8}),
        ("dense", True, {"tensor_parallel": 2}),
        ("head", False, {"precision": "fp32"}),
        ("loss", False, {"tensor_parallel": 2}),
    ],
)
def test_a_tape_is_what_other_sizes_do(unit: Unit, compiled: bool, fields: dict[str, Any]) -> None:
    layout = Layout.model_validate(ONE | fields)
    tape = recorded_tape(structure_of(MODEL, layout, unit, compiled))
    recording = record_unit(MODEL, layout, unit, compiled)
    changes = [*recording.forward, *recording.backward]
    assert bytes_of_tape(tape, MODEL, layout) == [
        size for kind, _, size, _ in changes if kind == "allocation"
    ]
    shapes = [
        tuple(elements_of(side, dimensions(MODEL, layout)) for side in one.shape) for one in tape.parameters
    ]
    assert shapes == [one.shape for one in recording.parameters]


def test_every_parameter_gets_its_gradient_once() -> None:
    tape = recorded_tape(structure_of(MODEL, Layout.model_validate(ONE), "dense", compiled=False))
    found = sorted(event.parameter for event in tape.backward if isinstance(event, Gradient))
    assert found == list(range(len(tape.parameters)))


def test_a_feature_of_the_block_is_in_the_next_tape(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout.model_validate(ONE)
    structure = structure_of(MODEL, layout, "dense", compiled=False)
    before = recorded_tape(structure)
    forward = Block.forward

    def doubled(block: Block, x: Tensor) -> Tensor:
        return torch.nn.functional.silu(forward(block, x))

    monkeypatch.setattr(Block, "forward", doubled)
    after = recorded_tape(structure)
    # The new operation keeps its input for backward, writes a result, and the gradient of its input.
    more = sum(bytes_of_tape(after, MODEL, layout)) - sum(bytes_of_tape(before, MODEL, layout))
    assert more == 2 * (2 * MODEL.seq * MODEL.hidden)

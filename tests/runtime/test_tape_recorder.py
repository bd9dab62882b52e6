"""The recorder of tapes: what units do, in symbols."""

from __future__ import annotations

from typing import Any

import pytest

from costmodels import Layout, ModelSpec
from costmodels.tapes.dimensions import dimensions
from costmodels.tapes.structure import Structure, Unit, structure_of
from costmodels.tapes.tape import (
    INPUT,
    OUTPUT,
    OUTPUT_GRADIENT,
    Allocation,
    Gradient,
    Loop,
    Mark,
    Release,
    Tape,
    elements_of,
)
from runtime.dryrun.loops import collapsed, rolled, rolled_together
from runtime.dryrun.recording import Change, Recording, UnitRecordings
from runtime.dryrun.tape_recorder import foreign_dimensions, recorded_tape
from runtime.dryrun.unit_recorder import record_unit
from tests.support.models import LLAMA

MODEL = LLAMA.model_copy(update={"layers": 1})

ONE = {"layers_per_stage": (1,), "global_batch_size": 2}


def bytes_of_tape(tape: Tape, model: ModelSpec, layout: Layout) -> list[int]:
    """Bytes of everything that a tape allocates, in order."""
    sizes = dimensions(model, layout)
    events = (*tape.forward, *tape.backward)
    return [elements_of(event.size, sizes) for event in events if isinstance(event, Allocation)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("unit", "compiled", "fields"),
    [
        ("embedding", False, {"tensor_parallel": 2, "sequence_parallel": True}),
        ("dense", False, {"tensor_parallel": 2, "sequence_parallel": True, "recompute": "full"}),
        ("dense", False, {"recompute": "selective", "recompute_modules": ("norm", "mlp")}),
        ("dense", False, {"tensor_parallel": 8}),
        ("dense", False, {"context_parallel": 2, "context_parallel_form": "ring"}),
        ("dense", False, {"context_parallel": 4, "context_parallel_form": "all_to_all"}),
        ("dense", False, {"precision": "fp32", "micro_batch_size": 2}),
        # Recorded in bf16, and with another activation function.
        (
            "dense",
            True,
            {"precision": "fp16", "recompute": "selective", "recompute_modules": ("activation",)},
        ),
        ("head", True, {"tensor_parallel": 2}),
        ("head", False, {"micro_batch_size": 2}),
    ],
)
def test_a_tape_is_what_other_sizes_do(unit: Unit, compiled: bool, fields: dict[str, Any]) -> None:
    layout = Layout.model_validate(ONE | fields)
    tape = recorded_tape(structure_of(MODEL, layout, unit, compiled))
    recording = record_unit(MODEL, layout, unit, compiled).whole
    changes = [*recording.forward, *recording.backward]
    assert bytes_of_tape(tape, MODEL, layout) == [
        size for kind, _, size, _ in changes if kind == "allocation"
    ]
    shapes = [
        tuple(elements_of(side, dimensions(MODEL, layout)) for side in one.shape) for one in tape.parameters
    ]
    assert shapes == [one.shape for one in recording.parameters]


ROUTED = MODEL.model_copy(update={"experts": 8, "top_k": 2, "expert_ffn": 128, "shared_expert_ffn": 64})

LATENT = ModelSpec.model_validate(
    MODEL.model_dump()
    | {
        "kv_heads": 8,
        "latent_attention": {
            "q_lora_rank": 96,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
        },
    }
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "unit", "fields"),
    [
        (ROUTED, "experts", {"tensor_parallel": 2}),
        (ROUTED, "experts", {"expert_parallel": 2, "data_parallel": 2, "recompute": "full"}),
        (ROUTED, "experts", {"precision": "fp16", "expert_parallel": 2, "data_parallel": 2}),
        (LATENT, "dense", {"tensor_parallel": 2, "sequence_parallel": True}),
    ],
)
def test_tapes_of_experts_and_latents(model: ModelSpec, unit: Unit, fields: dict[str, Any]) -> None:
    layout = Layout.model_validate({"layers_per_stage": (1,), "global_batch_size": 4} | fields)
    tape = recorded_tape(structure_of(model, layout, unit, compiled=False))
    recording = record_unit(model, layout, unit, compiled=False).whole
    changes = [*recording.forward, *recording.backward]
    recorded = [size for kind, _, size, _ in changes if kind == "allocation"]
    assert bytes_of_tape(tape, model, layout) == recorded
    marks = [event.name for event in (*tape.forward, *tape.backward) if isinstance(event, Mark)]
    assert marks.count("experts_backward_end") == (unit == "experts")


def test_sizes_of_layers_are_no_sums_of_what_only_others_have() -> None:
    latent, head = Structure("dense", "fp8", norm="rmsnorm", latent=True), Structure("head", "bf16")
    assert {"vocab", "positions", "head"} <= foreign_dimensions(latent)
    assert not foreign_dimensions(head)


def test_every_parameter_gets_its_gradient_once() -> None:
    tape = recorded_tape(structure_of(MODEL, Layout.model_validate(ONE), "dense", compiled=False))
    found = sorted(event.parameter for event in tape.backward if isinstance(event, Gradient))
    assert found == list(range(len(tape.parameters)))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_split_backward_makes_the_same_gradients(recompute: str) -> None:
    layout = Layout.model_validate(ONE | {"tensor_parallel": 2, "recompute": recompute})
    tape = recorded_tape(structure_of(MODEL, layout, "dense", compiled=False))
    assert tape.split is not None
    whole, split = (
        {event.parameter for event in events if isinstance(event, Gradient)}
        for events in (tape.backward, tape.split.first_weights)
    )
    assert split == whole
    made = [
        e.storage
        for e in (*tape.forward, *tape.split.inputs, *tape.split.weights)
        if isinstance(e, Allocation)
    ]
    passes = (tape.forward, tape.split.inputs, tape.split.weights, tape.split.forgotten, tape.split.rest)
    ends = [e.storage for events in passes for e in events if isinstance(e, Release)]
    assert sorted(ends) == sorted({*made, INPUT, OUTPUT, OUTPUT_GRADIENT} - {tape.split.input_gradient})
    # What was computed again and not used is left to the next layer.
    assert bool(tape.split.forgotten) == (recompute == "full")


def allocation(number: int, size: int = 8) -> Change:
    return "allocation", number, size, "temporaries"


def release(number: int) -> Change:
    return "release", number, 0, ""


def test_of_turns_that_leave_nothing_behind_the_highest_stands_for_all() -> None:
    turns = [change for n in range(3, 10) for change in (allocation(n, n), release(n))]
    found = collapsed(Recording(forward=[*turns, allocation(10)], backward=[release(10)]))
    assert found.forward == [allocation(3, 9), release(3), allocation(4)]
    assert found.backward == [release(4)]


def test_a_smaller_last_turn_stays_besides_the_highest_of_the_others() -> None:
    turns = [change for n in range(3, 9) for change in (allocation(n, n), release(n))]
    last = [allocation(9, 2), release(9)]
    found = collapsed(Recording(forward=[*turns, *last]), keeps_last=True)
    assert found.forward == [allocation(3, 8), release(3), allocation(4, 2), release(4)]


@pytest.mark.parametrize("steps", [9, 12])
def test_turns_that_keep_something_are_one_loop(steps: int) -> None:
    made = [allocation(3 + n) for n in range(steps)]
    found = rolled([allocation(2, 4), *made], steps)
    assert found.changes == [allocation(2, 4), allocation(3)]
    assert (found.loops, found.by_turn) == ([Loop(1, 1, 0)], [0, 1])
    back = rolled([release(2 + steps - n) for n in range(steps)], steps)
    assert (back.loops, back.by_turn) == ([Loop(0, 1, 0)], [-1])


def test_what_is_as_often_as_there_are_steps_by_chance_is_no_loop() -> None:
    def recording(steps: int) -> Recording:
        others = [3 + steps + n for n in range(10)]
        forward = [
            *(allocation(3 + n) for n in range(steps)),
            *(allocation(number, 2 + place % 3 * place) for place, number in enumerate(others)),
        ]
        mark: Change = ("mark", -1, 0, "ends")
        backward = [*map(release, others), mark, *(release(2 + steps - n) for n in range(steps))]
        return Recording(forward=forward, backward=backward)

    steps = (11, 13)
    every = [UnitRecordings(recording(n), None, None) for n in steps]
    assert rolled(every[0].whole.backward, steps[0]).loops[0].first == 0
    found, repeats = rolled_together(every, "steps", steps)
    assert repeats.loops == ((Loop(0, 1, 0),), (Loop(11, 1, 0),))
    assert [len(one.whole.backward) for one in found] == [12, 12]

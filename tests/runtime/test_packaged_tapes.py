"""Tapes of the package are what the recorder makes of the runtime as it is."""

from __future__ import annotations

import pytest

from costmodels import Layout
from costmodels.catalogue import load_model
from costmodels.tapes import store
from costmodels.tapes.dimensions import dimensions
from costmodels.tapes.structure import Unit, structure_of
from costmodels.tapes.tape import Allocation, Release, Tape, elements_of, passes_of
from runtime.dryrun.tape_recorder import recorded_tape


def peaks(tape: Tape, sizes: dict[str, int]) -> list[tuple[int, int]]:
    """The most bytes of each pass and those that it leaves, both over what was there before it.

    A compiler may order operations otherwise each time.
    """
    found: list[tuple[int, int]] = []
    made: dict[int, int] = {}
    for events in passes_of(tape):
        highest = total = 0
        for event in events:
            if isinstance(event, Allocation):
                made[event.storage] = elements_of(event.size, sizes)
                total += made[event.storage]
                highest = max(highest, total)
            elif isinstance(event, Release):
                total -= made.get(event.storage, 0)
        found.append((highest, total))
    return found


SPLIT = {"tensor_parallel": 2, "sequence_parallel": True}

EXPERTS = {"expert_parallel": 2, "data_parallel": 2}


@pytest.mark.parametrize(
    ("model", "unit", "compiled", "fields"),
    [
        ("gpt3-175b", "embedding", False, SPLIT),
        ("llama3-70b", "dense", False, SPLIT | {"recompute": "full"}),
        ("llama3-70b", "head", False, {}),
        pytest.param("mixtral-8x7b", "experts", False, EXPERTS, marks=pytest.mark.slow),
        pytest.param("llama3-70b", "dense", True, {"context_parallel": 2}, marks=pytest.mark.slow),
        pytest.param("qwen3-30b-a3b", "experts", True, EXPERTS, marks=pytest.mark.slow),
        pytest.param("gpt3-175b", "head", True, SPLIT, marks=pytest.mark.slow),
    ],
)
def test_a_packaged_tape_is_up_to_date(
    model: str, unit: Unit, compiled: bool, fields: dict[str, object]
) -> None:
    spec = load_model(model)
    layout = Layout.model_validate(
        {"layers_per_stage": (spec.layers,), "micro_batch_size": 2, "global_batch_size": 4, **fields}
    )
    structure = structure_of(spec, layout, unit, compiled)
    version = store.default_version()
    if not store.known_structures(version):
        pytest.skip(f"the package has no tapes of PyTorch {version}")
    assert structure.name in store.known_structures(version)
    packaged, recorded = store.tape_of(structure, version), recorded_tape(structure)
    assert packaged is not None
    told = [old.split for old in packaged.parameters]
    assert list(packaged.parameters) == [
        new if split is not None else new._replace(split=None)
        for new, split in zip(recorded.parameters, told, strict=True)
    ]
    sizes = dimensions(spec, layout)
    assert peaks(packaged, sizes) == peaks(recorded, sizes)

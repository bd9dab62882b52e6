"""Bytes of the bundled engine: what the tapes of its layers say, and how tables are evaluated."""

from __future__ import annotations

import numpy as np
import pytest

from costmodels import Layout, ModelSpec, even_split
from costmodels.bundled import KINDS, covers, moments_of_ranks, peak_bytes, rank_peaks, states
from costmodels.bundled.operations import elementwise, linear
from costmodels.bundled.replay import (
    ACTIVATIONS,
    TEMPORARIES,
    Edge,
    Leaf,
    Node,
    Storage,
    Tape,
    Tensor,
    run_backward,
)
from costmodels.bundled.units import structures_of, units_of
from costmodels.spec.table import LayoutTable

GPT = ModelSpec(name="gpt", layers=4, hidden=512, heads=8, vocab=1024, seq=256)


def layout(**fields: object) -> Layout:
    """A layout of the model."""
    stages = int(fields.get("pipeline_parallel", 1))  # type: ignore[call-overload]
    return Layout.model_validate(
        {"layers_per_stage": even_split(GPT.layers, stages), "global_batch_size": 8, **fields}
    )


def totals(tape: Tape) -> list[float]:
    """Bytes after each change of a tape, all sizes being 1."""
    return list(np.cumsum([factor for _, _, factor in tape.changes]))


def test_a_tape_keeps_what_backward_needs_and_frees_it_as_it_is_used() -> None:
    tape = Tape()
    weight = Leaf()
    x = Tensor(Storage(tape, ("x", 1.0)), (Leaf(kind=TEMPORARIES), 0))
    y = linear(elementwise(x, saves="input"), weight, ("x", 1.0), ("weight", 1.0))
    # The input of each of both operations, and the result.
    assert totals(tape)[-1] == 3.0
    assert [tape.kinds[number] for number in (0, 1)] == [ACTIVATIONS, ACTIVATIONS]
    assert y.edge is not None
    roots = [(y.edge, Storage(tape, ("x", 1.0)))]
    del x, y
    run_backward(tape, roots)
    # The gradient of the weight: nobody holds that of the input.
    assert weight.gradient is not None
    assert totals(tape)[-1] == 1.0


@pytest.mark.parametrize(("behind", "highest"), [(False, 5.0), (True, 4.0)])
def test_a_gradient_changes_its_number_format_as_it_comes(behind: bool, highest: float) -> None:
    tape = Tape()
    weight = Leaf(casts=2.0, behind=behind)
    x = Storage(tape, ("nothing", 0.0))
    inputs = [Tensor(x, (Leaf(kind=TEMPORARIES), 0)), Tensor(x, (weight, 0))]
    node = Node(tape, inputs, [], lambda node, _: [Storage(node.tape, ("x", 1.0)) for _ in inputs])
    roots: list[tuple[Edge, Storage]] = [((node, 0), Storage(tape, ("x", 1.0)))]
    run_backward(tape, roots)
    # Both results, twice the latter and, unless an operation hands that on, the gradient of what came out.
    assert max(totals(tape)) == highest


def test_gradients_are_wide_from_the_first_of_several_micro_batches_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in PyTorch since 2.15, where one micro batch alone leaves them as they are."""
    monkeypatch.setattr(states, "is_before", lambda major, minor: False)
    table = LayoutTable.of([layout(precision="bf16")])
    (structure,), _ = structures_of(GPT, table, moe=False)
    assert (structure.casts, structure.single, structure.alone.single) == (2.0, False, True)
    found = units_of(GPT, table)["dense"]
    assert found.first_backward.total[0] > found.alone_backward.total[0]
    assert found.backward.total[0] < found.alone_backward.total[0]
    table = LayoutTable.of([layout(precision="bf16", gradient_reduction="bf16")])
    found = units_of(GPT, table)["dense"]
    assert found.first_backward.total[0] == found.alone_backward.total[0]


def test_one_rank_has_twelve_bytes_of_fp32_states_for_each_parameter() -> None:
    table = LayoutTable.of([layout(precision="bf16")])
    _, composition = rank_peaks(GPT, table)
    held = dict(zip(KINDS, composition[:, 0, 0], strict=True))
    padded = (GPT.padded_vocab(1) - GPT.vocab) * GPT.hidden
    assert held["parameters"] == pytest.approx(4 * (GPT.parameters + padded), rel=0.001)
    assert held["optimizer"] == pytest.approx(8 * (GPT.parameters + padded), rel=0.001)


def test_ranks_that_can_be_the_fullest_have_the_peak_of_all() -> None:
    layouts = [
        layout(pipeline_parallel=pipeline, tensor_parallel=tp, data_parallel=dp, zero_stage=zero)
        for pipeline in (1, 2, 4)
        for tp in (1, 2)
        for dp, zero in ((1, 0), (2, 1), (2, 3))
    ]
    table = LayoutTable.of(layouts)
    assert covers(GPT, table).all()
    totals_of_ranks, compositions = rank_peaks(GPT, table)
    assert peak_bytes(GPT, table) == pytest.approx(totals_of_ranks.max(axis=1))
    assert compositions.sum(axis=0) == pytest.approx(totals_of_ranks)
    assert (compositions >= 0).all()


def test_rows_of_a_table_do_not_change_each_other() -> None:
    layouts = [layout(tensor_parallel=2, recompute=kind) for kind in ("none", "selective", "full")]
    together = peak_bytes(GPT, LayoutTable.of(layouts))
    alone = [peak_bytes(GPT, LayoutTable.of([one]))[0] for one in layouts]
    assert together == pytest.approx(alone)
    assert together[0] > together[1] > together[2]


def test_every_label_of_a_moment_is_one_of_a_step() -> None:
    moments = moments_of_ranks(GPT, LayoutTable.of([layout(data_parallel=2, zero_stage=2)]))
    assert {moment.label for moment in moments.moments} == {"forward", "backward", "reduce", "optimizer"}


@pytest.mark.parametrize(
    "fields",
    [
        {"precision": "fp8"},
        {"offload_activations": True},
        {"recompute": "full", "recompute_num_layers": 2},
        {"context_parallel": 2, "precision": "fp32"},
    ],
)
def test_what_is_not_known_is_told(fields: dict[str, object]) -> None:
    assert not covers(GPT, LayoutTable.of([layout(**fields)])).any()

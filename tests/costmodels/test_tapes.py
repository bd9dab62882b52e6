"""Tapes: symbolic sizes, structures, and files."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from costmodels import Layout, ModelSpec
from costmodels.catalogue import load_model
from costmodels.spec.model_parts import LinearAttention
from costmodels.tapes import store
from costmodels.tapes.coverage import structures_of_model
from costmodels.tapes.dimensions import dimensions
from costmodels.tapes.loops import unrolled
from costmodels.tapes.structure import Structure, structure_of, units_of_stage
from costmodels.tapes.tape import (
    BACKWARD,
    ENDS,
    EXPERTS,
    FORGETS,
    SEEN,
    Addend,
    Allocation,
    Event,
    Gradient,
    Loop,
    Mark,
    Parameter,
    Release,
    Repeats,
    SplitBackward,
    Tape,
    Term,
    elements_of,
    made_by_experts,
    seen_gradients,
)
from costmodels.tapes.text import as_json, parsed_size, parsed_tape, size_text

NAMES = ("batch", "hidden", "seq", "tp")

TERMS = st.builds(
    lambda numerator, denominator, powers: parsed_size(
        " ".join([f"{numerator}/{denominator}", *(f"{n}^{e}" for n, e in powers.items())])
    )[0],
    st.integers(1, 64),
    st.integers(1, 8),
    st.dictionaries(st.sampled_from(NAMES), st.sampled_from((-2, -1, 1, 2))),
)

MODEL = ModelSpec(name="small", layers=4, hidden=64, heads=4, vocab=100, seq=32)

TAPE = Tape(
    (Parameter("weight", (parsed_size("1 hidden"), parsed_size("3")), "layer", True, False),),
    (Allocation(1, parsed_size("2 hidden seq"), "activations"), Mark("experts_forward"), Release(1)),
    (Allocation(3, parsed_size("2 hidden + 8"), "gradients"), Addend(0, 3), Gradient(0, 3), Release(0)),
    None,
    "activations",
)


@given(st.lists(TERMS, max_size=3))
def test_sizes_survive_text(terms: list[Term]) -> None:
    assert parsed_size(size_text(tuple(terms))) == tuple(terms)


def test_a_size_is_the_sum_of_its_terms() -> None:
    size = parsed_size("2 batch seq hidden tp^-1 + 8")
    assert elements_of(size, {"batch": 3, "seq": 8, "hidden": 5, "tp": 4}) == 68


def test_dimensions_of_another_tape_are_refused() -> None:
    with pytest.raises(ValueError, match="no whole number"):
        elements_of(parsed_size("1 seq tp^-1"), {"seq": 5, "tp": 2})


def test_tapes_survive_files(tmp_path: Path) -> None:
    path = tmp_path / "torch-2.0.zip"
    structures = [Structure("embedding", "bf16"), Structure("head", "bf16", norm="rmsnorm")]
    store.write_tapes({structures[0]: TAPE}, path)
    store.write_tapes({structures[1]: TAPE._replace(input_gradient=4)}, path)
    assert store.structure_names(path) == [one.name for one in structures]
    assert parsed_tape(as_json(TAPE)) == TAPE


def test_split_backward_survives_files() -> None:
    split = SplitBackward((Release(0),), TAPE.backward, (Mark(FORGETS),), (), (Release(3),), 4)
    end = split._replace(inputs=(Release(0), Mark(ENDS), Release(3)), rest=())
    tape = TAPE._replace(split=split, split_end=end)
    assert parsed_tape(as_json(tape)) == tape
    assert parsed_tape(as_json(TAPE._replace(split=split))).split_end is None


def test_what_the_backward_of_experts_gives_itself_is_not_seen_with_what_was_there_before() -> None:
    size, begins, sees = parsed_size("1 hidden"), Mark(EXPERTS + BACKWARD), Mark(SEEN)
    made = [Allocation(number, size, "gradients") for number in range(3, 7)]
    given = [Gradient(number - 3, number) for number in range(3, 7)]
    events: list[Event] = [made[0], begins, made[1], sees, Release(0), made[2], begins, made[3], sees, *given]
    assert seen_gradients(events) == [[0], [0, 1, 2]]
    assert made_by_experts(events) == {1, 3}
    assert seen_gradients(given) == []


LOOPED = Tape(
    (),
    (
        Allocation(3, parsed_size("1 hidden"), "activations"),
        Allocation(4, parsed_size("1 seq"), "activations"),
    ),
    (Release(3), Release(4), Release(0)),
    None,
    "activations",
    repeats=Repeats(
        "steps",
        ((Loop(1, 1, 1),), (Loop(0, 1, 1),)),
        (((0, 0), (0, 1)), ((1, -1), (-1, 0), (0, 0))),
        (0, 0),
    ),
)
"""Forward makes one storage more with each step after the first; backward ends the last ones first."""


def test_a_loop_is_there_as_often_as_there_are_steps() -> None:
    tape = unrolled(LOOPED._replace(backward=(Release(2), Release(7), Release(0))), 4)
    assert tape.repeats is None
    assert [event.storage for event in tape.forward if isinstance(event, Allocation)] == [3, 4, 5, 6]
    assert [event.storage for event in tape.backward if isinstance(event, Release)] == [6, 5, 4, 3, 0]
    assert parsed_tape(as_json(LOOPED)) == LOOPED


LINEAR = MODEL.model_copy(
    update={
        "attention_pattern": ("linear",),
        "linear_attention": LinearAttention(
            kind="gated_delta", key_heads=4, value_heads=8, key_dim=16, value_dim=16
        ),
    }
)

CAPPED = MODEL.model_copy(
    update={"attention_pattern": ("window",), "window": 300, "attention_softcap": 50.0, "seq": 1024}
)

GATHERS = {"context_parallel": 2, "context_parallel_form": "all_gather"}


@pytest.mark.parametrize(
    ("model", "fields", "changes"),
    [
        (LINEAR, {"seq": 64 * 6}, {}),
        (LINEAR, {"seq": 64 * 5}, {"few_steps": 5}),
        (LINEAR, {"seq": 64 * 5 + 1}, {"partial_step": True}),
        (LINEAR, {"seq": 63}, {"few_steps": 1, "partial_step": True}),
        (LINEAR, {"seq": 64 * 6, "precision": "fp8"}, {"odd_heads": True}),
        (CAPPED, {}, {}),
        (CAPPED, {"micro_batch_size": 2, "kv_heads": 2}, {"several": True, "grouped_queries": True}),
        (CAPPED, {"seq": 1000}, {"partial_step": True}),
        (CAPPED, {"seq": 1000, "precision": "fp8"}, {"partial_step": True, "odd_rows": True}),
        (CAPPED, {"seq": 1000, "precision": "fp8", "micro_batch_size": 2}, {"partial_step": True}),
        # Of 256 queries each.
        (CAPPED, GATHERS, {}),
        (CAPPED, GATHERS | {"window": 129}, {"short_window": True}),
        (CAPPED, GATHERS | {"window": 130}, {}),
        (CAPPED, GATHERS | {"seq": 480}, {"few_steps": 1}),
        (CAPPED, GATHERS | {"seq": 1000}, {"partial_step": True}),
        # A mask hides what comes before a window, which plain kernels know nothing of.
        (CAPPED, GATHERS | {"attention_softcap": 0.0, "window": 255}, {}),
        (
            CAPPED,
            GATHERS | {"attention_softcap": 0.0, "window": 255, "precision": "fp32"},
            {"short_window": True},
        ),
        (CAPPED, GATHERS | {"attention_softcap": 0.0, "window": 256, "precision": "fp32"}, {}),
    ],
)
def test_structures_tell_how_a_sequence_comes_out_in_steps(
    model: ModelSpec, fields: dict[str, Any], changes: dict[str, Any]
) -> None:
    in_model = {name: value for name, value in fields.items() if name in ModelSpec.model_fields}
    in_layout = {name: value for name, value in fields.items() if name not in in_model}
    spec = model.model_copy(update=in_model)
    layout = Layout.model_validate(
        {"layers_per_stage": (4,), "global_batch_size": 8, "precision": "bf16", **in_layout}
    )
    found = structure_of(spec, layout, "dense", compiled=False)
    odd = {"odd_heads": False, "odd_rows": False}
    told = {"few_steps": 0, "partial_step": False, "short_window": False, **odd} | changes
    assert {name: getattr(found, name) for name in told} == told


@pytest.mark.parametrize(("ranks", "compiled", "one"), [(4, True, True), (2, True, False), (4, False, False)])
def test_compiled_linear_attention_of_one_key_head_is_apart(ranks: int, compiled: bool, one: bool) -> None:
    layout = Layout(layers_per_stage=(4,), global_batch_size=1, precision="bf16", tensor_parallel=ranks)
    found = structure_of(LINEAR, layout, "dense", compiled)
    assert (found.one_head, found.one_key_head) == (False, one)


def test_a_sequence_of_fewer_steps_than_are_always_there_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 steps"):
        unrolled(LOOPED, 0)


def test_equal_tapes_make_equal_files(tmp_path: Path) -> None:
    files = [tmp_path / "one.zip", tmp_path / "other.zip"]
    for path in files:
        store.write_tapes({Structure("head", "bf16"): TAPE}, path)
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("name", ["llama3-70b", "gpt3-175b"])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_package_has_the_usual_tapes_of_models(name: str, compiled: bool) -> None:
    version = store.packaged_versions()[-1]
    names = store.known_structures(version)
    assert {one.name for one in islice(structures_of_model(load_model(name), compiled), 30)} <= names


@pytest.mark.slow
def test_usual_structures_come_first() -> None:
    found = list(structures_of_model(load_model("mixtral-8x7b"), compiled=True))
    assert len(found) == len(set(found))
    assert [one.unit for one in found[:3]] == ["embedding", "experts", "head"]
    assert found[1].expert_parallel and not found[1].recompute and not found[1].context_form
    assert {one.context_ranks for one in found} == {1, 2, 4, 8, 16}


def test_a_file_that_is_no_archive_has_no_tapes_and_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "torch-2.0.zip"
    path.write_bytes(b"cut off")
    assert store.structure_names(path) == []
    store.write_tapes({Structure("head", "bf16"): TAPE}, path)
    assert store.structure_names(path) == ["head,bf16"]


def test_what_was_recorded_of_other_code_is_not_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runtime" / "model"
    folder.mkdir(parents=True)
    layer = folder / "layer.py"
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path / "runtime")])
    monkeypatch.setattr(store, "find_spec", lambda _: found)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    paths = []
    for text in ("one norm", "two norms", "one norm"):
        layer.write_text(text)
        store.code_digest.cache_clear()
        paths.append(store.cache_path("2.14"))
    store.code_digest.cache_clear()
    assert paths[0] == paths[2] != paths[1]


@pytest.mark.parametrize(
    ("installed", "expected"),
    [("", "2.15"), ("2.11", "2.11"), ("2.12", "2.12"), ("2.13", "2.13"), ("2.15", "2.15")],
)
def test_tapes_are_those_of_the_installed_version(
    installed: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "installed_version", lambda: installed)
    assert store.default_version() == expected


def test_a_stage_is_a_chain_of_units() -> None:
    layout = Layout(layers_per_stage=(1, 3), pipeline_parallel=2, global_batch_size=2)
    first, last = ([kind.unit for kind in units_of_stage(MODEL, layout, stage)] for stage in (0, 1))
    assert first == ["embedding", "dense"]
    assert last == ["dense"] * 3 + ["head"]


@pytest.mark.parametrize(
    ("fields", "changed"),
    [
        ({"micro_batch_size": 4}, {}),
        ({"tensor_parallel": 4}, {"tensor_parallel": True}),
        (
            {"tensor_parallel": 4, "sequence_parallel": True, "micro_batch_size": 4},
            {"tensor_parallel": True, "sequence_parallel": True, "several": True},
        ),
        ({"recompute": "selective"}, {"recompute": ("core_attention",)}),
        ({"data_parallel": 2, "zero_stage": 3, "optimizer": "sgd"}, {}),
        ({"precision": "fp16"}, {}),
        ({"precision": "fp8"}, {"precision": "fp8"}),
    ],
)
def test_a_structure_heeds_what_changes_operations(fields: dict[str, Any], changed: dict[str, Any]) -> None:
    base = {"layers_per_stage": (4,), "global_batch_size": 8}
    plain = structure_of(MODEL, Layout.model_validate(base), "dense", compiled=False)
    other = structure_of(MODEL, Layout.model_validate(base | fields), "dense", compiled=False)
    assert other == plain._replace(**changed)


def test_layers_beyond_those_that_recompute_are_plain() -> None:
    layout = Layout(layers_per_stage=(4,), global_batch_size=1, recompute="full", recompute_method="block")
    assert structure_of(MODEL, layout, "dense", compiled=True).recompute == ("full",)
    assert structure_of(MODEL, layout, "dense", compiled=True, recomputes=False).recompute == ()


def test_dimensions_are_those_of_one_rank() -> None:
    layout = Layout(layers_per_stage=(4,), global_batch_size=2, micro_batch_size=2, tensor_parallel=2)
    found = dimensions(MODEL, layout)
    assert (found["keys"], found["group"], found["ffn"], found["vocab"]) == (2, 1, 128, 64)

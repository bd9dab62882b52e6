"""`planner.explanation`: terms add up, verdicts name rules and GiB, changes and neighbours are searches."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest

from costmodels import ModelSpec
from costmodels.errors import InputError
from costmodels.spec.estimate import StepTime
from costmodels.spec.record import GIB
from planner import Plan, evaluate, search
from planner.explanation.changes import NOTICEABLE
from planner.explanation.explanation import explain, explain_plan, explain_result
from planner.explanation.outcome import outcome_of, parse_layout, place_of
from planner.inputs.pin_notation import pins_without_one
from planner.inputs.pins import degrees_of, parse_pins
from planner.objective import metric

PROBLEM: dict[str, Any] = {"world_size": 16, "device": "a100-80g", "max_global_batch_size": 32}

FORTY = ModelSpec(name="forty", layers=8, hidden=1280, heads=40, vocab=51200, seq=1024)
"""Forty heads: 16 does not divide them."""


@pytest.fixture(scope="module")
def result():
    return search("llama2-7b", **PROBLEM)


@pytest.fixture(scope="module")
def explained(result):
    return explain_result(result)


def only(verdicts):
    (verdict,) = verdicts
    return verdict


def test_the_terms_of_a_comparison_add_up_to_both_steps(result):
    found = explain_result(result, against=["tp=2,pp=2,mbs=1"], what_if=False)
    for comparison in found.comparisons:
        first, second = comparison.first.estimate, comparison.second.estimate
        assert sum(term.first for term in comparison.time) == pytest.approx(first.step_time_s, rel=1e-6)
        tokens = first.tokens_per_s * first.step_time_s
        assert sum(term.second for term in comparison.time) == pytest.approx(
            tokens / second.tokens_per_s, rel=1e-6
        )
        assert sum(term.first for term in comparison.memory) == pytest.approx(
            first.peak_memory_bytes, rel=1e-6
        )
        assert sum(term.second for term in comparison.memory) == pytest.approx(
            second.peak_memory_bytes, rel=1e-6
        )
        assert comparison.throughput == pytest.approx(first.tokens_per_s / second.tokens_per_s, rel=1e-6)
        assert {term.name for term in comparison.time} <= set(StepTime.model_fields)
        differences = [abs(term.difference) for term in comparison.time]
        assert differences == sorted(differences, reverse=True)
    assert [comparison.second.layout.tensor_parallel for comparison in found.comparisons][1:] == [2]


def test_the_runner_up_costs_something_else(explained):
    first, second = explained.comparisons[0].first, explained.comparisons[0].second
    costs = [(one.estimate.tokens_per_s, one.estimate.peak_memory_bytes) for one in (first, second)]
    assert costs[0] != pytest.approx(costs[1], rel=1e-9)
    assert first == explained.result.best


def test_the_best_layout_is_judged_first_and_others_have_their_place(result):
    best = only([outcome_of(result, result.best.layout.describe())])
    assert (best.outcome, best.place, best.comparison) == ("first", 1, None)
    for place in (2, 30, result.feasible):
        layout = result.plan(place - 1).layout
        assert place_of(result, result.plan(place - 1)) == place
        verdict = outcome_of(result, degrees_of(layout))
        assert verdict.plan is not None and verdict.plan.layout == layout
        assert (verdict.outcome, verdict.place, verdict.legal) == ("slower", place, 1)
        assert verdict.comparison is not None and verdict.comparison.throughput >= 1
        assert "than the best" in verdict.reason or "as fast" in verdict.reason


@pytest.mark.slow
def test_degrees_that_are_left_out_are_those_that_are_best_for_it(result):
    verdict = outcome_of(result, "tp=4,pp=2")
    assert verdict.outcome == "slower" and verdict.place is not None
    better = [
        layout
        for layout in (result.plan(rank).layout for rank in range(verdict.place - 1))
        if (layout.tensor_parallel, layout.pipeline_parallel) == (4, 2)
    ]
    assert better == []


def test_an_illegal_layout_is_told_its_rule_with_the_numbers():
    result = search(FORTY, world_size=32, local_world_size=32, global_batch_size=32)
    verdict = outcome_of(result, "tp=16")
    assert verdict.outcome == "illegal" and verdict.plan is None and verdict.legal == 0
    assert verdict.reason.startswith("tensor_parallel 16 does not divide 40 heads; use 1, 2, 4, 5, 8")
    assert "tensor_parallel_heads" in verdict.rules
    assert outcome_of(result, "tp=3").reason.startswith("tensor_parallel 3 does not divide world size 32")


def test_a_layout_that_is_too_big_is_told_what_it_lacks_and_of_what(result):
    verdict = outcome_of(result, "tp=1,pp=1,cp=1,zero=0")
    assert verdict.outcome == "too_big" and verdict.feasible == 0
    plan = verdict.plan
    assert plan is not None and not plan.fits
    lacks = (plan.estimate.peak_memory_bytes - plan.cluster.memory_bytes) / GIB
    assert f"lacks {lacks:.1f} GiB: optimizer " in verdict.reason


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        ("zero=2,pp=2,dp=8", "zero_pipeline: zero_stage 2 with pipeline_parallel 2"),
        ("offload_optimizer=true", "the search leaves offload_optimizer=false unless it is pinned"),
        ("mbs=3", "the search does not try such values"),
        ("precision=fp16", "the search is for bf16, not fp16"),
    ],
)
def test_what_the_search_leaves_out_is_priced_and_told_why(result, layout, why):
    verdict = outcome_of(result, layout)
    assert verdict.plan is not None and verdict.plan.fits == (verdict.place is not None)
    assert verdict.not_searched is not None and verdict.not_searched.startswith(why)


def test_a_pin_keeps_a_layout_out():
    pinned = search("llama2-7b", pin=["tp=4", "dp=..4"], **PROBLEM)
    assert outcome_of(pinned, "tp=1").not_searched == "the search is pinned to tensor_parallel=4"
    free = outcome_of(pinned, "tp=1,dp=8")
    assert free.outcome == "first" and free.comparison is not None and free.comparison.throughput < 1


def test_layouts_are_read_as_they_are_printed(result):
    for rank in range(0, result.feasible, result.feasible // 20):
        layout = result.plan(rank).layout
        degrees = parse_layout(layout.describe())
        for name, value in degrees.items():
            assert getattr(layout, name) == value
        assert {"tensor_parallel", "pipeline_parallel", "data_parallel", "micro_batch_size"} <= set(degrees)
    assert parse_layout("recompute=selective(norm+mlp)/block:2 offload=activations+optimizer") == {
        "recompute": "selective",
        "recompute_modules": ("mlp", "norm"),
        "recompute_method": "block",
        "recompute_num_layers": 2,
        "offload_activations": True,
        "offload_optimizer": True,
    }


@pytest.mark.parametrize("layout", ["", "tp", "tp=0", "shards=3", {}, []])
def test_what_is_no_layout_is_refused_in_one_line(result, layout):
    with pytest.raises(InputError, match=r"^layout"):
        outcome_of(result, layout)


def test_changes_are_searches_of_their_own(explained):
    best = explained.result.fastest
    by_kind = {change.kind: change for change in explained.changes}
    assert set(by_kind) == {"memory", "intra_node", "inter_node", "batch", "devices"}
    arguments = {
        "inter_node": {"inter_node_gbps": 400},  # the device has 200
        "memory": {"device_memory_gib": 2 * best.cluster.memory_bytes / GIB},
        "batch": {"max_global_batch_size": 64},
        "devices": {"world_size": 32},
    }
    for kind, changed in arguments.items():
        again = search("llama2-7b", **{**PROBLEM, **changed})
        assert by_kind[kind].plan.layout == again.best.layout, kind
        fastest = again.fastest.estimate.tokens_per_s
        assert by_kind[kind].ratio == pytest.approx(fastest / best.estimate.tokens_per_s)
    for kind in ("memory", "intra_node", "inter_node"):
        assert by_kind[kind].ratio >= 1 - 1e-9


@pytest.mark.parametrize(
    ("changed", "binds"),
    [
        pytest.param({"inter_node_gbps": 0.5}, "network", marks=pytest.mark.slow),
        pytest.param({"device_memory_gib": 13}, "memory", marks=pytest.mark.slow),
        ({}, None),
    ],
)
def test_the_binding_constraint_is_the_change_that_buys_most(explained, changed, binds):
    found = explain("llama2-7b", **PROBLEM, **changed) if changed else explained
    worth = {change.kind: change.ratio for change in found.changes if change.kind != "devices"}
    names = {"intra_node": "network", "inter_node": "network"}
    most = max(worth, key=worth.get)
    assert found.binding.constraint == (names.get(most, most) if worth[most] >= NOTICEABLE else "compute")
    assert binds is None or found.binding.constraint == binds
    assert binds is None or f"{worth[most]:.2f} x" in found.binding.reason


def test_a_pin_that_costs_most_is_what_binds():
    found = explain("llama2-7b", pin=["tp=16"], **PROBLEM)
    without = [change for change in found.changes if change.kind == "pin"]
    assert [change.what for change in without] == ["without the pin tensor_parallel=16"]
    assert without[0].ratio > 1.5
    assert found.binding.constraint == "pin"


def test_neighbours_are_one_step_away_and_priced(explained):
    best = explained.result.best
    assert explained.neighbours
    for one in explained.neighbours:
        if one.ratio is not None:
            estimate = evaluate(one.layout, model="llama2-7b", device="a100-80g")
            ratio = estimate.tokens_per_s / best.estimate.tokens_per_s
            # Behind the first plans of the ranking closed forms stand for simulated pipelines.
            assert one.ratio == pytest.approx(ratio, rel=0.02)
            assert one.layout != best.layout
        elif one.lacks_gib is not None:
            assert one.lacks_gib > 0
        else:
            assert one.rule and one.layout is None
    ratios = [one.ratio for one in explained.neighbours if one.ratio is not None]
    assert all(one >= other for one, other in pairwise(ratios))
    assert math.isclose(explained.neighbours[0].ratio, max(ratios))


def test_a_rule_in_the_way_of_the_best_is_named():
    found = explain(FORTY, world_size=16, local_world_size=16, global_batch_size=2, what_if=False, pin="cp=1")
    assert found.result.best.layout.tensor_parallel == 8
    assert found.binding is None and found.changes == ()
    stopped = next(one for one in found.neighbours if one.change.startswith("tp 8 -> 16"))
    assert "tensor_parallel 16 does not divide 40 heads" in stopped.rule
    assert stopped.were_it_legal is not None


def test_a_saved_plan_is_explained(tmp_path):
    plan = search("llama2-7b", pin=["tp=4", "optimizer=muon"], **PROBLEM).best
    plan.save(tmp_path / "plan.json")
    found = explain_plan(Plan.load(tmp_path / "plan.json"), what_if=False)
    verdict = only(found.verdicts)
    assert verdict.plan.layout == plan.layout and verdict.degrees == plan.layout.describe()
    assert verdict.outcome == "slower" and found.result.best.layout.optimizer == "muon"
    assert verdict.plan.estimate == plan.estimate


def test_where_nothing_fits_the_closest_plan_and_a_change_are_named():
    kept = ["offload_activations=false", "offload_optimizer=false"]
    found = explain("llama2-70b", world_size=8, max_global_batch_size=16, pin=kept, layout="tp=8")
    assert found.result.best is None and found.comparisons == () and found.changes == ()
    assert found.indistinguishable == () and found.binding is None
    assert "lacks" in found.advice and "it fits without the pin offload_optimizer=false" in found.advice
    assert only(found.verdicts).outcome == "too_big"


@pytest.mark.slow
def test_little_memory_is_held_back_by_nothing():
    found = explain("llama2-7b", objective="memory", layout="tp=1", **PROBLEM)
    assert found.binding is None and found.indistinguishable == (1,)
    verdict = only(found.verdicts)
    assert verdict.outcome == "slower" and "GiB" in verdict.reason and "more at the peak" in verdict.reason


def test_pins_that_belong_together_are_left_out_together(result):
    pins = parse_pins(["recompute=full", "recompute_method=block", "recompute_num_layers=2", "tp=4"])
    assert list(pins_without_one(pins)) == [
        (
            "without the pins recompute=full recompute_method=block recompute_num_layers=2",
            {"tensor_parallel": 4},
        ),
        ("without the pin tensor_parallel=4", {n: v for n, v in pins.items() if n != "tensor_parallel"}),
    ]
    found = explain("llama2-7b", pin=["recompute_modules=mlp"], **PROBLEM)
    (without,) = (change for change in found.changes if change.kind == "pin")
    assert without.what == "without the pins recompute_modules=mlp recompute=selective"
    assert without.plan.layout == result.best.layout


@pytest.mark.parametrize(
    ("pin", "pinned"),
    [
        (["recompute_method=block", "recompute_num_layers=2", "recompute=full"], set()),
        (["recompute_modules=norm", "recompute_method=block", "recompute_num_layers=2"], set()),
        (["dp=4", "zero=1", "zero_replicas=2", "mbs=1"], set()),
        # The search never finds these itself.
        (
            ["recompute_num_layers=4", "recompute=full"],
            {"recompute", "recompute_method", "recompute_num_layers"},
        ),
        (["offload_optimizer=true"], {"offload_optimizer"}),
    ],
)
def test_what_the_search_may_have_solved_is_not_pinned_for_a_saved_plan(pin, pinned):
    plan = search("llama2-7b", pin=pin, **PROBLEM).best
    found = explain_plan(plan, what_if=False)
    assert set(found.result.problem.pins) == pinned
    verdict = only(found.verdicts)
    assert verdict.plan.layout == plan.layout and verdict.place is not None


def test_a_plan_that_offloads_as_the_last_resort_is_explained_as_it_was_found():
    plan = search("llama2-70b", world_size=8, max_global_batch_size=16).best
    assert "offload" in plan.layout.describe()
    found = explain_plan(plan, what_if=False)
    assert found.result.problem.pins == {} and found.result.best.layout == plan.layout
    assert only(found.verdicts).outcome == "first"


@pytest.mark.parametrize(
    ("objective", "of"),
    [
        ("throughput", lambda estimate: estimate.tokens_per_s),
        pytest.param("step-time", lambda estimate: estimate.step_time_s, marks=pytest.mark.slow),
        pytest.param(
            "cost",
            lambda estimate: 1e9 / (3600 * estimate.tokens_per_s_per_device),
            marks=pytest.mark.slow,
        ),
        pytest.param("memory", lambda estimate: estimate.peak_memory_bytes / GIB, marks=pytest.mark.slow),
    ],
)
def test_changes_and_neighbours_have_the_figure_that_ranks(explained, objective, of):
    found = explained if objective == "throughput" else explain("llama2-7b", objective=objective, **PROBLEM)
    best, sign = found.result.best, -1 if objective == "throughput" else 1
    assert metric(objective, best.estimate) == pytest.approx(of(best.estimate))
    for change in found.changes:
        # The first plan is no better than the fastest, whose figure this is, and ties with it.
        assert sign * change.figure <= sign * of(change.plan.estimate) * (1 + sign * 1e-9)
        assert change.figure == pytest.approx(of(change.plan.estimate), rel=0.2)
    fitting = [one for one in found.neighbours if one.ratio is not None]
    assert [one.figure for one in fitting] == sorted((one.figure for one in fitting), key=lambda v: sign * v)
    for one in fitting:
        estimate = evaluate(one.layout, model="llama2-7b", device="a100-80g")
        assert one.figure == pytest.approx(of(estimate), rel=0.02)
    if found.binding is not None and found.binding.constraint != "compute":
        chosen = "a step of" if objective == "step-time" else "x the tokens/s"
        assert chosen in found.binding.reason


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("layers_per_stage=16,16 pp=2 gbs=32", "layers_per_stage=16,16, pipeline_parallel=2"),
        ("tp=2..4 layers_per_stage=32 gbs=32", "tensor_parallel=2..4, layers_per_stage=32"),
        ("layers_per_stage=16,16 gbs=32", "layers_per_stage=16,16"),
    ],
)
def test_a_verdict_says_the_degrees_that_were_given_and_no_others(result, layout, words):
    verdict = outcome_of(result, layout)
    assert verdict.degrees == f"{words}, global_batch_size=32" and verdict.plan is not None


def test_a_whole_layout_that_contradicts_itself_is_illegal(result):
    whole = {**degrees_of(result.best.layout), "layers_per_stage": "16,8,8"}
    verdict = outcome_of(result, whole)
    assert verdict.outcome == "illegal" and "layers_per_stage=16,8,8" in verdict.degrees


@pytest.mark.parametrize("objective", ["throughput", "memory"])
def test_a_layout_that_beats_the_winner_says_by_how_much(objective):
    free = search("llama2-7b", objective=objective, **PROBLEM)
    tensor_parallel = free.best.layout.tensor_parallel
    held = search("llama2-7b", objective=objective, forbid=f"tp={tensor_parallel}", **PROBLEM)
    verdict = outcome_of(held, f"tp={tensor_parallel}")
    assert (verdict.outcome, verdict.place, verdict.plan.layout) == ("first", 1, free.best.layout)
    assert verdict.not_searched == f"the search is pinned to tensor_parallel not {tensor_parallel}"
    best, other = free.best.estimate, held.best.estimate
    if objective == "memory":
        lead = f"{(other.peak_memory_bytes - best.peak_memory_bytes) / GIB:.2f} GiB ("
    else:
        lead = f"{100 * (best.tokens_per_s / other.tokens_per_s - 1):.1f} % more tokens/s than"
    assert verdict.reason.startswith(f"would be first: {lead}")
    assert verdict.reason.endswith("the best that was searched")


def test_equal_peaks_of_memory_are_placed_by_tokens_per_second():
    result = search("llama2-7b", objective="memory", **PROBLEM)
    again = explain_result(result, layouts=["optimizer=muon", result.best.layout.describe()], what_if=False)
    assert again.verdicts[1].place == 1
    for rank in (0, 1, 5):
        plan = result.plan(rank)
        # Without its own row, the place is counted.
        counted = place_of(
            search("llama2-7b", objective="memory", forbid=f"mbs={plan.layout.micro_batch_size}", **PROBLEM),
            plan,
        )
        better = [
            other
            for other in (result.plan(place).layout for place in range(rank))
            if other.micro_batch_size != plan.layout.micro_batch_size
        ]
        assert counted == 1 + len(better)


def test_the_memory_that_devices_need_is_rounded_up():
    job: dict[str, Any] = {"world_size": 1, "global_batch_size": 1, "device": "cpu", "what_if": False}
    found = explain(FORTY, device_memory_gib=0.5, **job)
    need = found.result.closest()[0].estimate.peak_memory_bytes / GIB
    said = float(found.advice.rpartition("on devices of at least ")[2].removesuffix(" GiB"))
    assert need <= said < need + 0.1
    assert explain(FORTY, device_memory_gib=said, **job).advice is None


def test_what_is_printed_is_short_or_readable(result, explained):
    best = result.best
    for shown in (repr(best), str(best), repr(result), repr(explained)):
        assert len(shown) < 300 and "\n" not in shown and best.layout.describe() in shown
    text = str(explained)
    assert text.startswith(f"best: {best.layout.describe()}\nwhy: {best.reason}\n")
    assert f"bottleneck: {explained.binding.constraint}. {explained.binding.reason}" in text
    for one in explained.neighbours[:3]:
        assert one.change in text
    # The columns of a comparison stand below each other.
    rows = text.split("for the same tokens:\n")[1].split("\n\n")[0].splitlines()
    assert rows[0].split() == ["best", "other", "difference"] and rows[-1].startswith("fullest device")
    assert len({len(row) for row in rows[1:] if row.endswith("GiB")}) == 1


def test_a_plan_that_is_first_though_another_is_faster_says_why():
    found = search("llama3-8b", world_size=8, device="h100", global_batch_size=64)
    assert found.first_faster
    verdict = only([outcome_of(found, found.best.layout.describe())])
    assert verdict.outcome == "first" and verdict.reason == found.best.reason
    assert f"the fastest, {found.fastest.layout.describe()}, " in verdict.reason

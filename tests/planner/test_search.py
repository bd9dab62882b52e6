"""Search, suggest and evaluate: ranking, accounts, and what is said when nothing works."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels import Layout, ModelSpec, even_split
from costmodels.catalogue import load_device, load_model
from costmodels.errors import InputError, NoLayoutFits
from costmodels.spec.model_parts import ExpertLoad
from planner import Plan, evaluate, search, suggest
from tests.support.layouts import layouts_of
from tests.support.models import TINY

GIB = 2**30
ON_THE_DEVICE = ["offload_activations=false", "offload_optimizer=false"]


@settings(max_examples=8, deadline=None)
@given(
    layers=st.integers(1, 6),
    world=st.sampled_from([1, 2, 4, 6, 8, 16]),
    batch=st.integers(8, 40),
    memory=st.sampled_from([None, 1.6, 1.7]),
)
def test_counts_add_up_and_plans_are_ranked(
    layers: int, world: int, batch: int, memory: float | None
) -> None:
    model = ModelSpec(name="tiny", layers=layers, hidden=256, heads=8, vocab=1000, seq=128)
    job: dict[str, Any] = {"max_global_batch_size": batch, "device_memory_gib": memory}
    result = search(model, world_size=world, prefer="fastest", **job)
    too_big = result.rejected.get("device_memory", 0)
    assert result.considered == result.legal + sum(result.rejected.values()) - too_big
    assert result.legal == result.feasible + too_big == len(result.table)
    limit = result.problem.cluster.memory_bytes
    plans = [*result.plans(20), *result.closest(20)]
    assert len(plans) == min(20, result.feasible) + min(20, too_big)
    assert sorted(result.order.tolist()) == list(range(result.legal))
    speeds = [plan.estimate.tokens_per_s for plan in plans if plan.fits]
    assert all(later <= sooner * (1 + 1e-8) for sooner, later in pairwise(speeds))
    needs = [plan.estimate.peak_memory_bytes for plan in plans if not plan.fits]
    assert all(later >= sooner * (1 - 1e-8) for sooner, later in pairwise(needs))
    assert all(plan.fits == (plan.estimate.peak_memory_bytes <= limit) for plan in plans)


def test_evaluate_prices_a_plan_as_the_search_does() -> None:
    result = search(TINY, world_size=8, global_batch_size=16)
    for plan in result.plans(5):
        again = evaluate(plan.layout, model=TINY, world_size=8)
        assert again.step_time_s == pytest.approx(plan.estimate.step_time_s, rel=1e-12)
        assert again.peak_memory_bytes == pytest.approx(plan.estimate.peak_memory_bytes, rel=1e-12)


@pytest.mark.parametrize(
    ("job", "best"),
    [
        (
            {"model": "llama2-70b", "world_size": 64, "max_global_batch_size": 64},
            {"tensor_parallel": 4, "sequence_parallel": True, "pipeline_parallel": 4, "context_parallel": 1},
        ),
        (
            {"model": "llama3-8b", "world_size": 64, "device": "h100", "max_global_batch_size": 128},
            # With one microbatch, ZeRO 3 and ZeRO 1 that recomputes more are within half a per cent.
            {"tensor_parallel": 1, "pipeline_parallel": 1, "data_parallel": 64},
        ),
        (
            {"model": "llama3-405b", "world_size": 16384, "device": "h100", "global_batch_size": 2048},
            # Tensor parallelism within nodes and chunks of few layers, as in arXiv:2407.21783, section 3.3.2.
            {"tensor_parallel": 8, "sequence_parallel": True, "virtual_pipeline_parallel": 8},
        ),
    ],
)
def test_well_known_jobs_get_layouts_that_practice_uses(job: dict[str, Any], best: dict[str, Any]) -> None:
    """Each microbatch adds all gradients of a device: few devices to a copy of the model do not pay."""
    found = suggest(**job).layout
    assert {name: getattr(found, name) for name in best} == best
    assert found.context_parallel <= 4


def test_equal_layouts_rank_the_simpler_one_first() -> None:
    # One device: recomputation and larger microbatches are the only choices; none is simplest.
    best = suggest(TINY, world_size=1, global_batch_size=1, pin="cuda_graphs=false")
    assert best.layout == Layout(layers_per_stage=(4,), global_batch_size=1)
    result = search(TINY, world_size=8, global_batch_size=16, pin=["cp=1", "schedule=1f1b"])
    ranked = layouts_of(result.table.take(result.order[: result.feasible]))
    rows = {layout: rank for rank, layout in enumerate(ranked)}
    assert [plan.layout for plan in result.plans(20)] == ranked[:20]
    for layout, rank in rows.items():
        if layout.recompute == "full":
            assert rows[layout.model_copy(update={"recompute": "none"})] < rank


def test_evaluate_takes_layouts_that_the_search_does_not_emit() -> None:
    layout = Layout(
        pipeline_parallel=2, data_parallel=2, zero_stage=2, layers_per_stage=(1, 3), global_batch_size=8
    )
    usual = layout.model_copy(update={"layers_per_stage": (2, 2), "zero_stage": 1})
    assert evaluate(layout, model=TINY).step_time_s > evaluate(usual, model=TINY).step_time_s


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"tensor_parallel": 16}, "tensor_parallel 16 does not divide 8 heads; use 1, 2, 4, 8"),
        ({"layers_per_stage": (3,)}, "layers_per_stage adds up to 3 layers, but tiny has 4"),
        ({"precision": "fp8"}, "precision fp8: a100-80g with engine bundled trains in"),
    ],
)
def test_evaluate_refuses_what_breaks_a_rule(change: dict[str, Any], line: str) -> None:
    layout = Layout(**{"layers_per_stage": (4,), "global_batch_size": 16, **change})
    with pytest.raises(InputError, match=re.escape(line)):
        evaluate(layout, model=TINY)


def test_evaluate_refuses_another_world_size() -> None:
    layout = Layout(data_parallel=4, layers_per_stage=(4,), global_batch_size=16)
    with pytest.raises(InputError, match="occupies 4 devices, not world_size 8"):
        evaluate(layout, model=TINY, world_size=8)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"model": "gpt-99b"}, "unknown model 'gpt-99b'"),
        ({"device": "a1000"}, "unknown device 'a1000'"),
        ({"engine": "none"}, "unknown engine 'none'"),
        ({"world_size": 0}, "world_size 0: expected a whole number of at least 1"),
        ({"world_size": 127}, "world size 127 is not a multiple of local world size 8; use 120 or 128"),
        ({"max_global_batch_size": 0}, "max_global_batch_size 0: expected a whole number"),
        ({"global_batch_size": 8}, "global_batch_size 8 and max_global_batch_size 16: give one of the two"),
        ({"max_global_batch_size": None}, "give global_batch_size or max_global_batch_size"),
        ({"precision": "fp8"}, "precision fp8: a100-80g with engine bundled trains in"),
        ({"precision": "fp16", "pin": "precision=bf16"}, "precision fp16 and pin precision=bf16 contradict"),
        ({"pin": "gbs=32"}, "pin global_batch_size=32 exceeds max_global_batch_size 16"),
        ({"device_memory_gib": -1.0}, "device_memory_gib=-1: expected a number of GiB above 0"),
    ],
)
def test_wrong_input_ends_in_one_line(arguments: dict[str, Any], line: str) -> None:
    usual = {"model": TINY, "world_size": 8, "max_global_batch_size": 16}
    with pytest.raises(InputError) as caught:
        search(**{**usual, **arguments})
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_world_size_without_a_legal_layout_names_neighbours_that_have_one() -> None:
    with pytest.raises(InputError) as caught:
        search("gpt-22b", world_size=127, local_world_size=1, max_global_batch_size=16, device="a100-80g")
    line = str(caught.value)
    assert "a batch of 16 is too small for 127 devices; use fewer of them, or a batch of 127 or more" in line
    near = [int(size) for size in re.search(r"world sizes that work: (\d+), (\d+)", line).groups()]  # type: ignore[union-attr]
    assert near[0] < 127 < near[1]
    assert all(search("gpt-22b", world_size=size, max_global_batch_size=16).legal for size in near)


@pytest.mark.slow
def test_a_world_far_too_large_for_its_batch_names_the_batch() -> None:
    with pytest.raises(
        InputError, match=r"a batch of 16 is too small for 1000000 devices; .* 250000 or more"
    ) as caught:
        search("gpt2-nano", world_size=10**6, max_global_batch_size=16)
    assert "stages" not in str(caught.value)
    # The batch that it names is large enough, and a pin is the cause where no batch helps.
    pins = {"context_parallel": 1, "tensor_parallel": 1, "pipeline_parallel": 2}
    with pytest.raises(InputError, match=r"a batch of 16 or more, as pp=2 dp=8 needs"):
        search(TINY, world_size=16, max_global_batch_size=15, pin=pins)
    assert search(TINY, world_size=16, max_global_batch_size=16, pin=pins).legal
    with pytest.raises(InputError, match="8 stages, but there are"):
        search(TINY, world_size=16, max_global_batch_size=16, pin={"pipeline_parallel": 8})


def test_a_batch_that_is_not_divisible_names_neighbours_that_are() -> None:
    with pytest.raises(InputError) as caught:
        search(TINY, world_size=8, global_batch_size=7, pin={"data_parallel": 4})
    assert "global_batch_size 7 is not divisible by micro_batch_size 1 x data_parallel 4" in str(caught.value)
    assert "batch sizes that work: 4, 8" in str(caught.value)


def test_a_pin_that_the_heads_do_not_allow_names_those_that_they_do() -> None:
    model = ModelSpec(name="forty", layers=4, hidden=5120, heads=40, vocab=1000, seq=128)
    with pytest.raises(
        InputError, match="tensor_parallel 16 does not divide 40 heads; use 1, 2, 4, 5, 8, 10"
    ):
        search(model, world_size=16, max_global_batch_size=16, pin="tp=16")


def test_no_layout_fits_says_what_is_missing_and_what_would_help() -> None:
    job: dict[str, Any] = {"max_global_batch_size": 16, "pin": ON_THE_DEVICE}
    with pytest.raises(NoLayoutFits) as caught:
        suggest("gpt-22b", world_size=2, **job)
    line = str(caught.value)
    assert caught.value.exit_code == 3
    need, lack = map(float, re.search(r"needs ([\d.]+) GiB and lacks ([\d.]+) GiB", line).groups())  # type: ignore[union-attr]
    assert need - lack == pytest.approx(load_device("a100-80g").memory_bytes / GIB, abs=0.11)
    more = int(re.search(r"it fits .*on (\d+) of them", line).group(1))  # type: ignore[union-attr]
    assert suggest("gpt-22b", world_size=more, **job).fits
    with pytest.raises(NoLayoutFits):
        suggest("gpt-22b", world_size=more // 2, **job)
    bigger = re.search(r"or on 2 x (\S+) \(", line).group(1)  # type: ignore[union-attr]
    assert suggest("gpt-22b", world_size=2, **job, device=bigger).fits


def test_no_layout_fits_names_the_pin_that_prevents_it() -> None:
    pins = [*ON_THE_DEVICE, "tp=1", "pp=1", "zero=0"]
    with pytest.raises(NoLayoutFits, match=r"it fits .*without the pin zero_stage=0 \(--unpin zero\), or"):
        suggest("gpt-22b", world_size=8, max_global_batch_size=16, pin=pins, device="h200")


def test_a_search_where_nothing_fits_keeps_the_closest_plans() -> None:
    result = search("gpt-22b", world_size=2, max_global_batch_size=16, pin=ON_THE_DEVICE)
    assert result.best is None and result.plans() == [] and result.feasible == 0
    closest = result.closest(3)
    assert [plan.fits for plan in closest] == [False] * 3
    assert re.search(r"needs .* GiB of .* lacks", closest[0].reason)


OVERLOOKED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a microbatch that divides nothing": (
        "mindformers-gpt-70b",
        {"world_size": 13, "local_world_size": 13, "device": "h100", "max_global_batch_size": 96},
        "dp=13 zero=3 mbs=7 x 1 recompute=full/block:76 offload=optimizer",
    ),
    "fits on the host with recomputation only, and stages": (
        "korthikanti-175b",
        {"world_size": 17, "local_world_size": 1, "device": "tpu-v5p", "global_batch_size": 256},
        "pp=17 mbs=1 x 256 recompute=selective(mlp)/block:5 offload=activations+optimizer",
    ),
    "fits with recomputation and unequal stages together": (
        "llama3-70b",
        {"world_size": 24, "local_world_size": 8, "device": "gaudi3", "global_batch_size": 512},
        "pp=12 dp=2 zero=1 mbs=1 x 256 recompute=selective(mlp+norm) "
        "layers_per_stage=6,7,7,7,7,7,7,7,7,7,6,5",
    ),
    "a longer chunk just before the last": (
        "llama3-8b",
        {"world_size": 128, "local_world_size": 4, "device": "a100-40g", "max_global_batch_size": 20},
        "tp=4+sp pp=2 vpp=8 schedule=interleaved_zb cp=2 cp_form=all_gather dp=8 zero=1 mbs=1 x 2 "
        "layers_per_stage=2,2,2,2,2,2,2,2,2,2,2,2,2,2,3,1",
    ),
    "unequal chunks, of a number between those of equal ones": (
        "gpt3-13b",
        {
            "world_size": 16,
            "local_world_size": 8,
            "device": "rtx-4090",
            "max_global_batch_size": 96,
            "memory_margin_gib": 6.0,
            "pin": ["zero=1"],
        },
        "tp=2+sp pp=2 vpp=8 dp=4 zero=1 mbs=5 x 2 recompute=full",
    ),
    "chunks that fit without recomputation where the last is short": (
        "qwen3-8b",
        {
            "world_size": 8,
            "local_world_size": 8,
            "device": "a100-40g",
            "max_global_batch_size": 1000,
            "memory_margin_gib": 2.0,
            "pin": ["schedule=zbv"],
        },
        "tp=4+sp pp=2 vpp=2 schedule=zbv dp=1 mbs=2 x 500 layers_per_stage=8,10,10,8",
    ),
    "chunks that fit without recomputation where the first is short, in a slower plan's schedule": (
        "sc21-39.1b",
        {
            "world_size": 20,
            "local_world_size": 5,
            "device": "a100-pcie-80g",
            "device_memory_gib": 90.0,
            "max_global_batch_size": 200,
            "memory_margin_gib": 6.0,
        },
        "tp=1 pp=10 vpp=2 schedule=dualpipev dp=2 zero=1 mbs=1 x 100 "
        "layers_per_stage=1,3,3,3,3,3,3,3,2,2,3,3,2,2,2,2,2,2,2,2",
    ),
    "more layers in front, where few microbatches leave the slowest rank waiting": (
        "gpt2-small",
        {"world_size": 36, "local_world_size": 12, "device": "a100-40g", "global_batch_size": 8},
        "tp=12 pp=3 mbs=2 x 4 layers_per_stage=5,4,3",
    ),
    "a slow end of a V, where few microbatches wait for it": (
        "gpt3-13b",
        {"world_size": 60, "local_world_size": 12, "device": "rtx-pro-6000", "global_batch_size": 8},
        "tp=10 pp=3 vpp=2 schedule=zbv cp=2 cp_form=all_gather mbs=1 x 8 layers_per_stage=6,8,7,6,6,7",
    ),
    "a microbatch that divides nothing, beside buffers that the optimizer's step alone has": (
        "mindformers-gpt-70b",
        {
            "world_size": 11,
            "local_world_size": 1,
            "device": "ascend-910b",
            "max_global_batch_size": 512,
            "engine": "deepspeed",
        },
        "dp=11 zero=3 mbs=3 x 15 recompute=full offload=optimizer",
    ),
    "a larger microbatch in one round, under pinned recomputation": (
        "korthikanti-175b",
        {
            "world_size": 30,
            "local_world_size": 15,
            "device": "tpu-v5p",
            "device_memory_gib": 103.0,
            "max_global_batch_size": 1000,
            "pin": ["recompute=full"],
        },
        "tp=2+sp pp=3 vpp=32 dp=5 zero=1 mbs=3 x 3 recompute=full",
    ),
    "less recomputation, where moved layers leave room for it": (
        "llama3-70b",
        {
            "world_size": 36,
            "local_world_size": 6,
            "device": "gaudi3",
            "global_batch_size": 48,
            "memory_margin_gib": 0.0,
        },
        "tp=1 pp=9 vpp=2 schedule=dualpipev cp=4 cp_form=all_gather zero=1 mbs=1 x 48 "
        "recompute=selective(norm) layers_per_stage=4,5,5,5,5,5,5,5,4,5,4,4,4,4,4,4,4,4",
    ),
    "experts whose weights are split, as fewer ranks then wait for the fullest": (
        "mixtral-8x7b",
        {"world_size": 20, "local_world_size": 10, "device": "v100-32g", "global_batch_size": 8},
        "tp=2+sp pp=5 cp=2 cp_form=all_gather ep=2 etp=2 zero=1 mbs=1 x 8 offload=optimizer",
    ),
}
"""Rivals that random draws had found ahead of the first plan."""


@pytest.mark.parametrize("name", OVERLOOKED)
def test_no_layout_that_was_once_overlooked_is_faster(name: str) -> None:
    model, job, rival = OVERLOOKED[name]
    names = ("world_size", "local_world_size", "device", "memory_margin_gib", "engine")
    where = {each: job[each] for each in names if each in job}
    other = evaluate(rival, model=model, **where)
    result = search(model, prefer="fastest", **job)
    assert other.peak_memory_bytes <= result.problem.cluster.memory_bytes
    assert result.best is not None
    assert result.best.estimate.tokens_per_s >= other.tokens_per_s * (1 - 1e-9)


def test_offloading_is_searched_where_nothing_fits_without_it() -> None:
    job: dict[str, Any] = {"model": "gpt-22b", "world_size": 2, "max_global_batch_size": 16}
    # Ties with the fastest depend on the other layouts of the search.
    job["prefer"] = "fastest"
    found = search(**job)
    plans = found.plans(20)
    assert found.offloads and plans
    fitting = found.table.take(found.fitting)
    assert (fitting.offload_optimizer | fitting.offload_activations).all()
    assert all(plan.reason.startswith("nothing fits without offloading; ") for plan in plans)
    too_big = found.rejected["device_memory"]
    assert found.considered == found.legal + sum(found.rejected.values()) - too_big
    alone = search(**job, pin=ON_THE_DEVICE)
    assert alone.legal < found.legal and not alone.offloads
    best = plans[0].layout
    own = [
        f"offload_{what}={getattr(best, f'offload_{what}')}".lower() for what in ("optimizer", "activations")
    ]
    pinned = search(**job, pin=own)
    assert pinned.best is not None and pinned.best.layout == best and not pinned.offloads
    # Nothing is offloaded where something fits.
    roomy = search("gpt-22b", world_size=8, max_global_batch_size=16)
    assert not roomy.offloads and not roomy.table.offload_optimizer.any()


def test_layers_that_all_recompute_send_no_activations_to_the_host() -> None:
    """Balanced stages once came up with such layouts, which no engine runs."""
    found = search("qwen3-30b-a3b", 13, local_world_size=1, device="rtx-4090", max_global_batch_size=64)
    assert found.offloads and found.best is not None
    assert all(found.table.layout(row) for row in found.fitting.tolist())


def test_the_memory_variable_replaces_the_devices_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEVICE_MEMORY_GB", "40")
    assert search(TINY, world_size=2, max_global_batch_size=4).problem.cluster.memory_bytes == 40 * GIB
    given = search(TINY, world_size=2, max_global_batch_size=4, device_memory_gib=20)
    assert given.problem.cluster.memory_bytes == 20 * GIB
    monkeypatch.setenv("DEVICE_MEMORY_GB", "much")
    with pytest.raises(InputError, match="DEVICE_MEMORY_GB=much: expected a number of GiB"):
        search(TINY, world_size=2, max_global_batch_size=4)


def test_a_pinned_batch_is_the_batch() -> None:
    best = suggest(TINY, world_size=2, max_global_batch_size=16, pin="gbs=12")
    assert best.layout.global_batch_size == 12


def test_cpu_ranks_share_the_machine() -> None:
    alone, shared = (
        search(TINY, world_size=ranks, device="cpu", max_global_batch_size=8).problem.cluster
        for ranks in (1, 2)
    )
    assert shared.memory_bytes == pytest.approx(alone.memory_bytes / 2, rel=0.2)
    assert suggest(TINY, world_size=2, device="cpu", max_global_batch_size=8).layout.precision == "fp32"


def test_a_model_can_be_a_yaml_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("layers: 4\nhidden: 256\nheads: 8\nvocab: 1000\nseq: 128\n")
    plan = suggest(file, world_size=2, max_global_batch_size=8)
    assert plan.model.model_copy(update={"name": "tiny"}) == TINY
    assert plan.model.name == "mine"


def test_the_best_plan_says_why(tmp_path: Path) -> None:
    result = search("gpt-22b", world_size=64, max_global_batch_size=16, prefer="fastest")
    best, second = result.plans(2)
    assert isinstance(best, Plan)
    assert second.layout.describe() in best.reason
    assert "slower than the best" in second.reason or "as fast" in second.reason
    assert sum(best.layout.layers_per_stage) == 48
    even = even_split(48, len(best.layout.layers_per_stage))
    alike = evaluate(best.layout.model_copy(update={"layers_per_stage": even}), model="gpt-22b")
    assert best.estimate.tokens_per_s >= alike.tokens_per_s


def _balanced(name: str) -> ModelSpec:
    """A model whose experts are balanced by force."""
    model = load_model(name)
    router = model.router.model_copy(update={"loads": (ExpertLoad(ranks=1, mean=1.0, peak=1.0),)})
    return model.model_copy(update={"router": router})


def test_experts_are_spread_inside_a_node() -> None:
    problem: dict[str, Any] = {"world_size": 64, "device": "h100-sxm", "max_global_batch_size": 256}
    balanced = _balanced("mixtral-8x7b")
    best = suggest(balanced, **problem)
    assert 1 < best.layout.expert_parallel * best.layout.expert_tensor_parallel <= 8
    assert best.estimate.time.expert_parallel > 0
    whole = suggest(balanced, **problem, pin=["ep=1", "etp=1"])
    assert whole.estimate.tokens_per_s < best.estimate.tokens_per_s


def test_optimizers_with_less_state_leave_room() -> None:
    peaks = [
        suggest("gpt-22b", world_size=8, global_batch_size=8, pin=f"optimizer={kind}", device="h200")
        for kind in ("adam", "adam8bit")
    ]
    assert [plan.layout.optimizer for plan in peaks] == ["adam", "adam8bit"]
    usual, light = (
        search("gpt-22b", world_size=8, global_batch_size=8, pin=f"optimizer={kind}").feasible
        for kind in ("adam", "adam8bit")
    )
    assert usual < light


def test_layouts_with_shared_experts_that_are_not_searched_are_no_better() -> None:
    """Layouts that `expert_tensor_parallel_spread` holds back are no better than their substitutes, with
    tokens that are balanced by force."""
    found = []
    for pin in (["ep=2", "etp=2"], ["ep=4", "etp=1"]):
        usual = ["vpp=1", "cp=1", "recompute=none"]
        problem: dict[str, Any] = {"world_size": 16, "global_batch_size": 32, "device_memory_gib": 1e5}
        result = search(_balanced("mixtral-8x7b"), **problem, pin=[*pin, *usual])
        same = {"expert_parallel": 1, "expert_tensor_parallel": 1}
        layouts = map(result.prices.table.layout, range(result.feasible))
        keys = [layout.model_copy(update=same) for layout in layouts]
        costs = zip(result.prices.step_time_s, result.prices.peak_memory_bytes, strict=True)
        found.append(dict(zip(keys, costs, strict=True)))
    shared, spread = found
    assert len(shared) > 50 and shared.keys() <= spread.keys()
    for layout, (seconds, memory) in shared.items():
        assert spread[layout][0] <= seconds * (1 + 1e-9)
        assert spread[layout][1] < memory


def test_unequal_chunks_are_searched_where_no_others_are_legal() -> None:
    """A V schedule on 5 ranks has 10 stages, which do not divide 32 layers."""
    asked: dict[str, Any] = {"world_size": 40, "local_world_size": 8, "device": "l40s"}
    found = search("gpt3-2.7b", **asked, global_batch_size=96, pin=["schedule=zbv"])
    plans = found.plans(30)
    assert plans and {plan.layout.schedule for plan in plans} == {"zbv"}
    assert len({plan.layout for plan in plans}) == len(plans)
    assert found.considered == found.legal + sum(found.rejected.values())

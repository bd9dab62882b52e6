"""Searches on nodes of two kinds: stages that suit the kinds, their memory, and what users write and read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner
from costmodels import Cluster, Layout, ModelSpec, even_split
from costmodels.errors import InputError
from costmodels.pipeline_times import stage_seconds
from costmodels.pricing import peak_memory, price
from costmodels.spec.layout import Recompute
from costmodels.spec.mixed_cluster import mixed_cluster
from costmodels.spec.record import GIB
from costmodels.spec.table import LayoutTable
from planner.explanation.changes import changed_problems
from planner.inputs.batch import Batch
from planner.inputs.cluster import resolve_cluster
from planner.inputs.engine import DEFAULT_ENGINE, resolve_engine
from planner.inputs.node_kinds import parse_kinds
from planner.inputs.pins import Pins
from planner.pipeline_ranks import device_ranks, idle_shares
from planner.preference import FASTEST
from planner.problem import Problem, resolve_problem
from planner.ranking.ranking import rank
from planner.solve.mixed_caps import exact_caps
from planner.solve.mixed_splits import layers_of_ranks, least_bound, pipelines
from tests.support.commands import Command

ENGINE = resolve_engine(DEFAULT_ENGINE)

PLAIN: Pins = {
    "virtual_pipeline_parallel": 1,
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "zero_replicas": 1,
}
"""Pins of the fields that brute force leaves out."""

KINDS = [("a100-80g", "v100-32g"), ("v100-32g", "a100-80g"), ("h100", "v100-32g"), ("h100", "a100-80g")]


def spec(layers: int, hidden: int = 1024, vocab: int = 50000) -> ModelSpec:
    sizes = {"layers": layers, "hidden": hidden, "heads": 8, "vocab": vocab, "seq": 1024}
    return ModelSpec.model_validate({"name": "tiny", **sizes})


def two_kinds(names: tuple[str, str], nodes: tuple[int, int], local: int) -> Cluster:
    first, second = (
        resolve_cluster(name, count * local, local) for name, count in zip(names, nodes, strict=True)
    )
    return mixed_cluster(first, second)


def with_memory(cluster: Cluster, *memory: float) -> Cluster:
    parts = [
        part.model_copy(update={"memory_bytes": held})
        for part, held in zip(cluster.parts, memory, strict=True)
    ]
    return mixed_cluster(*parts)


def compositions(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, layers), stages - 1):
        ends = (0, *cuts, layers)
        yield tuple(end - start for start, end in pairwise(ends))


def with_every_split(table: LayoutTable, layers: int) -> LayoutTable:
    rows, words = [], []
    for row in range(len(table)):
        for split in compositions(layers, int(table.pipeline_parallel[row])):
            rows.append(row)
            words.append(split)
    splits = tuple(dict.fromkeys(words))
    number = {split: place for place, split in enumerate(splits)}
    return replace(
        table.take(np.array(rows)), split=np.array([number[word] for word in words]), splits=splits
    )


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    names=st.sampled_from(KINDS),
    nodes=st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (1, 3)]),
    layers=st.integers(4, 9),
    vocab=st.sampled_from([1000, 200000]),
    share=st.sampled_from([None, 0.1, 0.4]),
    recompute=st.sampled_from(["none", "full"]),
)
def test_no_split_that_fits_has_a_faster_slowest_stage(
    names: tuple[str, str],
    nodes: tuple[int, int],
    layers: int,
    vocab: int,
    share: float | None,
    recompute: Recompute,
) -> None:
    model, cluster, stages = spec(layers, vocab=vocab), two_kinds(names, nodes, 1), sum(nodes)
    layout = Layout(
        pipeline_parallel=stages,
        layers_per_stage=even_split(layers, stages),
        global_batch_size=8,
        recompute=recompute,
        precision="fp16",
    )
    alone = LayoutTable.of([layout])
    every = with_every_split(alone, layers)
    if share is not None:
        held = peak_memory(model, with_memory(cluster, 1e15, 1e15), ENGINE, every)
        cluster = with_memory(cluster, *(np.quantile(held, [share, share / 2])))
    fits = peak_memory(model, cluster, ENGINE, every) <= cluster.memory_bytes
    seconds = np.array(
        [
            (each.forward + each.inputs + each.weights).max()
            for each in stage_seconds(model, cluster, ENGINE, every)
        ]
    )
    some = pipelines(model, cluster, ENGINE, alone)
    caps = exact_caps(model, cluster, ENGINE, alone, some, np.full_like(some.kind, layers))
    [bound] = least_bound(some, caps)
    if not fits.any():
        assert bound == np.inf
        return
    assert bound == pytest.approx(seconds[fits].min(), rel=1e-6)
    counts, _ = layers_of_ranks(some, least_bound(some, caps), caps)
    assert (counts.sum(axis=1) == layers).all()
    assert (counts <= caps).all()
    assert any(some.seconds(count[None])[0].max() <= bound * (1 + 1e-6) for count in counts)


@pytest.mark.parametrize("seed", range(8))
def test_the_search_finds_what_brute_force_and_the_simulation_find(seed: int) -> None:
    draw = np.random.default_rng(seed)
    names, layers = KINDS[draw.integers(len(KINDS))], int(draw.integers(4, 8))
    cluster = two_kinds(names, [(1, 1), (2, 1), (1, 2)][draw.integers(3)], int(draw.integers(1, 3)))
    model, batch = spec(layers, int(draw.choice([256, 2048]))), Batch(int(draw.choice([8, 16])))
    problem = Problem(model, cluster, ENGINE, batch, "fp16", PLAIN, preference=FASTEST)
    every = with_every_split(problem.space().table, layers)
    if seed % 2:
        limit = float(np.quantile(peak_memory(model, cluster, ENGINE, every), 0.4))
        problem = replace(problem, cluster=with_memory(cluster, limit, 0.8 * limit))
    cluster = problem.cluster
    fits = peak_memory(model, cluster, ENGINE, every) <= cluster.memory_bytes
    result = rank(problem, problem.space(), time.perf_counter())
    assert bool(result.feasible) == fits.any()
    if result.best is None:
        return
    prices = price(model, cluster, ENGINE, every.take(fits))
    close = np.flatnonzero(prices.step_time_s <= 1.2 * prices.step_time_s.min())
    best = prices.take(close).simulate(np.arange(len(close))).step_time_s.min()
    assert result.best.estimate.peak_memory_bytes <= cluster.memory_bytes
    # The layers of stages make the slowest one fastest, which the end of a short pipeline need not reward.
    assert best * (1 - 1e-9) <= result.best.estimate.step_time_s <= 1.03 * best


def test_a_kind_twice_as_fast_gets_about_twice_the_layers() -> None:
    slow = resolve_cluster("a100-80g", 2, 1)
    device = slow.device
    update: dict[str, Any] = {
        "name": "twice",
        "peak_flops": {name: 2 * peak for name, peak in device.peak_flops.items()},
        "memory_bandwidth": 2 * device.memory_bandwidth,
    }
    fast = slow.model_copy(update={"device": device.model_copy(update=update)})
    pins: Pins = {"pipeline_parallel": 4, "virtual_pipeline_parallel": 1, "recompute": "none"}
    problem = Problem(spec(36, 4096, 1000), mixed_cluster(fast, slow), ENGINE, Batch(64), "bf16", pins)
    best = rank(problem, problem.space(), 0.0).best
    assert best is not None
    layers = best.layout.layers_per_stage
    assert sum(layers[:2]) == pytest.approx(2 * sum(layers[2:]), abs=2)
    assert max(idle_shares(best)) < 0.2


@pytest.mark.slow
def test_the_better_order_of_the_kinds_is_found_however_they_are_written() -> None:
    asked: dict[str, Any] = {"world_size": 4, "local_world_size": 2, "global_batch_size": 16}
    pin = ["vpp=1", "recompute=none"]
    one, other = (
        planner.search(spec(12, 2048), device=kinds, pin=pin, **asked)
        for kinds in ("h100:1,a100-80g:1", "a100-80g:1,h100:1")
    )
    assert one.best is not None and other.best is not None
    assert one.best.estimate.step_time_s == pytest.approx(other.best.estimate.step_time_s)
    assert one.problem.cluster.parts == other.problem.cluster.parts
    first, second = one.problem.cluster.parts
    assert one.notes[0].startswith("start the nodes in this order: ranks 0 to 1 on ")
    assert first.device.name in one.notes[0].partition(", 2 to 3 on ")[0]
    assert one.notes[0].endswith(f"2 to 3 on {second.device.name}")


def test_a_kind_that_slows_the_other_down_is_named() -> None:
    result = planner.search(
        spec(4, 2048), world_size=4, local_world_size=2, device="h100:1,v100-16g:1", global_batch_size=4,
        pin="pp=1",
    )  # fmt: skip
    assert result.notes[1].startswith("leave the v100-16g nodes out: 2 x h100 alone have ")
    helped = planner.search(
        spec(8, 2048), world_size=4, local_world_size=2, device="a100-80g:1,a100-80g:1", global_batch_size=64
    )
    assert helped.notes[1].startswith("2 x a100-80g alone would have 0.5")


def test_every_kind_is_held_to_its_own_memory() -> None:
    plan = planner.suggest(
        "llama2-7b", world_size=8, local_world_size=4, device="a100-80g:1,v100-32g:1",
        max_global_batch_size=32, pin=["schedule=1f1b", "vpp=1", "cp=1", "recompute=none"],
    )  # fmt: skip
    limits = {part.device.name: part.memory_bytes for part in plan.cluster.parts}
    assert plan.layout.pipeline_parallel > 1
    for device, ranks in device_ranks(plan.cluster, plan.layout):
        for each in ranks:
            stage = plan.estimate.memory[each]
            assert stage.total - stage.absent <= limits[device]
    layers = {
        device: sum(plan.layout.layers_per_stage[each] for each in ranks)
        for device, ranks in device_ranks(plan.cluster, plan.layout)
    }
    assert layers["a100-80g"] > 1.5 * layers["v100-32g"]


@pytest.mark.slow
def test_twice_the_memory_is_twice_that_of_each_kind() -> None:
    asked: dict[str, Any] = {"local_world_size": 2, "device": "a100-80g:1,v100-32g:1", "global_batch_size": 8}
    problem = resolve_problem("gpt3-2.7b", 4, **asked)
    [(what, changed)] = [(what, each) for kind, what, each in changed_problems(problem) if kind == "memory"]
    whole, parts = changed.cluster, changed.cluster.parts
    assert [part.memory_bytes for part in parts] == [2 * part.memory_bytes for part in problem.cluster.parts]
    assert whole.memory_bytes == max(part.memory_bytes for part in parts)
    own = " and ".join(f"{part.memory_bytes / GIB:.0f}" for part in problem.cluster.parts)
    more = " and ".join(f"{part.memory_bytes / GIB:.0f}" for part in parts)
    assert own == "79 and 32" and what == f"{more} GiB a device instead of {own}"


def test_a_plan_of_two_kinds_is_reported_saved_and_explained(planner_command: Command, tmp_path: Any) -> None:
    job = ["--model", "gpt2-1.5b", "--device", "h100:1,a100-80g:1", "--local-world-size", "2"]
    job += ["--global-batch-size", "16", "--pin", "vpp=1", "--pin", "pp=2", "--pin", "mbs=1,2"]
    path = tmp_path / "plan.json"
    code, out, _ = planner_command("suggest", *job, "--save", path, "--top", "2")
    assert code == 0
    words = " ".join(out.split())
    plan = planner.Plan.load(path)
    assert plan.layout.world_size == 4
    names = [part.device.name for part in plan.cluster.parts]
    for part, rank_, layers in zip(plan.cluster.parts, (0, 1), plan.layout.layers_per_stage, strict=True):
        assert f"2 x {part.device.name} of {part.memory_bytes / GIB:.1f} GiB" in words
        assert f"{part.device.name}: pipeline rank {rank_}, {layers} layers, idle" in words
    assert f"ranks 0 to 1 on {names[0]}, 2 to 3 on {names[1]}" in words
    assert "absent" not in words
    code, out, _ = planner_command("explain", "--plan", path, "--no-what-if")
    assert code == 0
    assert "change one setting" in out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a100-80g:1,v100-32g:1,h100:1",
            "3 kinds; expected nodes of two kinds, such as a100-80g:4,v100-32g:4",
        ),
        ("a100-80g:1,v100-32g", "'v100-32g' has no number of nodes"),
        ("a100-80g:0,v100-32g:1", "'a100-80g:0' has no number of nodes"),
        ("a100-80g:x,v100-32g:1", "'a100-80g:x' has no number of nodes"),
        ("a100-80g:1,v900:1", "unknown device 'v900'"),
        ("cpu:1,v100-32g:1", "cpu is one rank's share of this machine"),
        ("a100-80g:1,mi300x:1", "a100-80g is of NVIDIA and mi300x of AMD"),
    ],
)
def test_kinds_that_are_none_are_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        parse_kinds(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"world_size": 8}, "world_size 8: device a100-80g:1,v100-32g:1 has 8 . 8 = 16 devices"),
        ({"island": 4}, "island with device .*: each kind has its own"),
        ({"intra_node_gbps": 100.0}, "intra_node_gbps with device"),
        ({"device_memory_gib": 40.0}, "device_memory_gib with device"),
        (
            {"precision": "bf16"},
            "precision bf16: a100-80g . v100-32g with engine bundled trains in fp32, fp16",
        ),
    ],
)
def test_what_does_not_go_with_two_kinds_is_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    asked: dict[str, Any] = {"world_size": 16, "device": "a100-80g:1,v100-32g:1", "global_batch_size": 16}
    with pytest.raises(InputError, match=message):
        planner.search(spec(4), **{**asked, **change})


def test_several_world_sizes_of_two_kinds_are_refused() -> None:
    with pytest.raises(InputError, match="tells how many nodes there are of each kind"):
        planner.sizes(spec(4), world_size="8..16", device="a100-80g:1,v100-32g:1", global_batch_size=16)

"""Nodes of two kinds: each stage costs what its own kind takes, and clusters say what they are made of."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from costmodels import Cluster, Layout, ModelSpec, estimate, even_split
from costmodels.pipeline_times import rank_seconds, stage_seconds
from costmodels.pricing import peak_memory, price
from costmodels.ranks.sites import MIXED, rank_kinds, sites
from costmodels.spec.mixed_cluster import mixed_cluster
from costmodels.spec.record import GIB
from costmodels.spec.table import LayoutTable
from planner.inputs.batch import Batch
from planner.inputs.cluster import resolve_cluster
from planner.inputs.engine import DEFAULT_ENGINE, resolve_engine
from planner.space.grid import build

ENGINE = resolve_engine(DEFAULT_ENGINE)

SIZES = {"layers": 8, "vocab": 50000, "seq": 1024}

MODEL = ModelSpec.model_validate({"name": "small", "hidden": 2048, "heads": 16, **SIZES})

EXPERTS = {"experts": 4, "top_k": 2, "expert_ffn": 1024, "dense_layers": 1}

MIXTURE = ModelSpec.model_validate({"name": "moe", "hidden": 1024, "heads": 8, **SIZES, **EXPERTS})


def nodes(device: str, count: int = 1, local: int = 2) -> Cluster:
    return resolve_cluster(device, count * local, local)


def layout(**degrees: Any) -> Layout:
    stages = degrees.get("pipeline_parallel", 1) * degrees.get("virtual_pipeline_parallel", 1)
    usual = {"layers_per_stage": even_split(8, stages), "global_batch_size": 16, "precision": "fp16"}
    return Layout(**{**usual, **degrees})


@pytest.mark.parametrize("model", [MODEL, MIXTURE], ids=["dense", "mixture"])
def test_two_halves_of_one_kind_cost_what_the_whole_does(model: ModelSpec) -> None:
    whole = nodes("a100-80g", 4)
    halves = mixed_cluster(nodes("a100-80g", 2), nodes("a100-80g", 2))
    table = build(model, 8, Batch(16), "bf16", {}).table
    alone, both = (price(model, cluster, ENGINE, table) for cluster in (whole, halves))
    # The first stages of a mixture may have most parameters besides experts, and the last ones most experts.
    assert both.step_time_s == pytest.approx(alone.step_time_s, rel=5e-2 if model.experts else 1e-9)
    assert both.peak_memory_bytes == pytest.approx(alone.peak_memory_bytes, rel=1e-9)
    played = [prices.simulate(np.arange(0, len(table), 97)).step_time_s for prices in (alone, both)]
    assert played[1] == pytest.approx(played[0], rel=5e-2 if model.experts else 1e-9)


@pytest.mark.parametrize(
    "degrees",
    [
        {"pipeline_parallel": 4, "tensor_parallel": 2},
        {"pipeline_parallel": 4, "data_parallel": 2, "zero_stage": 1, "recompute": "full"},
        {
            "pipeline_parallel": 4,
            "tensor_parallel": 2,
            "virtual_pipeline_parallel": 2,
            "schedule": "interleaved",
        },
        {"pipeline_parallel": 4, "tensor_parallel": 2, "virtual_pipeline_parallel": 2, "schedule": "zbv"},
    ],
    ids=["1f1b", "replicas", "interleaved", "zbv"],
)
def test_each_stage_takes_the_seconds_and_the_bytes_of_its_own_kind(degrees: dict[str, Any]) -> None:
    kinds = nodes("a100-80g", 2), nodes("v100-32g", 2)
    cluster, one = mixed_cluster(*kinds), layout(**degrees)
    whole = [resolve_cluster(part.device, 8, 2) for part in kinds]
    own = estimate(MODEL, cluster, ENGINE, one)
    took = rank_seconds(MODEL, cluster, ENGINE, one)
    for rank in range(4):
        kind = 0 if rank < 2 else 1
        alone = estimate(MODEL, whole[kind], ENGINE, one)
        assert took[rank] == pytest.approx(rank_seconds(MODEL, whole[kind], ENGINE, one)[rank])
        absent = cluster.memory_bytes - kinds[kind].memory_bytes
        assert own.memory[rank].absent == absent
        assert own.memory[rank].total - absent == pytest.approx(alone.memory[rank].total)
        assert own.memory[rank].allocated == pytest.approx(alone.memory[rank].allocated)
    assert own.peak_memory_bytes == pytest.approx(max(stage.total for stage in own.memory))
    # All wait for the slow kind.
    assert took[2:].min() > took[1]
    assert own.step_time_s > one.micro_batches * took.max()


def test_a_layout_without_a_pipeline_runs_at_the_pace_of_the_slow_kind() -> None:
    fast, slow = nodes("h100", 2), nodes("v100-32g", 2)
    one = layout(data_parallel=8, zero_stage=1)
    both = estimate(MODEL, mixed_cluster(fast, slow), ENGINE, one)
    alone = estimate(MODEL, resolve_cluster("v100-32g", 8, 2), ENGINE, one)
    assert both.step_time_s == pytest.approx(alone.step_time_s, rel=1e-6)
    table = LayoutTable.of([one])
    [limited] = peak_memory(MODEL, mixed_cluster(fast, slow), ENGINE, table)
    assert limited == both.peak_memory_bytes
    assert both.memory[0].absent == pytest.approx(fast.memory_bytes - slow.memory_bytes)


def test_messages_between_the_kinds_take_the_slower_network() -> None:
    cluster = mixed_cluster(nodes("a100-80g", 2), nodes("v100-32g", 2))
    table = LayoutTable.of([layout(pipeline_parallel=4, tensor_parallel=2)])
    [seconds] = stage_seconds(MODEL, cluster, ENGINE, table)
    within, between, slow = seconds.send
    assert within < between == pytest.approx(slow, rel=0.2)


@given(first=st.integers(1, 6), second=st.integers(1, 6), local=st.sampled_from([1, 2, 4]))
@settings(max_examples=30, deadline=None)
def test_every_rank_has_the_kind_of_its_nodes(first: int, second: int, local: int) -> None:
    cluster = mixed_cluster(nodes("a100-80g", first, local), nodes("v100-32g", second, local))
    ranks, border = cluster.world_size, first * local
    for pipeline in (size for size in range(1, ranks + 1) if ranks % size == 0):
        each = ranks // pipeline
        for rank, kind in enumerate(rank_kinds(cluster, pipeline)):
            own = {int(number >= border) for number in range(rank * each, (rank + 1) * each)}
            assert own == ({0, 1} if kind == MIXED else {kind})


def test_a_cluster_of_two_kinds_loads_back_equal_and_old_ones_still_load() -> None:
    both = mixed_cluster(nodes("a100-80g", 2), nodes("v100-32g", 1))
    assert Cluster.model_validate_json(both.model_dump_json()) == both
    assert both.world_size == 6
    assert both.device.default_precision == "fp16"
    old = json.loads(nodes("a100-80g").model_dump_json())
    del old["parts"]
    assert Cluster.model_validate(old) == nodes("a100-80g")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"world_size": 7}, "world size 7 is not in the proportion of its parts, 4 . 2"),
        ({"memory_bytes": 1e9}, "memory_bytes 1e.09 is less than a kind has"),
        ({"parts": [nodes("a100-80g").model_dump()]}, "expected nodes of two kinds"),
    ],
)
def test_clusters_that_contradict_their_parts_are_refused(change: dict[str, Any], message: str) -> None:
    values = mixed_cluster(nodes("a100-80g", 2), nodes("v100-32g", 1)).model_dump()
    with pytest.raises(ValidationError, match=message):
        Cluster.model_validate({**values, **change})


def test_parts_follow_a_change_of_the_whole() -> None:
    cluster = mixed_cluster(nodes("a100-80g", 2), nodes("v100-32g", 1))
    assert cluster.intra_node is not None
    faster = cluster.intra_node.model_copy(update={"bandwidth": 2 * cluster.intra_node.bandwidth})
    more = cluster.model_copy(
        update={"world_size": 12, "memory_bytes": cluster.memory_bytes + GIB, "intra_node": faster}
    )
    for before, after in zip(sites(cluster, ENGINE)[:2], sites(more, ENGINE)[:2], strict=True):
        assert after.cluster.world_size == 2 * before.cluster.world_size
        assert after.cluster.fast_link.bandwidth == 2 * before.cluster.fast_link.bandwidth
        assert after.cluster.slow_link == before.cluster.slow_link
        assert after.absent == before.absent

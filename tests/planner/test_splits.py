"""Solved layers of each stage against every split, and the bounds that leave rows unsolved."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels import Layout, ModelSpec, even_split
from costmodels.pipeline_times import stage_seconds
from costmodels.pricing import peak_memory, price
from costmodels.spec.hardware import Cluster
from costmodels.spec.table import Floats, LayoutTable
from planner import search
from planner.inputs.cluster import resolve_cluster
from planner.inputs.engine import DEFAULT_ENGINE, resolve_engine
from planner.solve.bounds import Worth, least_peak, least_seconds
from planner.solve.splits import balanced_splits

ENGINE = resolve_engine(DEFAULT_ENGINE)

CLUSTERS = {size: resolve_cluster("a100-80g", size) for size in range(2, 6)}

EVERYTHING = Worth("throughput", np.inf)
"""No layout is too slow."""


def spec(layers: int, vocab: int, expert_ffn: int, dense: int) -> ModelSpec:
    experts: dict[str, Any] = {
        "experts": 4,
        "top_k": 2,
        "expert_ffn": expert_ffn,
        "dense_layers": min(dense, layers - 1),
    }
    sizes: dict[str, Any] = {"layers": layers, "hidden": 256, "heads": 8, "vocab": vocab, "seq": 512}
    return ModelSpec(name="tiny", **sizes, **(experts if expert_ffn else {}))


def every_split(layout: Layout, layers: int) -> LayoutTable:
    pipeline = layout.pipeline_parallel
    splits = [split for split in product(range(1, layers + 1), repeat=pipeline) if sum(split) == layers]
    return LayoutTable.of([layout.model_copy(update={"layers_per_stage": split}) for split in splits])


def slowest(model: ModelSpec, cluster: Cluster, table: LayoutTable) -> Floats:
    """Seconds of one microbatch on the slowest stage."""
    engine = ENGINE.for_device(cluster.device)
    every = stage_seconds(model, cluster, engine, table)
    return np.array([(each.forward + each.inputs + each.weights).max() for each in every])


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    layers=st.integers(2, 8),
    pipeline=st.integers(2, 5),
    vocab=st.sampled_from([1000, 50000, 200000]),
    expert_ffn=st.sampled_from([0, 0, 128, 1024]),
    dense=st.integers(0, 3),
    recompute=st.sampled_from(["none", "full"]),
    share=st.sampled_from([0.0, 0.02, 0.1, 0.3, 1.0]),
)
def test_no_split_that_fits_has_a_faster_slowest_stage(
    layers: int, pipeline: int, vocab: int, expert_ffn: int, dense: int, recompute: Any, share: float
) -> None:
    pipeline = min(pipeline, layers)
    model = spec(layers, vocab, expert_ffn, dense)
    layout = Layout(
        pipeline_parallel=pipeline,
        layers_per_stage=even_split(layers, pipeline),
        global_batch_size=8,
        recompute=recompute,
    )
    every, alone = every_split(layout, layers), LayoutTable.of([layout])
    cluster = CLUSTERS[pipeline]
    # Sums of other rows may differ in the last digit.
    limit = float(np.quantile(peak_memory(model, cluster, ENGINE, every), share)) * (1 + 1e-12)
    cluster = cluster.model_copy(update={"memory_bytes": limit})
    fits = peak_memory(model, cluster, ENGINE, every) <= limit
    best = slowest(model, cluster, every)[fits].min()
    even_fits = peak_memory(model, cluster, ENGINE, alone) <= limit
    row, found = balanced_splits(model, cluster, ENGINE, alone, even_fits, EVERYTHING)
    assert set(row.tolist()) <= {0}
    candidates = [slowest(model, cluster, alone)[even_fits]]
    if len(found):
        candidates.append(slowest(model, cluster, found)[peak_memory(model, cluster, ENGINE, found) <= limit])
    assert np.concatenate(candidates).min() == pytest.approx(best, rel=1e-8)
    # No split beats the bounds.
    bound = least_seconds(model, cluster, ENGINE, alone)[0]
    assert bound <= price(model, cluster, ENGINE, every).step_time_s.min() * (1 + 1e-9)
    least = least_peak(model, cluster, ENGINE, alone)[0]
    assert least <= peak_memory(model, cluster, ENGINE, every).min() * (1 + 1e-9)


def test_the_stage_with_the_head_gets_fewer_layers_and_so_do_full_ones() -> None:
    pins = ["tp=1", "pp=4", "cp=1", "mbs=1", "schedule=1f1b", "zero=1", "recompute=none"]
    job: dict[str, Any] = {"world_size": 8, "device": "h100", "global_batch_size": 32}
    best, even, tight = (
        search("llama3-8b", **job, pin=[*pins, *more], device_memory_gib=memory).best
        for more, memory in (([], 80.0), (["layers_per_stage=8,8,8,8"], 80.0), ([], 55.0))
    )
    assert best is not None and even is not None and tight is not None
    assert best.layout.layers_per_stage == (8, 9, 9, 6)
    assert best.estimate.step_time_s < 0.95 * even.estimate.step_time_s
    # The first stages keep most microbatches, so that those behind take layers of theirs.
    assert tight.layout.layers_per_stage == (6, 9, 10, 7) and not tight.layout.offload_activations
    assert tight.estimate.peak_memory_bytes <= tight.cluster.memory_bytes < best.estimate.peak_memory_bytes


def test_a_pinned_split_stays() -> None:
    model = spec(6, 50000, 0, 0)
    result = search(model, world_size=2, global_batch_size=8, pin=["pp=2", "layers_per_stage=4,2"])
    assert result.solutions == 0 and set(result.table.splits) == {(4, 2)}

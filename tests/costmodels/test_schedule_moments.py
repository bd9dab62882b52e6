"""Fullest moments of ranks with several stages: against passes run one by one, and against dry runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from costmodels import Cluster, Layout, even_split
from costmodels.catalogue import load_device, load_engine, load_model
from costmodels.memory.schedule_moments import ROUNDS, SPLIT_ROUNDS, moments
from costmodels.pricing import price
from costmodels.spec.estimate import StageMemory
from costmodels.spec.layout import SPLIT_BACKWARD, Schedule
from costmodels.spec.record import GIB
from costmodels.spec.schedules import BACKWARD, FORWARD, INPUTS, orders
from costmodels.spec.table import LayoutTable

SHAPES: tuple[tuple[Schedule, int, int], ...] = (
    ("interleaved", 2, 2),
    ("interleaved", 3, 4),
    ("interleaved_zb", 2, 2),
    ("interleaved_zb", 4, 3),
    ("zbv", 4, 2),
    ("dualpipev", 3, 2),
)


def run_one_by_one(
    schedule: Schedule, pipeline: int, chunks: int, micro_batches: int, rank: int, whole: bool
) -> set[tuple[int, ...]]:
    """Counts of a rank after each of its passes, as `Alive` counts them.

    Args:
        whole: ZeRO 0, where gradients are summed as they are made; otherwise those of split backward wait in
            16 bits for the next backward pass of their stage.
    """
    order = orders(schedule, pipeline, chunks, micro_batches)[rank]
    head, active = pipeline * chunks - 1, next_stages(order.stage.tolist())
    stages = sorted(set(order.stage.tolist()))
    flying, waiting, done = (dict.fromkeys(stages, 0) for _ in range(3))
    sums, fresh, left = set[int](), set[int](), set[int]()
    found = set[tuple[int, ...]]()
    for place, (kind, stage) in enumerate(zip(order.kind.tolist(), order.stage.tolist(), strict=True)):
        before = [one for one in stages if done[one] < micro_batches]
        if kind == FORWARD:
            flying[stage] += 1
        elif kind == INPUTS and stage > 0:
            waiting[stage] += 1
            left.discard(stage)
            if stage in fresh:
                fresh.remove(stage)
            if done[stage] and not whole:
                sums.add(stage)
        elif kind != INPUTS:
            flying[stage] -= 1
            done[stage] += 1
            if kind == BACKWARD or stage == 0:
                fresh.discard(stage)
                left.discard(stage)
                sums.add(stage)
            else:
                waiting[stage] -= 1
                left.add(stage)
                if whole or (stage == head and stage in fresh):
                    sums.add(stage)
                if not whole:
                    fresh.add(stage)
        reducing = set() if whole else {one for one in before if done[one] == micro_batches}
        gone = set() if whole else {one for one in stages if done[one] == micro_batches}
        held = (sums - gone) | reducing
        # Gradients of weights, computed apart from those of inputs, lie beside sums of passes before.
        apart = whole and kind not in (FORWARD, INPUTS, BACKWARD) and stage > 0 and done[stage] > 1
        found |= {
            (
                sum(flying.values()),
                sum(waiting.values()),
                flying.get(head, 0),
                len(held),
                int(head in held),
                int(0 in held),
                len(fresh - (gone - ({head} & reducing))),
                len(left - gone),
                0 if whole else len(stages) - len(before),
                added,
                len(before) if whole else min(len(before), 3),
                gathered,
            )
            for added in {0, int(apart)}
            for gathered in {0, int(not whole and bool(active[place + 1] - active[place]))}
        }
    return found


def next_stages(stages: list[int]) -> list[set[int]]:
    """The stages that a rank has gathered at each pass: the next three; after the last pass none."""
    return [set(list(dict.fromkeys(stages[place:]))[:3]) for place in range(len(stages) + 1)]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_moments_cover_every_pass_and_each_happens(shape: tuple[Schedule, int, int], whole: bool) -> None:
    schedule, pipeline, chunks = shape
    for rank in range(pipeline):
        for rounds in (2, SPLIT_ROUNDS):
            known = moments(schedule, pipeline, chunks, rounds * pipeline, rank, whole, not whole)
            every = run_one_by_one(schedule, pipeline, chunks, rounds * pipeline, rank, whole)
            assert set(map(tuple, known.astype(int).tolist())) <= every
            for one in every:
                assert (known >= np.array(one)).all(axis=1).any()


@pytest.mark.parametrize("shape", SHAPES)
def test_further_rounds_of_micro_batches_add_no_moment(shape: tuple[Schedule, int, int]) -> None:
    schedule, pipeline, chunks = shape
    enough = SPLIT_ROUNDS if schedule in SPLIT_BACKWARD else ROUNDS
    for rank in range(pipeline):
        few, many = (
            moments(schedule, pipeline, chunks, rounds * pipeline, rank, False, True)
            for rounds in (enough, 2 * enough)
        )
        assert sorted(few.tolist()) == sorted(many.tolist())


@pytest.mark.parametrize("micro_batches", [2, 6])
def test_prices_of_unequal_stages_are_the_same_each_time(micro_batches: int) -> None:
    """Moments are shared by rows and searches."""
    fields = {"pipeline_parallel": 2, "virtual_pipeline_parallel": 3, "layers_per_stage": (6, 4, 4, 4, 3, 3)}
    layout = Layout.model_validate(
        {**fields, "schedule": "interleaved", "zero_stage": 1, "data_parallel": 2}
        | {"micro_batch_size": 1, "global_batch_size": 2 * micro_batches}
    )
    cluster = Cluster(device=load_device("h100"), world_size=4, devices_per_node=4, memory_bytes=80 * GIB)
    model = load_model("gpt2-medium").model_copy(update={"layers": 24})
    held = {
        float(price(model, cluster, load_engine("bundled"), LayoutTable.of([layout])).peak_memory_bytes[0])
        for _ in range(3)
    }
    assert len(held) == 1


TRACED: tuple[tuple[str, str, float, dict[str, Any]], ...] = (
    # Gradients in 16 bits of all stages beside their sums.
    (
        "gpt2-xl",
        "a100-80g",
        10.78,
        {"pp": 2, "vpp": 6, "cp": 2, "dp": 2, "zero": 1, "schedule": "interleaved_zb", "mbs": 2},
    ),
    ("gpt2-xl", "a100-80g", 19.62, {"pp": 2, "vpp": 4, "dp": 4, "schedule": "interleaved_zb", "mbs": 2}),
    # Copies of stages that have gone with their last backward pass.
    (
        "gpt2-xl",
        "a100-80g",
        13.41,
        {"pp": 2, "vpp": 12, "dp": 4, "schedule": "interleaved", "mbs": 8, "recompute": "full"},
    ),
    (
        "gpt2-xl",
        "a100-80g",
        5.90,
        {"pp": 2, "vpp": 6, "dp": 4, "zero": 1, "schedule": "interleaved", "mbs": 8, "recompute": "full"},
    ),
    ("gpt2-xl", "a100-80g", 20.81, {"pp": 2, "vpp": 2, "dp": 4, "schedule": "zbv", "mbs": 2}),
    ("gpt2-xl", "a100-80g", 16.37, {"pp": 2, "vpp": 2, "cp": 4, "schedule": "dualpipev", "mbs": 1}),
    # A chunk of the loss, or the last layer computed again.
    ("gpt2-xl", "a100-80g", 14.07, {"pp": 2, "dp": 4, "mbs": 1, "recompute": "full"}),
    # Gradients that become shards layer by layer, in a single backward pass and with ZeRO 3.
    ("gpt2-xl", "a100-80g", 3.88, {"dp": 8, "zero": 3, "mbs": 2, "recompute": "full"}),
    (
        "llama2-7b",
        "a100-80g",
        28.27,
        {"tp": 4, "sp": True, "cp": 2, "zero": 2, "mbs": 64, "recompute": "full"},
    ),
    # Layers that let go of their copies one by one.
    ("qwen3-8b", "h100", 66.44, {"tp": 2, "dp": 16, "mbs": 8, "batch": 128, "recompute": "full"}),
    (
        "deepseek-v2-lite",
        "h100",
        22.21,
        {"ep": 8, "dp": 16, "zero": 1, "mbs": 4, "recompute": "full"},
    ),
    # Weights of norms that wait for gradients of outputs in fp32.
    (
        "gemma-3-12b",
        "h100",
        168.81,
        {
            "pp": 4,
            "vpp": 2,
            "dp": 2,
            "zero": 1,
            "schedule": "zbv",
            "mbs": 2,
            "batch": 32,
            "recompute": "selective",
        },
    ),
    # Latent attention with values as wide as keys in a ring, and with its input copied beside latents.
    (
        "deepseek-v2-lite",
        "h100",
        61.48,
        {"cp": 8, "form": "ring", "ep": 16, "dp": 2, "zero": 1, "mbs": 16},
    ),
    (
        "deepseek-v2-lite",
        "h100",
        54.27,
        {"tp": 8, "cp": 2, "form": "all_to_all", "ep": 16, "mbs": 16, "recompute": "selective"},
    ),
    # Rows of experts that come back to the tokens of a rank.
    (
        "qwen3-30b-a3b",
        "h100",
        59.54,
        {"cp": 2, "ep": 16, "dp": 8, "zero": 3, "mbs": 2, "recompute": "selective"},
    ),
    # Gradients of the embedding beside the sums of all layers.
    (
        "gpt-oss-20b",
        "h100",
        54.85,
        {"cp": 2, "ep": 8, "dp": 4, "zero": 2, "batch": 32, "recompute": "full"},
    ),
    # Gradients of experts that FSDP2 adds up in the next pass.
    (
        "mixtral-8x7b",
        "h100",
        107.36,
        {
            "pp": 2,
            "vpp": 4,
            "cp": 2,
            "form": "ring",
            "ep": 2,
            "dp": 8,
            "zero": 1,
            "schedule": "interleaved_zb",
            "batch": 128,
        },
    ),
    # Capped attention, whose output stays.
    ("gemma-2-9b", "h100", 313.03, {"cp": 2, "dp": 4, "mbs": 8, "batch": 32, "recompute": "selective"}),
    # Stages whose parameters are free between their forward and their backward pass.
    (
        "qwen3-30b-a3b",
        "h100",
        105.86,
        {
            "tp": 2,
            "pp": 2,
            "vpp": 2,
            "dp": 4,
            "zero": 3,
            "schedule": "interleaved",
            "mbs": 4,
            "batch": 32,
            "recompute": "selective",
        },
    ),
    # Gradients of experts that no rank shares, after the stage's last backward pass.
    (
        "qwen3-30b-a3b",
        "h100",
        33.01,
        {
            "pp": 2,
            "vpp": 6,
            "cp": 8,
            "ep": 8,
            "form": "all_gather",
            "zero": 3,
            "mbs": 16,
            "batch": 32,
            "schedule": "interleaved",
            "recompute": "full",
        },
    ),
    # Gradients of whole inputs before tensor-parallel ranks sum these.
    (
        "qwen3-8b",
        "h100",
        17.64,
        {
            "tp": 16,
            "sp": True,
            "cp": 2,
            "form": "ring",
            "zero": 3,
            "mbs": 128,
            "batch": 128,
            "recompute": "full",
        },
    ),
    # Sums of gradients that a CUDA graph keeps in place.
    (
        "qwen3-0.6b",
        "h100",
        7.09,
        {
            "tp": 2,
            "sp": True,
            "cp": 4,
            "form": "all_to_all",
            "mbs": 32,
            "batch": 32,
            "recompute": "full",
            "cuda_graphs": True,
        },
    ),
)
"""GiB of the fullest rank by dry runs under PyTorch 2.14, and degrees; the batch is 64 unless it is given."""

NAMES = {
    "tp": "tensor_parallel",
    "sp": "sequence_parallel",
    "cp": "context_parallel",
    "form": "context_parallel_form",
    "ep": "expert_parallel",
    "pp": "pipeline_parallel",
    "vpp": "virtual_pipeline_parallel",
    "dp": "data_parallel",
    "zero": "zero_stage",
    "mbs": "micro_batch_size",
    "batch": "global_batch_size",
}


@pytest.mark.parametrize("case", TRACED, ids=lambda case: f"{case[0]}-{case[2]}")
def test_closed_forms_are_within_3_percent_of_dry_runs(case: tuple[str, str, float, dict[str, Any]]) -> None:
    name, kind, traced, degrees = case
    model, device = load_model(name), load_device(kind)
    stages = degrees.get("pp", 1) * degrees.get("vpp", 1)
    fields = {NAMES.get(key, key): value for key, value in degrees.items()}
    layout = Layout.model_validate(
        {"global_batch_size": 64, **fields, "layers_per_stage": even_split(model.layers, stages)}
    )
    cluster = Cluster(
        device=device, world_size=layout.world_size, devices_per_node=8, memory_bytes=device.memory_bytes
    )
    held = price(model, cluster, load_engine("bundled"), LayoutTable.of([layout])).memory
    assert set(held) == set(StageMemory.model_fields)
    stage = StageMemory(**{part: float(size[0]) for part, size in held.items()})
    assert stage.allocated == pytest.approx(traced * GIB, rel=0.03)
    assert traced * GIB <= stage.allocated + max(stage.doubt, 0.01 * stage.allocated)

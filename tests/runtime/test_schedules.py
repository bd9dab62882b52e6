"""Every pipeline schedule gives the gradients of one rank, reduces them once and keeps nothing."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from costmodels import Layout
from costmodels.spec.layout import Schedule
from runtime.parallel.pipeline import SCHEDULES
from tests.support.layouts import parse_layout
from tests.support.models import MODELS
from tests.support.ranks import schedules as work
from tests.support.schedule_orders import action_order, alive_by_stage, makespan, most_waiting
from tests.support.worker_pool import WorkerPool

CASES = (
    ("gpt2", "pp=2,schedule=zbv"),
    ("llama", "pp=2,schedule=zbv,cp=2"),
    ("llama", "pp=2,schedule=zbv,dp=2,zero=1"),
    ("gpt2", "pp=2,schedule=dualpipev,gbs=9"),
    ("gpt2", "pp=2,schedule=dualpipev,dp=2,zero=3"),
    ("llama", "pp=2,schedule=dualpipev,tp=2,sp=1,recompute=selective"),
    ("llama", "pp=2,schedule=interleaved_zb"),
    ("gpt2", "pp=2,schedule=interleaved_zb,dp=2"),
    ("llama", "pp=2,schedule=interleaved_zb,dp=2,zero=3"),
    ("gpt2", "pp=2,vpp=2,dp=2,zero=3"),
    ("deep", "pp=4,schedule=zbv"),
    ("deep", "pp=2,schedule=dualpipev,layers_per_stage=1;3;1;3"),
    ("deep", "pp=2,schedule=zbv,layers_per_stage=3;1;2;2,dp=2,zero=1"),
    ("deep", "pp=2,schedule=interleaved_zb,layers_per_stage=1;4;1;2,recompute=full"),
)
ALL_MODELS = MODELS | {"deep": MODELS["gpt2"].model_copy(update={"layers": 8})}


@pytest.fixture(scope="module")
def references() -> dict[str, work.Report]:
    """Reports of one rank, by model and batch."""
    return {}


def assert_same_step(
    pool: WorkerPool, references: dict[str, work.Report], name: str, text: str, tolerance: float = 1e-5
) -> None:
    model = ALL_MODELS[name]
    layout = parse_layout(text, model)
    alone = f"gbs={layout.global_batch_size},precision={layout.precision}"
    if name + alone not in references:
        references[name + alone] = pool.run(work.report, 1, model, parse_layout(alone, model))[0]
    reference = references[name + alone]
    whole = torch.stack([g.norm() for g in reference.gradients.values()]).norm()
    seen = set()
    for report in pool.run(work.report, layout.world_size, model, layout):
        assert report.loss == pytest.approx(reference.loss, rel=tolerance)
        assert report.evaluated == pytest.approx(reference.loss, rel=tolerance)
        for parameter, gradient in report.gradients.items():
            stored = "embedding.tokens.weight" if model.tied and parameter == "head.weight" else parameter
            expected = reference.gradients[stored]
            assert gradient.shape == expected.shape
            # Biases of keys have no gradient but rounding errors.
            assert (gradient - expected).norm() < tolerance * (expected.norm() + 1e-3 * whole), parameter
            seen.add(stored)
    assert seen == set(reference.gradients)


def layout_with(schedule: Schedule, rest: str = "") -> Layout:
    text = "pp=2" if schedule == "1f1b" else f"pp=2,schedule={schedule}"
    return parse_layout(f"{text}{rest}", MODELS["llama"])


@pytest.mark.parametrize(("name", "text"), CASES)
def test_gradients_and_losses_are_those_of_one_rank(
    pool: WorkerPool, references: dict[str, work.Report], name: str, text: str
) -> None:
    assert_same_step(pool, references, name, text)


def test_16_bit_parameters(pool: WorkerPool, references: dict[str, work.Report]) -> None:
    assert_same_step(pool, references, "llama", "pp=2,schedule=zbv,dp=2,zero=1,precision=bf16", 2e-2)


@pytest.mark.parametrize(
    ("schedule", "zero"), [*((schedule, 1) for schedule in SCHEDULES), ("1f1b", 3), ("zbv", 0), ("zbv", 3)]
)
def test_gradients_are_reduced_once_after_the_last_micro_batch(
    pool: WorkerPool, schedule: Schedule, zero: int
) -> None:
    layout = layout_with(schedule, f",dp=2,zero={zero}")
    last_stage = len(layout.layers_per_stage) - 1
    for rank, events in enumerate(pool.run(work.events, layout.world_size, MODELS["llama"], layout)):
        # One collective for each layer, and one for embedding or head.
        collectives = {
            stage: layout.layers_per_stage[stage] + (stage in (0, last_stage))
            for stage in layout.stages_of(rank // layout.data_parallel)
        }
        backward = Counter[int]()
        reduced = 0
        for event in events:
            if event == "reduce":
                reduced += 1
                done = [stage for stage, count in backward.items() if count == layout.micro_batches]
                assert reduced <= sum(collectives[stage] for stage in done)
            elif event[0] in "BW":
                backward[int(event[1:])] += 1
        assert reduced == sum(collectives.values())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ranks_run_the_known_order_and_keep_nothing(pool: WorkerPool, schedule: Schedule) -> None:
    model, layout = MODELS["llama"], layout_with(schedule, ",gbs=6")
    orders = action_order(schedule, 2, layout.virtual_pipeline_parallel, 6)
    activation, logits = 4 * model.seq * model.hidden, 4 * model.seq * model.padded_vocab(1)
    for order, trace in zip(orders, pool.run(work.live_activations, 2, model, layout), strict=True):
        assert [event for event, _ in trace.training] == [f"{a.kind}{a.stage}" for a in order]
        assert trace.left == trace.left_by_evaluation == 0
        # Logits of one microbatch. gloo keeps what it sends to the end: all outputs of at most two stages.
        assert max(size for _, size in trace.evaluation) <= logits + (2 * 6 + 3) * activation


def test_memory_does_not_grow_with_the_micro_batches(pool: WorkerPool) -> None:
    few, many = (
        pool.run(work.live_activations, 2, MODELS["llama"], layout_with("1f1b", f",gbs={batch}"))
        for batch in (4, 12)
    )
    for short, long in zip(few, many, strict=True):
        for pass_of_few, pass_of_many in zip(short, long, strict=True):
            if isinstance(pass_of_few, list):
                # Losses and labels aside.
                assert max(n for _, n in pass_of_many) < 1.01 * max(n for _, n in pass_of_few)


def test_a_tied_weight_with_both_copies_on_one_rank_is_clipped_once(pool: WorkerPool) -> None:
    model = MODELS["gpt2"]
    expected = pool.run(work.clipped, 1, model, parse_layout("", model), 0.1)[0]["embedding.tokens.weight"]
    copies = pool.run(work.clipped, 2, model, parse_layout("pp=2,schedule=zbv", model), 0.1)[0]
    for name in ("embedding.tokens.weight", "head.weight"):
        assert torch.allclose(copies[name], expected, rtol=1e-4, atol=1e-8)


def test_dualpipev_refuses_fewer_micro_batches_than_stages() -> None:
    action_order("dualpipev", 4, 2, 8)
    with pytest.raises(ValueError, match="at least as many microbatches as stages"):
        action_order("dualpipev", 4, 2, 7)
    with pytest.raises(ValueError, match="at least 4 microbatches, not 3"):
        action_order("1f1b", 4, 1, 3)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_orders_are_whole_and_never_wait_for_each_other(schedule: Schedule, ranks: int) -> None:
    chunks = 1 if schedule == "1f1b" else 2
    micro_batches = 3 * ranks
    orders = action_order(schedule, ranks, chunks, micro_batches)
    actions = [action for order in orders for action in order]
    for kinds in (("F",), ("B", "I"), ("B", "W")):
        assert sum(a.kind in kinds for a in actions) == micro_batches * ranks * chunks
    work_of_rank = 3.0 * micro_batches * chunks
    idle = makespan(orders, lambda kind, stage: 2.0 if kind == "B" else 1.0) - work_of_rank
    assert idle == IDLE_SLOTS[schedule](ranks)
    if schedule == "1f1b":
        assert [alive_by_stage(order) for order in orders] == [{r: ranks - r} for r in range(ranks)]
        assert not any(map(most_waiting, orders))


IDLE_SLOTS = {
    "1f1b": lambda ranks: 3.0 * (ranks - 1),
    "interleaved": lambda ranks: 3.0 * (ranks - 1),
    "interleaved_zb": lambda ranks: 1.0 * (ranks - 1),
    "zbv": lambda ranks: 1.0 * (ranks - 1),
    "dualpipev": lambda ranks: 1.0 * (ranks - 1),
}
"""Slots of a forward pass that a rank idles when B is I + W and all three take as long."""

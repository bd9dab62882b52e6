"""Goodput under failures, against simulated jobs and against published figures."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels import ModelSpec
from costmodels.errors import InputError
from costmodels.memory.checkpoints import checkpoint_bytes, checkpoint_memory
from planner import Plan, suggest
from planner.budget.goodput import Failures, Goodput, best_interval, expected_share
from planner.budget.run import run_lines
from tests.support.models import TINY

MINUTE, HOUR = 60.0, 3600.0


def young_interval(checkpoint: float, failure: float) -> float:
    """CACM 17 (1974): about best for short checkpoints."""
    return math.sqrt(2 * checkpoint * failure)


def daly_interval(checkpoint: float, failure: float) -> float:
    """Future Generation Computer Systems 22 (2006), equation 37."""
    if checkpoint >= 2 * failure:
        return failure
    half = checkpoint / (2 * failure)
    return young_interval(checkpoint, failure) * (1 + math.sqrt(half) / 3 + half / 9) - checkpoint


def simulated_share(
    interval: float, checkpoint: float, restart: float, failure: float, segments: int, seed: int
) -> float:
    """Share of useful time of a job that is played out, failure by failure."""
    draws = np.random.default_rng(seed).exponential(failure, size=1_000_000)
    failures = itertools.accumulate(draws.tolist())
    now, next_failure, done = 0.0, next(failures), 0
    restarting = False
    while done < segments:
        needs = restart if restarting else interval + checkpoint
        if now + needs <= next_failure:
            now += needs
            done += not restarting
            restarting = False
        else:
            now, next_failure, restarting = next_failure, next(failures), True
    return done * interval / now


@pytest.mark.parametrize(
    ("interval", "checkpoint", "restart", "failure"),
    [
        (230.0, 2.4, 600.0, 11_135.0),
        (1_800.0, 60.0, 600.0, 3 * HOUR),
        (600.0, 120.0, 300.0, 1_200.0),
        (900.0, 300.0, 60.0, 900.0),
        (7_000.0, 0.0, 0.0, 86_400.0),
    ],
)
def test_a_job_that_is_played_out_is_as_good_as_expected(
    interval: float, checkpoint: float, restart: float, failure: float
) -> None:
    expected = expected_share(interval, checkpoint, restart, failure)
    played = simulated_share(interval, checkpoint, restart, failure, 100_000, seed=1)
    assert played == pytest.approx(expected, rel=0.02)


@settings(max_examples=200, deadline=None)
@given(
    checkpoint=st.floats(1e-3, 1e5),
    failure=st.floats(1.0, 1e8),
    restart=st.floats(0.0, 1e3),
    factor=st.floats(0.2, 5.0),
)
def test_no_other_interval_is_better(
    checkpoint: float, failure: float, restart: float, factor: float
) -> None:
    interval = best_interval(checkpoint, failure)
    assert 0 < interval <= failure
    best = expected_share(interval, checkpoint, restart, failure)
    assert 0 <= best < 1
    assert expected_share(interval * factor, checkpoint, restart, failure) <= best * (1 + 1e-9)


@pytest.mark.parametrize(("failure", "minutes"), [(24 * HOUR, 117), (6 * HOUR, 57), (15 * MINUTE, 9.1)])
def test_the_interval_is_dalys_in_the_cases_of_his_figures(failure: float, minutes: float) -> None:
    """Figures 3 to 5 of Daly 2006: checkpoints of 5 minutes."""
    assert daly_interval(5 * MINUTE, failure) / MINUTE == pytest.approx(minutes, rel=0.01)
    assert best_interval(5 * MINUTE, failure) == pytest.approx(daly_interval(5 * MINUTE, failure), rel=0.01)


def test_short_checkpoints_make_the_interval_youngs_and_long_ones_the_time_to_a_failure() -> None:
    assert best_interval(1.0, 1e8) == pytest.approx(young_interval(1.0, 1e8), rel=1e-3)
    assert daly_interval(60.0, 10.0) == 10.0
    assert best_interval(60.0, 10.0) == pytest.approx(10.0, rel=0.01)


def goodput_of(plan: Plan, failures: Failures) -> Goodput:
    """The goodput of a job that runs `plan`, with `failures`."""
    kept = plan.run(1e12, failures=failures).goodput
    assert kept is not None
    return kept


@pytest.fixture(scope="module")
def plan() -> Plan:
    return suggest(TINY, world_size=8, global_batch_size=16)


@pytest.mark.parametrize(
    ("engine", "pins", "layer", "end"),
    [
        # FSDP2's fp32 shard is the master copy; Megatron-LM writes bf16 weights, a master and two moments.
        ("bundled", [], 12, 12),
        ("bundled", ["precision=fp32"], 12, 12),
        ("megatron", [], 14, 14),
        # Megatron-LM's gradients in fp32 are no part of a checkpoint.
        ("megatron", ["precision=fp16"], 14, 14),
        ("bundled", ["optimizer=sgd"], 8, 8),
        # Momentum of matrices, Adam for embedding and head.
        ("bundled", ["optimizer=muon"], 8, 12),
    ],
)
def test_a_checkpoint_holds_weights_and_optimizer_once(
    engine: str, pins: list[str], layer: float, end: float
) -> None:
    plan = suggest(TINY, world_size=8, global_batch_size=16, engine=engine, pin=pins)
    ends = TINY.vocab * TINY.hidden * (1 if TINY.tied else 2)
    ends += TINY.max_positions * TINY.hidden * (TINY.position == "learned")
    assert (
        checkpoint_bytes(plan.model, plan.cluster, plan.engine, plan.layout)
        == (TINY.parameters - ends) * layer + ends * end
    )


def test_llama_3_ran_for_more_than_nine_tenths_of_its_time() -> None:
    """arXiv:2407.21783, section 3.3.4: 419 failures in 54 days of 16,384 H100, over 90 % effective."""
    plan = suggest("llama3-405b", world_size=16384, device="h100", global_batch_size=2048)
    hours = 54 * 24 * 16384 / 419
    kept = goodput_of(plan, Failures(hours))
    assert 0.9 < kept.share < 0.96
    assert kept.failure_s == pytest.approx(54 * 24 * HOUR / 419)
    assert kept.checkpoint_bytes == pytest.approx(12 * 405.9e9, rel=0.01)
    # 2,048 nodes of a gigabyte per second.
    assert kept.checkpoint_s == pytest.approx(kept.checkpoint_bytes / 2.048e12)


def test_more_storage_fewer_failures_and_quicker_restarts_leave_more(plan: Plan) -> None:
    base = Failures(100.0, checkpoint_gbps=0.1, restart_seconds=600.0)
    share = goodput_of(plan, base).share
    for better in (
        Failures(200.0, 0.1, 600.0),
        Failures(100.0, 0.2, 600.0),
        Failures(100.0, 0.1, 60.0),
    ):
        assert share < goodput_of(plan, better).share < 1


def test_checkpoints_come_after_whole_steps_and_at_least_one(plan: Plan) -> None:
    kept = goodput_of(plan, Failures(1000.0))
    assert kept.interval_s == pytest.approx(kept.interval_steps * plan.estimate.step_time_s)
    ideal = best_interval(kept.checkpoint_s, kept.failure_s)
    assert abs(kept.interval_s - ideal) <= plan.estimate.step_time_s
    slow = plan.model_copy(update={"estimate": plan.estimate.model_copy(update={"step_time_s": 1e4})})
    assert goodput_of(slow, Failures(1000.0, 1e6)).interval_steps == 1


def test_a_job_that_never_gets_on_ends_in_one_line(plan: Plan) -> None:
    with pytest.raises(
        InputError, match=r"^mtbf_hours 0.1 of 8 devices: one fails every 45.0 s, but a step "
    ) as caught:
        goodput_of(plan, Failures(0.1))
    assert "\n" not in str(caught.value)
    assert expected_share(1.0, 1e6, 1.0, 1.0) == 0.0


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ((0.0,), "mtbf_hours 0: expected hours above 0, such as 50000"),
        ((-1.0,), "mtbf_hours -1: expected hours above 0"),
        ((math.nan,), "mtbf_hours nan: expected hours above 0"),
        ((math.inf,), "mtbf_hours inf: expected hours above 0"),
        ((1e306,), "mtbf_hours 1e+306: expected hours above 0, such as 50000, from 1e-09 to 1e+09"),
        ((1e-320,), "mtbf_hours 9.99989e-321: expected hours above 0"),
        (("5",), "mtbf_hours '5': expected hours above 0"),
        ((None, None, None, 0), "save_interval 0: expected a whole number of steps, such as 500"),
        ((None, None, None, 2.5), "save_interval 2.5: expected a whole number of steps, such as 500"),
        ((None, None, None, None, False, 10, -1), "eval_iters -1: expected a whole number of batches"),
        ((None, None, None, None, False, None, None, 0.0), "data_gbps 0: expected gigabits per second"),
        ((1.0, 1e308), "checkpoint_gbps 1e+308: expected gigabits per second"),
        ((1.0, None, "600"), "restart_seconds '600': expected seconds of at least 0"),
        ((1.0, 0.0), "checkpoint_gbps 0: expected gigabits per second"),
        ((1.0, None, -1.0), "restart_seconds -1: expected seconds of at least 0"),
        ((1.0, None, math.inf), "restart_seconds inf: expected seconds of at least 0"),
    ],
)
def test_failures_that_cannot_be_end_in_one_line(values: tuple[Any, ...], line: str) -> None:
    with pytest.raises(InputError) as caught:
        Failures(*values)
    assert str(caught.value).startswith(line)


def test_evaluation_and_slow_data_lengthen_every_step_by_what_they_take(plan: Plan) -> None:
    steps = plan.run(1e9, failures=Failures(1e9, 1e9, 0.0))
    forward_s = sum(event.end_s - event.start_s for event in plan.timeline().passes if event.kind == "F")
    evaluated = plan.run(1e9, failures=Failures(1e9, 1e9, 0.0, eval_interval=50, eval_iters=10))
    assert evaluated.goodput is not None and steps.days == pytest.approx(steps.training_days, rel=1e-3)
    # Forward seconds are of one data-parallel rank: besides, others only do the last passes of a step.
    assert evaluated.goodput.evaluation_s == pytest.approx(forward_s * 10 / 50, rel=0.2)
    added = evaluated.goodput.evaluation_s / plan.estimate.step_time_s
    assert evaluated.days == pytest.approx(steps.days * (1 + added), rel=1e-4)
    # Tokens of 2 bytes, at half the rate that the steps would read them.
    gbps = plan.estimate.tokens_per_s * 2 * 8 / 1e9 / 2
    assert plan.run(1e9, failures=Failures(1e9, 1e9, 0.0, data_gbps=gbps)).days == pytest.approx(
        2 * steps.days
    )
    with pytest.raises(InputError, match="eval_iters 0: expected a whole number"):
        Failures(eval_iters=0)
    assert Failures(eval_iters=20).eval_batches_per_step == 0.2
    assert Failures(eval_interval=50).eval_batches_per_step == 0.2
    faster = Failures(1e9, 1e9, 0.0, data_gbps=3 * gbps)
    assert plan.run(1e9, failures=faster).days == pytest.approx(steps.days)


def test_a_save_beside_training_is_written_before_the_next_begins(plan: Plan) -> None:
    slow = Failures(1000.0, checkpoint_gbps=0.002)
    waiting, beside = goodput_of(plan, slow), goodput_of(plan, replace(slow, async_save=True))
    assert beside.checkpoint_s == waiting.checkpoint_s == waiting.waits_s > 100 * beside.waits_s
    assert beside.share > waiting.share and beside.interval_s >= beside.checkpoint_s - 1e-9
    given = goodput_of(plan, replace(slow, save_interval=70_000))
    assert given.interval_steps == 70_000 and given.share <= waiting.share


def test_days_come_with_and_without_what_is_assumed_and_every_assumption_is_named(plan: Plan) -> None:
    run = plan.run(1e12)
    whole = run.whole
    assert whole is not None and run.goodput is None and run.days == run.training_days < whole.days
    assert whole.days_high is not None and whole.days_low < whole.days < whole.days_high
    names = ("mtbf_hours", "checkpoint_gbps", "restart_seconds", "eval_interval", "data_gbps")
    assert [name for name in names if any(name in one for one in whole.assumed)] == list(names)
    given = Failures(50_700.0, 8.0, 600.0, 100, False, 100, 1, 1e6)
    counted = plan.run(1e12, failures=given)
    assert counted.whole is not None and counted.whole.assumed == () and counted.days == counted.whole.days
    # Nothing but the step is in doubt then.
    assert counted.whole.days_high == pytest.approx(counted.days_high)
    ends = plan.run(1e12, failures=Failures(29_500.0, 2.0)), plan.run(1e12, failures=Failures(82_000.0, 28.0))
    assert (ends[0].days_high, ends[1].days_low) == pytest.approx((whole.days_high, whole.days_low))


def test_megatrons_save_holds_what_a_node_writes_in_host_memory() -> None:
    """radixark/Megatron-LM pull 61: 744e9 parameters on 16 nodes of 4 GB300, tp 8, pp 4: 650 GB a node."""
    plan = suggest(
        "deepseek-v3",
        world_size=64,
        local_world_size=4,
        device="gb300",
        engine="megatron",
        global_batch_size=64,
        pin=["pp=4", "tp=8", "zero=1", "precision=bf16"],
    )
    memory = checkpoint_memory(plan.model, plan.cluster, plan.engine, plan.layout, plan.estimate)
    assert memory.node_host_bytes is not None
    assert memory.node_host_bytes / plan.model.parameters == pytest.approx(650e9 / 744e9, rel=0.1)


def test_megatrons_resume_makes_the_moments_twice() -> None:
    """NVIDIA/Megatron-LM issue 1746: 20e9 parameters, pp 4, dp 2; 19,128 MiB besides for the moments."""
    model = ModelSpec(name="m", layers=48, hidden=5888, heads=46, vocab=50_000, seq=128)
    plan = suggest(
        model,
        world_size=8,
        device="h100",
        engine="megatron",
        global_batch_size=64,
        pin=["pp=4", "tp=1", "zero=1", "micro_batch_size=1"],
    )
    memory = checkpoint_memory(model, plan.cluster, plan.engine, plan.layout, plan.estimate)
    resting = max(
        stage.total - stage.activations - stage.logits - stage.temporaries - stage.doubt
        for stage in plan.estimate.memory
    )
    assert memory.resume_bytes is not None
    extra = memory.resume_bytes - resting
    assert extra / (model.parameters / 4) == pytest.approx(19_128 * 2**20 / 5e9, rel=0.08)


def test_a_resume_that_does_not_fit_is_said(plan: Plan) -> None:
    full = plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"memory_bytes": 2**20})})
    run = full.run(1e12)
    assert run.whole is not None and run.whole.resume_lacks_bytes > 0
    assert any("more than the device has" in line for line in run_lines(run))
    assert not any("more than the device has" in line for line in run_lines(plan.run(1e12)))
    unknown = suggest(TINY, world_size=8, global_batch_size=16, engine="nanotron").run(1e12)
    assert unknown.whole is not None and unknown.whole.memory.resume_bytes is None
    assert any("with this engine is not known" in line for line in run_lines(unknown))

"""A job that goes on with other ranks: planned anew, at the same global batch."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path

import pytest

import planner
from costmodels.errors import InputError
from planner.options.batch import BatchOptions
from planner.options.parallel import ParallelOptions
from planner.plan import Plan
from runtime import checkpoint
from runtime.job.continuation import (
    PreviousRun,
    change_line,
    keep_batch,
    keep_micro_batch,
    plan_for_ranks,
    previous_run,
)
from runtime.processes.start_variables import RESTARTS_VARIABLE, is_restarted
from runtime.settings.training_options import OutputOptions, TrainingOptions

TRAINING = TrainingOptions()
BALANCED = TrainingOptions(moe_aux_loss_coeff=0.01)


@cache
def plan_of(model: str, world_size: int, *pins: str) -> Plan:
    return planner.suggest(model, world_size=world_size, device="h100", global_batch_size=48, pin=list(pins))


@pytest.mark.parametrize(("before", "after", "local"), [(8, 6, 6), (8, 16, 8), (8, 1, 1)])
def test_other_ranks_get_a_plan_of_the_same_batch(before: int, after: int, local: int) -> None:
    plan = plan_of("gpt2-124m", before, "optimizer=adafactor", "precision=fp16")
    again = plan_for_ranks(plan, after, local, TRAINING)
    layout = again.layout
    assert (layout.world_size, again.cluster.devices_per_node) == (after, local)
    assert (layout.global_batch_size, layout.optimizer, layout.precision) == (48, "adafactor", "fp16")
    assert again.model == plan.model and again.cluster.device == plan.cluster.device and again.fits


def test_other_ranks_round_as_those_before_did() -> None:
    """Formats of sums and of products in 8 bits are none of the usual ones."""
    pins = ("precision=fp8", "fp8_recipe=tensorwise", "fp8_param_gather=True", "gradient_reduction=bf16")
    plan = plan_of("gpt2-124m", 8, *pins, "zero=1")
    names = ("precision", "fp8_recipe", "fp8_param_gather", "gradient_reduction")
    before, after = (
        [getattr(one.layout, name) for name in names] for one in (plan, plan_for_ranks(plan, 4, 4, TRAINING))
    )
    assert before == after == ["fp8", "tensorwise", True, "bf16"]


def test_the_micro_batch_stays_where_a_loss_is_counted_in_it() -> None:
    plan = plan_of("mixtral-8x7b", 32, "mbs=2")
    assert plan_for_ranks(plan, 16, 8, BALANCED).layout.micro_batch_size == 2
    previous = PreviousRun(global_batch_size=48, micro_batch_size=2)
    assert keep_micro_batch(ParallelOptions(), BALANCED, previous).micro_batch_size == "2"
    assert keep_micro_batch(ParallelOptions(micro_batch_size="4"), BALANCED, previous).micro_batch_size == "4"
    assert keep_micro_batch(ParallelOptions(), TRAINING, previous) == ParallelOptions()
    by_sequence = dataclasses.replace(BALANCED, moe_router_load_balancing_type="seq_aux_loss")
    assert keep_micro_batch(ParallelOptions(), by_sequence, previous) == ParallelOptions()


def test_ranks_that_no_layout_suits_are_refused_in_one_line() -> None:
    plan = plan_of("gpt2-124m", 8)
    with pytest.raises(InputError, match=r"12 ranks: world size 12 is not a multiple of local world size 8"):
        plan_for_ranks(plan, 12, 8, TRAINING)
    # 13 divides neither the heads nor the batch, and there are not as many layers.
    with pytest.raises(InputError, match="13"):
        plan_for_ranks(plan, 13, 13, TRAINING)


def test_the_batch_of_the_checkpoint_holds_unless_another_is_asked_for() -> None:
    had = PreviousRun(global_batch_size=48)
    for maximum in (48, 64):
        kept = keep_batch(BatchOptions(max_global_batch_size=maximum), had)
        assert (kept.global_batch_size, kept.max_global_batch_size) == (48, None)
    assert keep_batch(BatchOptions(), had).global_batch_size == 48
    for asked in (BatchOptions(global_batch_size=24), BatchOptions(max_global_batch_size=24)):
        assert keep_batch(asked, had) == asked
    assert keep_batch(BatchOptions(max_global_batch_size=64), None).max_global_batch_size == 64
    assert keep_batch(BatchOptions(max_global_batch_size=64), PreviousRun()).max_global_batch_size == 64


def test_a_change_of_the_layout_is_said_in_one_line() -> None:
    layout = plan_of("gpt2-124m", 8).layout
    now = layout.describe()
    assert change_line(PreviousRun(global_batch_size=48, layout=now), layout, 8) == ""
    assert change_line(PreviousRun(global_batch_size=48, layout="tp=2"), layout, 8) == (
        f"going on with 8 ranks, planned anew: tp=2 -> {now}; global batch 48"
    )
    assert change_line(PreviousRun(global_batch_size=96, layout="tp=2"), layout, 8).endswith(
        "; global batch 48 instead of 96"
    )


def test_a_run_without_a_checkpoint_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert previous_run(OutputOptions()) is None
    assert previous_run(OutputOptions(load=str(tmp_path), save=str(tmp_path))) is None
    assert previous_run(OutputOptions(load=str(tmp_path / "none"), load_or_start=True)) is None
    names = ("TORCHELASTIC_RESTART_COUNT", RESTARTS_VARIABLE, "SLURM_RESTART_COUNT", "JOBSET_RESTART_ATTEMPT")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert not is_restarted()
    for name in names:
        monkeypatch.setenv(name, "1")
        assert is_restarted()
        monkeypatch.delenv(name)


def test_a_run_whose_file_says_nonsense_is_refused(tmp_path: Path) -> None:
    folder = checkpoint.partial_folder(tmp_path, 5)
    folder.mkdir(parents=True)
    model = plan_of("gpt2-124m", 8).model.model_dump(mode="json")
    run = {"iteration": 5, "model": model, "global_batch_size": 48, "layout": "tp=2"}
    checkpoint.publish(tmp_path, 5, run, {})
    found = previous_run(OutputOptions(load=str(tmp_path)))
    assert found == PreviousRun(iteration=5, global_batch_size=48, layout="tp=2")
    for wrong in (0, "many"):
        folder.mkdir()
        checkpoint.publish(tmp_path, 5, json.loads(json.dumps(run)) | {"global_batch_size": wrong}, {})
        with pytest.raises(InputError, match=f"run.json is damaged: global_batch_size '?{wrong}"):
            previous_run(OutputOptions(load=str(tmp_path)))

"""Layouts that flags of a job rule out are neither proposed nor accepted as a plan."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest

from costmodels.errors import InputError
from costmodels.spec.layout import SPLIT_BACKWARD
from planner import explain, search
from planner.options.batch import BatchOptions
from runtime.job.continuation import plan_for_ranks
from runtime.settings.checks import check_training
from runtime.settings.job_rules import check_rules, job_rules, reachable_batch
from runtime.settings.training_options import DataOptions, TrainingOptions
from tests.support.layouts import layouts_of, parse_layout
from tests.support.models import MODELS

MODEL = MODELS["llama"]
COMPILE, MASK = TrainingOptions(compile=True), DataOptions(reset_attention_mask=True)
JOB: dict[str, Any] = {"world_size": 4, "max_global_batch_size": 16, "device": "h100"}


def test_flags_that_are_not_given_rule_nothing_out() -> None:
    assert job_rules(TrainingOptions(), DataOptions(), None) == ()
    assert [rule.name for rule in job_rules(COMPILE, MASK)] == [
        "compile_schedule",
        "reset_attention_mask",
    ]


def test_compiled_jobs_get_no_schedule_that_splits_backward() -> None:
    result = search(MODEL, pin=["pp=2"], rules=job_rules(COMPILE), **JOB)
    schedules = {layout.schedule for layout in layouts_of(result.table)}
    assert schedules == {"1f1b", "interleaved"}
    assert result.illegal["compile_schedule"] > 0


def test_masks_of_documents_leave_no_ring() -> None:
    free, masked = (search(MODEL, pin=["cp=2"], rules=rules, **JOB) for rules in ((), job_rules(MASK)))
    every, some = (
        {layout.context_parallel_form for layout in layouts_of(each.table)} for each in (free, masked)
    )
    assert every - some == {"ring"}


@pytest.mark.parametrize("ramp", [(4, 4, 100), (4, 2, 100), (8, 8, 100), (16, 3, 100), (1, 5, 9)])
def test_the_ramp_allows_what_can_run_every_size_of_it(ramp: tuple[int, int, int]) -> None:
    options = TrainingOptions(rampup_batch_size=ramp)
    every, ramped = (search(MODEL, rules=rules, **JOB) for rules in ((), job_rules(options)))
    start, increment, _ = ramp

    def runs(layout: Any, size: int) -> bool:
        unit = layout.micro_batch_size * layout.data_parallel
        count = size // unit
        if size % unit or count < layout.pipeline_parallel:
            return False
        if layout.schedule in ("interleaved", "interleaved_zb"):
            return count % layout.pipeline_parallel == 0
        return layout.schedule == "1f1b" or count >= 2 * layout.pipeline_parallel

    def climbs(layout: Any) -> bool:
        full = layout.global_batch_size
        sizes = range(start, full + 1, increment)
        return full in sizes and all(runs(layout, size) for size in sizes)

    def enumerated(result: Any) -> list[Any]:
        return layouts_of(result.table)[: result.legal - result.solutions]

    assert enumerated(ramped) == [layout for layout in enumerated(every) if climbs(layout)]


def test_the_largest_batch_that_the_ramp_reaches_is_the_maximum() -> None:
    options = TrainingOptions(rampup_batch_size=(2, 6, 100))
    batch = reachable_batch(BatchOptions(max_global_batch_size=16), DataOptions(), options)
    assert batch.max_global_batch_size == 14
    assert (
        reachable_batch(BatchOptions(max_global_batch_size=16), TrainingOptions()).max_global_batch_size == 16
    )
    result = search(MODEL, rules=job_rules(options), **{**JOB, "max_global_batch_size": 14})
    assert {plan.layout.global_batch_size for plan in result.plans(5)} <= {2, 8, 14}


def test_plans_of_the_search_pass_the_check_of_the_job() -> None:
    flags = [
        (TrainingOptions(compile=True), DataOptions()),
        (TrainingOptions(rampup_batch_size=(4, 4, 60)), MASK),
        (TrainingOptions(compile=True, rampup_batch_size=(8, 8, 60)), MASK),
    ]
    for (training, data), pin in itertools.product(flags, (["pp=2"], ["cp=2"], [])):
        for plan in search(MODEL, pin=pin, rules=job_rules(training, data), **JOB).plans(10):
            check_training(plan, training, data)


@pytest.mark.parametrize(
    ("layout", "training", "data", "words"),
    [
        ("pp=2,schedule=zbv,gbs=8", COMPILE, None, "--compile: schedule zbv splits backward"),
        ("cp=2,cp_form=ring", TrainingOptions(), MASK, "--reset-attention-mask: context_parallel_form ring"),
    ],
)
def test_a_given_layout_is_refused_in_the_same_words(
    layout: str, training: Any, data: Any, words: str
) -> None:
    found = parse_layout(f"{layout},dp=2", MODEL)
    with pytest.raises(InputError, match=words):
        check_rules(job_rules(training, data), MODEL, found)
    verdict = explain(MODEL, layout=found.describe(), rules=job_rules(training, data), what_if=False, **JOB)
    assert words in verdict.verdicts[0].reason


def test_a_job_that_goes_on_with_other_ranks_keeps_its_rules() -> None:
    plan = search(MODEL, pin=["pp=2", "schedule=1f1b"], **{**JOB, "max_global_batch_size": 8}).plans(1)[0]
    for world in (4, 8):
        again = plan_for_ranks(plan, world, world, COMPILE, MASK)
        assert again.layout.schedule not in SPLIT_BACKWARD
        check_training(again, COMPILE, MASK)


@pytest.mark.slow
def test_pasted_flags_cut_the_space_of_suggest_and_explain(planner_command: Any) -> None:
    words = ["--model", "llama2-7b", "--world-size", "8", "--global-batch-size", "32", "--json"]
    code, out, err = planner_command("suggest", *words, "--pin", "pp=2", "--compile", "--lr", "0.1")
    found = json.loads(out)
    assert code == 0 and found["rejected"]["compile_schedule"] > 0
    assert "not used for planning: --lr" in err and "--compile" not in err
    _, out, err = planner_command("suggest", *words, "--engine", "megatron", "--compile")
    assert "compile_schedule" not in json.loads(out)["rejected"] and "not used for planning: --compile" in err
    code, out, _ = planner_command(
        "explain", *words, "--no-what-if", "--pin", "cp=2", "--reset-attention-mask"
    )
    assert code == 0 and json.loads(out)["rejected"]["reset_attention_mask"] > 0
    code, _, err = planner_command("suggest", *words, "--rampup-batch-size", "0", "1", "1")
    assert code == 2 and "three whole numbers above 0" in err


def test_the_output_names_the_engine_that_was_taken(planner_command: Any) -> None:
    words = ["--model", "llama2-7b", "--world-size", "8", "--global-batch-size", "32", "--top", "1"]
    code, out, _ = planner_command("suggest", *words, "--device", "ascend-910b", "--json")
    found = json.loads(out)
    assert code == 0 and found["engine"] == "mindspeed"
    assert (
        "no engine given: mindspeed, as the runtime of this package has not run on ascend-910b"
        in found["assumed"]
    )
    assert np.isfinite(found["plans"][0]["estimate"]["step_time_s"])

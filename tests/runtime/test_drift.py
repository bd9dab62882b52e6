"""At the end of a run that its prediction missed: which term, and what to do."""

from __future__ import annotations

import pytest

from planner import Plan, suggest
from planner.history.step_parts import StepParts, predicted_parts
from runtime.job.comparison import comparison
from runtime.job.drift import CALIBRATED, FASTER, UNCALIBRATED
from runtime.job.measurement import Measurement


@pytest.fixture(scope="module")
def plan() -> Plan:
    return suggest(
        model="llama3-8b", world_size=8, device="a100-80g", global_batch_size=32, pin=["tp=8", "zero=0"]
    )


def parts_of(plan: Plan, **changed: float) -> StepParts:
    """The predicted parts, some of them so many times as long."""
    found = predicted_parts(plan.estimate.time)
    found = {name: changed.get(name, 1.0) * each for name, each in found.items()}
    return StepParts(
        **{name: found[name] for name in found if name != "communication"},
        collectives={"all_reduce": found["communication"]},
    )


def told(plan: Plan, parts: StepParts | None, ratio: float) -> str:
    peak = max(stage.allocated for stage in plan.estimate.memory)
    figures = Measurement(ratio * plan.estimate.step_time_s, round(peak), parts)
    (line,) = [line for line in comparison(plan, figures) if line.startswith("the step")]
    return line


@pytest.mark.parametrize(
    ("term", "words"),
    [
        ("products", "most of it is GEMMs"),
        ("attention", "most of it is attention"),
        ("host_gaps", "most of it is the host, which the device waits for"),
        ("communication", "most of it is communication, above all all-reduce of tensor parallelism"),
    ],
)
def test_the_term_that_grew_is_named_with_what_to_do(plan: Plan, term: str, words: str) -> None:
    line = told(plan, parts_of(plan, **{term: 60.0}), 4.0)
    assert "the step is slower than the predicted range" in line
    assert words in line and UNCALIBRATED[term] in line


def test_of_a_calibrated_device_the_advice_is_another(plan: Plan) -> None:
    device = plan.cluster.device.model_copy(update={"constants": {"planner": {}}})
    measured = plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"device": device})})
    assert CALIBRATED["products"] in told(measured, parts_of(plan, products=9.0), 4.0)


def test_a_faster_step_names_what_was_predicted_too_slow(plan: Plan) -> None:
    line = told(plan, parts_of(plan, products=0.01), 0.2)
    assert "faster than the predicted range" in line
    assert "GEMMs" in line and FASTER in line


def test_without_parts_the_general_advice_stays_and_in_the_range_none(plan: Plan) -> None:
    assert "look for a slow rank" in told(plan, None, 9.0)
    assert told(plan, parts_of(plan), 1.0).startswith("the step is in the predicted range")

"""All answers say the same of a layout's memory; what a search drops as too large is never said to fit."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import evaluate, search
from planner.explanation.outcome import outcome_of
from planner.inputs.pins import degrees_of
from planner.ranking.result import SearchResult

QUESTIONS = (
    ("gpt2-xl", 4, "a100-40g", 24, None),
    ("gpt2-xl", 8, "v100-32g", 64, None),
    ("llama3-8b", 8, "h100", 16, None),
    ("llama3-8b", 16, "a100-40g", 64, 8.0),
    ("qwen1.5-moe-a2.7b", 8, "a100-80g", 32, None),
    ("gemma-2-2b", 8, "a100-40g", 32, 2.0),
)
"""Model, devices, kind of device, largest batch, and memory that is set aside, in GiB."""


@cache
def searched(question: int) -> SearchResult:
    """The search of one of `QUESTIONS`."""
    model, world_size, device, batch, margin = QUESTIONS[question]
    return search(
        model, world_size=world_size, device=device, max_global_batch_size=batch, memory_margin_gib=margin
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, len(QUESTIONS) - 1), st.integers(0, 2**31))
def test_search_evaluate_and_explain_agree_on_memory(question: int, number: int) -> None:
    model, _, device, _, margin = QUESTIONS[question]
    result = searched(question)
    row = number % len(result.table)
    layout, limit = result.table.layout(row), result.problem.cluster.memory_bytes
    own = evaluate(layout, model=model, device=device, memory_margin_gib=margin)
    # The upper end of the range decides.
    assert own.peak_memory_low_bytes <= own.peak_memory_bytes
    assert max(stage.total for stage in own.memory) == own.peak_memory_bytes
    assert (own.peak_memory_bytes <= limit) == bool((result.fitting == row).any())
    verdict = outcome_of(result, degrees_of(layout))
    assert verdict.plan is not None
    again = evaluate(verdict.plan.layout, model=model, device=device, memory_margin_gib=margin)
    assert verdict.plan.estimate.peak_memory_bytes == again.peak_memory_bytes
    assert (verdict.outcome == "too_big") == (again.peak_memory_bytes > limit)
    if verdict.outcome == "too_big":
        assert own.peak_memory_bytes > limit and "lacks -" not in verdict.reason


@pytest.mark.parametrize(("device", "written"), [("v100-32g", True), ("t4", True), ("a100-80g", False)])
def test_megatron_keeps_scores_where_no_flash_attention_runs(device: str, written: bool) -> None:
    """arXiv:2205.05198, equation 2: softmax, dropout's mask and its output, 5 a s^2 b bytes a layer."""
    job: dict[str, Any] = {"model": "gpt2-xl", "device": device, "engine": "megatron", "precision": "fp16"}
    layout = "tp=1 pp=1 dp=8 zero=1 mbs=2 x 4"
    kept, again = (
        evaluate(f"{layout} recompute={kind}", **job).memory[0].activations for kind in ("none", "selective")
    )
    scores = 5 * 25 * 1024**2 * 2 * 48 if written else 0
    # The layer whose backward runs has them in either case.
    assert kept - again == pytest.approx(scores * 47 / 48, rel=0.01, abs=0.02e9)

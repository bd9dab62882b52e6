"""Jobs in small: legal, of the same form, and no larger than asked for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.catalogue import load_model
from costmodels.spec.layout import Layout
from costmodels.spec.table import LayoutTable
from planner import Plan
from planner.formats.scaling import DEGREES, scaled_down
from planner.space.rules import RULES
from tests.planner.test_exports import plans


def broken(model: Any, layout: Layout) -> list[str]:
    """The rules of the runtime's layouts that one breaks."""
    table = LayoutTable.one(layout)
    rules = [rule for rule in RULES if not rule.redundant]
    return [rule.message(model, table) for rule in rules if bool(rule.broken(model, table))]


@given(plan=plans("bundled"), ranks=st.integers(1, 16))
def test_a_job_in_small_is_legal_and_has_the_form(plan: Plan, ranks: int) -> None:
    small = scaled_down(plan.model, plan.layout, ranks)
    assert small.layout.world_size <= ranks
    assert not broken(small.model, small.layout)
    for name in DEGREES:
        assert getattr(small.layout, name) <= min(2, getattr(plan.layout, name))
    if ranks >= 16:
        for name in (*DEGREES, "expert_parallel"):
            assert (getattr(small.layout, name) > 1) == (getattr(plan.layout, name) > 1)
        same = ("recompute", "recompute_modules", "schedule", "zero_stage", "offload_activations")
        for name in (*same, "offload_optimizer", "sequence_parallel", "context_parallel_form"):
            assert getattr(small.layout, name) == getattr(plan.layout, name)
    assert small.model.parameters < 8_000_000


@pytest.mark.parametrize("name", ["llama3-70b", "mixtral-8x7b", "deepseek-v3", "qwen3-30b-a3b", "gpt2-xl"])
def test_published_models_have_small_ones(name: str) -> None:
    model = load_model(name)
    layout = Layout(
        tensor_parallel=4,
        sequence_parallel=True,
        pipeline_parallel=4,
        data_parallel=8,
        zero_stage=1,
        layers_per_stage=tuple(model.layers // 4 + (stage < model.layers % 4) for stage in range(4)),
        global_batch_size=64,
    )
    small = scaled_down(model, layout, 8)
    assert not broken(small.model, small.layout) and small.layout.world_size == 8
    assert (small.model.experts > 0) == (model.experts > 0)
    uneven = len(set(layout.layers_per_stage)) > 1
    assert (len(set(small.layout.layers_per_stage)) > 1) == uneven

"""Notes on plans, besides their figures."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from planner.api import suggest
from planner.options.parallel import ParallelOptions
from planner.plan import Plan
from planner.service.plan_notes import expert_island_notes, needs_head_room, optimizer_notes
from runtime.settings.plan_notes import expert_balance_notes
from runtime.settings.training_options import TrainingOptions


@cache
def planned(model: str, *pins: str, world_size: int = 64, device: str = "h200") -> Plan:
    return suggest(model, world_size=world_size, device=device, global_batch_size=64, pin=list(pins))


@pytest.mark.parametrize(
    ("model", "pin", "flags", "noted"),
    [
        ("mixtral-8x7b", "ep=8", {}, True),
        ("mixtral-8x7b", "ep=8", {"moe_z_loss_coeff": 1e-3}, True),
        ("mixtral-8x7b", "ep=8", {"moe_aux_loss_coeff": 1e-2}, False),
        (
            "mixtral-8x7b",
            "ep=8",
            {"moe_aux_loss_coeff": 1e-2, "moe_router_load_balancing_type": "none"},
            True,
        ),
        ("mixtral-8x7b", "ep=1", {}, False),
        ("llama2-7b", "tp=2", {}, False),
    ],
)
def test_experts_that_nothing_balances_are_noted(
    model: str, pin: str, flags: dict[str, Any], noted: bool
) -> None:
    notes = list(expert_balance_notes(planned(model, pin), TrainingOptions(**flags)))
    assert len(notes) == noted
    assert all("25 % more rows" in note and "--moe-aux-loss-coeff" in note for note in notes)


def test_biases_and_capacities_bound_the_load() -> None:
    plan = planned("mixtral-8x7b", "ep=8")
    for changes, head_room in (({"expert_bias": True}, True), ({"capacity_factor": 1.0}, False)):
        router = plan.model.router.model_copy(update=changes)
        other = plan.model_copy(update={"model": plan.model.model_copy(update={"router": router})})
        assert needs_head_room(other) is head_room
        assert not list(expert_balance_notes(other, TrainingOptions()))


def test_reused_parameters_are_noted_where_zero_would_save_more() -> None:
    asked = ParallelOptions(reuse_fp32_param=True, bf16=True)
    whole = planned("gpt2-124m", "zero=0", "dp=8")
    alone = planned("gpt2-124m", "dp=1", "cp=1", world_size=4)
    (note,) = optimizer_notes(whole, asked)
    assert "--use-distributed-optimizer" in note
    for plan, options in (
        (planned("gpt2-124m", "zero=1"), asked),
        (alone, asked),
        (whole, ParallelOptions()),
    ):
        assert not list(optimizer_notes(plan, options))


@pytest.mark.parametrize(
    ("device", "degree", "world_size", "noted"),
    [
        ("h100", 8, 64, False),
        ("h100", 16, 64, True),
        ("gb200", 64, 64, False),
        # The second group lies across the border of racks.
        ("gb200", 64, 128, True),
        ("gb200", 8, 144, False),
        ("ascend-910c", 64, 128, False),
        ("h100", 1, 64, False),
    ],
)
def test_experts_beyond_the_fast_link_are_noted(
    device: str, degree: int, world_size: int, noted: bool
) -> None:
    pins = (f"ep={degree}", "etp=1", *(("tp=2",) if world_size > 64 else ()))
    plan = planned("qwen3-30b-a3b", *pins, world_size=world_size, device=device)
    notes = list(expert_island_notes(plan))
    assert len(notes) == noted
    assert all(f"on {degree} devices and a fast-link domain has" in note for note in notes)

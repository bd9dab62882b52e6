"""Notes on a plan that a job executes with given flags of training. They need no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from planner.plan import Plan
from planner.service.plan_notes import head_room, needs_head_room

if TYPE_CHECKING:
    from runtime.settings.training_options import TrainingOptions

NO_BALANCE = "without --moe-aux-loss-coeff or expert biases nothing balances routers"


def expert_balance_notes(plan: Plan, training: TrainingOptions) -> Iterator[str]:
    """A note that `training` may exceed a plan's memory or time, as nothing balances the experts."""
    balanced = training.moe_aux_loss_coeff and training.moe_router_load_balancing_type != "none"
    if needs_head_room(plan) and not balanced and not plan.model.router.expert_bias:
        yield f"{head_room(plan)}; {NO_BALANCE}"

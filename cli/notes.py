"""What `planner suggest` and `planner launch` say about plans besides their figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from costmodels.shapes import PEAK_LOAD
from planner.flags import arguments, flag_names
from planner.inputs import DEFAULT_ENGINE
from planner.options import ParallelOptions
from planner.plan import Plan
from runtime.settings.job_rules import BY_FLAG

if TYPE_CHECKING:
    from runtime.settings.options import TrainingOptions

HEAD_ROOM = (
    f"experts are dropless: the fullest device may take in {100 * (PEAK_LOAD - 1):.0f} % more rows than the "
    "mean, and memory is planned for that"
)
UNBALANCED = "without --moe-aux-loss-coeff or expert biases nothing balances routers"


def needs_head_room(plan: Plan) -> bool:
    """Whether devices have some of the experts each, and take in all tokens that choose them."""
    spread = plan.model.moe_layers > 0 and plan.layout.expert_parallel > 1
    return spread and not plan.model.router.capacity_factor


def unbalanced_experts(plan: Plan, training: TrainingOptions) -> Iterator[str]:
    """Of a plan that `training` may not keep to, because its tokens choose experts as they like."""
    balanced = training.moe_aux_loss_coeff and training.moe_router_load_balancing_type != "none"
    if needs_head_room(plan) and not balanced and not plan.model.router.expert_bias:
        yield f"{HEAD_ROOM}; {UNBALANCED}"


def not_used(
    unused: Any, what: str, heeded: Container[str] = BY_FLAG, also: Iterable[str] = ()
) -> Iterator[str]:
    """Flags of other commands, and `also` those, that change nothing of `what`; the fields `heeded` do."""
    given: list[str] = []
    if unused is not None:
        words = arguments(unused)
        names = {flag_names(field)[0]: field.name for field in dataclasses.fields(unused)}
        given = [name for name, field in names.items() if name in words and field not in heeded]
    given += also
    if given:
        yield f"not used for {what}: {', '.join(given)}"


def not_planned_with(unused: Any, parallel: ParallelOptions, engine: str) -> Iterator[str]:
    """Flags of other commands that rule nothing out, and what only this package's runtime does anyway."""
    own = engine == DEFAULT_ENGINE
    return not_used(unused, "planning", BY_FLAG if own else (), () if own else parallel.given_accepted())


def whole_optimizer(plan: Plan, parallel: ParallelOptions) -> Iterator[str]:
    """Of a plan without ZeRO that was to save memory."""
    layout = plan.layout
    replicas = layout.data_parallel * layout.context_parallel
    if parallel.reuse_fp32_param and layout.zero_stage == 0 and replicas > 1:
        yield (
            "--reuse-fp32-param saves nothing here; --use-distributed-optimizer splits the optimizer's state "
            f"over {replicas} devices"
        )

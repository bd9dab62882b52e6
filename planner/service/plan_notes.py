"""Notes on a plan: the assumptions behind its figures, and changes that would lower them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from costmodels.errors import InputError
from costmodels.layers.shapes import peak_load
from costmodels.spec.record import GIB
from planner.inputs.engine import DEFAULT_ENGINE
from planner.inputs.trained_here import PRECISIONS, check_model
from planner.options.parallel import ParallelOptions
from planner.plan import Plan
from planner.problem import Problem


def head_room(plan: Plan) -> str:
    """A note on the memory that is reserved for uneven experts, where each device has a part of the
    experts."""
    more = 100 * (peak_load(plan.model, plan.layout.expert_parallel) - 1)
    return (
        f"experts are dropless: the fullest device may take in {more:.0f} % more rows than the mean, and "
        "memory is planned for that"
    )


def needs_head_room(plan: Plan) -> bool:
    """Return whether each device has a part of the experts and accepts all tokens routed to them."""
    spread = plan.model.moe_layers > 0 and plan.layout.expert_parallel > 1
    return spread and not plan.model.router.capacity_factor


def headroom_notes(plan: Plan) -> Iterator[str]:
    """A note on a best plan that leaves less free memory than the user asked for."""
    memory = plan.cluster.memory_bytes
    asked, left = plan.preference.headroom_bytes(memory), memory - plan.estimate.peak_memory_bytes
    if plan.fits and plan.preference.asks_headroom and left < asked:
        yield (
            f"headroom of {asked / GIB:.1f} GiB: the plan leaves {left / GIB:.1f} GiB, and no plan "
            "within the estimate's error of the fastest leaves as much"
        )


def headroom_notes_of_sizes(plans: Mapping[int, Plan]) -> Iterator[str]:
    """One note on the best plans of several world sizes that leave less free memory than the user asked
    for."""
    short = {size: plan for size, plan in plans.items() if any(headroom_notes(plan))}
    if not short:
        return
    left = [plan.cluster.memory_bytes - plan.estimate.peak_memory_bytes for plan in short.values()]
    plan = next(iter(short.values()))
    asked = plan.preference.headroom_bytes(plan.cluster.memory_bytes) / GIB
    least, most = (f"{end(left) / GIB:.1f}" for end in (min, max))
    which = ", ".join(map(str, short))
    yield (
        f"headroom of {asked:.1f} GiB: with {which} devices the plan leaves "
        f"{least if least == most else f'{least} to {most}'} GiB, and no plan within the estimate's "
        "error of the fastest leaves as much"
    )


def expert_island_notes(plan: Plan) -> Iterator[str]:
    """A note on a plan that spreads the experts of a layer over several fast-link domains."""
    layout = plan.layout
    ranks = layout.expert_parallel * layout.expert_tensor_parallel
    joined = min(part.joined for part in plan.cluster.parts or (plan.cluster,))
    lies_across = plan.cluster.world_size > joined and (ranks > joined or joined % ranks > 0)
    if plan.model.moe_layers and layout.expert_parallel > 1 and lies_across:
        whose = "tokens" if ranks > joined else "some tokens"
        yield (
            f"the experts of a layer are on {ranks} devices and a fast-link domain has {joined}: {whose} go "
            "to them over the network"
        )


def optimizer_notes(plan: Plan, parallel: ParallelOptions) -> Iterator[str]:
    """A note on a plan without ZeRO whose optimizer was chosen to save memory."""
    layout = plan.layout
    replicas = layout.data_parallel * layout.context_parallel
    if parallel.reuse_fp32_param and layout.zero_stage == 0 and replicas > 1:
        yield (
            "--reuse-fp32-param saves nothing here; --use-distributed-optimizer splits the optimizer's state "
            f"over {replicas} devices"
        )


def training_notes(problem: Problem) -> Iterator[str]:
    """Notes on a problem for this package's engine whose plans the runtime could not train."""
    if problem.engine.name != DEFAULT_ENGINE:
        return
    try:
        check_model(problem.model)
    except InputError as error:
        yield str(error)
    if problem.precision not in PRECISIONS:
        yield (
            f"precision {problem.precision}: the runtime does not train in it; it computes in "
            f"{' or '.join(PRECISIONS)}"
        )

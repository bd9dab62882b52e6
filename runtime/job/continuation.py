"""A new plan for a job that continues on other ranks, with the same global batch and so the same losses."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from costmodels import Layout
from costmodels.errors import InputError
from costmodels.spec.hardware import Cluster
from planner.inputs.pins import Pins
from planner.options.batch import BatchOptions
from planner.options.flags import one_line
from planner.options.parallel import ParallelOptions
from planner.plan import Plan
from runtime import checkpoint
from runtime.job.job_folders import begins_anew, iteration_of
from runtime.settings.job_rules import job_rules
from runtime.settings.training_options import OutputOptions, TrainingOptions

if TYPE_CHECKING:
    from runtime.train.trainer import Trainer


class PreviousRun(BaseModel):
    """The batch and the layout of the run that wrote a checkpoint."""

    model_config = ConfigDict(extra="ignore")

    iteration: int = 0
    """The last iteration that the run trained."""
    global_batch_size: int | None = Field(default=None, ge=1)
    micro_batch_size: int | None = Field(default=None, ge=1)
    layout: str = "another layout"


def run_state(plan: Plan, trainer: Trainer) -> dict[str, Any]:
    """The entries of run.json with which a job on other ranks continues in the same way."""
    layout = plan.layout
    state: dict[str, Any] = {
        "global_batch_size": layout.global_batch_size,
        "micro_batch_size": layout.micro_batch_size,
        "layout": layout.describe(),
    }
    if trainer.guard is not None:
        state["step_guard"] = trainer.guard.state()
    return state


def previous_run(output: OutputOptions) -> PreviousRun | None:
    """The earlier run that a job with these flags continues; None for a new run.

    Raises `InputError` when its checkpoint is damaged or missing.
    """
    if output.load is None:
        return None
    iteration = iteration_of(output)
    if iteration is None or begins_anew(output, iteration):
        return None
    folder = checkpoint.iteration_folder(output.load, iteration)
    try:
        return PreviousRun.model_validate({**checkpoint.read_run(folder).run_state(), "iteration": iteration})
    except ValidationError as error:
        raise InputError(f"{folder / checkpoint.RUN_FILE} is damaged: {one_line(error)}") from None


def keep_batch(batch: BatchOptions, previous: PreviousRun | None) -> BatchOptions:
    """The options of a continued run with its earlier batch, unless they ask for another batch or a lower
    maximum."""
    had = None if previous is None else previous.global_batch_size
    if had is None or batch.global_batch_size is not None:
        return batch
    if batch.max_global_batch_size is not None and batch.max_global_batch_size < had:
        return batch
    return dataclasses.replace(batch, global_batch_size=had, max_global_batch_size=None)


def keep_micro_batch(
    parallel: ParallelOptions, training: TrainingOptions, previous: PreviousRun | None
) -> ParallelOptions:
    """The options of a continued run; the microbatch stays the same if a balancing loss is computed per
    microbatch."""
    had = None if previous is None else previous.micro_batch_size
    if had is None or not counts_micro_batches(training) or parallel.micro_batch_size is not None:
        return parallel
    return dataclasses.replace(parallel, micro_batch_size=str(had))


def counts_micro_batches(training: TrainingOptions) -> bool:
    """Return whether losses depend on the size of the microbatch."""
    return training.moe_router_load_balancing_type == "aux_loss" and training.moe_aux_loss_coeff > 0


def plan_for_ranks(
    plan: Plan, world_size: int, local_world_size: int, training: TrainingOptions, data: object = None
) -> Plan:
    """The best plan for other ranks of the same devices that computes the same losses as `plan`,
    and that flags of `training` and `data` can run.

    Raises `InputError` when there is none.
    """
    from planner import advice  # Few jobs are planned anew.
    from planner.inputs.batch import Batch
    from planner.problem import Problem
    from planner.ranking.ranking import rank

    cluster, layout = plan.cluster, plan.layout
    if cluster.parts:
        raise InputError(
            f"the plan is for {cluster.world_size} devices of two kinds, but {world_size} ranks were "
            "started; plan again for these"
        )
    changes = {"world_size": world_size, "devices_per_node": min(local_world_size, world_size)}
    values = {name: getattr(cluster, name) for name in Cluster.model_fields} | changes
    if cluster.island is not None and _splits(cluster.island, changes["devices_per_node"]):
        values["island"] = None
    try:
        rest = Cluster.model_validate(values)
    except ValidationError as error:
        raise InputError(f"{world_size} ranks: {one_line(error)}") from None
    problem = Problem(
        model=plan.model,
        cluster=rest,
        engine=plan.engine,
        batch=Batch(layout.global_batch_size),
        precision=layout.precision,
        pins=_kept(layout, training, bool(plan.model.moe_layers)),
        objective=plan.objective,
        preference=plan.preference,
        rules=job_rules(training, data),
    )
    started = time.perf_counter()
    space = problem.space()
    if not len(space.table):
        raise advice.no_legal_layout(problem)
    result = rank(problem, space, started, offload=True)
    if result.best is None:
        raise advice.no_layout_fits(result)
    return result.plan(0)


def _splits(island: int, node: int) -> bool:
    return bool(max(island, node) % min(island, node))


def _kept(layout: Layout, training: TrainingOptions, has_experts: bool) -> Pins:
    """Pins of all fields on which the losses depend."""
    pins: Pins = {
        "optimizer": layout.optimizer,
        "muon_mode": layout.muon_mode,
        "gradient_reduction": layout.gradient_reduction,
        "fp8_recipe": layout.fp8_recipe,
        "fp8_param_gather": layout.fp8_param_gather,
    }
    if has_experts and counts_micro_batches(training):
        pins["micro_batch_size"] = layout.micro_batch_size
    return pins


def change_line(previous: PreviousRun, layout: Layout, world_size: int) -> str:
    """A line on the changed layout of a continued run; empty when the layout is the same."""
    now = layout.describe()
    if previous.layout == now:
        return ""
    batch = f"global batch {layout.global_batch_size}"
    if previous.global_batch_size not in (None, layout.global_batch_size):
        batch += f" instead of {previous.global_batch_size}"
    return f"going on with {world_size} ranks, planned anew: {previous.layout} -> {now}; {batch}"

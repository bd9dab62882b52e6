"""Checks that need neither torch nor ranks: what can be refused before a job starts."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

from costmodels import Layout, ModelSpec
from costmodels.errors import InputError
from planner.inputs import DEFAULT_ENGINE
from planner.plan import Plan
from planner.rules import first_illegal
from runtime.batch_ramp import check_ramp
from runtime.options import TrainingOptions

PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
"""Number formats that the runtime computes in."""


TRAINED_SCALINGS = ("linear", "llama3", "yarn")
"""Kinds of rotary scaling that the runtime computes."""


def check_model(spec: ModelSpec) -> None:
    """Raise `InputError` when `spec` needs what the runtime does not build."""
    scaling = spec.rope_scaling
    if spec.position == "rope" and scaling is not None and scaling.kind not in TRAINED_SCALINGS:
        raise InputError(
            f"model {spec.name}: the runtime does not train {scaling.kind} rope scaling; it trains "
            f"{', '.join(TRAINED_SCALINGS)}"
        )


def check_job(spec: ModelSpec, layout: Layout, world_size: int) -> None:
    """Raise `InputError` when `layout` does not split `spec` over `world_size` ranks, or cannot be run."""
    check_model(spec)
    if layout.world_size != world_size:
        raise InputError(
            f"the plan is for world size {layout.world_size}, but this job's is {world_size}; "
            f"start {layout.world_size} ranks or plan again for {world_size}"
        )
    if layout.precision not in PRECISIONS:
        raise InputError(
            f"precision {layout.precision}: the runtime computes in {' or '.join(PRECISIONS)}; "
            "pin one of them"
        )
    broken = first_illegal(spec, layout)
    if broken is not None:
        raise InputError(broken)


def check_plan(plan: Plan, world_size: int) -> None:
    """Raise `InputError` when `plan` is not one that the runtime executes on `world_size` ranks."""
    if plan.engine.name != DEFAULT_ENGINE:
        raise InputError(
            f"the plan was made for engine {plan.engine.name}, and what trains here is {DEFAULT_ENGINE}; "
            "plan again without --engine"
        )
    check_job(plan.model, plan.layout, world_size)


def check_training(plan: Plan, training: TrainingOptions) -> None:
    """Raise `InputError` when `training` asks for what the plan's layout does not do."""
    training.check_optimizer(plan.layout)
    training.compiles(plan.layout, on_gpu=False)
    check_ramp(training.batches(plan.layout), plan.model, plan.layout)


def check_timeout(minutes: float) -> None:
    """Raise `InputError` when a collective would have no time."""
    if not 0 < minutes < math.inf:
        raise InputError(f"--distributed-timeout-minutes {minutes}: must be positive, such as 10")


def check_folder(folder: str | Path, flag: str) -> Path:
    """Create `folder` if need be and try to write in it; `InputError` names `flag` if that fails."""
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise InputError(
            f"{flag} {folder}: cannot write there ({error.strerror}); give a writable folder"
        ) from error
    return path

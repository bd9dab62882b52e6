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

PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
"""Number formats that the runtime computes in."""


def check_model(spec: ModelSpec) -> None:
    """Raise `InputError` when `spec` needs an architecture that the runtime does not build."""
    missing = [
        name
        for name, needed in (
            ("mixture of experts", bool(spec.experts)),
            ("latent attention", spec.latent_attention is not None),
            ("query/key norms", spec.qk_norm),
            (f"{spec.rope_scaling} rope scaling", bool(spec.rope_scaling)),
        )
        if needed
    ]
    if missing:
        raise InputError(
            f"model {spec.name}: the runtime does not train {' and '.join(missing)}; "
            "it trains GPT-2/3 and Llama blocks"
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
    for name in ("expert_parallel", "expert_tensor_parallel"):
        if getattr(layout, name) > 1:
            raise InputError(f"{name} {getattr(layout, name)}: the runtime runs only 1")
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

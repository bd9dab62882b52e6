"""Checks before a job starts, which need neither torch nor ranks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from costmodels import Layout, ModelSpec
from costmodels.catalogue.local_machine import CONTEXT_BYTES, available_cores, available_memory, torch_build
from costmodels.errors import InputError
from costmodels.spec.layout import Fp8Recipe
from costmodels.spec.record import GIB
from planner.inputs.engine import DEFAULT_ENGINE, engines_on
from planner.inputs.trained_here import PRECISIONS, check_model
from planner.options.limits import Bounds
from planner.plan import Plan
from planner.space.kind_rules import kind_rules
from planner.space.lora_rules import check_precision
from planner.space.rules import first_violation
from runtime.settings.job_rules import check_rules, job_rules

if TYPE_CHECKING:
    from runtime.settings.training_options import TrainingOptions

RECIPES: tuple[Fp8Recipe, ...] = ("default", "tensorwise", "rowwise", "rowwise_with_gw_hp")
"""fp8 recipes that the runtime knows; the first two are one."""

RANKS_PER_CORE, RANKS_ALWAYS = 8, 16
"""Most ranks that share a CPU core, and the number of ranks that any machine may start: slow, but useful to
try a layout."""

TIMEOUT = Bounds("positive and at most 525600 (a year), such as 10", 1e-3, 525_600)
"""Bounds of the timeout in minutes: enough for a message, and within PyTorch's range."""

RESTARTS = Bounds("0 (never) or positive", 0)
"""Bounds of the number of restarts of a job."""


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
    if layout.fp8_recipe not in RECIPES:
        raise InputError(
            f"fp8_recipe {layout.fp8_recipe}: the runtime has {' or '.join(RECIPES[1:])}; pin one of them"
        )
    if layout.muon_mode not in ("default", "duplicated"):
        raise InputError(
            f"muon_mode {layout.muon_mode}: the runtime has duplicated; pin that or leave it out"
        )
    check_precision(spec, layout.precision)
    broken = first_violation(spec, layout)
    if broken is not None:
        raise InputError(broken)
    check_rules(kind_rules(layout.precision), spec, layout)


def check_plan(plan: Plan, world_size: int) -> None:
    """Raise `InputError` when the runtime cannot execute `plan` on `world_size` ranks."""
    if plan.engine.name != DEFAULT_ENGINE:
        here = f"what trains here is {DEFAULT_ENGINE}"
        able = DEFAULT_ENGINE in engines_on(plan.cluster.device)
        raise InputError(
            f"the plan was made for engine {plan.engine.name}, and {here}"
            + ("; plan again without --engine" if able else f", not on {plan.cluster.device.name}")
        )
    check_job(plan.model, plan.layout, world_size)


def check_training(plan: Plan, training: TrainingOptions, data: object = None) -> None:
    """Raise `InputError` when flags of training, or of `data`, need a feature that the plan's layout does not
    support."""
    training.check_optimizer(plan.layout)
    check_rules(job_rules(training, data), plan.model, plan.layout)


def check_host(ranks: int, asked: str, bytes_each: float | None = None) -> None:
    """Raise `InputError` when the CPU of this machine is too small for a number of ranks.

    Args:
        asked: source of the number, such as `--world-size 500`.
        bytes_each: bytes of a rank; those of an almost empty rank if None.
    """
    cores, memory = available_cores(), available_memory()
    each = CONTEXT_BYTES[torch_build()] if bytes_each is None else bytes_each
    most = min(max(RANKS_ALWAYS, RANKS_PER_CORE * cores), int(memory / each))
    if ranks > most:
        raise InputError(
            f"{asked}: {ranks} ranks on the CPU of this machine, which has {cores} cores and "
            f"{memory / GIB:.1f} GiB of memory, of which each rank takes {each / GIB:.2f} GiB; start at most "
            f"{most} here"
            if most
            else f"{asked}: a rank takes {each / GIB:.2f} GiB, and this machine has {memory / GIB:.1f} GiB"
        )


def check_folder(folder: str | Path, flag: str) -> Path:
    """Create `folder` if needed and try to write in it; raises `InputError` that names `flag` if that
    fails."""
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

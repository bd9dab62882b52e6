"""Jobs read from files of other software, for this runtime on this machine."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from costmodels import Device
from costmodels.errors import InputError
from costmodels.spec.hardware import Precision
from costmodels.spec.layout import Layout
from planner import advice
from planner.api import search_problem
from planner.formats.check import plan_as_it_stands
from planner.formats.facts.reading import Problems, Reading
from planner.formats.files import read_files
from planner.formats.scaling import scaled_down
from planner.inputs.device import resolve_device
from planner.inputs.engine import DEFAULT_ENGINE
from planner.inputs.trained_here import PRECISIONS
from planner.options.flags import flag_names
from planner.options.parallel import check_alone
from planner.plan import Plan
from planner.problem import Problem, resolve_problem
from runtime.job.job import Job
from runtime.launch.launch_options import LaunchOptions
from runtime.settings.checks import RECIPES

GROUPS = ("training", "data", "output", "faults")
"""Groups of flags about training, data and output."""

STEPS = ("--lr-decay-iters", "--lr-warmup-iters", "--lr-wsd-decay-iters", "--train-samples")
"""Flags about lengths of the run, which do not apply to a small job."""

SMALL_WITHOUT = {
    "data": "left out: the default corpus is learned",
    "output": "left out: flags beside --config say what is kept of a job in small",
}
"""Groups of flags that a small job does not take from the files."""

SMALL_STEPS = 20
"""Default optimizer steps of a small job."""

SMALL_BATCH = 16
"""Sequences of a small job's step, where the files leave the layout to a search."""


@dataclass(frozen=True)
class Difference:
    """A difference from the files: a setting that is not supported here, or handled differently."""

    what: str
    """The flag, key or field."""
    line: int | None
    here: str


@dataclass(frozen=True)
class ConfiguredJob:
    """A job read from files, for this machine."""

    plan: Plan
    job: Job
    """The job, with training options from the files where no flag gives them."""
    reading: Reading
    differences: tuple[Difference, ...]
    assumed: tuple[str, ...]


def configured_job(job: Job, options: LaunchOptions, ranks: int, device: Device | str) -> ConfiguredJob:
    """The job of `options.config` on `ranks` devices of this machine, or scaled down.

    Raises:
        InputError: the files cannot be read, or have no layout that these devices run.
    """
    check_alone(job.model, job.batch, job.parallel, beside="--config")
    small = options.scale_down
    reading = read_files(
        options.config, world_size=None if small else job.cluster.world_size, define=options.define
    )
    if reading.world_size is None and not small:
        reading = read_files(options.config, world_size=ranks, define=options.define)
    elif reading.world_size is None and small:
        reading = read_files(options.config, world_size=small, define=options.define)
    job, differences = _with_training(job, reading, in_small=small is not None)
    differences = [*_named(reading), *differences]
    plan = _plan(reading, small, ranks, device, differences)
    return ConfiguredJob(plan, job, reading, tuple(differences), reading.assumed)


def _named(reading: Reading) -> Iterator[Difference]:
    """Differences for flags that the reading reports as not priced or unknown."""
    for problem in reading.problems:
        if problem.severity == "note":
            yield Difference(problem.flag or "the files", problem.line, problem.text)


def _with_training(job: Job, reading: Reading, in_small: bool) -> tuple[Job, list[Difference]]:
    """The job with the files' training settings; flags of the command line take precedence."""
    differences = []
    changes: dict[str, dict[str, Any]] = {name: {} for name in GROUPS}
    lines = {flag.name: flag.line for flag in reading.flags}
    harmless = reading.by_role.get("harmless", ())
    for name, text in reading.training.items():
        found = _field(job, name)
        if found is None or (in_small and name in STEPS):
            why = "left out: the run is a short one" if found else "is not done here"
            if found or name not in harmless:
                differences.append(Difference(name, lines.get(name), why))
            continue
        group, field = found
        if in_small and group in SMALL_WITHOUT:
            differences.append(Difference(name, lines.get(name), SMALL_WITHOUT[group]))
            continue
        options = getattr(job, group)
        default = field.default if field.default is not dataclasses.MISSING else None
        if getattr(options, field.name) == default:
            changes[group][field.name] = _value(type(options), field, text)
    if in_small and job.training.train_iters == type(job.training)().train_iters:
        changes["training"]["train_iters"] = SMALL_STEPS
    groups = {name: replace(getattr(job, name), **change) for name, change in changes.items() if change}
    job = replace(job, **groups)
    job.training.check()
    return job, differences


def _field(job: Job, name: str) -> tuple[str, dataclasses.Field[Any]] | None:
    for group in GROUPS:
        for field in dataclasses.fields(getattr(job, group)):
            if name in flag_names(field):
                return group, field
    return None


def _value(group: type, field: dataclasses.Field[Any], text: str) -> Any:
    hint = typing.get_type_hints(group)[field.name]
    kinds = get_args(hint) or (hint,)
    if typing.get_origin(hint) is list:
        return text.split()
    if bool in kinds:
        return True
    for kind, what in ((int, "a whole number"), (float, "a number")):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                raise InputError(f"{flag_names(field)[0]} {text}: expected {what}") from None
    return text


def _plan(
    reading: Reading, small: int | None, ranks: int, device: Device | str, differences: list[Difference]
) -> Plan:
    """The plan with the files' layout on this machine, or the best plan where they leave it to a search."""
    if reading.model is None or (reading.layout is None and reading.chooses_layout):
        reasons = [one.describe() for one in reading.problems if one.severity in ("illegal", "unknown")]
        raise InputError(f"no job in {reading.file}: {'; '.join(reasons) or 'the model is not known'}")
    model, layout = reading.model, reading.layout
    world = reading.world_size or ranks
    batch, most = reading.global_batch_size, reading.max_global_batch_size
    if small is not None:
        whole = layout or Layout(layers_per_stage=(model.layers,), global_batch_size=small)
        made = scaled_down(model, whole, small)
        differences += [Difference("--scale-down", None, change) for change in made.changes]
        model, layout = made.model, None if layout is None else made.layout
        world = small if layout is None else layout.world_size
        batch, most = (None, SMALL_BATCH) if layout is None else (layout.global_batch_size, None)
    elif world != ranks:
        raise InputError(
            f"{reading.file} is for {world} devices, and this machine has {ranks}; give "
            f"--scale-down {ranks} to train it in small"
        )
    problem = _problem(reading, model, world, batch, most, device, layout, differences)
    if layout is None:
        result = search_problem(problem)
        if result.best is None:
            raise advice.no_layout_fits(result)
        return result.best
    problems = Problems(reading.file)
    plan = plan_as_it_stands(replace(reading, framework=DEFAULT_ENGINE), layout, problem, problems)
    if plan is None:
        raise InputError(f"{reading.file}: {'; '.join(one.describe() for one in problems.found)}")
    return plan


def _problem(
    reading: Reading,
    model: Any,
    world: int,
    batch: int | None,
    most: int | None,
    device: Device | str,
    layout: Layout | None,
    differences: list[Difference],
) -> Problem:
    found = resolve_device(device, world) if isinstance(device, str) else device
    wanted = reading.precision or (layout.precision if layout is not None else None)
    able = [name for name in get_args(Precision) if name in found.peak_flops and name in PRECISIONS]
    if wanted not in able:
        usual = found.default_precision
        if wanted is not None:
            differences.append(
                Difference("precision", None, f"{wanted} -> {usual}: {found.name} has no {wanted}")
            )
        wanted = usual
    kept: Mapping[str, object] = (
        {}
        if layout is None
        else {
            "optimizer": layout.optimizer,
            "gradient_reduction": layout.gradient_reduction,
        }
    )
    if layout is not None and wanted == "fp8":
        if layout.fp8_recipe in RECIPES:
            kept = {**kept, "fp8_recipe": layout.fp8_recipe, "fp8_param_gather": layout.fp8_param_gather}
        else:
            text = f"{layout.fp8_recipe} -> {RECIPES[1]}: the runtime has {', '.join(RECIPES[1:])}"
            differences.append(Difference("fp8_recipe", None, text))
    return resolve_problem(
        model,
        world,
        device=device,
        local_world_size=world,
        engine=DEFAULT_ENGINE,
        precision=wanted,
        global_batch_size=batch,
        max_global_batch_size=most,
        pin=dict(kept),
    )

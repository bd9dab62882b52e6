"""Is a configuration legal, does it fit, how fast is it in its own software, and what would be better?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from costmodels.catalogue import load_device
from costmodels.errors import InputError, on_one_line
from costmodels.pricing import estimate
from costmodels.spec.layout import Layout
from costmodels.spec.record import GIB
from costmodels.spec.table import LayoutTable
from planner import advice
from planner.api import search_problem
from planner.formats.files import read_files
from planner.formats.megatron import blame_degree
from planner.formats.megatron_export import layout_flags
from planner.formats.megatron_model import last_of_each
from planner.formats.megatron_names import DEGREE_FLAGS
from planner.formats.reading import ConfigProblem, Problems, Reading, Severity
from planner.inputs.cluster import ClusterKeywords
from planner.inputs.keywords import keywords
from planner.plan import Plan
from planner.problem import Problem, SearchKeywords, resolve_problem
from planner.ranking.exact_memory import known_bytes
from planner.ranking.reasons import memory_reason
from planner.space.rules import RULES

if TYPE_CHECKING:
    from typing_extensions import Unpack

OTHERS_RUN = {"pipeline_micro_batches"}
"""Rules of PyTorch's schedules, not of Megatron-LM's (megatron/core/pipeline_parallel/schedules.py)."""


@dataclass(frozen=True)
class FlagChange:
    """One flag that the best plan has otherwise."""

    flag: str
    before: str | None
    """Its value; empty for a switch, None where it is not given."""
    after: str | None
    line: int | None
    """Where the file gives it."""


@dataclass(frozen=True)
class Check:
    """What became of a configuration."""

    reading: Reading
    legal: bool | None
    """None where the files do not say enough."""
    fits: bool | None
    problems: tuple[ConfigProblem, ...]
    assumed: tuple[str, ...]
    plan: Plan | None
    """The configuration as it stands; None where it is not legal or not known."""
    best: Plan | None
    """The best plan for the same job in the same software; None where nothing fits."""
    changes: tuple[FlagChange, ...]
    """From the configuration to the best plan."""

    @property
    def gain(self) -> float | None:
        """Tokens per second of the best plan over those of the configuration, where both fit."""
        if self.plan is None or self.best is None or not self.fits:
            return None
        return self.best.estimate.tokens_per_s / self.plan.estimate.tokens_per_s


class CheckKeywords(ClusterKeywords, total=False):
    """What a check takes besides files: what they do not say, or what is to be taken instead."""

    world_size: int | None
    """Devices of the job."""
    local_world_size: int | None
    """Devices of one node."""
    device: str | None
    """Name of a device, or its file."""
    engine: str | None
    """Who executes the layout, instead of the software that the files are for."""
    define: Mapping[str, str] | Iterable[str] | None
    """Variables that a script gets from outside, as a mapping or as `NAME=VALUE`."""


@keywords(CheckKeywords)
def check(files: Sequence[str | Path] | str | Path, **given: Unpack[CheckKeywords]) -> Check:
    """Judge the configuration that `files` hold, and plan the same job anew. Nothing in them is run.

    `world_size`, `local_world_size` and `device` say what the files leave open, `define` the variables that a
    script gets from outside. Raises `InputError` for files that cannot be read or that start no job.
    """
    several = [files] if isinstance(files, (str, Path)) else list(files)
    reading = read_files(
        several,
        world_size=given.get("world_size"),
        local_world_size=given.get("local_world_size"),
        define=given.get("define"),
    )
    problems = Problems(reading.file, list(reading.problems))
    if reading.model is None or reading.world_size is None:
        return _answer(reading, problems, (), None, None)
    problem, assumed = _problem(reading, given)
    plan = None
    if reading.layout is not None and not problems.fatal:
        plan = _as_it_stands(reading, reading.layout, problem, problems)
    best = _best(problem, problems)
    if plan is not None and plan.fits and (best is None or _faster(plan, best)):
        best = plan
    return _answer(reading, problems, assumed, plan, best)


def _answer(
    reading: Reading, problems: Problems, assumed: Sequence[str], plan: Plan | None, best: Plan | None
) -> Check:
    severities = {problem.severity for problem in problems.found}
    legal = False if "illegal" in severities else (None if "unknown" in severities else True)
    order = ("illegal", "unknown", "too_big", "note")
    ordered = sorted(problems.found, key=lambda one: (order.index(one.severity), one.line or 0))
    return Check(
        reading=reading,
        legal=legal,
        fits=None if plan is None else plan.fits,
        problems=tuple(ordered),
        assumed=(*reading.assumed, *assumed),
        plan=plan,
        best=best,
        changes=_changes(reading, best),
    )


def _problem(reading: Reading, given: CheckKeywords) -> tuple[Problem, list[str]]:
    """The same job as a problem of the search, and what was assumed for it."""
    assert reading.model is not None and reading.world_size is not None
    assumed = []
    device = given.get("device") or reading.device
    if given.get("device") is None:
        name = device or "a100-80g"
        assumed.append(f"devices are {name} (the files do not say; give --device)")
    precision = reading.precision
    if precision == "fp32" and device is not None and "fp32" not in load_device(device).peak_flops:
        precision = None
        assumed.append(f"the usual number format of {device}, which does not train in fp32")
    job: SearchKeywords = {
        "device": device,
        "local_world_size": reading.local_world_size,
        "engine": given.get("engine") or reading.engine,
        "precision": precision,
        "global_batch_size": reading.global_batch_size,
        "max_global_batch_size": reading.max_global_batch_size,
        "pin": _kept(reading.layout),
    }
    for name in ClusterKeywords.__annotations__:
        if given.get(name) is not None:
            job[name] = given[name]  # type: ignore[literal-required]
    if reading.device_memory_gib is not None and job.get("device_memory_gib") is None:
        job["device_memory_gib"] = reading.device_memory_gib
    return resolve_problem(reading.model, reading.world_size, **job), assumed


def _kept(layout: Layout | None) -> dict[str, object]:
    """What changes numbers, not speed alone, and so stays as it is."""
    if layout is None:
        return {}
    return {"optimizer": layout.optimizer, "gradient_reduction": layout.gradient_reduction}


def _as_it_stands(reading: Reading, layout: Layout, problem: Problem, problems: Problems) -> Plan | None:
    """The configuration as a plan; None, and the rules that it breaks as problems, where it is illegal."""
    model, degrees = problem.model, LayoutTable.one(layout)
    given = last_of_each(reading.flags, Problems(reading.file))
    broken = False
    for rule in (*RULES, *problem.further):
        if rule.redundant or not bool(rule.broken(model, degrees)):
            continue
        message = rule.message(model, degrees)
        flag = blame_degree(message, given)
        if rule.name in OTHERS_RUN:
            message += " (Megatron-LM runs it all the same)"
        else:
            broken = True
        severity: Severity = "note" if rule.name in OTHERS_RUN else "illegal"
        problems.add(severity, message, flag.name if flag else "", flag.line if flag else None)
    if broken:
        return None
    layout = layout.model_copy(update={"precision": problem.precision})
    where = problem.model, problem.cluster, problem.engine, layout
    costs = estimate(*where, known_bytes(*where))
    fits = costs.peak_memory_bytes <= problem.cluster.memory_bytes
    if not fits:
        fullest = max(costs.memory, key=lambda stage: stage.total)
        held = {name: size for name, size in fullest.model_dump().items() if size >= 0.05 * GIB}
        parts = sorted(held.items(), key=lambda part: -part[1])
        text = f"{memory_reason(costs, problem.cluster)}: " + ", ".join(
            f"{name} {size / GIB:.1f}" for name, size in parts
        )
        name = _LARGEST_PART.get(parts[0][0], "") if parts else ""
        line = given[name].line if name in given else None
        problems.add("too_big", text, name, line)
    return Plan(
        model=problem.model,
        cluster=problem.cluster,
        engine=problem.engine,
        layout=layout,
        estimate=costs,
        fits=fits,
        reason=f"as {reading.file} says",
        considered=1,
        legal=1,
        feasible=int(fits),
        rejected={},
    )


_LARGEST_PART = {
    "activations": DEGREE_FLAGS["micro_batch_size"],
    "logits": DEGREE_FLAGS["micro_batch_size"],
    "parameters": DEGREE_FLAGS["tensor_parallel"],
    "gradients": DEGREE_FLAGS["tensor_parallel"],
    "optimizer": DEGREE_FLAGS["zero_stage"],
}
"""Flags that what fills most of the memory depends on."""


def _best(problem: Problem, problems: Problems) -> Plan | None:
    """The best plan for the same job; None, and why, where there is none."""
    try:
        result = search_problem(problem)
    except InputError as error:
        problems.add("note", f"no plan for the same job: {on_one_line(error)}")
        return None
    if result.best is None:
        problems.add("note", f"nothing for the same job fits: {advice.no_layout_fits(result)}")
    return result.best


def _faster(plan: Plan, other: Plan) -> bool:
    return plan.estimate.tokens_per_s >= other.estimate.tokens_per_s


def _changes(reading: Reading, best: Plan | None) -> tuple[FlagChange, ...]:
    """The flags of the layout that differ, in the order of the new ones."""
    if best is None:
        return ()
    given = last_of_each(reading.flags, Problems(reading.file))
    software = "mindspeed" if reading.engine == "mindspeed" else "megatron"
    after = layout_flags(best.layout, best.model, software, [])
    before = {}
    if reading.layout is not None:
        before = layout_flags(reading.layout, best.model, software, [])
    elif reading.chooses_layout:
        before = {name: flag.text for name, flag in given.items() if flag.known.role == "layout"}
    return tuple(
        FlagChange(name, before.get(name), after.get(name), given[name].line if name in given else None)
        for name in dict.fromkeys([*after, *before])
        if before.get(name) != after.get(name)
    )


def as_json(answer: Check) -> dict[str, object]:
    """The answer of `planner check --json`."""
    reading, plan, best = answer.reading, answer.plan, answer.best
    return {
        "framework": reading.framework,
        "engine": reading.engine if best is None else best.engine.name,
        "legal": answer.legal,
        "fits": answer.fits,
        "problems": [dataclasses.asdict(problem) for problem in answer.problems],
        "assumed": list(answer.assumed),
        "flags": {role: list(names) for role, names in reading.by_role.items()},
        "model": None if reading.model is None else reading.model.model_dump(mode="json"),
        "world_size": reading.world_size,
        "step_time_s": None if plan is None else plan.estimate.step_time_s,
        "plan": None if plan is None else plan.model_dump(mode="json"),
        "best": None if best is None else best.model_dump(mode="json"),
        "gain": answer.gain,
        "changes": [dataclasses.asdict(change) for change in answer.changes],
    }

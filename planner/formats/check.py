"""The check of a configuration: its legality, memory and speed in its own software, and better flags."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from costmodels.catalogue import load_device, load_engine
from costmodels.dataclass import dataclass
from costmodels.errors import InputError, on_one_line
from costmodels.pricing import estimate
from costmodels.spec.engine import Engine
from costmodels.spec.estimate import Estimate
from costmodels.spec.hardware import Cluster
from costmodels.spec.layout import Layout
from costmodels.spec.record import GIB
from costmodels.spec.table import LayoutTable
from planner import advice
from planner.api import search_problem
from planner.formats.facts.layout_fields import Places
from planner.formats.facts.reading import ConfigProblem, Problems, Reading, Severity, verdict
from planner.formats.files import read_files
from planner.formats.megatron.deepspeed_flags import deepspeed_flags
from planner.formats.mindformers.dynamic import keys_of_layout
from planner.formats.nemo.reader import keys_of_flags
from planner.formats.targets import TARGETS
from planner.inputs.cluster import ClusterKeywords
from planner.inputs.keywords import keywords
from planner.plan import Plan
from planner.problem import Problem, SearchKeywords, resolve_problem
from planner.proposals.own_layout import own_layout_proposals
from planner.proposals.proposal import Proposal
from planner.ranking.reasons import memory_reason
from planner.space.rules import RULES

if TYPE_CHECKING:
    from typing_extensions import Unpack

OTHERS_RUN = {"pipeline_micro_batches", "lora_offload_optimizer"}
"""Rules that do not apply to other software: rules of PyTorch's schedules, and rules against redundant
layouts (megatron/core/pipeline_parallel/schedules.py)."""

USUAL_DEVICES = ("a100-80g", "h100", "b200")
"""Devices for conversions without a given device: the first one that supports the job's number format is
used.

Nothing is priced on them, and legality is the same on each.
"""

PYTORCHS = ("torchtitan",)
"""Software that uses PyTorch's pipeline schedules."""


@dataclass(frozen=True)
class FlagChange:
    """One flag with another value in the best plan."""

    flag: str
    before: str | None
    """The flag's value; empty for a switch, None where it is not given."""
    after: str | None
    line: int | None
    """Line of the file that gives the flag."""


@dataclass(frozen=True)
class Check:
    """The result of the check of a configuration."""

    reading: Reading
    legal: bool | None
    """True or False for a legal or an illegal configuration; None where the files do not say enough."""
    fits: bool | None
    problems: tuple[ConfigProblem, ...]
    assumed: tuple[str, ...]
    plan: Plan | None
    """The plan of the unchanged configuration; None where it is not legal or not known."""
    best: Plan | None
    """The best plan for the same job in the same software; None where nothing fits."""
    changes: tuple[FlagChange, ...]
    """Flags that differ between the configuration and the best plan."""
    proposals: tuple[tuple[Proposal, tuple[FlagChange, ...]], ...] = ()
    """Changes that make a configuration fit, with the flags of the files; empty if it fits."""

    @property
    def unknown(self) -> tuple[ConfigProblem, ...]:
        """Facts that the files do not give, each with the key to add and a remedy."""
        return tuple(problem for problem in self.problems if problem.severity == "unknown")

    @property
    def layout(self) -> Layout | None:
        """The layout in the files, even if it is not priced; None where a fact that it depends on is
        unknown."""
        return self.reading.layout if self.legal else None

    @property
    def gain(self) -> float | None:
        """Tokens per second of the best plan over those of the configuration, where both fit."""
        if self.plan is None or self.best is None or not self.fits:
            return None
        return self.best.estimate.tokens_per_s / self.plan.estimate.tokens_per_s


class CheckKeywords(ClusterKeywords, total=False):
    """Arguments of a check besides files: facts that the files lack, or values that override theirs."""

    world_size: int | None
    """Devices of the job."""
    local_world_size: int | None
    """Devices of one node."""
    device: str | None
    """Name of a device, or its file."""
    model: str | Path | None
    """The model, by its name in the catalogue or its file, where no file of the job says it."""
    engine: str | None
    """The engine to price, instead of the software of the files."""
    define: Mapping[str, str] | Iterable[str] | None
    """Variables that a script gets from its environment, as a mapping or as `NAME=VALUE`."""


@keywords(CheckKeywords)
def check(files: Sequence[str | Path] | str | Path, **given: Unpack[CheckKeywords]) -> Check:
    """Judge the configuration in `files`, and plan the same job anew.

    Nothing in the files is run. `world_size`, `local_world_size` and `device` give facts that the files leave
    open. `define` gives the variables that a script gets from its environment. Raises `InputError` for files
    that cannot be read or that start no job.
    """
    several = [files] if isinstance(files, (str, Path)) else list(files)
    reading = read_files(
        several,
        world_size=given.get("world_size"),
        local_world_size=given.get("local_world_size"),
        define=given.get("define"),
        model=given.get("model"),
    )
    problems = Problems(reading.file, list(reading.problems))
    name_what_is_missing(reading, problems)
    nothing = _rests_on_nothing(reading, problems)
    device = given.get("device") or reading.device
    if device is None:
        text = "no file names the device, on which memory, speed and the best plan depend"
        problems.add("unknown", text, "--device", remedy="give --device", of_price=True)
    if nothing:
        return _answer(reading, problems, (), None, None)
    try:
        problem, assumed = problem_of_reading(reading, given)
    except InputError as error:
        message = on_one_line(error)
        if message.startswith("quantize-base "):
            problems.add(
                "unknown", f"memory and time are not priced: {message}", remedy="give --engine bundled"
            )
        elif message.startswith("engine ") and given.get("engine") is None:
            reason = message.partition("; ")[0]
            remedy = "give --device of one on which it runs, or --engine of another software"
            problems.add("unknown", f"memory and time are not priced: {reason}", "--device", remedy=remedy)
        elif message.startswith("precision "):
            runs = reading.precision in load_device(device or usual_device(reading)).peak_flops
            # A precision that the device has, but for which the engine is not priced, is no fault of the job.
            severity: Severity = "unknown" if runs else "illegal"
            remedy = "give --engine of one that is" if runs else ""
            problems.add(severity, message, *_places(reading).of("precision"), remedy)
        else:
            raise
        return _answer(reading, problems, (), None, None)
    if any(problem.of_price for problem in problems.found):
        if reading.layout is not None:
            breaks_rules(reading, reading.layout, problem, problems)
        return _answer(reading, problems, (), None, None)
    plan = None
    if reading.layout is not None and not problems.fatal:
        plan = plan_as_it_stands(reading, reading.layout, problem, problems)
    best, fitting = _best(problem, plan, problems)
    if plan is not None and not plan.fits and not _may_fit(reading, plan.estimate, problem.cluster):
        fitting = (*own_layout_proposals(problem, plan.layout), *fitting)
    return _answer(reading, problems, assumed, plan, best, fitting)


def _answer(
    reading: Reading,
    problems: Problems,
    assumed: Sequence[str],
    plan: Plan | None,
    best: Plan | None,
    fitting: Sequence[Proposal] = (),
) -> Check:
    legal, kept = verdict(problems.found)
    order = ("illegal", "unknown", "too_big", "note")
    ordered = sorted(kept, key=lambda one: (order.index(one.severity), one.line or 0))
    return Check(
        reading=reading,
        legal=legal,
        fits=None if plan is None else _fits(reading, plan),
        problems=tuple(ordered),
        assumed=(*reading.assumed, *assumed, *([plan.load_assumed] if plan and plan.load_assumed else [])),
        plan=plan,
        best=best,
        changes=_changes(reading, plan, best),
        proposals=tuple((one, _changes(reading, plan, one.plan)) for one in fitting),
    )


def _fits(reading: Reading, plan: Plan) -> bool | None:
    return True if plan.fits else None if _may_fit(reading, plan.estimate, plan.cluster) else False


def _may_fit(reading: Reading, costs: Estimate, cluster: Cluster) -> bool:
    """Return whether a job whose layout does not fit as priced may fit all the same."""
    if reading.memory_is_bound or not reading.activations_are_bound:
        return reading.memory_is_bound
    states = (one.parameters + one.gradients + one.optimizer for one in costs.memory)
    return max(states) < cluster.memory_bytes


def name_what_is_missing(reading: Reading, problems: Problems) -> None:
    """Add problems for unknown facts of a job that its reader has not named."""
    if problems.fatal:
        return
    places = _places(reading)
    if reading.model is None:
        problems.add("unknown", "the model is not known", *places.of("layers"), "give --model")
    if reading.world_size is None:
        problems.add("unknown", "the number of devices is not known", remedy="give --world-size")
    if reading.chooses_layout and reading.layout is None:
        problems.add("unknown", "the layout is not known", *places.of("tensor_parallel"))
    if reading.global_batch_size is None and reading.max_global_batch_size is None:
        name, line = places.of("global_batch_size")
        problems.add("unknown", "the global batch is not known", name, line, f"give --define {name}=N")


def _rests_on_nothing(reading: Reading, problems: Problems) -> bool:
    """Return whether a fact is missing on which prices and the best plan depend."""
    batches = reading.global_batch_size, reading.max_global_batch_size
    return (
        any(problem.severity == "unknown" and not problem.of_price for problem in problems.found)
        or None in (reading.model, reading.world_size)
        or not any(batches)
    )


def problem_of_reading(reading: Reading, given: CheckKeywords) -> tuple[Problem, list[str]]:
    """The job of a configuration as a problem of the search, and the assumptions made for it."""
    assert reading.model is not None and reading.world_size is not None
    assumed = []
    device = given.get("device") or reading.device
    if device is None:
        device = usual_device(reading)
        assumed.append(f"devices are {device} (the files do not say; give --device)")
    elif given.get("device") is None:
        assumed.append(f"devices are {device} (give --device for others)")
    precision = reading.precision
    if precision == "fp32" and "fp32" not in load_device(device).peak_flops:
        precision = None
        assumed.append(f"the usual number format of {device}, which does not train in fp32")
    job: SearchKeywords = {
        "device": device,
        "local_world_size": reading.local_world_size,
        "engine": given.get("engine") or engine_of(reading),
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


def engine_of(reading: Reading) -> Engine | str:
    """The engine of a configuration, with the constants that its files decide."""
    if not reading.engine_constants:
        return reading.engine
    return load_engine(reading.engine).with_constants(reading.engine_constants)


def usual_device(reading: Reading) -> str:
    """The first usual device that has the number format of a job."""
    runs = (name for name in USUAL_DEVICES if reading.precision in load_device(name).peak_flops)
    return next(runs, USUAL_DEVICES[0])


def _kept(layout: Layout | None) -> dict[str, object]:
    """Fields of the layout that change numerical results, not speed alone, and so are not changed."""
    if layout is None:
        return {}
    return {
        "optimizer": layout.optimizer,
        "muon_mode": layout.muon_mode,
        "gradient_reduction": layout.gradient_reduction,
        "fp8_recipe": layout.fp8_recipe,
        "fp8_param_gather": layout.fp8_param_gather,
    }


def breaks_rules(reading: Reading, layout: Layout, problem: Problem, problems: Problems) -> bool:
    """Return whether a configuration is illegal; broken rules are added to `problems`."""
    model, degrees = problem.model, LayoutTable.one(layout)
    places = _places(reading)
    broken = False
    for rule in (*RULES, *problem.further):
        if rule.redundant or not bool(rule.broken(model, degrees)):
            continue
        message = rule.message(model, degrees)
        runs = rule.name in OTHERS_RUN and reading.framework not in PYTORCHS
        if rule.name.startswith("engine_"):
            # The search keeps to what is sure to run; what software is given for is judged by its own rules.
            runs, message = True, f"the search for the best plan excludes this layout: {message}"
        elif runs:
            message += f" ({reading.framework} runs it all the same)"
        broken |= not runs
        severity: Severity = "note" if runs else "illegal"
        problems.add(severity, message, *places.blamed(message))
    return broken


def plan_as_it_stands(reading: Reading, layout: Layout, problem: Problem, problems: Problems) -> Plan | None:
    """The configuration as a plan; for an illegal one None, with the broken rules as problems."""
    if breaks_rules(reading, layout, problem, problems):
        return None
    places = _places(reading)
    layout = layout.model_copy(update={"precision": problem.precision})
    where = problem.model, problem.cluster, problem.engine, layout
    costs = estimate(*where)
    fits = costs.peak_memory_bytes <= problem.cluster.memory_bytes
    if not fits:
        fullest = max(costs.memory, key=lambda stage: stage.total)
        held = {name: size for name, size in fullest.model_dump().items() if size >= 0.05 * GIB}
        parts = sorted(held.items(), key=lambda part: -part[1])
        text = f"{memory_reason(costs, problem.cluster)}: " + ", ".join(
            f"{name} {size / GIB:.1f}" for name, size in parts
        )
        field = _LARGEST_PART.get(parts[0][0], "") if parts else ""
        if _may_fit(reading, costs, problem.cluster):
            problems.add("note", f"the layout may not fit: as priced it {text}", *places.of(field))
        else:
            problems.add("too_big", text, *places.of(field))
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


def _places(reading: Reading) -> Places:
    return Places(reading.names, {flag.name: flag.line for flag in reading.flags})


_LARGEST_PART = {
    "activations": "micro_batch_size",
    "logits": "micro_batch_size",
    "parameters": "tensor_parallel",
    "gradients": "tensor_parallel",
    "optimizer": "zero_stage",
}
"""The degrees that the largest part of the memory depends on, by part."""


def _best(
    problem: Problem, plan: Plan | None, problems: Problems
) -> tuple[Plan | None, tuple[Proposal, ...]]:
    """The best plan for the same job, or None with the reason; where nothing fits, also the changes that
    would fit.

    It is the plan of `planner suggest`, unless the configuration fits and no plan is faster.
    """
    own = plan if plan is not None and plan.fits else None
    try:
        result = search_problem(problem)
    except InputError as error:
        problems.add("note", f"no plan for the same job: {on_one_line(error)}")
        return own, ()
    best, fastest = result.best, result.fastest
    if best is None or fastest is None:
        nothing = advice.no_layout_fits(result)
        problems.add("note", f"nothing for the same job fits: {nothing}")
        return own, nothing.proposals
    if own is not None and own.estimate.tokens_per_s >= fastest.estimate.tokens_per_s:
        return own, ()
    return best, ()


def _writer(reading: Reading) -> Callable[[Plan], Mapping[str, str]] | None:
    """The function that writes a plan's layout as flags or keys of the software; None where there is none."""
    if reading.framework == "nemo":
        return lambda plan: keys_of_flags(TARGETS["megatron"](plan).layout_flags)
    if reading.framework == "mindformers-dynamic":
        return lambda plan: keys_of_layout(plan.layout)
    if reading.framework in ("megatron-deepspeed", "gpt-neox"):
        write = TARGETS["megatron"]
        return lambda plan: _in_words(deepspeed_flags(write(plan).layout_flags, plan.layout), reading.words)
    usual = "megatron" if reading.engine == "megatron" else ""
    usual = reading.engine if reading.framework == "primus" else usual
    target = TARGETS.get(reading.framework, TARGETS.get(usual))
    return None if target is None else lambda plan: _in_words(target(plan).layout_flags, reading.words)


def _in_words(flags: Mapping[str, str], words: Mapping[str, str]) -> dict[str, str]:
    """Flags as keys of a file; a switch is a key with the value true."""
    found = {}
    for flag, text in flags.items():
        name = words.get(flag, flag)
        found[name] = "true" if not text and flag.startswith("--") and not name.startswith("--") else text
    return found


def _changes(reading: Reading, plan: Plan | None, best: Plan | None) -> tuple[FlagChange, ...]:
    """The flags or keys of the layout that differ, in the order of the new layout's flags."""
    write = _writer(reading)
    if best is None or write is None:
        return ()
    lines = {flag.name: flag.line for flag in reading.flags}
    texts = {flag.name: flag.text for flag in reading.flags}
    after = write(best)
    before: Mapping[str, str] = {}
    if reading.layout is not None:
        # An illegal layout is no plan: its flags stand beside the same model and cluster.
        before = write(plan or best.model_copy(update={"layout": reading.layout}))
    elif reading.chooses_layout:
        before = {flag.name: flag.text for flag in reading.flags if flag.known.role == "layout"}
    return tuple(
        FlagChange(
            name, texts.get(name, before[name]) if name in before else None, after.get(name), lines.get(name)
        )
        for name in dict.fromkeys([*after, *before])
        if before.get(name) != after.get(name) and not _stands(name, before, after, texts)
    )


def _stands(name: str, before: Mapping[str, str], after: Mapping[str, str], texts: Mapping[str, str]) -> bool:
    """Return whether a file already has the new value of a flag, without effect on the present layout.

    An example is `--use-distributed-optimizer` with a single replica.
    """
    return name not in before and name in texts and texts[name] == after[name]


def as_json(answer: Check) -> dict[str, object]:
    """The answer of `planner check --json`."""
    reading, plan, best = answer.reading, answer.plan, answer.best
    return {
        "framework": reading.framework,
        "engine": reading.engine if best is None else best.engine.name,
        "objective": reading.objective,
        "legal": answer.legal,
        "fits": answer.fits,
        "problems": [dataclasses.asdict(problem) for problem in answer.problems],
        "unknown": [dataclasses.asdict(problem) for problem in answer.unknown],
        "assumed": list(answer.assumed),
        "flags": {role: list(names) for role, names in reading.by_role.items()},
        "model": None if reading.model is None else reading.model.model_dump(mode="json"),
        "world_size": reading.world_size,
        "layout": None if answer.layout is None else answer.layout.model_dump(mode="json"),
        "step_time_s": None if plan is None else plan.estimate.step_time_s,
        "plan": None if plan is None else plan.model_dump(mode="json"),
        "best": None if best is None else best.model_dump(mode="json"),
        "gain": answer.gain,
        "changes": [dataclasses.asdict(change) for change in answer.changes],
        "proposals": [
            one.as_json() | {"changes": [dataclasses.asdict(change) for change in changes]}
            for one, changes in answer.proposals
        ],
    }

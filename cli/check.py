"""`planner check`: judge a configuration of other software, and plan the same job anew."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, ClassVar, cast

from cli.tables import console
from cli.waiting import waiting
from costmodels.catalogue import model_names
from costmodels.dataclass import dataclass
from costmodels.spec.record import GIB, in_seconds
from planner.formats.check import Check, CheckKeywords, FlagChange, as_json
from planner.formats.check import check as checked
from planner.options.cluster import ClusterOptions
from planner.options.flags import argument, flag, flag_groups
from planner.plan import Plan


@dataclass(frozen=True)
class CheckOptions:
    """The files to read and the output to print."""

    SECTIONS: ClassVar[dict[str, str]] = {"define": "Files", "json": "Output"}

    files: list[str] = argument(
        "A script of Megatron-LM, MindSpeed, PAI's llmacc, ms-swift, slime or Hugging Face's trainer, a "
        "configuration of MindFormers, torchtitan, nanotron, NeMo, NeMo-RL, Megatron-Bridge, GPT-NeoX, "
        "accelerate, DeepSpeed, axolotl, LLaMA-Factory, TRL or Primus, or a page with one; beside it a "
        "config.json or YAML file of the model. Nothing in them is run.",
        "FILE...",
    )
    define: list[str] = flag(
        [],
        "Environment variable of a script, such as NNODES=4, or a flag, key or parameter that replaces "
        "the one of a file, such as num_layers=32 (no value: leave it out); repeatable.",
        metavar="NAME=VALUE",
    )
    model: str | None = flag(
        None, "Catalogue name or file of the model, if no given file names the model.", values=model_names
    )
    engine: str | None = flag(
        None, "Software whose performance is estimated, instead of the software of the files."
    )
    json: bool = flag(False, "Print one JSON object instead of text.")
    save: str | None = flag(None, "Write the best plan to this file.", metavar="FILE")


@flag_groups(options=CheckOptions, cluster=ClusterOptions)
def check(options: CheckOptions, cluster: ClusterOptions) -> None:
    """Check a training script: is it legal, does it fit, how fast is it, and which flags would be better?

    A value that the file does not give has the default of its software; a value that cannot be known is
    unknown. The exit code is 0 for a script that is legal and fits, 3 if it does not fit, 2 if it is illegal
    or not known.
    """
    given: dict[str, Any] = {
        "world_size": cluster.world_size,
        "local_world_size": cluster.local_world_size,
        "device": cluster.device,
        "memory_margin_gib": cluster.memory_margin_gib,
        "model": options.model,
        "engine": options.engine,
        "define": options.define,
        **cluster.network(),
    }
    with waiting("checking"):
        answer = checked(options.files, **cast(CheckKeywords, given))
    if options.save is not None and answer.best is not None:
        # Before anything is printed: a reader of that may go away.
        answer.best.save(options.save)
    if options.json:
        print(json.dumps(as_json(answer), indent=2))
    else:
        print_check(answer)
    raise SystemExit(exit_code(answer))


def exit_code(answer: Check) -> int:
    """0, 2 or 3, as the help says."""
    if answer.legal is not True or answer.unknown:
        return 2
    if answer.plan is not None and answer.fits is None:
        return 2
    return 3 if answer.fits is False or answer.best is None else 0


def print_check(answer: Check) -> None:
    """Print the whole answer for people."""
    screen = console()
    for line in check_lines(answer):
        screen.print(line, markup=False, emoji=False, soft_wrap=True)


def check_lines(answer: Check) -> Iterator[str]:
    """The lines of the answer."""
    reading, plan, best = answer.reading, answer.plan, answer.best
    yield f"{reading.file}: {reading.framework}" + _job(answer)
    for note in answer.assumed:
        yield f"assumed: {note}"
    counts = {role: len(names) for role, names in reading.by_role.items()}
    named = ", ".join(f"{count} {_ROLES[role]}" for role, count in sorted(counts.items()) if role in _ROLES)
    yield f"flags: {sum(counts.values())} read" + (f"; {named}" if named else "")
    yield f"legal: {_yes(answer.legal)}   fits: {_yes(answer.fits)}"
    for problem in answer.problems:
        yield f"{problem.severity}: {problem.describe()}"
    if plan is not None:
        yield f"as it is: {plan.layout.describe()}"
        yield f"          {_figures(plan)}"
    elif answer.layout is not None and answer.unknown:
        yield f"as read: {answer.layout.describe()}"
    if answer.proposals:
        yield "changes that would fit, the smallest of each kind:"
    for proposal, changes in answer.proposals:
        yield f"  {proposal.what}: {proposal.price}"
        yield f"      {proposal.plan.layout.describe()}"
        yield from (f"      {change_line(change)}" for change in changes)
    if best is None:
        return
    if plan is not None and plan.layout == best.layout:
        yield "best: this is the best plan for the job"
        return
    yield f"best:     {best.layout.describe()}"
    yield f"          {_figures(best)}" + _gain(answer.gain)
    if answer.changes:
        yield "change:"
        for change in answer.changes:
            yield f"  {change_line(change)}"


_ROLES = {"training": "for training", "harmless": "do not affect the estimate", "unpriced": "not priced"}
_ROLES |= {"unsupported": "not supported", "unknown": "not known"}


def _yes(holds: bool | None) -> str:
    return "not known" if holds is None else ("yes" if holds else "no")


def _job(answer: Check) -> str:
    reading = answer.reading
    plan = answer.plan or answer.best
    if plan is None:
        return "" if reading.model is None else f", {reading.model.name}"
    cluster = plan.cluster
    limit = cluster.memory_bytes / GIB
    return (
        f", {plan.model.name} on {cluster.world_size} x {cluster.device.name} of {limit:.1f} GiB, "
        f"{plan.layout.precision}, engine {plan.engine.name}"
    )


def _gain(gain: float | None) -> str:
    """The gain of the best plan over the configuration; if the configuration is faster, the reason for the
    plan."""
    if gain is None:
        return ""
    doubt = (
        ""
        if gain > 1
        else ": simpler, or with more memory left, and within the estimate's error of the fastest"
    )
    return f", {gain:.2f} x the tokens/s{doubt}"


def _figures(plan: Plan) -> str:
    estimate = plan.estimate
    low, high = estimate.peak_memory_low_bytes / GIB, estimate.peak_memory_high_bytes / GIB
    wide = f" (80 % prediction interval {low:.0f} to {high:.0f})" if high else ""
    return (
        f"{in_seconds(estimate.step_time_s)} a step, {estimate.tokens_per_s:,.0f} tokens/s, "
        f"MFU {estimate.mfu:.1%}, {estimate.peak_memory_bytes / GIB:.1f} GiB{wide}"
    )


def change_line(change: FlagChange) -> str:
    """A change of one flag: `- --old 1 (line 7)`, `+ --new 2`, or both with an arrow."""
    where = f"   (line {change.line})" if change.line is not None else ""
    if change.after is None:
        return f"- {change.flag} {change.before}".rstrip() + where
    if change.before is None or change.line is None:
        usual = "" if change.before is None else f"   ({change.before} unless given)"
        return f"+ {change.flag} {change.after}".rstrip() + usual
    return f"~ {change.flag} {change.before} -> {change.after}{where}"

"""An answer for a page: HTML, figures, and files to download."""

from __future__ import annotations

import html
import json
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from costmodels.errors import InputError
from costmodels.spec.record import GIB, in_seconds
from planner.budget.question import RunQuestion
from planner.explanation.comparison import compare
from planner.inputs.huggingface.hub import HubUse
from planner.plan import Plan
from planner.proposals.proposal import Proposal
from planner.ranking.distinct import DistinctPlan
from planner.ranking.ties import indistinguishable, ties_text
from planner.report.drawing import Figure
from planner.report.figures import device_counts, memory, pipeline, ranges, step_time
from planner.report.parts import (
    TITLES,
    facts,
    lacks,
    ranking,
    section,
    sizes_caption,
    sizes_table,
    terms,
)
from planner.report.range_basis import range_basis
from planner.service.answers import Answer, SizesAnswer
from planner.service.commands import WrittenFile, run_command, usual_target, written_plan
from planner.service.fields import spelled
from planner.service.questions import Asked, answered
from planner.web.form import SCRIPT

MOST_PASSES = 3000
"""Most passes of a pipeline that are drawn; of a longer one only the first and the last microbatches are
drawn."""


def page_answer(question: Mapping[str, Any], hub: HubUse = "cached") -> dict[str, Any]:
    """The contents of a page that answers a question, for JSON; a wrong question has `error` alone.

    `html` is the answer, `figures` has the figures by the names of their places, `files` has texts by file
    name, `answer` is the output of `planner suggest --json`, and `command` asks the same at the command line.
    """
    try:
        own = {name: value for name, value in question.items() if name != SCRIPT}
        asked, found = answered(own, files=False, hub=hub)
        return _shown(asked, found, str(question.get(SCRIPT) or ""))
    except InputError as error:
        return {"error": str(error)}


def answer_text(question: Mapping[str, Any], hub: HubUse = "cached") -> str:
    """The JSON of `page_answer`; an internal error becomes one line in it, and is printed by the server."""
    try:
        return json.dumps(page_answer(question, hub))
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        line = f"the planner failed on this question ({type(error).__name__}), which is a bug of the planner"
        return json.dumps({"error": line})


def _shown(asked: Asked, found: Answer | SizesAnswer, to: str) -> dict[str, Any]:
    plan, command = found.best, _command(asked)
    files: dict[str, str] = {}
    written: WrittenFile | InputError | None = None
    if plan is not None:
        files["plan.json"] = plan.file_text()
        try:
            written = written_plan(plan, to or usual_target(plan))
            files[written.name] = written.text
        except InputError as error:
            written = error
    figures: dict[str, str] = {}

    def place(name: str, figure: Figure | None, caption: str | None = None, after: str = "") -> str:
        if figure is None:
            return ""
        figures[name] = figure.to_json()
        return section(name, caption, after)

    parts = [
        _head(found, plan),
        _commands(asked, plan, command, written),
        *_plans(found, plan, place),
        *_file(written),
        _told(found),
    ]
    shown = {"html": "\n".join(parts), "figures": figures, "files": files}
    return {**shown, "config_file": asked.config_file, "command": command, "answer": found.as_json()}


def _command(asked: Asked) -> str:
    words = ["planner", "suggest", *(shlex.quote(word) for word in asked.words)]
    return " ".join(words)


def _head(found: Answer | SizesAnswer, plan: Plan | None) -> str:
    problem = found.found.problem if isinstance(found, SizesAnswer) else found.result.problem
    cluster = problem.cluster
    if plan is not None:
        cluster = plan.cluster
    devices = " and ".join(f"{part.world_size} x {part.device.name}" for part in cluster.parts or (cluster,))
    title = f"<h1>{html.escape(f'{problem.model.name} on {devices}')}</h1>"
    if plan is None:
        line = f'<p class="error" role="alert">{html.escape(found.error_line or "")}</p>'
        return f"<header>{title}{line}{_proposals(found.proposals)}</header>"
    asked = plan.asked or RunQuestion(tokens=None)
    run = None if plan.asked is None else plan.run(asked.run_tokens, asked.price, asked.failures)
    reason = html.escape(plan.reason)
    return f'<header>{title}<dl class="facts">{facts(plan, run, asked)}</dl><p>{reason}</p></header>'


def _proposals(found: Sequence[Proposal]) -> str:
    """Changes that would fit, each as a button that changes the question."""
    if not found:
        return ""
    items = []
    for one in found:
        fields = html.escape(json.dumps(_as_fields(one.flags)))
        price = f"{in_seconds(one.plan.estimate.step_time_s)} a step, "
        price += f"{one.plan.estimate.peak_memory_bytes / GIB:.1f} GiB"
        items.append(
            f'<li><button type="button" data-fields="{fields}">{html.escape(one.what)}</button> '
            f"{price} <code>{html.escape(' '.join(one.flags))}</code></li>"
        )
    return (
        f'<p>Changes that would fit, the smallest of each kind:</p><ul class="changes">{"".join(items)}</ul>'
    )


def _as_fields(flags: Sequence[str]) -> dict[str, str]:
    """Flags and their values as fields of a question; several values of one flag are joined by blanks."""
    found: dict[str, str] = {}
    name = ""
    for word in flags:
        if word.startswith("--"):
            name = spelled()[word.lstrip("-").replace("-", "_")]
            found.setdefault(name, "true")
        else:
            found[name] = word if found[name] == "true" else f"{found[name]} {word}"
    return found


def _commands(asked: Asked, plan: Plan | None, command: str, written: WrittenFile | InputError | None) -> str:
    saved = "" if plan is None else " --save plan.json"
    lines = [command + saved, *([] if plan is None else [run_command(plan, "plan.json")])]
    links = []
    if asked.config_file is not None:
        links.append(_download(asked.config_file, "the pasted config.json, for this command"))
    if plan is not None:
        links.append(_download("plan.json", "the plan file for planner launch, report and script"))
    if isinstance(written, WrittenFile):
        links.append(_download(written.name, "below"))
    listed = f'<ul class="files">{"".join(links)}</ul>' if links else ""
    return (
        "<section><h2>At the command line</h2>"
        f'<pre id="command">{chr(10).join(map(_unbroken, lines))}</pre>{listed}</section>'
    )


def _unbroken(line: str) -> str:
    """A line of a command as HTML; a narrow screen breaks it only between words, never behind a dash."""
    return " ".join(f"<span>{html.escape(word)}</span>" for word in line.split(" "))


def _download(name: str, what: str) -> str:
    shown = html.escape(name)
    return f'<li><a href="#" download="{shown}" data-file="{shown}">{shown}</a>: {html.escape(what)}</li>'


Place = Callable[..., str]


def _plans(found: Answer | SizesAnswer, plan: Plan | None, place: Place) -> Iterator[str]:
    """The plan compared with others, and its figures."""
    if isinstance(found, SizesAnswer):
        asked = None if plan is None else plan.asked
        if asked is None:
            return
        after = sizes_table(asked)
        yield place("sizes", device_counts(asked), sizes_caption(asked), after) or after
        rows: list[DistinctPlan] = []
    else:
        rows = found.rows
        heading = "The ranking" if plan is not None else "Layouts that come closest to fitting"
        shown = found.plans[0] if plan is None else plan
        asked = None if plan is None else plan.asked
        ties = _ties(found)
        yield f"<section><h2>{heading}</h2>{ranking(shown, rows, asked)}{ties}</section>"
        others = [row.plan for row in rows if row.plan.layout != shown.layout]
        if plan is not None and others:
            comparison = compare(plan, others[0])
            yield f"<section><h2>Gap to the runner-up</h2>{lacks(comparison)}</section>"
        plan = shown
    if plan is None:
        return
    yield place("step-time", step_time(plan, rows))
    yield place("memory", memory(plan))
    yield _pipeline(plan, place)
    yield place("range", ranges(plan, rows), f"{TITLES['range'][1]} {range_basis(plan)}")


def _ties(found: Answer) -> str:
    words = ties_text(tuple(indistinguishable(found.result)))
    return "" if words is None else f'<p class="caption">{html.escape(words)}</p>'


def _pipeline(plan: Plan, place: Place) -> str:
    title, caption = TITLES["pipeline"]
    try:
        timeline = plan.timeline()
    except InputError as error:
        return f"<section><h2>{title}</h2><p>{html.escape(str(error))}</p></section>"
    if len(timeline.passes) > MOST_PASSES:
        caption = caption.replace("every microbatch", "the first and the last microbatches")
    return place("pipeline", pipeline(timeline, MOST_PASSES), caption)


def _file(written: WrittenFile | InputError | None) -> Iterator[str]:
    if written is None:
        return
    if isinstance(written, InputError):
        yield f"<section><h2>The file</h2><p>{html.escape(str(written))}</p></section>"
        return
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in written.notes)
    told = f"<p>Parts that the file does not state:</p><ul>{notes}</ul>" if notes else ""
    yield (
        f'<section id="file"><h2>{html.escape(written.name)}</h2>'
        f"<pre>{html.escape(written.text)}</pre>{told}</section>"
    )


def _told(found: Answer | SizesAnswer) -> str:
    """The HTML of assumptions, notes, and the plan for Megatron-LM."""
    items = [*(f"assumed: {note}" for note in found.assumed), *(f"note: {note}" for note in found.notes)]
    if isinstance(found, Answer):
        if found.other is not None:
            items.append(f"also: {found.other}")
        rejected = found.result.rejected
        counts = {name.replace("_", " "): f"{count:,}" for name, count in rejected.items()}
        removed = (
            f'<details><summary>Rejected layouts</summary><dl class="facts">{terms(counts)}</dl></details>'
        )
    else:
        removed = ""
    listed = "".join(f"<li>{html.escape(item)}</li>" for item in items)
    return f"<section><h2>Notes</h2><ul>{listed}</ul>{removed}</section>"

"""Parts of a page about a plan, as HTML: its facts, the ranking, the gap to the runner-up, several sizes."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from costmodels.spec.record import GIB, in_seconds
from planner.budget.money import money_text
from planner.budget.question import RunQuestion
from planner.budget.run import Run, spent_text, whole_facts
from planner.budget.words import DAY, duration, scaled_number, short_number
from planner.explanation.comparison import Comparison
from planner.plan import Plan
from planner.plan_rows import shown
from planner.ranking.distinct import DistinctPlan

MORE_SIZES = "Days against cost, by the best plan for each of these numbers of devices."

TITLES = {
    "step-time": (
        "Where the time goes",
        "Parts of a step of this plan and of the next plans of the ranking.",
    ),
    "memory": (
        "Memory",
        "One device of each pipeline rank at the peak of a step, against what a device has.",
    ),
    "pipeline": (
        "The pipeline",
        "One step, every microbatch, as simulated; drag to zoom, double-click to go back.",
    ),
    "range": (
        "Range of the estimate",
        "The range is an 80 % prediction interval, by measured steps of jobs like this one.",
    ),
    "front": ("Time against memory", "Layouts that fit; the Pareto-optimal ones are joined."),
    "sizes": ("More devices, or fewer", MORE_SIZES),
    "map": (
        "Ranks on devices",
        "Each cell is a device; lines separate nodes; hover for the rank, its layers and its place in each "
        "dimension.",
    ),
    "loss": ("Loss", "Loss of the run, as logged."),
    "speed": ("Tokens per second", "Throughput of the whole job, as logged."),
    "peaks": ("Peak memory", "Peak of the fullest device, as logged."),
    "measured": (
        "Predicted and measured",
        "Measured steps of the run, and the step time that the plan predicts.",
    ),
    "profile": (
        "Step time by operation",
        "Parts of the step by the profiler of the first rank, scaled to the median step, beside the "
        "predicted parts.",
    ),
}
"""Heading and caption of each figure."""


def section(name: str, caption: str | None = None, after: str = "") -> str:
    """A section with the place of a figure and the text below it."""
    title, usual = TITLES[name]
    text = html.escape(usual if caption is None else caption).replace(" %", "&nbsp;%")
    return (
        f'<section><h2>{title}</h2><p class="caption">{text}</p>'
        f'<div class="figure" id="{name}" role="img" aria-label="{html.escape(title)}"></div>'
        f"{after}</section>"
    )


def launch_command(plan: Plan) -> str:
    """The command that runs the plan."""
    nodes = plan.cluster.nodes
    where = f"    # on each of {nodes} nodes" if nodes > 1 else ""
    return f"planner launch --plan plan.json --train-iters 1000{where}"


def sizes_caption(asked: RunQuestion) -> str:
    """A caption with the tokens of the runs of several sizes and the recommended size."""
    tokens = scaled_number(asked.run_tokens)
    unasked = ", as no number was asked for" if asked.tokens is None else ""
    advice = f" Recommended: {asked.recommended:,} devices, as {asked.why}." if asked.recommended else ""
    return f"{MORE_SIZES} Runs of {tokens} tokens{unasked}.{advice}"


def sizes_table(asked: RunQuestion) -> str:
    """A table of the sizes, each with its plan or the reason why it has none; empty for a single size."""
    if len(asked.sizes) < 2:
        return ""
    rows = []
    for size in asked.sizes:
        cells = [f"{size.world_size:,}", size.layout or size.problem or ""]
        if size.days is None or size.device_hours is None:
            cells += ["", "", ""]
        else:
            cost = "" if size.money is None else money_text(size.money, asked.currency)
            cells += [short_number(size.days), scaled_number(size.device_hours), cost]
        rows.append(_row(cells, size.world_size == asked.recommended))
    return _table("ranking sizes", ("devices", "layout", "days", "device-hours", "cost"), rows)


def facts(plan: Plan, run: Run | None, asked: RunQuestion) -> str:
    """The properties and costs of a plan, as a list of terms.

    Args:
        run: the run of the plan, where one was asked for.
        asked: the question about the run, with the size to take where several were compared.
    """
    estimate, cluster, layout = plan.estimate, plan.cluster, plan.layout
    share = estimate.peak_memory_bytes / cluster.memory_bytes
    rows = {
        "layout": layout.describe(),
        "step": f"{in_seconds(estimate.step_time_s)} "
        f"({in_seconds(estimate.step_time_low_s)} to {in_seconds(estimate.step_time_high_s)})",
        "tokens/s": f"{estimate.tokens_per_s:,.0f}, {estimate.tokens_per_s_per_device:,.0f} a device",
        "MFU": f"{100 * estimate.mfu:.1f} %",
        "memory": f"{estimate.peak_memory_bytes / GIB:.1f} of {cluster.memory_bytes / GIB:.1f} GiB "
        f"({100 * share:.0f} %{'' if plan.fits else ', does not fit'})",
        "batch": f"{layout.global_batch_size} sequences of {plan.model.seq} tokens, {layout.precision}",
        "engine": plan.engine.name,
        "searched": f"{plan.considered:,} layouts, {plan.legal:,} legal, {plan.feasible:,} fit",
    }
    if run is not None:
        rows[f"{scaled_number(run.tokens)} tokens"] = spent_text(run)
        rows |= whole_facts(run)
    if asked.recommended is not None:
        rows["recommended"] = f"{asked.recommended:,} devices: {asked.why}"
    return terms(rows)


def terms(rows: Mapping[str, str]) -> str:
    """Names and texts as the items of an HTML list of terms."""
    return "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>" for name, text in rows.items())


def ranking(plan: Plan, rows: Sequence[DistinctPlan], asked: RunQuestion | None) -> str:
    """The first plans of a question, with the days and the cost of each where a run was asked for."""
    heads = ["", "layout", "step", "tokens/s a device", "MFU", "GiB"]
    if asked is not None:
        heads += ["time", "cost" if asked.price is not None else "device-hours"]
    found = []
    for row in rows:
        layout, *figures = shown(row.plan.layout, row.plan.estimate)
        cells = [str(row.place), layout + row.note_after, *figures]
        if asked is not None:
            cells += _spent(row.plan.run(asked.run_tokens, asked.price, asked.failures))
        found.append(_row(cells, row.plan.layout == plan.layout))
    return _table("ranking", heads, found)


def _spent(run: Run) -> tuple[str, str]:
    """The time and the cost of a run, or its device-hours where it has no price."""
    cost = scaled_number(run.device_hours) if run.money is None else money_text(run.money, run.currency)
    return duration(run.days * DAY), cost


def _row(cells: Sequence[str], chosen: bool) -> str:
    mark = ' class="chosen"' if chosen else ""
    return f"<tr{mark}>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"


def _table(classes: str, heads: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    body = "\n".join(rows)
    return (
        f'<div class="scroll"><table class="{classes}">'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def lacks(comparison: Comparison | None) -> str:
    """The lag of the best other plan behind this one, as a paragraph and a list."""
    if comparison is None:
        return "<p>No other layout fits.</p>"
    other = comparison.second
    faster = comparison.throughput - 1
    how = (
        f"{abs(100 * faster):.1f} % {'slower' if faster > 0 else 'faster'}"
        if abs(faster) >= 5e-4
        else "as fast"
    )
    sure = "beyond the estimate's error" if comparison.distinguishable else "within the estimate's error"
    step = comparison.first.estimate.step_time_s
    terms = [
        (term.name, f"{1e3 * term.difference:+.3g} ms")
        for term in comparison.time[:4]
        if abs(term.difference) > 1e-4 * step
    ]
    terms += [
        (term.name, f"{term.difference / GIB:+.2f} GiB")
        for term in comparison.memory[:3]
        if abs(term.difference) > 0.005 * GIB
    ]
    items = "".join(f"<li>{name.replace('_', ' ')}: {text}</li>" for name, text in terms)
    return (
        f"<p>The best other layout, <code>{html.escape(other.layout.describe())}</code>, is {how}"
        + (f", {sure}" if how != "as fast" else "")
        + (
            "." + f' Differences of a step and of the fullest device:</p><ul class="terms">{items}</ul>'
            if terms
            else ".</p>"
        )
    )

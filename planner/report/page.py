"""One self-contained HTML page of a report: it asks the network for nothing."""

from __future__ import annotations

import html
from importlib.resources import files
from pathlib import Path
from string import Template

from costmodels.errors import InputError
from costmodels.files import write_whole
from costmodels.spec.record import GIB, in_seconds
from planner.budget.money import money_text
from planner.budget.question import RunQuestion
from planner.budget.run import spent_text, whole_facts
from planner.budget.words import scaled_number, short_number
from planner.explanation.side_by_side import measured_steps
from planner.plan import Plan
from planner.plan_rows import shown
from planner.report.contents import MOST_PASSES, Contents
from planner.report.figures import figures
from planner.report.range_basis import range_basis

TITLES = {
    "step-time": ("Where the time goes", "Parts of a step of this plan (1) and of those that come next."),
    "memory": (
        "Memory",
        "One device of each pipeline rank at the peak of a step, against what a device has.",
    ),
    "pipeline": (
        "The pipeline",
        "One step, every microbatch, as simulated; drag to zoom, double-click to go back.",
    ),
    "range": (
        "How sure this is",
        "The range is an 80 % prediction interval, by measured steps of jobs like this one.",
    ),
    "front": ("Time against memory", "Layouts that fit, and those that no other one beats in both."),
    "sizes": (
        "More devices, or fewer",
        "Days against cost, by the best plan for each of these numbers of devices.",
    ),
    "map": (
        "Which device holds what",
        "Each cell is a device; lines separate nodes; hover for the rank, its layers and its place in each "
        "dimension.",
    ),
    "loss": ("Loss", "What the run has logged."),
    "measured": ("Predicted and measured", "Steps of the run, and what the plan promised."),
    "profile": (
        "Step time by operation",
        "By the profiler of the first rank, scaled to the median step, beside what the plan expected.",
    ),
}
"""Heading and caption of each figure."""

IMAGES = ("svg", "png")
"""Formats of single figures."""


def _library() -> str:
    """The plotting library's script; `InputError` where it is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise InputError(
            "planner report draws with plotly, which is not installed; "
            "pip install 'llm-parallelism-planner[report]'"
        ) from None
    return str(get_plotlyjs())


def write_page(contents: Contents, path: str | Path) -> None:
    """Write the page; a reader sees the old file or the new one, never a part.

    Raises `InputError` where plotly is missing or the file cannot be written.
    """
    script = _library()
    write_whole("report", path, page(contents, script))


def page(contents: Contents, script: str) -> str:
    """The HTML of the page, with `script` in it."""
    plan = contents.plan
    sections, calls = [], []
    for name, figure in figures(contents).items():
        title, caption = TITLES[name]
        if name == "sizes":
            caption = f"{caption} {_of_sizes(contents.asked)}"
        if name == "range":
            caption = f"{caption} {range_basis(plan)}"
        if contents.timeline is not None and len(contents.timeline.passes) > MOST_PASSES:
            caption = caption.replace("every microbatch", "the first and the last microbatches")
        sections.append(
            f'<section><h2>{title}</h2><p class="caption">{html.escape(caption).replace(" %", "&nbsp;%")}</p>'
            f'<div class="figure" id="{name}" role="img" aria-label="{html.escape(title)}"></div>'
            f"{_sizes_table(contents.asked) if name == 'sizes' else ''}</section>"
        )
        # A closing tag within data would end the script.
        spec = figure.to_json().replace("</", "<\\/")
        calls.append(f'draw("{name}", {spec});')
    if contents.timeline is None:
        sections.append(f"<section><h2>The pipeline</h2><p>{html.escape(contents.no_timeline)}</p></section>")
    template = Template(files("planner.report").joinpath("page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=html.escape(f"{plan.model.name} on {plan.cluster.world_size} x {plan.cluster.device.name}"),
        facts=_facts(contents),
        reason=html.escape(plan.reason),
        command=_command(plan),
        ranking=_ranking(contents),
        lacks=_lacks(contents),
        measured=_measured(contents),
        sections="\n".join(sections),
        script=script,
        calls="\n".join(calls),
    )


def write_figures(contents: Contents, folder: str | Path) -> list[Path]:
    """Write each figure as SVG and PNG into `folder`; the paths.

    Raises `InputError` where the folder cannot be written, or what renders them is missing: kaleido and a
    Chrome or Chromium.
    """
    _library()
    where, written = Path(folder), []
    try:
        where.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--figures {folder}: cannot write there ({error.strerror})") from None
    drawn = []
    for name, figure in figures(contents).items():
        figure.update_layout(paper_bgcolor="white", plot_bgcolor="white", width=1000)
        for kind in IMAGES:
            drawn.append(figure)
            written.append(where / f"{name}.{kind}")
    try:
        from plotly.io import write_images

        # All at once: to start a browser takes longer than to draw.
        write_images(drawn, written)
    except (ImportError, ValueError, RuntimeError, OSError) as error:
        lines = str(error).strip().splitlines()
        raise InputError(
            f"--figures {folder}: rendering needs kaleido and a Chrome or Chromium "
            f"({lines[0] if lines else type(error).__name__})"
        ) from None
    return written


def _command(plan: Plan) -> str:
    """The command that runs the plan."""
    nodes = plan.cluster.nodes
    where = f"    # on each of {nodes} nodes" if nodes > 1 else ""
    return f"planner launch --plan plan.json --train-iters 1000{where}"


def _of_sizes(asked: RunQuestion) -> str:
    """How many tokens the runs of several sizes have, and which size to take."""
    tokens = scaled_number(asked.run_tokens)
    unasked = ", as no number was asked for" if asked.tokens is None else ""
    advice = f" Recommended: {asked.recommended:,} devices, as {asked.why}." if asked.recommended else ""
    return f"Runs of {tokens} tokens{unasked}.{advice}"


def _size_rows(asked: RunQuestion) -> str:
    """A row for each size that was asked for, or why it has no plan."""
    rows = []
    for size in asked.sizes:
        cells = [f"{size.world_size:,}", size.layout or size.problem or ""]
        if size.days is None or size.device_hours is None:
            cells += ["", "", ""]
        else:
            cost = "" if size.money is None else money_text(size.money, asked.currency)
            cells += [short_number(size.days), scaled_number(size.device_hours), cost]
        chosen = ' class="chosen"' if size.world_size == asked.recommended else ""
        rows.append(f"<tr{chosen}>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    return "\n".join(rows)


def _sizes_table(asked: RunQuestion) -> str:
    """The sizes as a table; nothing where there is one alone."""
    if len(asked.sizes) < 2:
        return ""
    heads = "".join(f"<th>{name}</th>" for name in ("devices", "layout", "days", "device-hours", "cost"))
    return (
        '<div class="scroll"><table class="ranking sizes">'
        f"<thead><tr>{heads}</tr></thead><tbody>{_size_rows(asked)}</tbody></table></div>"
    )


def _facts(contents: Contents) -> str:
    plan, run = contents.plan, contents.run
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
    if contents.asked.recommended is not None:
        rows["recommended"] = f"{contents.asked.recommended:,} devices: {contents.asked.why}"
    return "".join(f"<dt>{name}</dt><dd>{html.escape(text)}</dd>" for name, text in rows.items())


def _ranking(contents: Contents) -> str:
    rows = []
    for number, plan in enumerate(contents.rivals, 1):
        chosen = ' class="chosen"' if plan.layout == contents.plan.layout else ""
        cells = str(number), *shown(plan.layout, plan.estimate)
        rows.append(f"<tr{chosen}>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    return "\n".join(rows)


def _lacks(contents: Contents) -> str:
    comparison = contents.comparison
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
        f"<p>The best other one, <code>{html.escape(other.layout.describe())}</code>, is {how}"
        + (f", {sure}" if how != "as fast" else "")
        + ("." + f' It has, of a step and a device:</p><ul class="terms">{items}</ul>' if terms else ".</p>")
    )


def _measured(contents: Contents) -> str:
    step = measured_steps(contents.records)
    if step is None:
        return ""
    estimate = contents.plan.estimate
    peaks = [record["peak_memory_bytes"] for record in contents.records if "peak_memory_bytes" in record]
    inside = estimate.step_time_low_s <= step <= estimate.step_time_high_s
    rows = [
        ("step", in_seconds(estimate.step_time_s), in_seconds(step), f"{estimate.step_time_s / step:.2f}"),
    ]
    if peaks:
        peak = max(estimate.memory, key=lambda stage: stage.total)
        predicted = peak.total if contents.plan.cluster.device.kind == "cpu" else peak.allocated
        most = max(peaks)
        rows.append(
            ("memory", f"{predicted / GIB:.2f} GiB", f"{most / GIB:.2f} GiB", f"{predicted / most:.2f}")
        )
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        '<section><h2>The run</h2><div class="scroll"><table class="measured">'
        "<thead><tr><th></th><th>predicted</th><th>measured</th>"
        f"<th>predicted / measured</th></tr></thead><tbody>{body}</tbody></table></div>"
        f"<p>The median step is {'inside' if inside else 'outside of'} the predicted range."
        "</p></section>"
    )

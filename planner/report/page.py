"""One self-contained HTML page of a report: it needs no network."""

from __future__ import annotations

import html
from importlib.resources import files
from pathlib import Path
from string import Template

from costmodels.errors import InputError
from costmodels.files import write_whole
from costmodels.spec.record import GIB, in_seconds
from planner.explanation.side_by_side import measured_steps
from planner.report.contents import MOST_PASSES, Contents
from planner.report.figures import figures
from planner.report.parts import (
    TITLES,
    facts,
    lacks,
    launch_command,
    ranking,
    section,
    sizes_caption,
    sizes_table,
)
from planner.report.range_basis import range_basis

IMAGES = ("svg", "png")
"""Formats of single figures."""


def plotly_script(what: str = "planner report") -> str:
    """The script of the plotting library, needed by `what`; raises `InputError` where it is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise InputError(
            f"{what} draws with plotly, which is not installed; pip install 'llm-parallelism-planner[report]'"
        ) from None
    return str(get_plotlyjs())


def write_page(contents: Contents, path: str | Path) -> None:
    """Write the page; a reader sees the old file or the new one, never a part.

    Raises `InputError` where plotly is missing or the file cannot be written.
    """
    script = plotly_script()
    write_whole("report", path, page(contents, script))


def page(contents: Contents, script: str) -> str:
    """The HTML of the page, with `script` in it."""
    plan, asked = contents.plan, contents.asked
    sections, calls = [], []
    for name, figure in figures(contents).items():
        caption, after = TITLES[name][1], ""
        if name == "sizes":
            caption, after = sizes_caption(asked), sizes_table(asked)
        if name == "range":
            caption = f"{caption} {range_basis(plan)}"
        if contents.timeline is not None and len(contents.timeline.passes) > MOST_PASSES:
            caption = caption.replace("every microbatch", "the first and the last microbatches")
        sections.append(section(name, caption, after))
        # A closing tag within data would end the script.
        spec = figure.to_json().replace("</", "<\\/")
        calls.append(f'draw("{name}", {spec});')
    if contents.timeline is None:
        sections.append(f"<section><h2>The pipeline</h2><p>{html.escape(contents.no_timeline)}</p></section>")
    return Template(asset("page.html")).substitute(
        title=html.escape(f"{plan.model.name} on {plan.cluster.world_size} x {plan.cluster.device.name}"),
        facts=facts(plan, contents.run, asked),
        reason=html.escape(plan.reason),
        command=html.escape(launch_command(plan)),
        ranking=ranking(plan, contents.rows, plan.asked),
        lacks=lacks(contents.comparison),
        measured=_measured(contents),
        sections="\n".join(sections),
        style=asset("page.css"),
        script=script,
        drawing=asset("figures.js"),
        calls="\n".join(calls),
    )


def asset(name: str) -> str:
    """The text of a file of this folder that pages include."""
    return files("planner.report").joinpath(name).read_text(encoding="utf-8")


def write_figures(contents: Contents, folder: str | Path) -> list[Path]:
    """Write each figure as SVG and PNG into `folder`; the paths.

    Raises `InputError` where the folder cannot be written, or where kaleido or a Chrome or Chromium browser,
    which render them, is missing.
    """
    plotly_script()
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


def _measured(contents: Contents) -> str:
    step = measured_steps(contents.records)
    if step is None:
        return ""
    estimate = contents.plan.estimate
    peaks = [record["peak_memory_bytes"] for record in contents.records if "peak_memory_bytes" in record]
    inside = estimate.step_time_low_s <= step <= estimate.step_time_high_s
    rows = [
        (
            "median step",
            in_seconds(estimate.step_time_s),
            in_seconds(step),
            f"{estimate.step_time_s / step:.2f}",
        ),
    ]
    if peaks:
        peak = max(estimate.memory, key=lambda stage: stage.total)
        predicted = peak.total if contents.plan.cluster.device.kind == "cpu" else peak.allocated
        most = max(peaks)
        rows.append(
            ("peak memory", f"{predicted / GIB:.2f} GiB", f"{most / GIB:.2f} GiB", f"{predicted / most:.2f}")
        )
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        '<section><h2>The run</h2><div class="scroll"><table class="measured">'
        "<thead><tr><th></th><th>predicted</th><th>measured</th>"
        f"<th>predicted / measured</th></tr></thead><tbody>{body}</tbody></table></div>"
        f"<p>The median step is {'inside' if inside else 'outside of'} the predicted range."
        "</p></section>"
    )

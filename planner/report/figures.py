"""The figures of a report, each with its data and without colours of its own page."""

from __future__ import annotations

from typing import Any

import numpy as np

from costmodels.errors import InputError
from costmodels.spec.estimate import StageMemory, StepTime
from costmodels.spec.record import GIB
from costmodels.timeline import Event, Timeline
from planner.plan import Plan
from planner.report.contents import MOST_PASSES, Contents, gather

COLOURS = (
    *("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#882255", "#44aa99", "#999933"),
    *("#ddaa33", "#6699cc", "#997700", "#bbbbbb", "#ee8866"),
)
"""Paul Tol's qualitative colours, which are told apart without red or green (personal.sron.nl/~pault)."""

PASSES = {
    "F": ("forward", "#4477aa"),
    "B": ("backward", "#228833"),
    "I": ("gradients of inputs", "#44aa99"),
    "W": ("gradients of weights", "#aa3377"),
}

MOST_DEVICES = 32_768
"""Devices of the largest map that is drawn."""

Figure = Any
"""A `plotly.graph_objects.Figure`: its types come with plotly, which is asked for only here."""


def figures(contents: Contents) -> dict[str, Figure]:
    """The figures by name, in the order of the page; those without data are left out."""
    found = {
        "loss": loss(contents),
        "measured": measured(contents),
        "step-time": step_time(contents),
        "memory": memory(contents.plan),
        "pipeline": None if contents.timeline is None else pipeline(contents.timeline),
        "range": ranges(contents),
        "front": front(contents),
        "sizes": device_counts(contents),
        "map": device_map(contents.plan),
    }
    return {name: figure for name, figure in found.items() if figure is not None}


def plan_figures(plan: Plan) -> dict[str, Figure]:
    """The figures of a plan by name, as `plotly.graph_objects.Figure`, which notebooks show.

    They are `step-time`, `memory`, `pipeline`, `range`, `front`, `sizes` and `map`.

    Raises `InputError` where plotly is not installed.
    """
    try:
        import plotly  # noqa: F401  To say what is missing before anything is computed.
    except ImportError:
        raise InputError("figures need plotly; pip install 'llm-parallelism-planner[report]'") from None
    return figures(gather(plan))


def _figure(title_x: str, title_y: str, height: int = 380, **layout: Any) -> Figure:
    from plotly import graph_objects

    return graph_objects.Figure(
        layout={
            "template": "none",
            "height": height,
            "margin": {"l": 64, "r": 16, "t": 16, "b": 48},
            "font": {"family": "system-ui, sans-serif", "size": 13},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "xaxis": {"title": {"text": title_x}, "automargin": True},
            "yaxis": {"title": {"text": title_y}, "automargin": True},
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
            "hoverlabel": {"namelength": -1},
            **layout,
        }
    )


def _short(plan: Plan, number: int) -> str:
    layout = plan.layout
    return f"{number}: tp{layout.tensor_parallel} pp{layout.pipeline_parallel} dp{layout.data_parallel}"


def step_time(contents: Contents) -> Figure:
    """The parts of a step of the plan and of its rivals, in milliseconds."""
    plans = [contents.plan, *(one for one in contents.rivals if one.layout != contents.plan.layout)][:6]
    names = [_short(plan, number) for number, plan in enumerate(plans, 1)]
    result = _figure("ms of a step", "", height=120 + 44 * len(plans), barmode="stack")
    for colour, part in zip(COLOURS, StepTime.model_fields, strict=False):
        seconds = [1e3 * getattr(plan.estimate.time, part) for plan in plans]
        if max(seconds) > 0:
            result.add_bar(
                y=names,
                x=seconds,
                name=part.replace("_", " "),
                orientation="h",
                marker_color=colour,
                hovertemplate=f"%{{y}}<br>{part.replace('_', ' ')} %{{x:.4g}} ms<extra></extra>",
            )
    result.update_yaxes(autorange="reversed")
    return result


def memory(plan: Plan) -> Figure:
    """The parts of the memory of one device of each pipeline rank, in GiB, and what a device has."""
    result = _figure("pipeline rank", "GiB", barmode="stack")
    ranks = list(range(len(plan.estimate.memory)))
    for colour, part in zip(COLOURS, StageMemory.model_fields, strict=False):
        values = [getattr(stage, part) / GIB for stage in plan.estimate.memory]
        if max(values) > 0:
            result.add_bar(
                x=ranks,
                y=values,
                name=part.replace("_", " "),
                marker_color=colour,
                hovertemplate=f"rank %{{x}}<br>{part.replace('_', ' ')} %{{y:.2f}} GiB<extra></extra>",
            )
    limit = plan.cluster.memory_bytes / GIB
    result.add_hline(
        y=limit, line_dash="dash", line_color="#cc3311", annotation_text=f"a device has {limit:.1f} GiB"
    )
    result.update_xaxes(dtick=max(1, len(ranks) // 16))
    result.update_yaxes(range=[0, 1.08 * max(limit, plan.estimate.peak_memory_bytes / GIB)])
    return result


def _some_passes(timeline: Timeline) -> list[Event]:
    """All passes, or those of the first and of the last micro batches."""
    passes = timeline.passes
    if len(passes) <= MOST_PASSES:
        return passes
    count = max(event.micro_batch for event in passes) + 1
    each = max(1, MOST_PASSES * count // len(passes) // 2)
    return [event for event in passes if event.micro_batch < each or event.micro_batch >= count - each]


def pipeline(timeline: Timeline) -> Figure:
    """When each rank computes which micro batch, in milliseconds; hover names a pass."""
    result = _figure(
        "ms", "pipeline rank", height=140 + 22 * min(40, timeline.ranks), hovermode="closest", dragmode="zoom"
    )
    shown = _some_passes(timeline)
    for kind, (name, colour) in PASSES.items():
        events = [event for event in shown if event.kind == kind]
        for odd in (False, True):
            part = [event for event in events if (event.chunk % 2 == 1) == odd]
            if not part:
                continue
            x: list[float | None] = []
            y: list[int | None] = []
            text: list[str] = []
            for event in part:
                start, end = 1e3 * event.start_s, 1e3 * event.end_s
                label = (
                    f"{event.name}: {name}, micro batch {event.micro_batch}, stage {event.stage}<br>"
                    f"{start:.4g} to {end:.4g} ms"
                )
                # A point in the middle catches the pointer between the ends.
                x += [start, (start + end) / 2, end, None]
                y += [event.rank, event.rank, event.rank, None]
                text += [label, label, label, ""]
            result.add_scatter(
                x=x,
                y=y,
                text=text,
                mode="lines",
                line={"color": colour, "width": 12 if timeline.ranks <= 16 else 8},
                opacity=0.62 if odd else 1.0,
                name=name + (", odd chunks" if odd else ""),
                hovertemplate="%{text}<extra></extra>",
            )
    result.update_yaxes(
        range=[timeline.ranks - 0.4, -0.6], dtick=max(1, timeline.ranks // 16), zeroline=False
    )
    return result


def ranges(contents: Contents) -> Figure:
    """The steps of the plan and its rivals with the range that holds four of five measured steps, in ms."""
    plans = [contents.plan, *(one for one in contents.rivals if one.layout != contents.plan.layout)][:RANGES]
    result = _figure("ms of a step", "", height=120 + 30 * len(plans))
    steps = [plan.estimate for plan in plans]
    result.add_scatter(
        x=[1e3 * step.step_time_s for step in steps],
        y=[_short(plan, number) for number, plan in enumerate(plans, 1)],
        mode="markers",
        marker={"size": 10, "color": COLOURS[0]},
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [1e3 * (step.step_time_high_s - step.step_time_s) for step in steps],
            "arrayminus": [1e3 * (step.step_time_s - step.step_time_low_s) for step in steps],
        },
        hovertemplate="%{y}: %{x:.4g} ms<extra></extra>",
        showlegend=False,
    )
    result.update_yaxes(autorange="reversed")
    return result


RANGES = 8
"""Plans whose ranges are shown."""


def front(contents: Contents) -> Figure | None:
    """Tokens a second of a device against the memory of the fullest one: what fits, and the Pareto front."""
    cloud = contents.cloud
    if not len(cloud.tokens_per_s):
        return None
    result = _figure("GiB of the fullest device", "tokens/s of a device", hovermode="closest")
    rest = ~cloud.on_front
    result.add_scattergl(
        x=np.round(cloud.peak_bytes[rest], 2),
        y=np.round(cloud.tokens_per_s[rest], 1),
        mode="markers",
        marker={"size": 4, "color": "#bbbbbb"},
        name="layouts that fit",
        hovertemplate="%{x} GiB, %{y} tokens/s<extra></extra>",
    )
    result.add_scatter(
        x=np.round(cloud.peak_bytes[cloud.on_front], 2),
        y=np.round(cloud.tokens_per_s[cloud.on_front], 1),
        text=list(cloud.names),
        mode="lines+markers",
        line={"color": COLOURS[4], "shape": "hv"},
        name="none is faster in less",
        hovertemplate="%{text}<br>%{x} GiB, %{y} tokens/s<extra></extra>",
    )
    estimate = contents.plan.estimate
    result.add_scatter(
        x=[estimate.peak_memory_bytes / GIB],
        y=[estimate.tokens_per_s_per_device],
        mode="markers",
        marker={"size": 14, "symbol": "star", "color": COLOURS[0]},
        name="this plan",
        hovertemplate="this plan<br>%{x:.2f} GiB, %{y:.1f} tokens/s<extra></extra>",
    )
    return result


def device_counts(contents: Contents) -> Figure | None:
    """Days against device-hours of the best plans of other numbers of devices, for the same tokens."""
    if contents.sizes is None:
        return None
    found = [size for size in contents.sizes.sizes if size.run is not None]
    if len(found) < 2:
        return None
    result = _figure("device-hours", "days", hovermode="closest")
    runs = [size.run for size in found if size.run is not None]
    result.add_scatter(
        x=[run.device_hours for run in runs],
        y=[run.days for run in runs],
        text=[f"{size.world_size} device{'s' * (size.world_size > 1)}" for size in found],
        mode="lines+markers+text",
        textposition="top center",
        marker={"size": 10, "color": [COLOURS[4] if size.on_front else "#bbbbbb" for size in found]},
        line={"color": "#bbbbbb", "dash": "dot"},
        hovertemplate="%{text}<br>%{x:.4g} device-hours, %{y:.4g} days<extra></extra>",
        showlegend=False,
    )
    return result


def coordinates(plan: Plan) -> dict[str, np.ndarray]:
    """The place of each rank of a job in every dimension of its layout, [world size] each.

    Tensor-parallel ranks are neighbours, then context-parallel ones, then copies, then pipeline ranks
    (Megatron-LM's order "tp-cp-dp-pp").
    """
    layout = plan.layout
    rank = np.arange(layout.world_size)
    found, stride = {}, 1
    for name, size in (
        ("tp", layout.tensor_parallel),
        ("cp", layout.context_parallel),
        ("dp", layout.data_parallel),
        ("pp", layout.pipeline_parallel),
    ):
        found[name] = rank // stride % size
        stride *= size
    return found


def device_map(plan: Plan) -> Figure | None:
    """Which node holds which rank: a cell a device, coloured by its pipeline rank."""
    world, each = plan.cluster.world_size, min(plan.cluster.devices_per_node, plan.cluster.world_size)
    if world > MOST_DEVICES or world % each:
        return None
    places = coordinates(plan)
    nodes = world // each
    # Nodes side by side make rows of as many cells as the page is wide.
    across = max(1, min(nodes, 96 // each))
    rows = -(-nodes // across)
    cells = np.full((rows * across, each), -1)
    cells[:nodes] = places["pp"].reshape(nodes, each)
    labels = np.full((rows * across, each), "", dtype=object)
    text = [
        f"rank {rank}, node {rank // each}<br>"
        + ", ".join(f"{name} {at}" for name, at in zip(places, place, strict=True))
        for rank, place in enumerate(zip(*(column.tolist() for column in places.values()), strict=True))
    ]
    labels[:nodes] = np.array(text, dtype=object).reshape(nodes, each)
    grid = cells.reshape(rows, across * each).astype(float)
    grid[grid < 0] = np.nan
    pipeline = plan.layout.pipeline_parallel
    result = _figure(
        f"devices, {across} node{'s' * (across > 1)} of {each} in a row",
        "",
        height=120 + min(600, max(40, 14 * rows)),
    )
    result.add_heatmap(
        z=grid,
        text=labels.reshape(rows, across * each),
        hovertemplate="%{text}<extra></extra>",
        colorscale="Viridis",
        zmin=0,
        zmax=max(1, pipeline - 1),
        xgap=1,
        ygap=1 if rows <= 60 else 0,
        colorbar={"title": {"text": "pipeline rank"}, "dtick": max(1, pipeline // 8)},
        showscale=pipeline > 1,
    )
    for border in range(1, across):
        result.add_vline(x=border * each - 0.5, line_width=1, line_color="#888888")
    result.update_xaxes(showgrid=False, zeroline=False, showticklabels=False)
    result.update_yaxes(autorange="reversed", showgrid=False, zeroline=False, showticklabels=False)
    return result


def _steps(contents: Contents, name: str) -> tuple[list[int], list[float]]:
    found = [record for record in contents.records if record.get(name) is not None and "iteration" in record]
    return [record["iteration"] for record in found], [record[name] for record in found]


def loss(contents: Contents) -> Figure | None:
    """Losses of a run by iteration."""
    iterations, values = _steps(contents, "loss")
    if not values:
        return None
    result = _figure("iteration", "loss")
    result.add_scatter(x=iterations, y=values, mode="lines", name="training", line={"color": COLOURS[0]})
    evaluated = _steps(contents, "validation_loss")
    if evaluated[1]:
        line = {"color": COLOURS[4]}
        result.add_scatter(x=evaluated[0], y=evaluated[1], mode="lines+markers", name="validation", line=line)
    return result


def measured(contents: Contents) -> Figure | None:
    """Measured steps of a run beside the predicted one and its range, in milliseconds."""
    iterations, seconds = _steps(contents, "step_time_s")
    if not seconds:
        return None
    estimate = contents.plan.estimate
    result = _figure("iteration", "ms of a step")
    result.add_hrect(
        y0=1e3 * estimate.step_time_low_s,
        y1=1e3 * estimate.step_time_high_s,
        fillcolor=COLOURS[0],
        opacity=0.15,
        line_width=0,
        annotation_text="predicted range",
    )
    result.add_hline(y=1e3 * estimate.step_time_s, line_color=COLOURS[0], line_dash="dash")
    result.add_scatter(
        x=iterations,
        y=[1e3 * value for value in seconds],
        mode="lines+markers",
        name="measured",
        line={"color": COLOURS[4]},
    )
    return result

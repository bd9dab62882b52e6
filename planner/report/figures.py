"""The figures of a report, each with its data and without the page's colours."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from costmodels.errors import InputError
from costmodels.spec.estimate import StageMemory, StepTime
from costmodels.spec.layout import SHORT_NAMES
from costmodels.spec.record import GIB, in_seconds
from costmodels.timeline import Event, Timeline
from planner.budget.question import RunQuestion
from planner.plan import Plan
from planner.ranking.distinct import DistinctPlan
from planner.report.contents import MOST_PASSES, Contents, gather
from planner.report.device_map import device_map
from planner.report.drawing import COLOURS, Figure, empty_figure, time_unit
from planner.report.run_figures import LoggedRun, loss, profiled, steps

PASSES = {
    "F": ("forward", "#4477aa"),
    "B": ("backward", "#228833"),
    "I": ("gradients of inputs", "#44aa99"),
    "W": ("gradients of weights", "#aa3377"),
}


def figures(contents: Contents) -> dict[str, Figure]:
    """The figures by name, in the order of the page; those without data are left out."""
    runs = [LoggedRun("", contents.records)]
    found = {
        "loss": loss(runs),
        "measured": steps(runs, contents.plan.estimate),
        "profile": profiled(contents.plan.estimate, contents.parts),
        "step-time": step_time(contents.plan, contents.rows),
        "memory": memory(contents.plan),
        "pipeline": None if contents.timeline is None else pipeline(contents.timeline),
        "range": ranges(contents.plan, contents.rows),
        "front": front(contents),
        "sizes": device_counts(contents.asked),
        "map": device_map(contents.plan),
    }
    return {name: figure for name, figure in found.items() if figure is not None}


def plan_figures(plan: Plan) -> dict[str, Figure]:
    """The figures of a plan by name, as `plotly.graph_objects.Figure`, which notebooks show.

    They are `step-time`, `memory`, `pipeline`, `range`, `front`, `sizes` and `map`.

    Raises `InputError` where plotly is not installed.

    Examples:
        >>> import planner
        >>> plan = planner.suggest("gpt2-small", world_size=4, device="h100", global_batch_size=16)
        >>> figures = planner.plan_figures(plan)
        >>> figures["memory"].layout.yaxis.title.text
        'GiB'
    """
    try:
        import plotly  # noqa: F401  To say what is missing before anything is computed.
    except ImportError:
        raise InputError("figures need plotly; pip install 'llm-parallelism-planner[report]'") from None
    return figures(gather(plan))


def _shown(chosen: Plan, rows: Sequence[DistinctPlan], most: int) -> tuple[list[Plan], list[str]]:
    """The plan and the first of its rivals, with names made of the degrees that differ."""
    plans = [chosen, *(row.plan for row in rows if row.plan.layout != chosen.layout)][:most]
    places = {row.plan.layout: str(row.place) for row in rows}
    differing = [
        short
        for short in ("vpp", "cp", "ep", "zero", "mbs")
        if len({getattr(plan.layout, SHORT_NAMES[short]) for plan in plans}) > 1
    ]
    return plans, [
        f"{places.get(plan.layout, 'this')}: "
        + " ".join(
            f"{short}={getattr(plan.layout, SHORT_NAMES[short])}" for short in ("tp", "pp", "dp", *differing)
        )
        for plan in plans
    ]


def step_time(chosen: Plan, rows: Sequence[DistinctPlan]) -> Figure:
    """The parts of a step of a plan and of its rivals."""
    plans, names = _shown(chosen, rows, 6)
    scale, unit = time_unit(plan.estimate.step_time_s for plan in plans)
    result = empty_figure(f"step ({unit})", "", height=120 + 44 * len(plans), barmode="stack")
    for colour, part in zip(COLOURS, StepTime.model_fields, strict=False):
        times = [scale * getattr(plan.estimate.time, part) for plan in plans]
        if max(times) > 0:
            result.add_bar(
                y=names,
                x=times,
                name=part.replace("_", " "),
                orientation="h",
                marker_color=colour,
                customdata=[plan.layout.describe() for plan in plans],
                hovertemplate=f"%{{customdata}}<br>{part.replace('_', ' ')} %{{x:.4g}} {unit}<extra></extra>",
            )
    result.update_yaxes(autorange="reversed")
    return result


def memory(plan: Plan) -> Figure:
    """The parts of the memory of one device of each pipeline rank, in GiB, and the memory of a device."""
    result = empty_figure("pipeline rank", "GiB", barmode="stack")
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


def _some_passes(timeline: Timeline, most: int) -> list[Event]:
    """All passes, or those of the first and of the last microbatches."""
    passes = timeline.passes
    if len(passes) <= most:
        return passes
    count = max(event.micro_batch for event in passes) + 1
    each = max(1, most * count // len(passes) // 2)
    return [event for event in passes if event.micro_batch < each or event.micro_batch >= count - each]


def pipeline(timeline: Timeline, most: int = MOST_PASSES) -> Figure:
    """The passes of each rank over time, about `most` at most; hovering names a pass."""
    shown = _some_passes(timeline, most)
    scale, unit = time_unit(event.end_s for event in shown)
    result = empty_figure(
        f"time ({unit})",
        "pipeline rank",
        height=170 + 22 * min(40, timeline.ranks),
        hovermode="closest",
        dragmode="zoom",
    )
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
                start, end = scale * event.start_s, scale * event.end_s
                label = (
                    f"{event.name}: {name}, microbatch {event.micro_batch}, stage {event.stage}<br>"
                    f"{start:.4g} to {end:.4g} {unit}"
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


def ranges(chosen: Plan, rows: Sequence[DistinctPlan]) -> Figure:
    """The steps of a plan and its rivals with their 80 % prediction intervals."""
    plans, names = _shown(chosen, rows, RANGES)
    scale, unit = time_unit(plan.estimate.step_time_s for plan in plans)
    result = empty_figure(f"step ({unit})", "", height=120 + 30 * len(plans))
    steps = [plan.estimate for plan in plans]
    result.add_scatter(
        x=[scale * step.step_time_s for step in steps],
        y=names,
        text=[
            f"{plan.layout.describe()}<br>{in_seconds(plan.estimate.step_time_s)}, "
            f"{in_seconds(plan.estimate.step_time_low_s)} to {in_seconds(plan.estimate.step_time_high_s)}"
            for plan in plans
        ],
        mode="markers",
        marker={"size": 10, "color": COLOURS[0]},
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [scale * (step.step_time_high_s - step.step_time_s) for step in steps],
            "arrayminus": [scale * (step.step_time_s - step.step_time_low_s) for step in steps],
        },
        hovertemplate="%{text}<extra></extra>",
        showlegend=False,
    )
    result.update_yaxes(autorange="reversed")
    return result


RANGES = 8
"""Number of plans whose ranges are shown."""


def _rounded(values: np.ndarray) -> list[float]:
    """The values rounded to five digits, which makes a page of thousands of values smaller."""
    return [float(f"{value:.5g}") for value in values.tolist()]


def front(contents: Contents) -> Figure | None:
    """Tokens per second of a device against the memory of the fullest device: layouts that fit, and the
    Pareto front."""
    cloud = contents.cloud
    if not len(cloud.tokens_per_s):
        return None
    result = empty_figure("GiB of the fullest device", "tokens/s of a device", hovermode="closest")
    rest = ~cloud.on_front
    result.add_scattergl(
        x=_rounded(cloud.peak_bytes[rest]),
        y=_rounded(cloud.tokens_per_s[rest]),
        mode="markers",
        marker={"size": 4, "color": "#999999", "opacity": 0.6},
        name="layouts that fit",
        hovertemplate="%{x} GiB, %{y} tokens/s<extra></extra>",
    )
    result.add_scatter(
        x=_rounded(cloud.peak_bytes[cloud.on_front]),
        y=_rounded(cloud.tokens_per_s[cloud.on_front]),
        text=list(cloud.names),
        mode="lines+markers",
        line={"color": COLOURS[4], "shape": "hv"},
        name="Pareto-optimal",
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


def device_counts(asked: RunQuestion) -> Figure | None:
    """Days against cost of the best plans of several numbers of devices, for the same tokens."""
    found = [size for size in asked.sizes if size.days is not None and size.device_hours is not None]
    if len(found) < 2:
        return None
    currency = f"cost ({asked.currency})" if asked.currency else "cost (in the unit of the price)"
    unit = "device-hours" if asked.price is None else currency
    result = empty_figure(unit, "days", hovermode="closest")
    costs = {
        size.world_size: size.device_hours if size.money is None else size.money
        for size in found
        if size.device_hours is not None
    }
    optimal, others = ([size for size in found if size.on_front is on] for on in (True, False))
    for name, sizes, colour, mode in (
        ("Pareto-optimal: no size is both faster and cheaper", optimal, COLOURS[4], "lines+"),
        (
            "another size is faster and cheaper",
            others,
            "#999999",
            "",
        ),
    ):
        result.add_scatter(
            x=[costs[size.world_size] for size in sizes],
            y=[size.days for size in sizes],
            text=[f"{size.world_size:,}" for size in sizes],
            mode=f"{mode}markers+text",
            textposition="top center",
            marker={"size": 10, "color": colour},
            line={"color": colour, "dash": "dot"},
            name=name,
            hovertemplate=f"%{{text}} devices<br>%{{x:.4g}} {unit}, %{{y:.4g}} days<extra></extra>",
        )
    for size in (size for size in found if size.world_size == asked.recommended):
        result.add_scatter(
            x=[costs[size.world_size]],
            y=[size.days],
            mode="markers",
            marker={"size": 18, "symbol": "circle-open", "line_width": 3, "color": COLOURS[0]},
            name="recommended",
            hovertemplate=f"recommended: {size.world_size:,} devices<extra></extra>",
        )
    if asked.deadline_days is not None:
        result.add_hline(y=asked.deadline_days, line_dash="dash", annotation_text="deadline")
    if asked.budget is not None:
        result.add_vline(x=asked.budget, line_dash="dash", annotation_text="budget")
    # Room for the names beside the outermost points.
    ends = [*costs.values(), *([] if asked.budget is None else [asked.budget])]
    room = 0.1 * (max(ends) - min(ends) or max(ends))
    result.update_xaxes(range=[min(ends) - room, max(ends) + room])
    result.update_yaxes(rangemode="tozero")
    return result

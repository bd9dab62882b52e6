"""Figures of a run: its losses, its steps, and what they went to, beside what its plan promised."""

from __future__ import annotations

from planner.history.step_parts import TERMS, predicted_parts
from planner.report.contents import Contents
from planner.report.drawing import COLOURS, Figure, empty_figure, time_unit


def _steps(contents: Contents, name: str) -> tuple[list[int], list[float]]:
    found = [record for record in contents.records if record.get(name) is not None and "iteration" in record]
    return [record["iteration"] for record in found], [record[name] for record in found]


def loss(contents: Contents) -> Figure | None:
    """Losses of a run by iteration."""
    iterations, values = _steps(contents, "loss")
    if not values:
        return None
    result = empty_figure("iteration", "loss")
    result.add_scatter(x=iterations, y=values, mode="lines", name="training", line={"color": COLOURS[0]})
    evaluated = _steps(contents, "validation_loss")
    if evaluated[1]:
        line = {"color": COLOURS[4]}
        result.add_scatter(x=evaluated[0], y=evaluated[1], mode="lines+markers", name="validation", line=line)
    return result


def measured(contents: Contents) -> Figure | None:
    """Measured steps of a run beside the predicted one and its range."""
    iterations, seconds = _steps(contents, "step_time_s")
    if not seconds:
        return None
    estimate = contents.plan.estimate
    scale, unit = time_unit([*seconds, estimate.step_time_high_s])
    result = empty_figure("iteration", f"step ({unit})")
    result.add_hrect(
        y0=scale * estimate.step_time_low_s,
        y1=scale * estimate.step_time_high_s,
        fillcolor=COLOURS[0],
        opacity=0.15,
        line_width=0,
        annotation_text="predicted range",
    )
    predicted = scale * estimate.step_time_s
    for name, values, mode, line in (
        ("predicted", [predicted] * len(seconds), "lines", {"color": COLOURS[0], "dash": "dash"}),
        ("measured", [scale * value for value in seconds], "lines+markers", {"color": COLOURS[4]}),
    ):
        result.add_scatter(x=iterations, y=values, mode=mode, name=name, line=line)
    result.update_yaxes(rangemode="tozero")
    return result


def profiled(contents: Contents) -> Figure | None:
    """What a step of the first rank went to by its profiler, beside what the plan expected of each part."""
    if contents.parts is None:
        return None
    promised, seen = predicted_parts(contents.plan.estimate.time), contents.parts.by_term()
    shown = [name for name in TERMS if promised[name] or seen[name]]
    scale, unit = time_unit([*promised.values(), *seen.values()])
    result = empty_figure(f"step ({unit})", "", height=120 + 44 * len(shown), barmode="group")
    for label, values, colour in (("predicted", promised, COLOURS[0]), ("measured", seen, COLOURS[4])):
        result.add_bar(
            y=[TERMS[name].split(",")[0].split(" and ")[0].removeprefix("the ") for name in shown],
            x=[scale * values[name] for name in shown],
            name=label,
            orientation="h",
            marker_color=colour,
            hovertemplate=f"%{{y}}, {label}: %{{x:.4g}} {unit}<extra></extra>",
        )
    result.update_yaxes(autorange="reversed")
    return result

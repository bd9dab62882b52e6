"""Figures of one or several runs by iteration: losses, steps, tokens per second and memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from costmodels.dataclass import dataclass
from costmodels.spec.estimate import Estimate
from costmodels.spec.record import GIB, in_seconds
from planner.explanation.side_by_side import measured_steps
from planner.history.step_parts import TERMS, StepParts, predicted_parts
from planner.report.drawing import COLOURS, Figure, empty_figure, time_unit

MOST_POINTS = 2000
"""Most points of a line; of more points, every n-th is drawn."""


@dataclass(frozen=True)
class LoggedRun:
    """The records of a run, and its name."""

    name: str
    records: Sequence[dict[str, Any]]

    def line(self, name: str) -> tuple[list[int], list[float]]:
        """Iterations and the values of a metric in them, without steps that a profiler slowed."""
        found = [
            (record["iteration"], record[name])
            for record in self.records
            if isinstance(record.get(name), (int, float))
            and isinstance(record.get("iteration"), int)
            and not (record.get("profiled") and name != "loss")
        ]
        some = found[:: -(-len(found) // MOST_POINTS) or 1]
        return [iteration for iteration, _ in some], [value for _, value in some]


def loss(runs: Sequence[LoggedRun]) -> Figure | None:
    """Losses of runs by iteration."""
    result = empty_figure("iteration", "loss")
    drawn = False
    for number, run in enumerate(runs):
        for metric, label, dash in (("loss", "training", "solid"), ("validation_loss", "validation", "dot")):
            iterations, values = run.line(metric)
            if values:
                drawn = True
                result.add_scatter(
                    x=iterations,
                    y=values,
                    mode="lines" if metric == "loss" else "lines+markers",
                    name=_name(runs, run, label),
                    line={"color": _colour(runs, number, 0 if metric == "loss" else 4), "dash": dash},
                )
    return result if drawn else None


def steps(runs: Sequence[LoggedRun], estimate: Estimate | None = None) -> Figure | None:
    """Measured and predicted steps of runs, with the median of each run.

    Args:
        estimate: estimate of the plan of a single run; its range is drawn too.
    """
    lines = [run.line("step_time_s") for run in runs]
    if not any(values for _, values in lines):
        return None
    highest = 0.0 if estimate is None else estimate.step_time_high_s
    scale, unit = time_unit([*(second for _, values in lines for second in values), highest])
    result = empty_figure("iteration", f"step ({unit})")
    if estimate is not None:
        result.add_hrect(
            y0=scale * estimate.step_time_low_s,
            y1=scale * estimate.step_time_high_s,
            fillcolor=COLOURS[0],
            opacity=0.15,
            line_width=0,
            annotation_text="predicted range",
        )
    for number, (run, (iterations, seconds)) in enumerate(zip(runs, lines, strict=True)):
        if not seconds:
            continue
        predicted = run.line("predicted_step_time_s")[1]
        if estimate is not None:
            predicted = [estimate.step_time_s]
        median = measured_steps(run.records)
        measured = _colour(runs, number, 4)
        flat = [
            ("predicted", predicted[-1] if predicted else None, _colour(runs, number, 0), "dash"),
            ("median", median, measured, "dot"),
        ]
        result.add_scatter(
            x=iterations,
            y=[scale * second for second in seconds],
            mode="lines+markers",
            name=_name(runs, run, "measured"),
            line={"color": measured},
            marker={"size": 4},
        )
        for label, second, colour, dash in flat:
            if second is not None:
                result.add_scatter(
                    x=[iterations[0], iterations[-1]],
                    y=[scale * second] * 2,
                    mode="lines",
                    name=_name(runs, run, f"{label} {in_seconds(second)}"),
                    line={"color": colour, "dash": dash},
                )
    result.update_yaxes(rangemode="tozero")
    return result


def of_metric(runs: Sequence[LoggedRun], metric: str, title: str, unit: float = 1.0) -> Figure | None:
    """A metric of runs by iteration, in `unit`, on an axis from zero."""
    result = empty_figure("iteration", title)
    drawn = False
    for number, run in enumerate(runs):
        iterations, values = run.line(metric)
        if values:
            drawn = True
            result.add_scatter(
                x=iterations,
                y=[value / unit for value in values],
                mode="lines",
                name=run.name,
                line={"color": _colour(runs, number, 4)},
            )
    result.update_yaxes(rangemode="tozero")
    result.update_layout(showlegend=len(runs) > 1)
    return result if drawn else None


def speed(runs: Sequence[LoggedRun]) -> Figure | None:
    """Tokens per second of runs."""
    return of_metric(runs, "tokens_per_s", "tokens/s")


def peaks(runs: Sequence[LoggedRun]) -> Figure | None:
    """Peak memory of the fullest device of runs, in GiB."""
    return of_metric(runs, "peak_memory_bytes", "GiB", GIB)


def _name(runs: Sequence[LoggedRun], run: LoggedRun, label: str) -> str:
    return label if len(runs) == 1 else f"{run.name}, {label}"


def _colour(runs: Sequence[LoggedRun], number: int, alone: int) -> str:
    """The colour of a run among several; for a single run, the usual colour of its metric."""
    return COLOURS[alone if len(runs) == 1 else number % len(COLOURS)]


def profiled(estimate: Estimate, parts: StepParts | None) -> Figure | None:
    """The profiled parts of a step on the first rank, and the predicted parts."""
    if parts is None:
        return None
    promised, seen = predicted_parts(estimate.time), parts.by_term()
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


RUN_COLUMNS = (
    "run",
    "iteration",
    "loss",
    "median step",
    "predicted",
    "predicted / measured",
    "tokens/s",
    "GiB",
)
"""Headings of `run_row`."""


def run_row(run: LoggedRun) -> tuple[str, ...]:
    """The state of a run in the cells of a row, by `RUN_COLUMNS`; a value that is not logged yet is left
    empty."""
    (iterations, losses), step = run.line("loss"), measured_steps(run.records)
    predicted = run.line("predicted_step_time_s")[1][-1:]
    speed_of, memory_of = run.line("tokens_per_s")[1][-1:], run.line("peak_memory_bytes")[1]
    return (
        run.name,
        *(f"{iterations[-1]:,}" if iterations else "", f"{losses[-1]:.4g}" if losses else ""),
        "" if step is None else in_seconds(step),
        *(in_seconds(seconds) for seconds in predicted or ()),
        *(() if predicted else ("",)),
        f"{predicted[0] / step:.2f}" if predicted and step else "",
        f"{speed_of[0]:,.0f}" if speed_of else "",
        f"{max(memory_of) / GIB:.2f}" if memory_of else "",
    )


def stragglers(runs: Sequence[LoggedRun], most: int = 5) -> list[str]:
    """The last lines that name a slow rank, newest first, with the iteration of each."""
    found = [
        (record["iteration"], f"{run.name}, iteration {record['iteration']:,}: {record['straggler']}")
        for run in runs
        for record in run.records
        if isinstance(record.get("straggler"), str) and isinstance(record.get("iteration"), int)
    ]
    return [line for _, line in sorted(found, key=lambda one: -one[0])[:most]]

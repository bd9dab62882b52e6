"""How a job scales: the best plan of each number of devices, as a table and as a page of plots.

python examples/scaling_study.py [MODEL] [SIZES] [FILE]
"""

from __future__ import annotations

import sys

import plotly.graph_objects as go
from plotly.subplots import make_subplots

import planner


def main(
    model: str = "llama3-70b", sizes: str = "32,64,128,256,512,1024", file: str = "scaling.html"
) -> None:
    """Plan 1 T tokens on each number of H100, with steps of at most 1,024 sequences."""
    found = planner.sizes(
        model, world_size=sizes, device="h100", max_global_batch_size=1024, tokens="1T", price_per_hour=2.5
    )
    rows = [(size.world_size, size.plan, size.run) for size in found.sizes if size.plan and size.run]
    first = rows[0]
    print(f"{'devices':>7} {'days':>8} {'money':>12} {'MFU':>7} {'scaling':>8}  layout")
    scaling = []
    for count, plan, run in rows:
        speedup = first[2].days / run.days
        scaling.append(speedup * first[0] / count)
        print(
            f"{count:7} {run.days:8.1f} {run.money:12,.0f} {100 * plan.estimate.mfu:5.1f} % "
            f"{100 * scaling[-1]:6.1f} %  {plan.layout.describe()}"
        )
    counts = [count for count, _, _ in rows]
    titles = ("days", "money", "efficiency against the first, %")
    figure = make_subplots(rows=1, cols=3, subplot_titles=titles)
    days = [run.days for _, _, run in rows]
    low = [run.days - run.days_low for _, _, run in rows]
    high = [run.days_high - run.days for _, _, run in rows]
    error = {"type": "data", "array": high, "arrayminus": low}
    figure.add_trace(go.Scatter(x=counts, y=days, error_y=error, mode="lines+markers"), 1, 1)
    figure.add_trace(go.Scatter(x=counts, y=[run.money for _, _, run in rows], mode="lines+markers"), 1, 2)
    figure.add_trace(go.Bar(x=[str(count) for count in counts], y=[100 * share for share in scaling]), 1, 3)
    figure.update_xaxes(type="log", col=1).update_xaxes(type="log", col=2).update_yaxes(type="log", col=1)
    figure.update_layout(title=f"{model} on H100, 1 T tokens", showlegend=False, template="plotly_white")
    figure.write_html(file)
    print(f"saved {file}")


if __name__ == "__main__":
    main(*sys.argv[1:])

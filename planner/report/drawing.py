"""Parts that all figures of a report share: colours, frames, units."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

COLOURS = (
    *("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#882255", "#44aa99", "#999933"),
    *("#ddaa33", "#6699cc", "#997700", "#bbbbbb", "#ee8866"),
)
"""Paul Tol's qualitative colours, which colour-blind people can distinguish (personal.sron.nl/~pault)."""

Figure = Any
"""A `plotly.graph_objects.Figure`; plotly is an optional dependency, so the type is loose."""


def empty_figure(title_x: str, title_y: str, height: int = 380, **layout: Any) -> Figure:
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


def time_unit(seconds: Iterable[float]) -> tuple[float, str]:
    """The unit in which times are shown, and its number per second."""
    return (1.0, "s") if max(seconds, default=0.0) >= 1.0 else (1e3, "ms")

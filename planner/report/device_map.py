"""The map of a cluster: the rank of each device, and its part of the model."""

from __future__ import annotations

import numpy as np

from planner.plan import Plan
from planner.report.drawing import Figure, empty_figure

MOST_DEVICES = 32_768
"""Devices of the largest map that is drawn."""

MOST_NUMBERED = 256
"""Most devices with the rank written into each cell; with more, hovering shows the rank."""

ACROSS = 32, 96
"""Cells in a row of a small map and of a large map."""


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
    """A map of ranks on nodes: each cell is a device, coloured by the coordinate that decides its part of the
    model."""
    world, each = plan.cluster.world_size, min(plan.cluster.devices_per_node, plan.cluster.world_size)
    if world > MOST_DEVICES or world % each:
        return None
    places = coordinates(plan)
    dimension, title = _coloured(plan)
    count = int(places[dimension].max()) + 1
    nodes, small = world // each, world <= MOST_NUMBERED
    # Nodes side by side make rows of at most so many cells as fit the width of the page.
    across = max(1, min(nodes, ACROSS[not small] // each))
    rows = -(-nodes // across)
    grid = _rows(places[dimension].astype(float), rows, across * each, np.nan)
    result = empty_figure("", "", height=140 + min(600, max(40, (34 if small else 14) * rows)))
    result.add_heatmap(
        z=grid,
        customdata=_rows(_labels(plan, places, each), rows, across * each, ""),
        text=_rows(np.arange(world).astype(str).astype(object), rows, across * each, "") if small else None,
        texttemplate="%{text}" if small else None,
        hovertemplate="%{customdata}<extra></extra>",
        # Light to dark without the ends, so that a rank can be read in its cell.
        colorscale=[[0.0, "#cfe3f5"], [0.5, "#88b5dd"], [1.0, "#3f78b0"]],
        zmin=0,
        zmax=max(1, count - 1),
        xgap=1,
        ygap=1 if rows <= 60 else 0,
        colorbar={
            "title": {"text": title, "side": "top", "font": {"size": 12}},
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "y": 1.02,
            "yanchor": "bottom",
            "len": 0.5,
            "thickness": 10,
            "dtick": max(1, count // 4),
        },
        showscale=count > 1,
    )
    result.update_layout(margin_t=24)
    for border in range(1, across):
        result.add_vline(x=border * each - 0.5, line_width=3, line_color="#888888")
    first = [row * across for row in range(rows)]
    shown = first[:: -(-rows // 16)]
    result.update_xaxes(showgrid=False, zeroline=False, showticklabels=False, ticks="")
    result.update_yaxes(
        autorange="reversed",
        showgrid=False,
        zeroline=False,
        ticks="",
        tickvals=[node // across for node in shown],
        ticktext=[_row_name(node, min(node + across, nodes) - 1) for node in shown],
    )
    return result


def _row_name(first: int, last: int) -> str:
    return f"node {first}" if first == last else f"nodes {first}-{last}"


def _coloured(plan: Plan) -> tuple[str, str]:
    """The dimension in which devices hold different parts of the model, and its name."""
    layout = plan.layout
    if layout.pipeline_parallel > 1:
        return "pp", "pipeline rank"
    return ("tp", "tensor rank") if layout.tensor_parallel > 1 else ("dp", "replica")


def _labels(plan: Plan, places: dict[str, np.ndarray], each: int) -> np.ndarray:
    """The hover text of each rank, [world size]."""
    held = [_held(plan, rank) for rank in range(plan.layout.pipeline_parallel)]
    columns = zip(*(column.tolist() for column in places.values()), strict=True)
    return np.array(
        [
            f"rank {rank}, node {rank // each}<br>"
            + ", ".join(f"{name} {at}" for name, at in zip(places, place, strict=True))
            + f"<br>{held[place[-1]]}"
            for rank, place in enumerate(columns)
        ],
        dtype=object,
    )


def _held(plan: Plan, rank: int) -> str:
    """The layers of a pipeline rank, counted from 0, in words."""
    ranges = [plan.layout.layer_range(stage) for stage in plan.layout.stages_of(rank)]
    spans = [f"{one[0]} to {one[-1]}" if len(one) > 1 else f"{one[0]}" for one in ranges if one]
    more = f" and {len(spans) - 4} more chunks" if len(spans) > 4 else ""
    return f"layers {', '.join(spans[:4])}{more}" if spans else "no layers"


def _rows(values: np.ndarray, rows: int, columns: int, empty: object) -> np.ndarray:
    """The values in rows, the last one filled with `empty`."""
    found = np.full(rows * columns, empty, dtype=values.dtype)
    found[: len(values)] = values
    return found.reshape(rows, columns)

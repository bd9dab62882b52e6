"""Plans as rows of a table, for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from costmodels.errors import InputError
from costmodels.spec.estimate import Estimate
from costmodels.spec.layout import Layout
from costmodels.spec.record import GIB, in_seconds

if TYPE_CHECKING:
    import pandas

COLUMNS = ("layout", "step", "tokens/s/device", "MFU", "GiB")
"""Headings of `shown`."""


def shown(layout: Layout, estimate: Estimate) -> tuple[str, ...]:
    """The cells of a row for people, by `COLUMNS`."""
    return (
        layout.describe(),
        in_seconds(estimate.step_time_s),
        f"{estimate.tokens_per_s_per_device:,.0f}",
        f"{100 * estimate.mfu:.1f} %",
        f"{estimate.peak_memory_bytes / GIB:.1f}",
    )


def record(layout: Layout, estimate: Estimate) -> dict[str, Any]:
    """A row for programs: all fields of a layout, seconds, bytes and rates of its estimate."""
    figures = {
        name: getattr(estimate, name) for name in Estimate.model_fields if name not in ("time", "memory")
    }
    parts = {f"{name}_s": seconds for name, seconds in estimate.time.model_dump().items()}
    return layout.model_dump() | figures | parts


def data_frame(rows: Sequence[Mapping[str, Any]]) -> pandas.DataFrame:
    """Rows as a table of pandas; raises `InputError` where it is not installed."""
    try:
        import pandas  # Nothing else needs it.
    except ImportError:
        raise InputError("to_pandas needs pandas; pip install pandas") from None
    return pandas.DataFrame(list(rows))


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """An HTML table with a line above it."""
    import html  # Notebooks alone ask for one, and it loads a table of all entities.

    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<p>{html.escape(title)}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

"""Measured collectives: read from a file, and looked up by a group's nodes and ranks per node."""

from __future__ import annotations

import csv
from collections import defaultdict
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
from pydantic import ValidationError

from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.files import MIB, read_text
from costmodels.spec.hardware import Collective, MeasuredCollective
from costmodels.spec.table import Floats, Ints

LARGEST_TABLE = 64 * MIB

COLUMNS = ("collective", "devices", "nodes", "busbw_gbs")

SUBSTITUTES: dict[Collective, tuple[Collective, ...]] = {
    "all_gather": ("all_gather", "reduce_scatter", "all_reduce"),
    "reduce_scatter": ("reduce_scatter", "all_gather", "all_reduce"),
    "all_reduce": ("all_reduce", "all_gather", "reduce_scatter"),
    "all_to_all": ("all_to_all", "all_gather", "reduce_scatter", "all_reduce"),
    "send": ("send",),
}
"""Rows that may replace those of a collective; the first one in the table counts.

No row replaces messages between two devices, which a busy network slows down far less.
"""

_WORDS = {word.replace("_", ""): word for word in get_args(Collective)} | {"sendrecv": "send"}
"""Collectives by name, reduced to letters, as nccl-tests and others spell them differently."""


def read_network_table(path: str | Path) -> tuple[MeasuredCollective, ...]:
    """Rows of a CSV file with the columns collective, devices, nodes, busbw_gbs and, if any, bytes.

    `busbw_gbs` is nccl-tests' busbw in 10^9 bytes per second, `devices` the ranks of the group on all its
    `nodes`. Other columns are left alone. Raises `InputError`, which names the file and the line.
    """
    where = f"network table {str(path)!r}"
    try:
        text = read_text(path, LARGEST_TABLE, "utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InputError(f"cannot read {where}: {reason}") from None
    lines = csv.DictReader(text.splitlines())
    missing = [name for name in COLUMNS if name not in (lines.fieldnames or ())]
    if missing:
        raise InputError(
            f"{where}: no column {', '.join(missing)} in the first line; "
            f"expected {', '.join(COLUMNS)} and, if known, bytes"
        )
    rows = tuple(_row(f"{where} line {lines.line_num}", line) for line in lines)
    if not rows:
        raise InputError(f"{where}: no rows below the first line")
    return rows


def _row(where: str, line: dict[str, str]) -> MeasuredCollective:
    word = (line["collective"] or "").strip()
    letters = word.lower().removesuffix("_perf").replace("_", "").replace("-", "")
    if letters not in _WORDS:
        raise InputError(f"{where}: collective {word!r} is not one of {', '.join(get_args(Collective))}")
    numbers: dict[str, float | None] = {}
    for name in ("devices", "nodes", "busbw_gbs", "bytes"):
        given = (line.get(name) or "").strip()
        if not given and name == "bytes":
            numbers[name] = None
            continue
        try:
            numbers[name] = float(given)
        except ValueError:
            raise InputError(f"{where}: {name} {given!r} is not a number") from None
    fields = {
        "collective": _WORDS[letters],
        "devices": numbers["devices"],
        "nodes": numbers["nodes"],
        "bus_bandwidth": (numbers["busbw_gbs"] or 0.0) * 1e9,
        "message_bytes": numbers["bytes"],
    }
    try:
        return MeasuredCollective.model_validate(fields)
    except ValidationError as error:
        item = error.errors(include_url=False)[0]
        field = str(item["loc"][0]) if item["loc"] else ""
        name = {"bus_bandwidth": "busbw_gbs", "message_bytes": "bytes"}.get(field, field)
        given = f"{name} {line[name].strip()}: " if name else ""
        message = item["msg"].removeprefix("Value error, ")
        raise InputError(f"{where}: {given}{message}") from None


@dataclass(frozen=True)
class Rates:
    """Bytes per second of one collective by a group's nodes and ranks per node."""

    within: tuple[Floats, Floats] | None
    """Logarithms of the ranks of a group in one node or island, and its bus bandwidth; None if unmeasured."""
    across: tuple[tuple[int, Floats, Floats], ...]
    """Measurements across nodes, an entry for each number of ranks per node: that number, logarithms of the
    nodes, and one rank's share of the network; empty if unmeasured."""
    late: tuple[Floats, Floats] | None = None
    """Logarithms of the nodes, and a call's latency for each number of nodes; None where no row gives it."""
    late_within: tuple[Floats, Floats] | None = None
    """Logarithms of the ranks of a group in one node, and a call's latency; None where no row gives it."""

    def lag(self, nodes: Ints, local: Ints) -> Floats | float:
        """Seconds of a tiny call in groups of `local` ranks on each of `nodes` nodes, [n]."""
        near: Floats | float = 0.0
        if self.late_within is not None:
            near = np.interp(np.log2(np.maximum(local, 2)), *self.late_within)
        if self.late is None:
            return near
        result: Floats = np.where(nodes > 1, nodes * np.interp(np.log2(nodes), *self.late), near)
        return result

    def inside(self, local: Ints, links: Floats) -> Floats:
        """Bus bandwidth of groups of `local` ranks in one node, [n]; `links` gives it where no row does."""
        if self.within is None:
            return links
        result: Floats = np.interp(np.log2(local), *self.within)
        return result

    def outside(self, nodes: Ints, local: Ints, links: Floats) -> Floats:
        """One rank's share of the network in groups of `local` ranks on each of `nodes`, [n].

        The rows with the nearest number of ranks per node are interpolated in the logarithm of nodes; `links`
        gives it where nothing was measured.
        """
        if not self.across:
            return links
        wanted = np.log2(nodes)
        shares = np.array([np.interp(wanted, x, y) for _, x, y in self.across])
        counts = np.log2([float(count) for count, *_ in self.across])
        nearest = np.abs(counts[:, None] - np.log2(local)).argmin(axis=0)
        result: Floats = np.take_along_axis(shares, nearest[None], axis=0)[0]
        return result


@lru_cache(maxsize=64)
def table_rates(
    measured: tuple[MeasuredCollective, ...], collective: Collective, home: int, per_node: int
) -> Rates:
    """Rates of `collective` by a table where `home` neighbouring ranks share the fast link or a node.

    Among rows that differ only in message size, the largest counts, as bandwidth is reached by large
    messages. Nodes of one island count as one node. Rows of another collective are used where a table has
    none.
    """
    within: dict[int, float] = {}
    across: dict[int, dict[float, float]] = {}
    late: dict[float, float] = {}
    late_within: dict[int, float] = {}
    for kind in SUBSTITUTES[collective]:
        rows = _largest(measured, kind)
        inside = {row.devices: row.bus_bandwidth for row in rows if _is_inside(row, home, per_node)}
        outside: dict[int, dict[float, float]] = defaultdict(dict)
        slow: dict[float, float] = {}
        for row in rows:
            if not _is_inside(row, home, per_node):
                homes = max(row.nodes * per_node / max(home, per_node), 1.0)
                local = max(round(row.devices / homes), 1)
                outside[local][homes] = _share(row, kind, local)
                if row.latency:
                    slow[homes] = row.latency / homes
        if not across:
            late = slow
        if not within:
            late_within = {row.devices: row.latency for row in rows if row.devices in inside and row.latency}
        within, across = within or inside, across or outside
    curves = tuple((local, *_curve(points)) for local, points in sorted(across.items(), reverse=True))
    latencies = (_curve(points) if points else None for points in (late, late_within))
    return Rates(_curve(within) if within else None, curves, *latencies)


def _is_inside(row: MeasuredCollective, home: int, per_node: int) -> bool:
    return row.nodes == 1 or row.nodes * per_node <= home


def _share(row: MeasuredCollective, kind: Collective, local: int) -> float:
    """The network bandwidth of one rank, from the bus bandwidth of a row.

    In a ring the ranks of a node share the traffic to other nodes. In an exchange each rank sends (n - local)
    / (n - 1) of its bus bandwidth to other nodes. A message uses the card of one rank.
    """
    if kind == "send":
        return row.bus_bandwidth
    if kind == "all_to_all":
        return row.bus_bandwidth * (row.devices - local) / (row.devices - 1)
    return row.bus_bandwidth / local


def _largest(measured: tuple[MeasuredCollective, ...], kind: Collective) -> list[MeasuredCollective]:
    found: dict[tuple[int, int], MeasuredCollective] = {}
    for row in measured:
        place = (row.devices, row.nodes)
        if row.collective == kind and (
            place not in found or (row.message_bytes or np.inf) >= (found[place].message_bytes or np.inf)
        ):
            found[place] = row
    return list(found.values())


def _curve(points: dict[Any, float]) -> tuple[Floats, Floats]:
    ordered = sorted(points.items())
    return np.log2([float(x) for x, _ in ordered]), np.array([y for _, y in ordered])

"""Sites of pipeline ranks: nodes of one kind, or of two kinds that each run a part of the stages.

Ranks of the first kind come first, and pipeline ranks are the outermost degree of a layout. So the first
stages are on the first kind and the rest on the second. Groups of a stage (tp, cp, ep, dp) then have devices
and links of one kind. A stage with ranks of both kinds, as in a layout without a pipeline, waits in every
collective for its slower ranks, and uses the slower links of both kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from costmodels.dataclass import dataclass
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Cluster, Link
from costmodels.spec.layout import V_SCHEDULES
from costmodels.spec.table import SCHEDULES, Floats, Ints, LayoutTable

MIXED = 2
"""Code of a stage that has ranks of both kinds of nodes; 0 and 1 are the codes of the kinds."""


@dataclass(frozen=True)
class Site:
    """A place of stages: devices of one kind, and the links between them."""

    cluster: Cluster
    """Cluster of one kind of node."""
    engine: Engine
    """Engine with its constants for the device."""
    absent: float
    """Bytes by which a device of this kind has less memory than a device of the kind with the most."""


def sites(cluster: Cluster, engine: Engine) -> tuple[Site, ...]:
    """The sites of the cluster: its devices; for two kinds of nodes each kind, then each kind on the links
    that join both.

    Args:
        engine: the catalogue's engine with its constants for all devices.
    """
    if not cluster.parts:
        return (Site(cluster, engine.for_device(cluster.device), 0.0),)
    apart = [
        _followed(cluster, part, ranks)
        for part, ranks in zip(cluster.parts, kind_sizes(cluster), strict=True)
    ]
    joined = [
        cluster.model_copy(update={"device": part.device, "memory_bytes": part.memory_bytes, "parts": ()})
        for part in cluster.parts
    ]
    most = max(part.memory_bytes for part in cluster.parts)
    own = [engine.for_device(part.device) for part in cluster.parts]
    return tuple(
        Site(one, constants, most - one.memory_bytes)
        for one, constants in zip((*apart, *joined), (*own, *own), strict=True)
    )


def border_sites(every: tuple[Site, ...]) -> tuple[Site, ...]:
    """Sites of a cluster that are on the links between kinds of nodes, or the only one."""
    return every[MIXED:] or every


def _followed(cluster: Cluster, part: Cluster, ranks: int) -> Cluster:
    """A kind of node with its share of ranks; its links are scaled like those of the whole cluster."""
    fast, slow = (
        whole.bandwidth / min(getattr(one, name).bandwidth for one in cluster.parts)
        for name, whole in (("fast_link", cluster.fast_link), ("slow_link", cluster.slow_link))
    )
    changed: dict[str, object] = {"world_size": ranks}
    if fast != 1.0:
        changed["intra_node"] = _times(part.fast_link, fast)
    if slow != 1.0:
        changed |= {"inter_node": _times(part.slow_link, slow), "nics_per_node": None}
    return part.model_copy(update=changed)


def _times(link: Link, times: float) -> Link:
    return link.model_copy(update={"bandwidth": link.bandwidth * times})


def kind_sizes(cluster: Cluster) -> tuple[int, int]:
    """Number of ranks of each kind; if the world size was changed, in the proportion of the cluster's
    parts."""
    if not cluster.parts:
        return cluster.world_size, 0
    first, second = (part.world_size for part in cluster.parts)
    border = cluster.world_size * first // (first + second)
    return border, cluster.world_size - border


def rank_kinds(cluster: Cluster, pipeline: int) -> Ints:
    """Kind of each pipeline rank, [pp]: 0, 1 or `MIXED`."""
    each = cluster.world_size // pipeline
    start = np.arange(pipeline) * each
    border, _ = kind_sizes(cluster)
    return np.where(start + each <= border, 0, np.where(start >= border, 1, MIXED))


def stage_places(table: LayoutTable, row: int) -> Ints:
    """Pipeline rank of each stage of one row, [stages]."""
    pipeline, stages = int(table.pipeline_parallel[row]), len(table.splits[int(table.split[row])])
    rank = np.arange(stages) % pipeline
    if SCHEDULES[int(table.schedule[row])] in V_SCHEDULES:
        rank[pipeline:] = rank[pipeline:][::-1].copy()
    return rank


def site_values(site: Ints, codes: Sequence[int], value: Callable[[int], Floats]) -> Floats:
    """The value of each entry's site, in the shape of `site`; with a single site, an array that broadcasts to
    it.

    Args:
        site: index of the site of each entry.
        codes: the indices in use.
        value: function of an index: an array that broadcasts to the shape of `site`.
    """
    if len(codes) == 1:
        return value(codes[0])
    result: Floats = np.zeros(site.shape)
    for code in codes:
        if (here := site == code).any():
            result = np.where(here, value(code), result)
    return result


def decisive_site(kind: Ints, value: Callable[[int], Floats]) -> Ints:
    """Index of the site of each entry: its kind, or for both kinds the one with the larger value."""
    if not (kind == MIXED).any():
        return kind
    return np.where((kind == MIXED) & (value(MIXED + 1) > value(MIXED)), MIXED + 1, kind)


def check_precision(cluster: Cluster, engine: Engine, precision: str) -> None:
    """Raise `InputError` where the engine does not train in `precision` on a kind of device."""
    for site in sites(cluster, engine)[:MIXED]:
        site.engine.memory_policy(precision)

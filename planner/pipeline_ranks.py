"""Devices and idle shares of the pipeline ranks of a plan."""

from __future__ import annotations

from costmodels.pipeline_times import rank_seconds
from costmodels.ranks.sites import MIXED, rank_kinds
from costmodels.spec.hardware import Cluster
from costmodels.spec.layout import Layout
from planner.plan import Plan


def device_ranks(cluster: Cluster, layout: Layout) -> list[tuple[str, list[int]]]:
    """Devices by name and the pipeline ranks of each, in order; both names for a rank on both kinds."""
    ranks = range(layout.pipeline_parallel)
    if not cluster.parts:
        return [(cluster.device.name, list(ranks))]
    kinds = rank_kinds(cluster, layout.pipeline_parallel).tolist()
    names = {
        MIXED: cluster.device.name,
        **{code: part.device.name for code, part in enumerate(cluster.parts)},
    }
    return [(names[kind], [rank for rank in ranks if kinds[rank] == kind]) for kind in dict.fromkeys(kinds)]


def idle_shares(plan: Plan) -> list[float]:
    """Share of the step that each pipeline rank waits for messages and for slower ranks, 0 to 1."""
    layout, estimate = plan.layout, plan.estimate
    busy = layout.micro_batches * rank_seconds(plan.model, plan.cluster, plan.engine, layout)
    waits = estimate.time.bubble + estimate.time.pipeline_parallel + busy.max() - busy
    return [float(share) for share in waits / estimate.step_time_s]

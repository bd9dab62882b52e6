"""The arguments of a search, as flags give them."""

from __future__ import annotations

from typing import Any

from costmodels.model_spec import ModelSpec
from planner.options import BatchOptions, HardwareOptions, ParallelOptions


def search_arguments(
    model: ModelSpec, cluster: HardwareOptions, batch: BatchOptions, parallel: ParallelOptions
) -> dict[str, Any]:
    """Keyword arguments of `planner.search`, `explain` and `sizes`, all but the model and the world size."""
    return {
        "local_world_size": cluster.local_world_size,
        "device": cluster.device,
        "global_batch_size": batch.global_batch_size,
        "max_global_batch_size": batch.max_global_batch_size,
        "objective": batch.objective,
        "engine": parallel.engine,
        "pin": parallel.pins(model),
        "memory_margin_gib": cluster.memory_margin_gib,
        **cluster.network(),
    }

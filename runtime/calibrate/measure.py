"""Kernels and collectives that the ranks of one calibration measure, all of them at the same time."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from costmodels import ModelSpec
from costmodels.calibration.machine_measurements import Measurements
from costmodels.spec.engine import Engine
from costmodels.spec.table import LayoutTable
from runtime.calibrate import kernels
from runtime.calibrate.collectives import measure_calls
from runtime.calibrate.quiet import Watch
from runtime.model.number_formats import DTYPES
from runtime.parallel.accelerator import is_accelerator
from runtime.parallel.ranks import Ranks

PRODUCTS_SHARE, ATTENTION_SHARE = 0.3, 0.45
"""Shares of the time after which no further GEMM, or attention, is begun; collectives have the rest."""

LEAST = 2
"""Number of shapes that are always measured."""


def measure_kernels(
    models: Sequence[tuple[ModelSpec, LayoutTable]],
    engine: Engine,
    ranks: Ranks,
    device: torch.device,
    budget_s: float,
) -> Measurements:
    """Seconds of kernels and collectives on this machine for shapes of `models`; every rank calls it.

    Args:
        models: models with their layouts, all in one number format.
        engine: engine with its constants for the device, which determine the shapes of a layer.
        budget_s: seconds after which no further measurement begins.
    """
    started, watch = time.perf_counter(), Watch()
    precision = models[0][1].precision
    dtype = DTYPES[precision]
    resident = _resident_bytes(device)

    def late(share: float) -> bool:
        """Return whether this share of the time has passed, by the first rank's clock."""
        over = torch.tensor(float(time.perf_counter() - started > share * budget_s), device=device)
        if dist.get_world_size() > 1:
            dist.broadcast(over, 0)
        return bool(over)

    shapes, attended = [], []
    for spec, table in models:
        sizes = list(kernels.distinct([table.layout(row) for row in range(len(table))]))
        shapes += kernels.product_shapes(spec, engine, sizes)
        attended += [(spec, layout) for layout in sizes if layout.context_parallel == 1]
    products = [
        kernels.measure_product(shape, dtype, device)
        for number, shape in enumerate(dict.fromkeys(shapes))
        if not late(PRODUCTS_SHARE) or number < LEAST
    ]
    attention = [
        kernels.measure_attention(spec, layout, dtype, device)
        for number, (spec, layout) in enumerate(attended)
        if not late(ATTENTION_SHARE) or number < LEAST
    ]
    left = budget_s - (time.perf_counter() - started)
    return Measurements(
        ranks=ranks.local_world_size,
        nodes=ranks.world_size // ranks.local_world_size,
        precision=precision,
        products=tuple(products),
        attention=tuple(attention),
        copy_bytes_per_s=kernels.slowest_rate(kernels.copy_rate(device), device),
        host_bytes_per_s=kernels.host_rate(device),
        layer_host_s=min(kernels.layer_host_seconds(spec, device) for spec, _ in models),
        update_s=kernels.update_seconds(device),
        rank_bytes=resident,
        calls=tuple(measure_calls(ranks, device, left)) if ranks.world_size > 1 else (),
        others=watch.others(),
    )


def _resident_bytes(device: torch.device) -> float:
    """Resident bytes of this process so far, if its tensors are in host memory."""
    if is_accelerator(device):
        return 0.0
    scale = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale)

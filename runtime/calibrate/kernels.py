"""Seconds of the kernels of a training step, on all ranks at the same time, so that shared resources are
shared as in training.

Shapes are those of the cost model for the layers of a model (`costmodels.layers.operators`).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from costmodels import Layout, ModelSpec
from costmodels.calibration.machine_measurements import AttentionTime, ProductTime
from costmodels.layers.operators import Operators, head, layer, padded_vocabulary
from costmodels.spec.engine import Engine
from costmodels.spec.table import LayoutTable
from runtime.model.transformer import Block
from runtime.parallel.accelerator import is_accelerator, kind_of
from runtime.preflight.speed import seconds_of

LEAST_CALLS, ENOUGH_S = 3, 0.02
"""Least number of timed calls of a kernel, whose median counts, and seconds after which no further call is
timed."""

QUEUED = 8
"""Number of calls queued on an accelerator before waiting for it, as in a step."""

TOGETHER, TOGETHER_S = (7, 31), 0.05
"""Fewest and most timed calls of a collective, whose median counts, and the seconds for them."""

COPY_BYTES = {"cpu": 1 << 25, "accelerator": 1 << 29}
"""Bytes that are copied; more than one rank's share of any cache."""

PARAMETERS = {"cpu": 1 << 21, "accelerator": 1 << 26}
"""Elements of the tensor that the optimizer updates."""

TINY = 32
"""Hidden size of a layer whose time is almost only its launches."""


def kernel_seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a warmed-up call: the median of several calls, on the slowest rank."""
    call()
    queued = QUEUED if is_accelerator(device) else 1

    def calls() -> None:
        for _ in range(queued):
            call()

    taken: list[float] = []
    while len(taken) < LEAST_CALLS or (sum(taken) < ENOUGH_S and len(taken) < 100):
        taken.append(seconds_of(calls, device))
    taken.sort()
    return slowest(taken[len(taken) // 2] / queued, device)


def call_seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a call that all ranks make together, with the same number of calls on each rank."""
    call()
    least, most = TOGETHER
    count = min(most, max(least, round(TOGETHER_S / slowest(seconds_of(call, device), device))))
    return slowest(statistics.median(seconds_of(call, device) for _ in range(count)), device)


def slowest(seconds: float, device: torch.device) -> float:
    """The largest of the ranks' measurements."""
    found = torch.tensor(seconds, dtype=torch.float64, device=device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def slowest_rate(rate: float, device: torch.device) -> float:
    """The smallest of the ranks' measurements of a rate."""
    return 1.0 / slowest(1.0 / rate, device)


def product_shapes(model: ModelSpec, engine: Engine, layouts: Sequence[Layout]) -> list[tuple[int, int, int]]:
    """[m, k] by [k, n] of every GEMM of a layer and of the head under `layouts`, each shape once."""
    table = LayoutTable.of(layouts)
    works: list[Operators] = [head(model, engine, padded_vocabulary(model, table), table)]
    for routed in (False, True)[: 1 + (model.routed_layers > 0)]:
        works += [layer(spec, engine, table, mlp) for _, spec, mlp in model.variants(not routed)]
    found = {
        tuple(max(1, round(float(size[row]))) for size in gemm[:3])
        for work in works
        for gemm in work.gemms
        for row in range(len(table))
    }
    return sorted(found)  # type: ignore[arg-type]


def measure_product(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> ProductTime:
    """Measure a GEMM of a layer, and the two GEMMs of its backward pass."""
    m, k, n = shape
    left, right, gradient = (
        torch.randn(*size, device=device, dtype=dtype) for size in ((m, k), (n, k), (m, n))
    )
    forward = kernel_seconds(lambda: F.linear(left, right), device)
    backward = kernel_seconds(lambda: (gradient @ right, gradient.t() @ left), device)
    return ProductTime(m=m, k=k, n=n, forward_s=forward, backward_s=backward)


def measure_attention(
    model: ModelSpec, layout: Layout, dtype: torch.dtype, device: torch.device
) -> AttentionTime:
    """Measure core attention of a layer under `layout`, forward and backward."""
    batch, heads = layout.micro_batch_size, max(1, model.heads // layout.tensor_parallel)
    shape = batch, heads, model.seq, model.head_dim
    q, k, v = (torch.randn(*shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    with torch.no_grad():
        forward = kernel_seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), device)
    output = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    gradient = torch.randn_like(output)
    backward = kernel_seconds(
        lambda: torch.autograd.grad(output, (q, k, v), gradient, retain_graph=True), device
    )
    return AttentionTime(
        batch=batch,
        heads=heads,
        seq=model.seq,
        head_dim=model.head_dim,
        forward_s=forward,
        backward_s=backward,
    )


def copy_rate(device: torch.device) -> float:
    """Bytes per second that a copy reads and writes."""
    size = COPY_BYTES[kind_of(device)]
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / kernel_seconds(lambda: target.copy_(source), device)


def host_rate(device: torch.device) -> float | None:
    """Bytes per second from the device to its host; None on a CPU, which is its own host."""
    if device.type == "cpu":
        return None
    size = COPY_BYTES[kind_of(device)]
    source = torch.ones(size // 4, device=device)
    target = torch.empty(size // 4, pin_memory=True)
    return size / kernel_seconds(lambda: target.copy_(source, non_blocking=True), device)


def layer_host_seconds(model: ModelSpec, device: torch.device) -> float:
    """Seconds to launch a layer: the forward pass of a tiny layer of the model's kind."""
    sizes: dict[str, object] = {
        "hidden": TINY,
        "heads": 2,
        "kv_heads": 2,
        "head_dim": TINY // 2,
        "ffn": TINY,
        "seq": 4,
    }
    sizes |= {"vocab": TINY, "layers": 1, "max_positions": 4, "latent_attention": None}
    if model.experts:
        sizes |= {"expert_ffn": TINY, "dense_layers": 0}
    tiny = ModelSpec.model_validate({**model.model_dump(), **sizes, "published_parameters": 0})
    block = Block(tiny, 0).to(device)
    x = torch.randn(1, 4, TINY, device=device)
    started = time.perf_counter()
    block(x)
    calls = min(50, max(5, math.ceil(0.05 / (time.perf_counter() - started))))

    def several() -> None:
        for _ in range(calls):
            block(x)

    return kernel_seconds(several, device) / calls


def update_seconds(device: torch.device) -> float:
    """Seconds of the optimizer for each parameter."""
    count = PARAMETERS[kind_of(device)]
    weight = torch.zeros(count, device=device, requires_grad=True)
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)
    return kernel_seconds(optimizer.step, device) / count


def distinct(layouts: Sequence[Layout]) -> Iterator[Layout]:
    """One layout for each distinct set of tensor sizes on a rank."""
    seen = set()
    for layout in layouts:
        sizes = layout.tensor_parallel, layout.context_parallel, layout.micro_batch_size
        if sizes not in seen:
            seen.add(sizes)
            yield layout

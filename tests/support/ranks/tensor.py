"""Passes of tensor parallelism: losses, shapes and what is sent."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from costmodels import Layout, ModelSpec
from runtime.model.transformer import Transformer
from runtime.parallel.initialisation import initialise
from runtime.parallel.loss import TokenLoss, Vocabulary, eager_scores, fusible_scores, head_loss
from runtime.parallel.mesh import build_grid
from runtime.train.stages import build_stage
from tests.support.ranks.parity import losses_of
from tests.support.ranks.training import CPU, whole_gradients

KINDS = ("reduce_scatter", "allreduce", "allgather")


def loss_and_gradients(spec: ModelSpec, layout: Layout) -> tuple[float, float, dict[str, Tensor]]:
    """Loss of the first step, gradient norm, and whole gradients that this rank has."""
    [loss] = losses_of(spec, layout, 1)
    return loss, *whole_gradients(spec, layout)


class Watch(TorchDispatchMode):
    """Counts collectives, and keeps the last dimension of every tensor that an operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: Counter[str] = Counter()
        self.widths: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.__name__.replace("all_", "all").lstrip("_")
            self.collectives.update(kind for kind in KINDS if name.startswith(kind))
        results = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(results) if isinstance(x, Tensor) and x.ndim and not _is_view(func)]
        self.widths.update(x.shape[-1] for x in made)
        return results


def _is_view(func: Any) -> bool:
    return any(a.alias_info is not None for a in func._schema.returns)


def stage_of(spec: ModelSpec, layout: Layout, compiled: bool = False) -> Transformer:
    """The only stage of a layout, with its initial weights."""
    grid = build_grid(spec, layout, CPU)
    stage = build_stage(spec, layout, grid, 0, compiled=compiled)
    stage.to_empty(device="cpu")
    stage.tie()
    initialise(stage, spec, 1)
    return stage


def watched_passes(spec: ModelSpec, layout: Layout) -> dict[str, Any]:
    """Collectives of forward, loss included, and of backward, and widths of tensors."""
    stage = stage_of(spec, layout)
    loss = TokenLoss(spec, layout, build_grid(spec, layout, CPU))
    tokens = torch.arange(2 * spec.seq).view(2, -1) % spec.vocab
    loss.score(stage)
    loss.labels = tokens
    with Watch() as forward:
        total = stage(tokens)
    with Watch() as backward:
        total.backward()  # type: ignore[no-untyped-call]
    return {
        "forward": dict(forward.collectives),
        "backward": dict(backward.collectives),
        "widths": forward.widths | backward.widths,
    }


def compiled_and_not(spec: ModelSpec, layout: Layout) -> float:
    """Largest difference of the results of one block and of its compiled form: output and all gradients."""
    block = stage_of(spec, layout).blocks[1]
    split = layout.tensor_parallel if layout.sequence_parallel else 1
    x = torch.randn(2, spec.seq // split, spec.hidden, generator=torch.Generator().manual_seed(1))
    x.requires_grad_()
    results = []
    for forward in (block.forward, torch.compile(block.forward, fullgraph=True, backend="aot_eager")):
        y = forward(x)
        y.square().sum().backward()
        gradients = [p.grad for p in block.parameters()]
        results.append(
            [y.detach(), x.grad, *(g.to_local() if isinstance(g, DTensor) else g for g in gradients)]
        )
        x.grad = None
        block.zero_grad()
    return max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))


def traced_shapes(spec: ModelSpec, layout: Layout) -> tuple[tuple[int, ...], set[tuple[int, ...]]]:
    """Shapes of logits and of local gradients on a rank of a job that does not exist, without memory."""
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=1, world_size=layout.world_size, store=FakeStore())
    grid = build_grid(spec, layout, CPU)
    stage = build_stage(spec, layout, grid, 0, compiled=False)
    with FakeTensorMode(allow_non_fake_inputs=True):
        stage.to_empty(device="cpu")
        stage.tie()
        logits = stage(torch.zeros(1, spec.seq, dtype=torch.int64))
        logits.sum().backward()
    gradients = {tuple(p.grad.to_local().shape) for p in stage.parameters() if isinstance(p.grad, DTensor)}
    return tuple(logits.shape), gradients


def split_loss(
    x: Tensor, weight: Tensor, targets: Tensor, vocab: int, fusible: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Three times the loss under a matrix that is split evenly over all ranks, and this rank's gradients."""
    rows = len(weight) // dist.get_world_size()
    start = dist.get_rank() * rows
    x.requires_grad_()
    part = weight[start : start + rows].clone().requires_grad_()
    vocabulary = Vocabulary(vocab, start, dist.group.WORLD)
    scores = partial(fusible_scores if fusible else eager_scores, vocabulary)
    loss = head_loss(x, part, targets, vocabulary, 3.0, scores)
    loss.backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None and part.grad is not None
    return loss.detach(), x.grad, part.grad

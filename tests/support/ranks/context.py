"""Attention under context parallelism, and what it sends and computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from costmodels import Layout, ModelSpec
from runtime.model.attention import CoreAttention
from runtime.model.transformer import Transformer
from runtime.parallel.context import context_parallel, local_positions
from runtime.parallel.mesh import Grid
from runtime.settings.training_options import TrainingOptions
from runtime.train.trainer import Trainer
from tests.support.layouts import layout_of
from tests.support.ranks.training import CPU, batch_of, step_gradients

BATCH = 2


class Heads(NamedTuple):
    """Shape of one attention."""

    queries: int
    keys: int
    size: int
    seq: int = 32


class Work(NamedTuple):
    """Bytes and query/key pairs of one attention of one rank."""

    forward_bytes: int
    backward_bytes: int
    pairs: int
    """Query/key pairs of one head and sequence that the kernels computed in forward."""


class Meter(TorchDispatchMode):
    """Bytes that this rank sends, and query/key pairs in attention kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = self.pairs = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.name().split("::")[1]
        if name == "all_gather_into_tensor":
            self.sent += args[0].nbytes * (args[1] - 1)
        elif name == "reduce_scatter_tensor":
            self.sent += args[0].nbytes // args[2] * (args[2] - 1)
        elif name == "all_to_all_single":
            other = sum(args[2]) - args[2][dist.get_rank()]
            self.sent += args[0].nbytes // args[0].shape[0] * other
        elif name == "_scaled_dot_product_flash_attention_for_cpu":
            self.pairs += _pairs(*args, **kwargs)
        return func(*args, **kwargs)


def _pairs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> int:
    tokens, keys = q.shape[2], k.shape[2]
    if attn_mask is not None:
        allowed = attn_mask if attn_mask.dtype == torch.bool else attn_mask == 0
        return int(allowed[..., -tokens:, :].sum()) // (allowed.numel() // (tokens * keys))
    return tokens * (tokens + 1) // 2 if is_causal else tokens * keys


def core_of(form: str, heads: Heads) -> tuple[Callable[..., Tensor], Tensor]:
    """Core attention of a block under context parallelism over all ranks, and this rank's positions."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    spec = ModelSpec(
        name="core",
        layers=1,
        hidden=heads.queries * heads.size,
        heads=heads.queries,
        kv_heads=heads.keys,
        head_dim=heads.size,
        vocab=10,
        seq=heads.seq,
    )
    layout = layout_of(spec, context_parallel=ranks, context_parallel_form=form)
    mesh = init_device_mesh("cpu", (ranks,))
    grid = Grid(mesh, CPU, 0, 0, rank, 0, cp_group=dist.group.WORLD)
    with torch.device("meta"):
        stage = Transformer(spec, 128)
    context_parallel(stage, layout, grid)
    [block] = stage.blocks
    return block.attention.core, local_positions(spec, layout, rank)


def tokens_of(heads: Heads, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Whole q, k and v, in memory as projections leave them, and a gradient of attention's result."""
    random = torch.Generator().manual_seed(7)
    sizes = (heads.queries, heads.keys, heads.keys, heads.queries)
    *inputs, gradient = (
        torch.randn(BATCH, heads.seq, n, heads.size, generator=random).to(dtype).transpose(1, 2)
        for n in sizes
    )
    return inputs, gradient


def attention_errors(form: str, heads: Heads, dtype: torch.dtype, how: str = "eager") -> list[float]:
    """Largest error of this rank's output and gradients of q, k and v, over the largest value of each."""
    core, positions = core_of(form, heads)
    inputs, gradient = tokens_of(heads, dtype)
    local = [x[:, :, positions].requires_grad_() for x in inputs]
    call: Callable[..., Tensor] = core
    if how == "compiled":
        call = torch.compile(core, backend="aot_eager", fullgraph=form != "ring")
    elif how == "recomputed":

        def call(*arguments: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(core, *arguments, use_reentrant=False)

    result = call(*local)
    assert result.dtype == dtype
    result.backward(gradient[:, :, positions])
    whole = [x.float().requires_grad_() for x in inputs]
    expected = CoreAttention()(*whole)
    expected.backward(gradient.float())
    pairs = [(result, expected), *((x.grad, y.grad) for x, y in zip(local, whole, strict=True))]
    return [
        float((ours.float() - theirs[:, :, positions]).detach().abs().max() / theirs.detach().abs().max())
        for ours, theirs in pairs
    ]


def errors_of_cases(form: str, cases: list[tuple[Heads, torch.dtype]]) -> list[list[float]]:
    """`attention_errors` of several shapes and dtypes."""
    return [attention_errors(form, heads, dtype) for heads, dtype in cases]


def attention_work(form: str, heads: Heads, dtype: torch.dtype) -> Work:
    """Bytes and pairs of one attention."""
    core, positions = core_of(form, heads)
    inputs, gradient = tokens_of(heads, dtype)
    local = [x[:, :, positions].requires_grad_() for x in inputs]
    with Meter() as forward:
        result = core(*local)
    with Meter() as backward:
        result.backward(gradient[:, :, positions])
    return Work(forward.sent, backward.sent, forward.pairs)


def loss_and_gradients(
    spec: ModelSpec, layouts: list[Layout]
) -> list[tuple[float, float, dict[str, torch.Tensor]]]:
    """The loss of the first batch, the gradient norm and whole gradients of one step, for each layout."""
    results = []
    for layout in layouts:
        trainer = Trainer(spec, layout, TrainingOptions(train_iters=1, clip_grad=0.0), CPU)
        loss = trainer.evaluate(batch_of(spec, layout, 0)[trainer.rows])
        results.append((loss, *step_gradients(trainer, spec, 0)))
    return results


def fake_gradients(form: str, heads: Heads) -> list[tuple[int, ...]]:
    """Shapes of the output and the gradients of fake tensors."""
    core, _ = core_of(form, heads)
    seq = heads.seq // dist.get_world_size()
    with FakeTensorMode():
        local = [
            torch.empty(BATCH, seq, n, heads.size, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
            for n in (heads.queries, heads.keys, heads.keys)
        ]
        result = core(*local)
        gradients = torch.autograd.grad(result, local, torch.empty_like(result))
        return [tuple(x.shape) for x in (result, *gradients)]

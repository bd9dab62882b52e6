"""Split the matrices of one stage over tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from costmodels import Layout
from runtime.model.adapters import DOWN, UP, AdaptedLinear
from runtime.model.attention import Attention, LatentAttention
from runtime.model.experts import MixtureOfExperts
from runtime.model.gated_delta import GatedDelta
from runtime.model.mlp import MLP
from runtime.model.multi_token import FurtherToken
from runtime.model.norms import NormFromOne
from runtime.model.transformer import Block, Embedding, Transformer
from runtime.parallel.collectives import (
    copy_to_ranks,
    gather,
    join_from_ranks,
    reduce_from_ranks,
    reduce_scatter,
    split_to_ranks,
)
from runtime.parallel.local_tensors import partial_sums
from runtime.parallel.mesh import Grid
from runtime.parallel.narrow_weight import multiply


def tensor_parallel(stage: Transformer, layout: Layout, grid: Grid) -> None:
    """Split the matrices of `stage` (Megatron-LM, arXiv:1909.08053, section 3).

    Parameters become distributed tensors, so FSDP2, the optimizer and checkpoints know their split.

    The computation uses local tensors, as distributed ones would take more host time than the GEMMs of a
    small layer. A linear layer multiplies with its attribute `product`: torch.nn.functional.linear, unless
    another number format has replaced it. With sequence parallelism, norms and residuals have S/tp tokens
    (arXiv:2205.05198, section 4.2.2). Activations between stages are split in the same way. Gradients of
    parameters that every rank holds whole are partial sums. With fewer key/value heads than ranks, each rank
    stores its share of the rows of one head. In every forward pass it gathers the rest from the ranks that
    share the head. These rows are far fewer than the activations, and nothing is stored twice. MTP modules
    project their two inputs by a matrix that every rank holds whole. Routing works on tokens that only this
    rank has. Without sequence parallelism a rank takes its slice of the tokens first, and all ranks gather
    the results. `runtime.parallel.expert` splits the experts.
    """
    mesh = grid.mesh["tp"]
    region = _Region(mesh, mesh.get_group(), grid.tp_rank, layout.tensor_parallel, layout.sequence_parallel)
    for embedding in (stage.embedding, stage.further_embedding):
        if embedding is not None:
            _split_embedding(embedding, region)
    for block in stage.blocks:
        _split_block(block, region, grid.kv_group)
    if stage.norm is not None and stage.head is not None:
        _split_norm(stage.norm, region)
        _split_columns(stage.head, region)
        _enter_first(stage.head, region)
    for module in stage.mtp:
        assert isinstance(module, FurtherToken)
        _keep_whole(module.join, region)
        for norm in module.norms:
            _split_norm(norm, region)
    stage.tie()


@dataclass(frozen=True)
class _Region:
    """The part of the model where ranks have different slices of the activations' last dimension.

    Outside of it, every rank has [B, S, D], or [B, S / tp, D] with sequence parallelism.
    """

    mesh: DeviceMesh
    group: dist.ProcessGroup
    rank: int
    size: int
    sequence_parallel: bool

    def enter(self, x_BSD: Tensor) -> Tensor:
        """[B, S, D] of all tokens."""
        return gather(x_BSD, 1, self.group) if self.sequence_parallel else copy_to_ranks(x_BSD, self.group)

    def leave(self, x_BSD: Tensor) -> Tensor:
        """The sum over the ranks of [B, S, D]."""
        if self.sequence_parallel:
            return reduce_scatter(x_BSD, 1, self.group)
        return reduce_from_ranks(x_BSD, self.group)


def _split_block(block: Block, region: _Region, kv_group: dist.ProcessGroup | None) -> None:
    attention, mlp = block.attention, block.mlp
    if isinstance(attention, LatentAttention):
        _split_latent_attention(attention, region)
    elif isinstance(attention, GatedDelta):
        _split_gated_delta(attention, region)
    else:
        assert isinstance(attention, Attention)
        _split_attention(attention, region, kv_group)
    if isinstance(mlp, MixtureOfExperts):
        _split_tokens(mlp, region)
    else:
        _split_mlp(mlp, region)
    for norm in block.norms:
        _split_norm(norm, region)


def _split_attention(attention: Attention, region: _Region, kv_group: dist.ProcessGroup | None) -> None:
    _split_columns(attention.query, region)
    for linear in (attention.key, attention.value):
        _split_columns(linear, region, kv_group)
    if attention.core.sinks is not None:
        core = attention.core
        _distribute(core, "sinks", Shard(0), region)
        core.own_sinks = lambda: local_weight(core.sinks)  # type: ignore[method-assign]
    # Every rank normalises other heads with the same weights.
    for norm in (attention.query_norm, attention.key_norm):
        if norm is None:
            continue
        if attention.norms_all:
            _split_wide_norm(norm, region)
        else:
            _split_norm(norm, replace(region, sequence_parallel=True))
    if attention.gate is not None:
        _split_columns(attention.gate, region)
    _split_rows(attention.output, region)
    entry = _enter_first(attention, region)
    attention.enter = lambda x_BSD: attention.heads(entry(x_BSD))  # type: ignore[method-assign]


def _split_gated_delta(attention: GatedDelta, region: _Region) -> None:
    """Split the heads; each rank has the states of its own heads."""
    inputs = attention.inputs
    for linear in (inputs.query, inputs.key, inputs.value, inputs.strength, inputs.decay, attention.gate):
        assert isinstance(linear, nn.Linear)
        _split_columns(linear, region)
    for name, _ in list(inputs.named_parameters(recurse=False)):
        _distribute(inputs, name, Shard(0), region)
    inputs.weight = lambda name: local_weight(getattr(inputs, name))  # type: ignore[method-assign]
    # Every rank normalises other heads with the same weights.
    _split_norm(attention.gated_norm, replace(region, sequence_parallel=True))
    _split_rows(attention.output, region)
    _enter_first(attention, region)


def _split_latent_attention(attention: LatentAttention, region: _Region) -> None:
    """Split the heads. Ranks compress their own tokens, and gather the compressed tokens."""
    compress = attention.compress
    for linear in (compress.query, compress.latent):
        if linear is not None:
            _keep_whole(linear, region)
    for norm in (compress.query_norm, compress.latent_norm):
        if norm is not None:
            _split_norm(norm, region)
    forward, entry = compress.forward, _Entry(region)
    attention.entry = entry
    # One message for all three.
    _replace_forward(compress, lambda x: entry(torch.cat(forward(x), dim=-1)).split(compress.widths, dim=-1))
    for linear in (attention.query, attention.key_value):
        _split_columns(linear, region)
    _split_rows(attention.output, region)


def _split_mlp(mlp: MLP, region: _Region) -> None:
    _split_columns(mlp.up, region)
    if mlp.gate is not None:
        _split_columns(mlp.gate, region)
    _split_rows(mlp.down, region)
    _enter_first(mlp, region)


def _split_tokens(experts: MixtureOfExperts, region: _Region) -> None:
    """Let each rank route the tokens that only it has."""
    inner = replace(region, sequence_parallel=True)
    router = experts.router
    _share(router, inner)
    router.logits = lambda x_BSD: router.product(  # type: ignore[method-assign]
        x_BSD, local_weight(router.weight), local_weight(router.bias)
    )
    if experts.shared is not None:
        _split_mlp(experts.shared, inner)
    if experts.shared_gate is not None:
        _keep_whole(experts.shared_gate, inner)
    if not region.sequence_parallel:
        forward, group = experts.forward, region.group
        _replace_forward(experts, lambda x: join_from_ranks(forward(split_to_ranks(x, 1, group)), 1, group))


def _enter_first(module: nn.Module, region: _Region) -> _Entry:
    """Copy or gather the input of `module` once for all its matrices, in a separate module `entry`.

    Recomputation may wrap the entry, and so gather again in backward.
    """
    forward, entry = module.forward, _Entry(region)
    module.entry = entry
    _replace_forward(module, lambda x: forward(entry(x)))
    return entry


class _Entry(nn.Module):
    def __init__(self, region: _Region) -> None:
        super().__init__()
        self.region = region

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.region.enter(x_BSD)


def _split_columns(linear: nn.Linear, region: _Region, sharers: dist.ProcessGroup | None = None) -> None:
    """Let each rank compute its slice of the outputs; `sharers` compute the same and split the weights."""
    linear.product = F.linear  # type: ignore[assignment]
    _distribute(linear, "weight", Shard(0), region)
    _distribute(linear, "bias", Shard(0), region)
    linear.sharers = 1 if sharers is None else sharers.size()  # type: ignore[assignment]
    if isinstance(linear, AdaptedLinear):
        # Each rank's gradient of a shared tensor is that of its outputs, or of its inputs.
        _distribute(linear, DOWN, Replicate(), region)
        _distribute(linear, UP, Shard(0), region)

    def forward(x_BSI: Tensor) -> Tensor:
        weight, bias = local_weight(linear.weight), local_weight(linear.bias)
        if sharers is not None:
            if isinstance(weight, Tensor):
                weight = gather(weight, 0, sharers)
            bias = None if bias is None else gather(bias, 0, sharers)
        return _multiply(linear, x_BSI, weight, bias, sharers)

    _replace_forward(linear, forward)


def _split_rows(linear: nn.Linear, region: _Region) -> None:
    """Let each rank multiply its slice of the inputs, and sum the results over ranks."""
    linear.product = F.linear  # type: ignore[assignment]
    _distribute(linear, "weight", Shard(1), region)
    if isinstance(linear, AdaptedLinear):
        _distribute(linear, DOWN, Shard(1), region)
        _distribute(linear, UP, Replicate(), region)
    _share(linear, region)

    def forward(x_BSI: Tensor) -> Tensor:
        product = _multiply(linear, x_BSI, local_weight(linear.weight), None)
        plain = linear.product is F.linear or isinstance(linear, AdaptedLinear)
        if not plain and torch.compiler.is_compiling():
            # A GEMM in 8 bits is a view made in an autograd function: compiled code may not write over it.
            product = product.clone()
        result = region.leave(product)
        return result if linear.bias is None else result.add(local_weight(linear.bias))

    _replace_forward(linear, forward)


def _keep_whole(linear: nn.Linear, region: _Region) -> None:
    """Let each rank multiply its own tokens by the whole matrix."""
    if region.sequence_parallel:
        linear.product = F.linear  # type: ignore[assignment]
        _share(linear, region)
        _replace_forward(
            linear, lambda x: _multiply(linear, x, local_weight(linear.weight), local_weight(linear.bias))
        )


def _multiply(
    linear: nn.Linear,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sharers: dist.ProcessGroup | None = None,
) -> Tensor:
    result = multiply(linear, x, weight, bias)
    if not isinstance(linear, AdaptedLinear):
        return result
    up = local_weight(linear.lora_b)
    return linear.adapt(
        result, x, local_weight(linear.lora_a), up if sharers is None else gather(up, 0, sharers)
    )


def _split_embedding(embedding: Embedding, region: _Region) -> None:
    """Split the vocabulary; with sequence parallelism, each rank adds the positions of its tokens."""
    tokens, positions = embedding.tokens, embedding.positions
    rows = tokens.num_embeddings // region.size
    _distribute(tokens, "weight", Shard(0), region)

    def look_up(ids_BS: Tensor) -> Tensor:
        ids_BS = ids_BS - region.rank * rows
        foreign_BS = (ids_BS < 0) | (ids_BS >= rows)
        found_BSD = F.embedding(ids_BS.masked_fill(foreign_BS, 0), local_weight(tokens.weight))
        return region.leave(found_BSD.masked_fill(foreign_BS.unsqueeze(-1), 0.0))

    _replace_forward(tokens, look_up)
    if positions is not None and region.sequence_parallel:
        table = positions
        _share(table, region)
        _replace_forward(
            table,
            lambda at_BS: F.embedding(
                at_BS.chunk(region.size, dim=1)[region.rank], local_weight(table.weight)
            ),
        )


def _split_norm(norm: nn.Module, region: _Region) -> None:
    """Let each rank normalise its own tokens."""
    if not region.sequence_parallel:
        return
    _share(norm, region)
    if isinstance(norm, nn.LayerNorm):
        shape, eps = norm.normalized_shape, norm.eps
        _replace_forward(
            norm, lambda x: F.layer_norm(x, shape, local_weight(norm.weight), local_weight(norm.bias), eps)
        )
    elif isinstance(norm, NormFromOne):
        _replace_forward(norm, lambda x: norm.weighted(x, local_weight(norm.weight)))
    elif isinstance(norm, nn.RMSNorm):
        shape, epsilon = norm.normalized_shape, norm.eps
        _replace_forward(norm, lambda x: F.rms_norm(x, shape, local_weight(norm.weight), epsilon))


def _split_wide_norm(norm: nn.RMSNorm, region: _Region) -> None:
    """Normalise heads that are split over ranks by the mean square over all heads."""
    width = norm.normalized_shape[0]
    _distribute(norm, "weight", Shard(0), region)

    def forward(x_BSQ: Tensor) -> Tensor:
        wide = x_BSQ.float()
        # Every rank's result depends on every rank's squares, so gradients of the sum are summed too.
        own = wide.square().sum(-1, keepdim=True)
        mean = copy_to_ranks(reduce_from_ranks(own, region.group), region.group) / width
        scaled = wide * torch.rsqrt(mean + (norm.eps or 0.0))
        result_BSQ: Tensor = (scaled * local_weight(norm.weight).float()).to(x_BSQ.dtype)
        return result_BSQ

    _replace_forward(norm, forward)


def _share(module: nn.Module, region: _Region) -> None:
    """Mark parameters that every rank holds whole, if ranks have different tokens.

    Without sequence parallelism every rank computes the whole gradient of such a parameter.
    """
    if region.sequence_parallel:
        for name, parameter in module.named_parameters():
            if not isinstance(parameter, DTensor):
                _distribute(module, name, Replicate(), region)


def _replace_forward(module: nn.Module, forward: Callable[[Tensor], Any]) -> None:
    module.forward = forward  # type: ignore[method-assign]


def _distribute(module: nn.Module, name: str, placement: Placement, region: _Region) -> None:
    """Make a parameter of `module`, if it exists, a distributed tensor."""
    parameter = getattr(module, name)
    if parameter is not None:
        part = distribute_tensor(parameter, region.mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))


def local_weight(parameter: Tensor | None) -> Any:
    """This rank's part of a parameter; the gradient of a parameter that all ranks hold whole is a partial
    sum."""
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=partial_sums(parameter.placements))

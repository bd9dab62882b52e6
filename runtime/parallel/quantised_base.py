"""The 4-bit frozen matrices of a stage, split over tensor-parallel ranks like the original ones."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from costmodels import Layout, ModelSpec
from costmodels.layers.quantised import GROUP, quantised_layers
from runtime.model.adapters import AdaptedLinear
from runtime.model.nf4 import NF4Weight, nf4_linear
from runtime.model.number_formats import DTYPES
from runtime.model.transformer import Transformer
from runtime.parallel.collectives import gather
from runtime.parallel.local_tensors import local_part, split_dim
from runtime.parallel.mesh import Grid


class BaseWeight(NF4Weight):
    """This rank's part of a frozen matrix.

    Its values equal those of the whole matrix for any number of ranks: no block is split, and ranks that
    share a group of scales agree on the largest one.

    Args:
        parameter: the replaced parameter.
        sharers: ranks that all use the rows of all of them.
    """

    def __init__(self, parameter: Tensor, dtype: torch.dtype, sharers: dist.ProcessGroup | None) -> None:
        rows, inputs = local_part(parameter).shape
        self.rows_apart = isinstance(parameter, DTensor) and split_dim(parameter.placements[0]) == 0
        rank = parameter.device_mesh.get_local_rank() if isinstance(parameter, DTensor) else 0
        first = rank * rows if self.rows_apart else 0
        super().__init__(rows, inputs, dtype, first, parameter.device)
        self.shape, self.sharers = parameter.shape, sharers
        self.like = parameter.detach().to("meta")

    def empty(self) -> Tensor:
        """Memory for the matrix in fp32, with the same distribution."""
        local = torch.empty(self.outputs, self.inputs, device=self.codes.device)
        if not isinstance(self.like, DTensor):
            return local
        return DTensor.from_local(local, self.like.device_mesh, self.like.placements, run_check=False)

    def take(self, part: Tensor) -> None:
        """Quantise this rank's part of the matrix; ranks that split its rows call it together."""
        self.fill(part.to(self.codes.device), self._largest if self.rows_apart else lambda factors: factors)

    def _largest(self, factors: Tensor) -> Tensor:
        assert isinstance(self.like, DTensor)
        every = factors.new_zeros(-(-self.shape[0] // GROUP), factors.shape[1])
        own = slice(self.first_group, self.first_group + len(factors))
        every[own] = factors
        dist.all_reduce(every, dist.ReduceOp.MAX, group=self.like.device_mesh.get_group())
        return every[own]

    def dense(self) -> Tensor:
        """The matrix [O, I], with the rows of all sharers."""
        own = super().dense()
        return own if self.sharers is None else gather(own.contiguous(), 0, self.sharers)


def quantise_base(stage: Transformer, spec: ModelSpec, layout: Layout, grid: Grid) -> None:
    """Replace the matrices of `stage` that can have adapters by 4-bit buffers, still without content.

    Data-parallel ranks hold them whole. A layer with its own forward (split by tensor parallelism) uses its
    attribute `product` for the GEMM.
    """
    for number, block in zip(stage.numbers, stage.blocks, strict=True):
        kind = spec.layer_kind(number)
        for layer in quantised_layers(spec.with_attention(kind.attention), kind.mlp):
            linear = block.get_submodule(layer.module)
            assert isinstance(linear, nn.Linear)
            shares = layer.module in ("attention.key", "attention.value")
            weight = BaseWeight(linear.weight, DTYPES[layout.precision], grid.kv_group if shares else None)
            del linear.weight
            linear.weight = weight  # type: ignore[assignment]
            linear.product = nf4_linear  # type: ignore[assignment]
            if not isinstance(linear, AdaptedLinear) and "forward" not in linear.__dict__:
                _multiply_with_product(linear)


def _multiply_with_product(linear: nn.Linear) -> None:
    product = linear.product
    linear.forward = lambda x: product(x, linear.weight, linear.bias)  # type: ignore


def base_weights(stage: nn.Module) -> Iterator[tuple[str, BaseWeight]]:
    """The 4-bit matrices by the names of the replaced parameters."""
    for name, module in stage.named_modules():
        if isinstance(module, BaseWeight):
            yield name, module

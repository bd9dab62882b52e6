"""Weights of tensor-wise GEMMs in 8 bits, cast once a step, where each rank holds what it multiplies by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from runtime.model.transformer import Transformer
from runtime.parallel.float8_tensorwise import formats, multiplies_narrow, narrow
from runtime.parallel.local_tensors import local_part
from runtime.parallel.narrow_weight import NarrowWeight


class Float8Weights:
    """The weights of a stage that are cast to 8 bits from their masters in fp32.

    Weights of 16 bits are rounded first: the elements are those that a cast of the working copy would have.

    Args:
        copies: working copies by their masters; those of the weights here are never filled.
        compiled: casts of a layer are a few kernels.
    """

    def __init__(
        self, stage: Transformer, copies: Mapping[nn.Parameter, nn.Parameter], compiled: bool
    ) -> None:
        self.places: dict[nn.Parameter, NarrowWeight] = {}
        """The weight in 8 bits by its working copy."""
        self.layers: list[tuple[list[Tensor], list[NarrowWeight]]] = []
        """Masters of each layer, and the places of their elements."""
        self.cast: Callable[..., None] = torch.compile(_cast, dynamic=False) if compiled else _cast
        dtype = formats().operand
        for block in stage.blocks:
            masters, places = [], []
            for module in block.modules():
                if not isinstance(module, nn.Linear) or not multiplies_narrow(module):
                    continue
                weight = module.weight
                assert isinstance(weight, nn.Parameter)
                copy = copies.get(weight)
                if copy is None or copy.dtype == weight.dtype:
                    continue
                self.places[copy] = NarrowWeight(module, dtype)
                masters.append(local_part(weight.detach()))
                places.append(self.places[copy])
            if masters:
                self.layers.append((masters, places))
        self.computes = {copy.dtype for copy in self.places}

    @torch.no_grad()
    def fill(self) -> None:
        """Cast the weights as they are."""
        for masters, places in self.layers:
            for one in places:
                one.take_memory()
            [dtype] = self.computes
            self.cast(masters, [one.parts for one in places], dtype)


def _cast(masters: Sequence[Tensor], places: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> None:
    for master, parts in zip(masters, places, strict=True):
        for place, part in zip(parts, _parts(master, dtype, parts[0].dtype), strict=True):
            place.copy_(part)


@torch._dynamo.allow_in_graph  # type: ignore[untyped-decorator]
def _parts(master: Tensor, computes: torch.dtype, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The tensors of `NarrowWeight.parts` for a weight."""
    found = narrow(master.to(computes), dtype)
    return found.elements, found.elements.t(), found.scale, found.inverse

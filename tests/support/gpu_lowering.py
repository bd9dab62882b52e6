"""What Inductor gives the kernels of a GPU: graphs of dry runs lowered as for the device, without one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from runtime.dryrun import compiled_layers
from runtime.model.routing import ALIGNMENT_BYTES

GROUPED = ("_grouped_mm", "_scaled_grouped_mm")

AS_ON_A_GPU = {"pattern_matcher": True, "joint_graph_constant_folding": True}
"""Passes that change which operations have products as their only readers, and that dry runs leave out."""


class Operand(NamedTuple):
    """One matrix, or several of one shape, of a grouped product, as a kernel gets it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    itemsize: int

    @property
    def is_aligned(self) -> bool:
        """Whether the memory begins at a multiple of 16 bytes, and so does each row of it."""
        steps = [self.offset, *(stride for stride in self.strides if stride != 1)]
        return not any(step * self.itemsize % ALIGNMENT_BYTES for step in steps)


class Product(NamedTuple):
    """A grouped product, as a kernel gets it."""

    left: Operand
    right: Operand

    @property
    def fault(self) -> str:
        """The rule of CUDA's kernel that the operands break, of groups of any number of rows; none if ''.

        Of [M, R] times [R, N] the groups are parts of R. Each begins at some multiple of the stride of R: at
        16 bytes, unless that stride is one element. Of [R, K] times [E, K, N] they are rows.
        """
        (left, right), rows = self, len(self.left.shape) == len(self.right.shape) == 2
        for one in self:
            if one.strides.count(1) == 0 or 1 not in one.strides[-2:]:
                return "no dimension of a matrix is dense"
            if not one.is_aligned:
                return "rows begin at no multiple of 16 bytes"
        if rows and (left.strides[1] == 1 or right.strides[0] == 1):
            return "groups begin at any element of a dense dimension"
        return ""


@contextmanager
def lowered_products() -> Iterator[list[Product]]:
    """The grouped products of all graphs that dry runs compile while this lasts."""
    from torch._inductor.fx_passes import joint_graph

    found: list[Product] = []
    plain, folder = compiled_layers.memory_function, joint_graph.UniformValueConstantFolder

    def lowering(graph: fx.GraphModule, tracker: Any) -> Any:
        # Nothing else of a dry run shows what lowering changes: it ends with ATen's operators.
        if any(_is_grouped(node) for node in graph.graph.nodes):
            found.extend(products_of(copy.deepcopy(graph)))
        return plain(graph, tracker)

    with (
        patch.object(compiled_layers, "memory_function", lowering),
        patch.object(folder, "_deduce_value", _deduced_on_a_cpu(folder._deduce_value)),
        patch.dict(compiled_layers.SETTINGS, AS_ON_A_GPU),
    ):
        yield found


def _deduced_on_a_cpu(deduce: Callable[[Any, fx.Node], Any]) -> Callable[[Any, fx.Node], Any]:
    """How Inductor finds out what is constant, and of what value, without the device of the graph."""

    def on_a_cpu(self: Any, node: fx.Node) -> Any:
        given = node.args, node.kwargs
        node.args, node.kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), given)
        try:
            return deduce(self, node)
        finally:
            node.args, node.kwargs = given

    return on_a_cpu


def _is_grouped(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._opname in GROUPED


def products_of(graph: fx.GraphModule) -> list[Product]:
    """The grouped products of a graph of ATen's operators, lowered for the device of its tensors."""
    from torch._inductor import compile_fx, config
    from torch._inductor.graph import GraphLowering
    from torch._inductor.runtime.hints import DeviceProperties
    from torch._inductor.virtualized import V

    # What Inductor asks a device for, to split sums: an H100's.
    device = DeviceProperties("cuda", 0, 132, 90, 9, 65536, 2048, 1024, 32)
    inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    mode = torch._guards.detect_fake_mode(inputs)
    with (
        V.set_fake_mode(mode),
        config.patch({"pattern_matcher": True}),
        patch.object(DeviceProperties, "create", lambda _: device),
    ):
        compile_fx._recursive_record_original_output_strides(graph)
        compile_fx.fake_tensor_prop(graph, inputs)
        compile_fx._recursive_post_grad_passes(graph, is_inference=False)
        lowered = GraphLowering(graph, example_inputs=inputs, shape_env=mode.shape_env)
        with V.set_graph_handler(lowered):
            lowered.run(*inputs)
            products: list[Any] = [one for one in lowered.operations if _kernel(one) in GROUPED]
            wanted = sum(map(_is_grouped, graph.graph.nodes))
            assert len(products) == wanted, (len(products), wanted)
            return [Product(*map(_operand, one.inputs[:2])) for one in products]


def _kernel(operation: Any) -> str:
    """The operator of PyTorch that an operation of Inductor calls."""
    overload = getattr(operation, "op_overload", None)
    return "" if overload is None else overload._opname


def _operand(node: Any) -> Operand:
    layout = node.get_layout()
    shape, strides = (tuple(int(size) for size in sizes) for sizes in (layout.size, layout.stride))
    return Operand(shape, strides, int(layout.offset), layout.dtype.itemsize)

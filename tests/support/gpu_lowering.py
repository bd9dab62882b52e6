"""Operands of a GPU's kernels from Inductor: graphs of dry runs lowered for the device, without one."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from runtime.dryrun import compiled_layers
from runtime.dryrun.compiled_layers import ADDED
from runtime.model.number_formats import FLOAT8_SIDES, MXFP8_BLOCK
from runtime.model.routing import ALIGNMENT_BYTES
from runtime.parallel import summing_products
from runtime.parallel.mxfp8 import TILE_BLOCKS, TILE_ROWS

GROUPED = ("_grouped_mm", "_scaled_grouped_mm")

SCALED = ("_scaled_mm", "_scaled_mm_v2", "mxfp8_product", "_scaled_grouped_mm")

SUMMING = (summing_products.GROUPED, summing_products.SCALED)
"""Products of our own kernels, which add to sums."""

PRODUCTS = {*GROUPED, *SCALED, *SUMMING}

AS_ON_A_GPU = {"pattern_matcher": True, "joint_graph_constant_folding": True}
"""Passes that change which operations have products as their only readers, and that dry runs leave out."""


class Operand(NamedTuple):
    """One matrix, or several of one shape, of a product, or its scales, as a kernel gets it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @property
    def is_aligned(self) -> bool:
        """True if the memory begins at a multiple of 16 bytes, and so does each row of it."""
        steps = [self.offset, *(stride for stride in self.strides if stride != 1)]
        return not any(step * self.dtype.itemsize % ALIGNMENT_BYTES for step in steps)

    @property
    def is_contiguous(self) -> bool:
        """True if elements follow each other, the last dimension fastest."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


class Product(NamedTuple):
    """A grouped or scaled product, as a kernel gets it."""

    left: Operand
    right: Operand
    kernel: str = "_grouped_mm"
    further: tuple[Operand, ...] = ()
    """Scales of the left and of the right operand, and a bias if there is one; or where groups end."""

    @property
    def fault(self) -> str:
        """The rule of CUDA's kernel that the operands break; none if ''."""
        for one in self[:2]:
            if one.strides.count(1) == 0 or 1 not in one.strides[-2:]:
                return "no dimension of a matrix is dense"
            if not one.is_aligned:
                return "rows begin at no multiple of 16 bytes"
        if self.kernel in SUMMING:
            return self._fault_of_summing
        if self.kernel in GROUPED:
            return self._fault_of_groups or (self._fault_of_scaled if self.kernel in SCALED else "")
        return self._fault_of_scaled or self._fault_of_scales

    @property
    def _fault_of_summing(self) -> str:
        """A rule of our own kernels that is broken, without which they read single elements.

        Rows of experts are [R, N] and [R, K], with what is no sum dense. Matrices in 8 bits are [N, M] and
        [K, M], with what is summed over dense, as tensor cores read these.
        """
        if any(one.strides[-1] != 1 for one in self[:2]):
            return "rows are not dense"
        if self.kernel == summing_products.SCALED:
            return self._fault_of_scale_factors
        ends = self.further[0]
        dense = ends.dtype == torch.int32 and ends.is_contiguous
        return "" if dense else "ends of groups are not dense numbers of 32 bits"

    @property
    def _fault_of_scale_factors(self) -> str:
        if self.left.shape[-1] % FLOAT8_SIDES:
            return "what is summed over is no multiple of 16"
        if any(scale.shape or scale.dtype != torch.float32 for scale in self.further[:2]):
            return "not a scale in fp32 for each operand"
        return ""

    @property
    def _fault_of_groups(self) -> str:
        """A rule of grouped products that is broken, of groups of any number of rows.

        Of [M, R] times [R, N] the groups are parts of R. Each begins at some multiple of the stride of R: at
        16 bytes, unless that stride is one element. Of [R, K] times [E, K, N] they are rows.
        """
        (left, right), rows = self[:2], len(self.left.shape) == len(self.right.shape) == 2
        if rows and (left.strides[1] == 1 or right.strides[0] == 1):
            return "groups begin at any element of a dense dimension"
        ends = self.further[-1:]
        if ends and (ends[0].dtype != torch.int32 or not ends[0].is_contiguous):
            return "ends of groups are not dense numbers of 32 bits"
        return ""

    @property
    def _fault_of_scaled(self) -> str:
        """A rule of products in 8 bits that is broken: cuBLASLt's, for operands of any format."""
        left, right = self[:2]
        if left.strides[-1] != 1 or right.strides[-2] != 1:
            return "not rows times columns"
        if left.shape[-1] % FLOAT8_SIDES or right.shape[-1] % FLOAT8_SIDES:
            return "what is summed over, or a column of the result, is no multiple of 16"
        if left.dtype == right.dtype == torch.float8_e5m2:
            return "both operands are in E5M2"
        return ""

    @property
    def _fault_of_scales(self) -> str:
        """A rule of scales, and of a bias after them, that is broken: one scale for each matrix, row or 32
        elements."""
        sides = (self.left.shape[0], self.left.shape[-1]), (self.right.shape[-1], self.right.shape[0])
        scales, biases = self.further[:2], self.further[2:]
        if len(scales) != 2:
            return "not a scale for each operand"
        for bias in biases:
            if bias.shape != self.right.shape[-1:] or bias.dtype != torch.bfloat16 or not bias.is_contiguous:
                return "a bias is no dense row in 16 bits"
        for scale, (lines, inner), of_lines in zip(scales, sides, ((-1, 1), (1, -1)), strict=True):
            count = math.prod(scale.shape)
            if scale.dtype == torch.float8_e8m0fnu:
                blocks = -(-inner // MXFP8_BLOCK)
                wanted = _filled(lines, TILE_ROWS) * _filled(blocks, TILE_BLOCKS)
                if inner % MXFP8_BLOCK or count != wanted:
                    return "not a scale for each 32 elements, in whole tiles"
            elif scale.dtype != torch.float32:
                return "a scale is not in fp32"
            elif count != 1 and scale.shape != tuple(lines if side == -1 else 1 for side in of_lines):
                return "not a scale for each row of the left and column of the right operand"
            if not scale.is_contiguous:
                return "scales do not follow each other"
        return ""


def _filled(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


@contextmanager
def lowered_products() -> Iterator[list[Product]]:
    """The grouped and scaled products of all graphs that dry runs compile while this lasts."""
    found: list[Product] = []
    plain = compiled_layers.memory_function

    def lowering(graph: fx.GraphModule, tracker: Any) -> Any:
        # Nothing else of a dry run shows what lowering changes: it ends with ATen's operators.
        if any(_is_product(node) for node in graph.graph.nodes):
            found.extend(products_of(copy.deepcopy(graph)))
        return plain(graph, tracker)

    with seen_graphs(lowering):
        yield found


def _deduced_on_a_cpu(deduce: Callable[[Any, fx.Node], Any]) -> Callable[[Any, fx.Node], Any]:
    """Inductor's deduction of constants and their values, on the CPU in place of the graph's device."""

    def on_a_cpu(self: Any, node: fx.Node) -> Any:
        given = node.args, node.kwargs
        node.args, node.kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), given)
        try:
            return deduce(self, node)
        finally:
            node.args, node.kwargs = given

    return on_a_cpu


def _is_product(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._opname in PRODUCTS


def products_of(graph: fx.GraphModule) -> list[Product]:
    """The grouped and scaled products of a graph of ATen operators, lowered for its device."""
    with lowered(graph) as made:
        products: list[Any] = [one for one in made.operations if _kernel(one) in PRODUCTS]
        wanted = sum(map(_is_product, graph.graph.nodes))
        assert len(products) == wanted, (len(products), wanted)
        return [_product(one) for one in products]


@contextmanager
def lowered(graph: fx.GraphModule) -> Iterator[Any]:
    """A graph of ATen operators, lowered for its device: what Inductor schedules, while this lasts."""
    from torch._inductor import compile_fx, config
    from torch._inductor.graph import GraphLowering
    from torch._inductor.runtime.hints import DeviceProperties
    from torch._inductor.virtualized import V

    # Properties of an H100, which Inductor asks for to split sums.
    device = DeviceProperties("cuda", 0, 132, 90, 9, 65536, 2048, 1024, 32)
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    inputs = [node.meta["val"] for node in placeholders]
    mode = torch._guards.detect_fake_mode(inputs)
    with (
        V.set_fake_mode(mode),
        config.patch({"pattern_matcher": True}),
        patch.object(DeviceProperties, "create", lambda _: device),
    ):
        compile_fx._recursive_record_original_output_strides(graph)
        compile_fx.fake_tensor_prop(graph, inputs)
        compile_fx._recursive_post_grad_passes(graph, is_inference=False)
        made = GraphLowering(
            graph,
            example_inputs=inputs,
            shape_env=mode.shape_env,
            # Operators that Inductor does not know get other operands in backward.
            is_backward=any(str(node.target).startswith("tangents") for node in placeholders),
        )
        with V.set_graph_handler(made):
            made.run(*inputs)
            yield made


@contextmanager
def seen_graphs(see: Callable[[fx.GraphModule, Any], Any]) -> Iterator[None]:
    """Let `see` make the function of each graph that dry runs compile, passed through as for a GPU."""
    from torch._inductor.fx_passes import joint_graph

    folder = joint_graph.UniformValueConstantFolder
    with (
        patch.object(compiled_layers, "memory_function", see),
        patch.object(folder, "_deduce_value", _deduced_on_a_cpu(folder._deduce_value)),
        patch.dict(compiled_layers.SETTINGS, AS_ON_A_GPU),
    ):
        yield


def _product(operation: Any) -> Product:
    left, right, *further = map(_operand, operation.inputs)
    return Product(left, right, _kernel(operation), tuple(further))


def _kernel(operation: Any) -> str:
    """The operator of PyTorch that an operation of Inductor calls."""
    overload = getattr(operation, "op_overload", None)
    return "" if overload is None else overload._opname


def _operand(node: Any) -> Operand:
    layout = node.get_layout()
    shape, strides = (tuple(int(size) for size in sizes) for sizes in (layout.size, layout.stride))
    return Operand(shape, strides, int(layout.offset), layout.dtype)


class Launch(NamedTuple):
    """A kernel of a compiled graph."""

    kind: str
    bytes: int
    """Bytes that it reads and writes."""
    name: str
    """The operators that it computes."""


def launches_of(graph: fx.GraphModule) -> list[Launch]:
    """The kernels of a graph of ATen operators, as Inductor fuses them for its device."""
    from torch._inductor import scheduler
    from torch._inductor.debug import DebugContext
    from torch._inductor.virtualized import V

    with (
        lowered(graph) as made,
        V.set_debug_handler(DebugContext()),
        patch.object(scheduler, "has_triton", lambda: True),
    ):
        made.init_wrapper_code()
        nodes = scheduler.Scheduler(made.operations).nodes
        return [_launch(node) for node in nodes if _starts_kernel(node)]


def _starts_kernel(node: Any) -> bool:
    """Return whether a node of the schedule is more than a name for a part of another one's result."""
    from torch._inductor import ir

    return not (node.is_template() is None or isinstance(node.node, (ir.MultiOutput, ir.NopKernel)))


def _launch(node: Any) -> Launch:
    if node.is_extern():
        name = _kernel(node.node) or str(getattr(node.node, "python_kernel_name", ""))
        return Launch(_kind_of_kernel(name), int(node.get_read_write_buffers_sizes()), name)
    parts = [part.node for part in node.get_nodes() if part.node is not None]
    origins = {origin for part in parts for origin in part.get_origins()}
    names = {str(getattr(origin.target, "_opname", origin.target)) for origin in origins}
    narrow = any(part.get_dtype() in FLOAT8 for part in parts) or "amax" in names
    kind = "casts to 8 bits" if narrow else "element-wise and sums"
    return Launch(kind, int(node.get_read_write_buffers_sizes()), " ".join(sorted(names)))


FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)


def _kind_of_kernel(name: str) -> str:
    if name in (*GROUPED, summing_products.GROUPED):
        return "grouped GEMM"
    if "attention" in name:
        return "attention"
    sums = name.startswith(ADDED.split("::")[1])
    is_product = sums or name in SCALED or name.endswith("mm") or "product" in name
    return "GEMM" if is_product else "element-wise and sums"

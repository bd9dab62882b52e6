"""Compiled layers without code generation:

PyTorch's own graphs run for their memory only. Dynamo, AOTAutograd and Inductor's passes and partitioner run
as for the device, so a layer saves the same tensors as the compiled one. Each graph runs node by node and
allocates the buffers of Inductor's code:

- GEMMs, attention, collectives and all other separate kernels read and write buffers;
- element-wise operations, copies and casts are computed where they are read; they have a buffer only if a
  separate kernel reads them or the graph returns them;
- reductions write a buffer, and read element-wise operations without a buffer;
- views share the buffer of their base; a sum over ranks is made in place if nothing else reads its input;
- a buffer lives until its last reader, including readers through element-wise operations.

Inductor may also write in place into a buffer at its last read, and reorder kernels to save memory. Neither
is done here, so temporaries within a layer are larger by up to a few tensors of its inputs' size.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from runtime.dryrun.fake_gpu import cpp_device
from runtime.dryrun.repeats import repeats_of_compilers
from runtime.dryrun.tracker import COLLECTIVES, Tracker
from runtime.parallel.summing_linear import place_of

SETTINGS = {
    # Would try out GEMMs on the device.
    "shape_padding": False,
    # Looks for attention that is not written as such; takes seconds to get ready.
    "pattern_matcher": False,
    # Computes constants on the device.
    "joint_graph_constant_folding": False,
    "fx_graph_cache": False,
    # No code is made, so nobody needs to wait for it.
    "compile_threads": 1,
}
"""Settings of Inductor under which layers are compiled."""

INLINED_OPERATORS = {
    "expand",
    "clone",
    "copy",
    "full",
    "full_like",
    "zeros",
    "ones",
    "zeros_like",
    "ones_like",
    "scalar_tensor",
    "arange",
    "iota",
    "embedding",
    "gather",
    "index",
    "index_select",
    "constant_pad_nd",
    "slice_scatter",
    "select_scatter",
    "convert_element_type",
    "_to_copy",
    "empty",
    "rev",
    "flip",
    "repeat",
}
"""Operators that Inductor inlines into their readers, besides PyTorch's pointwise operators."""

REDUCTIONS = {
    "sum",
    "mean",
    "amax",
    "amin",
    "var_mean",
    "var",
    "prod",
    "any",
    "all",
    "argmax",
    "cat",
    "logsumexp",
    "index_put",
    "scatter_add",
}
"""Operators whose result has a buffer, and whose inputs need none. `cat` is one, since its parts are written
into the result, and so are operators that write to places of a new tensor."""

ALIASES = {"_unsafe_view", "reshape", "wait_tensor", "lift_fresh", "alias", "copy_"}
"""Operators whose result shares memory, besides PyTorch's views; a copy into an input is written in place."""

READERS = ("kernel", "output")
"""Kinds of nodes that only read buffers."""

ADDED = "planner::add_weight_gradient"
"""The GEMM that adds to a sum, which no graph knows; names of others begin so."""

SUMS, WAIT = "_c10d_functional::all_reduce", "_c10d_functional::wait_tensor"

NORMS = ("attention_norm", "attended_norm", "mlp_norm", "computed_norm")

KINDS = (*((name, "norm") for name in NORMS), ("attention", "attention"), ("mlp", "mlp"))
"""Parts of a block by the name of their module."""


class _EveryFile:
    """A set that contains every file name, so that no source lines are recorded."""

    def __contains__(self, name: object) -> bool:
        return True


@contextmanager
def compiled_layers(tracker: Callable[[], Tracker]) -> Iterator[None]:
    """Within this context `torch.compile` makes functions that only allocate memory.

    They report to the tracker that is active when they run.
    """
    import torch._dynamo
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config
    from torch._dynamo import guards, output_graph
    from torch._functorch import partitioners

    compile, put = torch.compile, torch._prims.device_put

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(
            graph, list(inputs), inner_compile=lambda gm, _, **kwargs: memory_function(gm, tracker)
        )

    def put_elsewhere(x: Tensor, device: torch.device, non_blocking: bool = False) -> Tensor:
        # Casts name the device that C++ sees, and decompositions take it for another one.
        moved: Tensor = x if cpp_device(device) == cpp_device(x.device) else put(x, device, non_blocking)
        return moved

    def made(function: Any, **_: Any) -> Any:
        # Sizes are the same each time: rows of experts come evenly in a dry run.
        return compile(function, backend=backend, dynamic=False)

    with ExitStack() as stack:
        stack.enter_context(inductor_config.patch(SETTINGS))
        stack.enter_context(functorch_config.patch({"enable_autograd_cache": False}))
        # Every node has the lines of the model that it comes from, with marks below them, for errors.
        stack.enter_context(patch.object(output_graph, "uninteresting_files", _EveryFile))
        # Graphs are printed for a log that nobody keeps.
        stack.enter_context(patch.object(fx.GraphModule, "print_readable", lambda *_, **__: ""))
        # Would time guards, for the same log, on caches that it empties.
        stack.enter_context(patch.object(guards, "profile_guard_manager", lambda *_: 0.0))
        stack.enter_context(patch.object(torch, "compile", made))
        stack.enter_context(patch.object(torch._prims, "device_put", put_elsewhere))
        # Attention that is computed again has no dropout, and needs no random numbers of the device.
        stack.enter_context(
            patch.object(
                partitioners, "functionalize_rng_ops", lambda _, forward, backward, *rest: (forward, backward)
            )
        )
        stack.enter_context(repeats_of_compilers())
        torch._dynamo.reset()
        stack.callback(torch._dynamo.reset)
        yield


def memory_function(graph: fx.GraphModule, current: Callable[[], Tracker]) -> Any:
    """A function that allocates the outputs of `graph` from a list of inputs, which it empties."""
    steps = plan(graph)

    def run(inputs: list[Any]) -> Any:
        tracker = current()
        category, layer = tracker.category, tracker.layer
        try:
            return run_steps(tracker, inputs, category, layer)
        finally:
            tracker.category, tracker.layer = category, layer

    def run_steps(tracker: Tracker, inputs: list[Any], category: str | None, layer: str) -> Any:
        values: dict[fx.Node, Any] = {}
        inside: dict[fx.Node, list[int]] = {}
        given = list(reversed(inputs))
        inputs.clear()
        for step in steps:
            node = step.node
            if step.kind == "input":
                values[node] = given.pop()
            elif step.kind == "output":
                return fx.node.map_arg(node.args[0], values.__getitem__)
            elif step.returned:
                tracker.category, tracker.layer = step.category or category, step.layer
                if step.name.startswith(ADDED):
                    tracker.add_to_sum(place_of(values[node.all_input_nodes[-1]]), step.name)
                values[node] = node_buffers(step, values)
            elif step.in_place:
                inside[node] = inside.pop(reduction_source(node), [])
            elif step.sizes:
                tracker.category, tracker.layer = step.category or category, layer
                inside[node] = [tracker.open(size) for size in step.sizes]
            for dead in step.last:
                values.pop(dead, None)
                for number in inside.pop(dead, ()):
                    tracker.close(number)
        raise AssertionError("a graph ends with its outputs")

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


@dataclass(eq=False)
class Step:
    """The effect of one node of a graph on memory."""

    node: fx.Node
    kind: str
    layer: str
    name: str
    makes: bool = False
    """True if the step allocates a buffer, or returns a view of one."""
    returned: bool = False
    """True if the step's buffer outlives the graph."""
    sizes: list[int] = field(default_factory=list)
    """Bytes of the step's own buffers that are freed within the graph."""
    in_place: bool = False
    reads: set[fx.Node] = field(default_factory=set)
    """Nodes whose buffers the step reads, also through nodes without buffers."""
    last: list[fx.Node] = field(default_factory=list)
    """Nodes whose last reader is this step."""

    @cached_property
    def category(self) -> str | None:
        """The category of the operator's buffers; None where the operator does not decide it."""
        return "message" if self.name.startswith(COLLECTIVES) else None


def plan(graph: fx.GraphModule) -> list[Step]:
    """The effects of the nodes of `graph`, in order."""
    steps = {node: Step(node, kind_of(node), layer_of(node), name_of(node)) for node in graph.graph.nodes}
    read_as_buffer: set[fx.Node] = set()
    for node in reversed(steps):
        users = [(user, steps[user].kind) for user in node.users]
        if any(
            kind in ("kernel", "output") or (kind == "view" and user in read_as_buffer)
            for user, kind in users
        ):
            read_as_buffer.add(node)
    for node, step in steps.items():
        sources = [steps[source] for source in node.all_input_nodes]
        if step.kind == "view":
            step.makes = sources[0].makes
        else:
            step.makes = step.kind != "inlined" or node in read_as_buffer
        for source in sources:
            step.reads |= {source.node} if source.makes else set()
            step.reads |= source.reads if source.kind == "view" or not source.makes else set()
    seen: set[fx.Node] = set()
    for step in reversed(steps.values()):
        if step.makes or step.kind == "output":
            step.last = [node for node in step.reads if node not in seen]
            seen |= step.reads
            if step.node not in seen:
                step.last.append(step.node)
        step.in_place = step.name.startswith(SUMS) and reduction_source(step.node) in step.last
        step.in_place = step.in_place and steps[reduction_source(step.node)].kind != "input"
    for step in reversed(steps.values()):
        step.returned = step.returned or step.kind == "output"
        for source in [steps[source] for source in step.node.all_input_nodes] if step.returned else ():
            source.returned = source.returned or step.kind in ("output", "view") or step.in_place
    for step in steps.values():
        if step.makes and not (step.returned or step.in_place or step.kind in ("view", "input")):
            step.sizes = [bytes_of(part) for part in pytree.tree_leaves(step.node.meta["val"])]
    return list(steps.values())


def reduction_source(node: fx.Node) -> fx.Node:
    """The node whose buffer a sum over ranks reads."""
    source = node.all_input_nodes[0]
    while kind_of(source) == "view":
        source = source.all_input_nodes[0]
    return source


def bytes_of(value: Any) -> int:
    """Bytes of a tensor of this shape; 0 for other values."""
    return value.untyped_storage().nbytes() if isinstance(value, Tensor) else 0


def kind_of(node: fx.Node) -> str:
    """The kind of a node: input, output, view, inlined, reduction or kernel."""
    if node.op == "placeholder":
        return "input"
    if node.op == "output":
        return "output"
    target = node.target
    if target is operator.getitem:
        return "view"
    if not isinstance(target, torch._ops.OpOverload):
        return "kernel"
    name = name_of(node).split("::")[1].split(".")[0]
    if target.is_view or name in ALIASES:
        return "view"
    if torch.Tag.pointwise in target.tags or name in INLINED_OPERATORS:
        return "inlined"
    return "reduction" if name in REDUCTIONS else "kernel"


def name_of(node: fx.Node) -> str:
    """The operator of a node with its namespace; empty for other functions than PyTorch's operators."""
    return str(node.target.name()) if isinstance(node.target, torch._ops.OpOverload) else ""  # type: ignore[no-untyped-call]


def layer_of(node: fx.Node) -> str:
    """The kind of layer of a node in a forward graph."""
    path = ".".join(str(entry[0]) for entry in (node.meta.get("nn_module_stack") or {}).values())
    return next((kind for part, kind in KINDS if part in path), "residual")


def node_buffers(step: Step, values: dict[fx.Node, Any]) -> Any:
    """The buffers of a node, or its view of another's."""
    node = step.node
    if step.in_place or step.name.startswith(WAIT):
        # Waiting makes nothing new; the fake operation would.
        return values[node.all_input_nodes[0]]
    if step.kind == "view":
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        return node.target(*args, **kwargs)  # type: ignore[operator]
    if "val" not in node.meta:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        return node.target(*args, **kwargs)  # type: ignore[operator]
    return pytree.tree_map(node_memory, node.meta["val"])


def node_memory(value: Any) -> Any:
    """Memory for the result of a node."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)

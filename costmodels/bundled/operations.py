"""The operations of PyTorch that the runtime's layers are made of, for `costmodels.bundled.replay`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from costmodels.bundled.replay import Gradients, Leaf, Node, Size, Storage, Tape, Tensor


def times(size: Size, factor: float) -> Size:
    """Several times a size."""
    return size[0], size[1] * factor


def result_of(
    tape: Tape,
    result: Storage | Size,
    inputs: Sequence[Tensor],
    saved: Sequence[Storage],
    backward: Callable[[Node, Gradients], Gradients],
    saves_result: bool = False,
    size: Size | None = None,
) -> Tensor:
    """The result of an operation, in the graph if there is one and an input needs gradients.

    Args:
        result: its storage if it is there, else its size: PyTorch saves inputs before it computes.
        saves_result: backward keeps the result too.
        size: of what it shows of its storage, if that is a part.
    """
    node = None
    if tape.records and any(one.edge is not None for one in inputs):
        node = Node(tape, inputs, saved, backward)
    storage = result if isinstance(result, Storage) else Storage(tape, result)
    if node is not None and saves_result:
        node.save(storage)
    return Tensor(storage, None if node is None else (node, 0), size)


def keep(result: Tensor, storage: Storage) -> None:
    """Let the operation that gave `result` keep one more tensor for backward, if it is in the graph."""
    if result.edge is not None:
        node = result.edge[0]
        assert isinstance(node, Node)
        node.save(storage)


def present(gradient: Storage | None) -> Storage:
    """A gradient that must be there."""
    assert gradient is not None
    return gradient


def view(x: Tensor) -> Tensor:
    """A tensor that shares the memory of another one."""
    return result_of(x.storage.tape, x.storage, [x], [], _same, size=x.size)


def _same(node: Node, grads: Gradients) -> Gradients:
    return [grads[0]] * len(node.edges)


def elementwise(
    x: Tensor, size: Size | None = None, *, saves: str = "", gradient: Size | None = None
) -> Tensor:
    """A function of one tensor: `saves` its "input", its "output" or nothing (""); backward makes one tensor.

    Args:
        size: of the result; that of the input when not given.
        gradient: size of the gradient; that of the input when not given.
    """
    tape = x.storage.tape
    out, given = x.size if size is None else size, x.size if gradient is None else gradient
    saved = [x.storage] if saves == "input" else []
    return result_of(
        tape, out, [x], saved, lambda node, grads: [Storage(node.tape, given)], saves_result=saves == "output"
    )


def square(x: Tensor) -> Tensor:
    """The square: backward computes the power of the input, twice that, and its product with the gradient."""
    tape, size = x.storage.tape, x.size

    def backward(node: Node, grads: Gradients) -> Gradients:
        # C++ frees none of them before the end of the expression.
        held: Gradients = [Storage(node.tape, size) for _ in range(3)]
        return held[2:]

    return result_of(tape, size, [x], [x.storage], backward)


def add(a: Tensor, b: Tensor) -> Tensor:
    """The sum of two tensors of one size, which saves nothing."""
    return result_of(a.storage.tape, a.size, [a, b], [], _same)


def multiply(a: Tensor, b: Tensor, size: Size | None = None) -> Tensor:
    """The product of two tensors: each is saved if the other one needs a gradient."""
    tape = a.storage.tape
    saved = [one.storage for one, other in ((a, b), (b, a)) if other.edge is not None]
    sizes = [one.size if one.edge is not None else None for one in (a, b)]

    def backward(node: Node, grads: Gradients) -> Gradients:
        return [None if one is None else Storage(node.tape, one) for one in sizes]

    return result_of(tape, a.size if size is None else size, [a, b], saved, backward)


def cat(parts: Sequence[Tensor], size: Size) -> Tensor:
    """Tensors joined; backward hands out views."""
    tape = parts[0].storage.tape
    return result_of(tape, size, parts, [], _same)


def chunk(x: Tensor, sizes: Sequence[Size]) -> list[Tensor]:
    """Views of the parts of a tensor; backward joins their gradients in new memory."""
    tape, size = x.storage.tape, x.size
    whole = result_of(tape, x.storage, [x], [], lambda node, grads: [Storage(node.tape, size)])
    node = None if whole.edge is None else whole.edge[0]
    edges = [None if node is None else (node, index) for index in range(len(sizes))]
    return [Tensor(x.storage, edge, part) for edge, part in zip(edges, sizes, strict=True)]


def copy(x: Tensor, size: Size) -> Tensor:
    """A copy, whose gradient is handed on."""
    return result_of(x.storage.tape, size, [x], [], lambda node, grads: grads)


def handed_on(storage: Storage, leaf: Leaf, size: Size) -> Tensor:
    """A parameter as an operation reads it: the part of a distributed one takes an operation before."""
    whole = Tensor(storage, (leaf, 0), size)
    return view(whole) if leaf.behind else whole


def linear(
    x: Tensor, weight: Leaf | Tensor, size: Size, weight_size: Size, bias: tuple[Leaf, Size] | None = None
) -> Tensor:
    """torch.nn.functional.linear of three dimensions: keeps its input, and a weight that is no parameter; the
    gradients of the weight and of the bias come with that of the input."""
    tape, given = x.storage.tape, x.size
    if not tape.records:
        return Tensor(Storage(tape, size))

    def backward(node: Node, grads: Gradients) -> Gradients:
        return [node.gradient(place, one) for place, one in enumerate(sizes)]

    added = [] if bias is None else [bias]
    # The bias is as long as what it is added to, and its gradient is summed before anything is freed
    # (torch/csrc/autograd/engine.cpp, validate_outputs).
    sizes = (given, weight_size, *(one for _, one in added))
    computed = isinstance(weight, Tensor)
    source = weight if isinstance(weight, Tensor) else handed_on(x.storage, weight, weight_size)
    biases = [handed_on(x.storage, leaf, one) for leaf, one in added]
    # PyTorch flattens the input before it transposes the weight where there is a bias, else after.
    if bias is None:
        transposed, flat = view(source), view(x)
    else:
        flat, transposed = view(x), view(source)
    saved = [x.storage]
    if computed:
        saved.append(source.storage)
    elif added:
        # With a bias the weight is saved after the input: what stops there has taken the input.
        saved.append(Storage(tape, times(weight_size, 0.0)))
    node = Node(tape, [flat, transposed, *biases], saved, backward)
    node.repeats = [2] * len(biases)
    return view(Tensor(Storage(tape, size), (node, 0)))


def function(
    inputs: Sequence[Tensor],
    outputs: Storage,
    saved: Sequence[Storage],
    backward: Callable[[Node, Gradients], Gradients],
) -> Tensor:
    """One torch.autograd.Function with one result."""
    return result_of(outputs.tape, outputs, inputs, saved, backward)


Returned = TypeVar("Returned")


def call(module: Callable[..., Returned], *inputs: Any) -> Returned:
    """Call a module: PyTorch holds the inputs of one until it returns."""
    return module(*inputs)

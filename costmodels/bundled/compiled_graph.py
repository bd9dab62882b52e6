"""The joint graph of a compiled layer: forward and backward as AOTAutograd traces them, of names of sizes.

`Graph` collects what the operations of `compiled_layers` compute, then what autograd computes from it.
`partition` splits it as PyTorch's default partitioner does: a layer keeps the results of kernels (matrix
products, attention, collectives), statistics and what kernels of backward read; what is element-wise besides
is computed again, and so is all that recomputation covers (torch/_functorch/partitioners.py: nodes that may
not be recomputed are those that are "materialized in backward", reductions and what is not in its list).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from costmodels.bundled.replay import Size

INPUT, KERNEL, SUM, REDUCTION, JOINED, INLINED, PART = (
    "input",
    "kernel",
    "sum",
    "reduction",
    "joined",
    "inlined",
    "part",
)
"""Kinds of values: what comes in; results of a kernel, and of a sum over ranks, which is made in place where
nothing else reads its input; a reduction; tensors written beside each other; what is computed where it is
read; one of several results."""

READS_BUFFERS = (KERNEL, SUM)
"""Kinds that read memory only, and so nothing that is computed on the way."""


class Value:
    """One tensor, or several results of one kernel."""

    __slots__ = ("again", "args", "index", "is_message", "kind", "number", "sizes")

    def __init__(
        self, number: int, kind: str, args: Sequence[Value], sizes: tuple[Size, ...], again: int
    ) -> None:
        self.number, self.kind, self.args, self.sizes, self.again = number, kind, tuple(args), sizes, again
        """Place in the graph; what it is and reads; bytes of the results; and the number of the call that
        backward computes again as a whole, 0 for none."""
        self.is_message = False
        """A collective delivers it."""
        self.index = 0
        """Which of the results a part is."""


Backward = Callable[[Sequence["Value | None"]], "list[Value | None]"]


class Function:
    """A node of autograd's graph."""

    __slots__ = ("backward", "edges", "number")

    def __init__(self, number: int, edges: list[Edge | None], backward: Backward) -> None:
        self.number, self.edges, self.backward = number, edges, backward


Edge = tuple["Function | str", int]
"""Where a gradient goes: a function and which of its results it is of, or the name of a parameter."""


@dataclass(frozen=True)
class Tensor:
    """A value, its size, and how backward goes on from it."""

    value: Value
    size: Size
    edge: Edge | None


class Graph:
    """What a layer computes, in order."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.functions = 0
        self.calls = 0
        self.again = 0
        """Number of the running call that backward computes again."""
        self.gradients: list[tuple[str, Value]] = []
        """Of parameters and of the input, in the order in which they come."""

    def add(self, kind: str, args: Iterable[Value], *sizes: Size) -> Value:
        """One more value."""
        value = Value(len(self.values), kind, tuple(args), sizes, self.again)
        self.values.append(value)
        return value

    def part(self, value: Value, index: int) -> Value:
        """One of the results of a kernel."""
        result = self.add(PART, [value], value.sizes[index])
        result.index = index
        return result

    def message(self, args: Iterable[Value], size: Size) -> Value:
        """What a collective delivers."""
        value = self.add(KERNEL, args, size)
        value.is_message = True
        return value

    def copied(self, value: Value | None, size: Size) -> Value:
        """The same in another order."""
        assert value is not None
        return self.add(INLINED, [value], size)

    @contextmanager
    def computed_again(self, applies: bool) -> Iterator[None]:
        """Let backward compute again what is computed meanwhile, if this `applies`."""
        before = self.again
        if applies and not before:
            self.calls += 1
            self.again = self.calls
        try:
            yield
        finally:
            self.again = before

    def joins(self, value: Value, size: Size, inputs: Sequence[Edge | None], backward: Backward) -> Tensor:
        """A tensor whose gradient `backward` turns into those of `inputs`."""
        self.functions += 1
        return Tensor(value, size, (Function(self.functions, list(inputs), backward), 0))

    def run_backward(self, roots: Sequence[Tensor], gradients: Sequence[Value]) -> None:
        """Add what backward computes: of functions whose gradients are complete, the latest one first."""
        waiting: dict[int, dict[int, Value]] = {}
        starts: list[Function] = []
        for root, gradient in zip(roots, gradients, strict=True):
            assert root.edge is not None and isinstance(root.edge[0], Function)
            start, index = root.edge
            assert isinstance(start, Function)
            starts.append(start)
            waiting.setdefault(start.number, {})[index] = gradient
        missing, seen = _uses(starts)
        ready = [(-number, function) for number, function in seen.items() if not missing.get(number)]
        heapq.heapify(ready)
        while ready:
            _, function = heapq.heappop(ready)
            known = waiting.pop(function.number, {})
            results = function.backward([known.get(index) for index in range(max(known, default=0) + 1)])
            for edge, result in zip(function.edges, results, strict=True):
                if edge is None:
                    continue
                target, index = edge
                if isinstance(target, str):
                    assert result is not None
                    self.gradients.append((target, result))
                    continue
                if result is not None:
                    own = waiting.setdefault(target.number, {})
                    own[index] = result if index not in own else self._sum(own[index], result)
                missing[target.number] -= 1
                if not missing[target.number] and target.number in waiting:
                    heapq.heappush(ready, (-target.number, seen[target.number]))

    def _sum(self, a: Value, b: Value) -> Value:
        return self.add(INLINED, [a, b], a.sizes[0])


def _uses(starts: list[Function]) -> tuple[dict[int, int], dict[int, Function]]:
    """How many gradients each function waits for, and the functions, by number."""
    missing: dict[int, int] = {}
    seen, todo = (
        {start.number: start for start in starts},
        list({start.number: start for start in starts}.values()),
    )
    while todo:
        for edge in todo.pop().edges:
            if edge is None or isinstance(edge[0], str):
                continue
            target = edge[0]
            missing[target.number] = missing.get(target.number, 0) + 1
            if target.number not in seen:
                seen[target.number] = target
                todo.append(target)
    return missing, seen


@dataclass(frozen=True)
class Program:
    """What one of the two compiled functions computes."""

    values: list[Value]
    inputs: set[Value]
    outputs: list[Value]


def partition(
    graph: Graph, turn: int, results: Sequence[Value], given: Sequence[Value]
) -> tuple[Program, Program]:
    """The compiled forward and backward function.

    Args:
        turn: how many values of the graph belong to forward.
        results: of the layer; the outputs of forward begin with them.
        given: the inputs and the gradients of the results.
    """
    forward, backward = graph.values[:turn], graph.values[turn:]
    saved = _saved(forward, backward, set(results))
    outputs = [*results, *(value for value in saved if value not in (*given, *results))]
    first = Program(_needed(outputs, set(given)), set(given), outputs)
    inputs = {*saved, *(value for value in given if value.number >= turn)}
    return first, Program(
        _as_backward_needs(backward, inputs), inputs, [value for _, value in graph.gradients]
    )


def _saved(forward: list[Value], backward: list[Value], results: set[Value]) -> list[Value]:
    """Values that forward keeps for backward."""
    users: dict[Value, list[Value]] = {}
    for value in (*forward, *backward):
        for arg in value.args:
            users.setdefault(arg, []).append(value)
    ours = set(forward)

    def stays(value: Value) -> bool:
        readers = users.get(value, [])
        if value.again:
            # Between two calls that are computed again, what one gives to the other is kept.
            return any(reader.again > value.again for reader in readers)
        if value.kind in (INPUT, KERNEL, SUM, REDUCTION) or value in results:
            return True
        if value.kind == PART:
            return stays(value.args[0])
        return any(reader not in ours and reader.kind in READS_BUFFERS for reader in readers)

    found: set[Value] = set()
    seen: set[Value] = set()
    borders: list[Value] = []

    def keep(values: Iterable[Value]) -> None:
        todo = [value for value in values if value in ours]
        while todo:
            value = todo.pop()
            if value in seen:
                continue
            seen.add(value)
            if stays(value):
                found.add(value)
            elif value.again:
                for arg in value.args:
                    (todo if arg.again or arg.kind != INLINED or stays(arg) else borders).append(arg)
            else:
                todo += value.args

    keep(arg for value in backward for arg in value.args)
    for border in borders:
        # What a call reads is kept rather than what it was computed from, unless that is there anyway and
        # nothing was joined on the way, which is not done twice.
        way = _needed([border], found)
        if any(one not in found and (stays(one) or one.kind == JOINED) for one in way):
            found.add(border)
    return sorted(found, key=lambda value: value.number)


def _needed(wanted: Iterable[Value], inputs: set[Value]) -> list[Value]:
    """What must be computed to have some values, in order."""
    found, todo = set(), list(wanted)
    while todo:
        value = todo.pop()
        if value not in found:
            found.add(value)
            if value not in inputs:
                todo += value.args
    return sorted(found, key=lambda value: value.number)


def _as_backward_needs(backward: list[Value], inputs: set[Value]) -> list[Value]:
    """Backward, and before each value what it needs of forward."""
    order: list[Value] = []
    there: set[Value] = set()
    for value in backward:
        missing = [one for one in _needed([value], inputs | there) if one not in there]
        order += missing
        there.update(missing)
    return order

"""A replay of what PyTorch's autograd allocates and frees, of names of sizes instead of tensors.

The layers of this package repeat the operations of the runtime's. Every operation allocates its result and
holds what its backward needs; a storage is freed with the last reference to it, as in PyTorch. What comes out
is a tape: changes of the allocated bytes in their order, each a kind, the name of a size and a factor. A tape
depends on the structure of a layer only; `costmodels.bundled.tapes` evaluates it for many layouts.

Backward runs nodes by PyTorch's rule: of those whose gradients are complete, the one that was created last
(torch/csrc/autograd/engine.cpp).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

KINDS = ("parameters", "gradients", "optimizer", "activations", "logits", "communication", "temporaries")
"""What bytes belong to."""

PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOGITS, COMMUNICATION, TEMPORARIES = range(len(KINDS))

Size = tuple[str, float]
"""Name of a size and factor."""

STRENGTH = (5, 5, 5, 2, 3, 4, 0)
"""By kind: of the roles that a tensor has in its life, the strongest one names it from the beginning. What
forward saves is an activation, although a collective delivered it (`MESSAGE`)."""

MESSAGE_STRENGTH = 1


class Tape:
    """Changes of the allocated bytes, in their order."""

    def __init__(self) -> None:
        self.changes: list[tuple[int, str, float]] = []
        """Number of the storage, name of a size and factor; negative for what is freed."""
        self.kinds: list[int] = []
        """Of each storage."""
        self.kind = TEMPORARIES
        """Of what operations allocate now."""
        self.numbers = count()
        self.records = True
        """Whether operations join the graph of backward."""
        self.marks: dict[str, int] = {}
        """Places to which something lasts."""
        self.drops: dict[str, list[Callable[[], None]]] = {}
        """What to do where backward sets a mark."""
        self.hooks: list[Callable[[Storage], Packed]] = []
        """Of saved tensors; the last one alone is called."""
        self.outputs: list[list[tuple[Any, Any]]] = []
        """Of the running layers: results that are computed again, and the calls that gave them."""


class Storage:
    """Memory of one tensor and its views."""

    __slots__ = ("__weakref__", "number", "size", "strength", "tape")

    def __init__(self, tape: Tape, size: Size, kind: int | None = None) -> None:
        self.tape, self.size, self.number = tape, size, len(tape.kinds)
        kind = tape.kind if kind is None else kind
        self.strength = MESSAGE_STRENGTH if kind == COMMUNICATION else STRENGTH[kind]
        tape.kinds.append(kind)
        tape.changes.append((self.number, *size))

    def become(self, kind: int) -> None:
        """Have another role, which names the storage if it is a stronger one."""
        if STRENGTH[kind] > self.strength:
            self.tape.kinds[self.number], self.strength = kind, STRENGTH[kind]

    def __del__(self) -> None:
        name, factor = self.size
        self.tape.changes.append((self.number, name, -factor))


Packed = Storage | Callable[[], Storage]
"""What stands for a saved tensor: its storage, or a function that returns it."""

Gradients = list["Storage | None"]


class Leaf:
    """A parameter, or the input of a stage, and its gradient."""

    __slots__ = ("gradient", "kind")

    def __init__(self, gradient: Storage | None = None, kind: int = GRADIENTS) -> None:
        self.gradient, self.kind = gradient, kind

    def accumulate(self, gradient: Storage) -> None:
        """Take a gradient, or add it in place to the one that is there."""
        if self.gradient is None:
            gradient.become(self.kind)
            self.gradient = gradient

    def drop(self) -> None:
        """Forget the gradient."""
        self.gradient = None


class Leaves(Leaf):
    """Parameters of one size, each with one use and without a gradient yet."""

    __slots__ = ("taken",)

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[Storage] = []

    def accumulate(self, gradient: Storage) -> None:
        gradient.become(self.kind)
        self.taken.append(gradient)


class SharedLeaf(Leaf):
    """A parameter with two uses, whose gradients are summed before they are taken or added."""

    __slots__ = ("waiting",)

    def __init__(self, gradient: Storage | None = None, waiting: Storage | None = None) -> None:
        super().__init__(gradient)
        self.waiting = waiting

    def accumulate(self, gradient: Storage) -> None:
        if self.waiting is None:
            self.waiting = gradient
            return
        total = Storage(gradient.tape, gradient.size)
        self.waiting = None
        del gradient
        super().accumulate(total)


class Node:
    """An operation in the graph of backward."""

    __slots__ = ("backward", "edges", "number", "saved", "tape")

    def __init__(
        self,
        tape: Tape,
        inputs: Sequence[Tensor],
        saved: Iterable[Storage],
        backward: Callable[[Node, Gradients], Gradients],
    ) -> None:
        self.tape, self.backward = tape, backward
        self.edges = [one.edge for one in inputs]
        self.number = next(tape.numbers)
        self.saved: list[Packed] = []
        for storage in saved:
            self.save(storage)

    def save(self, storage: Storage) -> None:
        """Keep a tensor for backward, or what the hooks of the tape give for it."""
        packed = self.tape.hooks[-1](storage) if self.tape.hooks else storage
        if isinstance(packed, Storage):
            packed.become(ACTIVATIONS)
        self.saved.append(packed)

    def unpack(self) -> list[Storage]:
        """What was saved."""
        return [one if isinstance(one, Storage) else one() for one in self.saved]


Edge = tuple["Node | Leaf", int]
"""Where a gradient goes, and which of the results there it is of."""


class Tensor:
    """A result: its memory, how backward goes on from it, and its own size where it shows a part only."""

    __slots__ = ("edge", "size", "storage")

    def __init__(self, storage: Storage, edge: Edge | None = None, size: Size | None = None) -> None:
        self.storage, self.edge = storage, edge
        self.size = storage.size if size is None else size


def run_backward(tape: Tape, roots: list[tuple[Edge, Storage]]) -> None:
    """Backward from `roots`, whose gradients this takes over: it empties the list."""
    missing: dict[int, int] = {}
    todo: list[Node] = []
    buffers: dict[int, dict[int, Storage]] = {}
    ready: list[tuple[int, Node]] = []
    while roots:
        (start, index), gradient = roots.pop()
        assert isinstance(start, Node)
        buffers.setdefault(id(start), {})[index] = gradient
        ready.append((-start.number, start))
        todo.append(start)
        del gradient, start
    seen = {id(node) for node in todo}
    while todo:
        for edge in todo.pop().edges:
            if edge is not None and isinstance(edge[0], Node):
                reached = edge[0]
                missing[id(reached)] = missing.get(id(reached), 0) + 1
                if id(reached) not in seen:
                    seen.add(id(reached))
                    todo.append(reached)
                del reached
    heapq.heapify(ready)
    while ready:
        _, node = heapq.heappop(ready)
        inputs = buffers.pop(id(node))
        grads: Gradients = [inputs.get(index) for index in range(max(inputs) + 1)]
        del inputs
        unpacked = node.unpack()
        results = node.backward(node, grads)
        del grads, unpacked
        node.saved = []
        accumulating: list[tuple[Leaf, Storage]] = []
        for place, edge in enumerate(node.edges):
            result, results[place] = results[place], None
            if edge is None:
                continue
            target, index = edge
            if isinstance(target, Leaf):
                if result is not None:
                    accumulating.append((target, result))
                result = None
                continue
            if result is not None:
                own = buffers.setdefault(id(target), {})
                if index in own:
                    # Under a dispatch mode, and so in a trace, never in place.
                    own[index] = Storage(tape, own[index].size, TEMPORARIES)
                else:
                    own[index] = result
                result = None
                del own
            missing[id(target)] -= 1
            if not missing[id(target)] and id(target) in buffers:
                heapq.heappush(ready, (-target.number, target))
        while accumulating:
            leaf, result = accumulating.pop(0)
            leaf.accumulate(result)
            result = None

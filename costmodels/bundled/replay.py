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
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
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


def _nobody() -> None:
    return None


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
        self.again: Callable[[], Any] = _nobody
        """The call that computed again last for a gradient that was split off, if it is still there."""
        self.later: list[tuple[int, int, int]] = []
        """Operations from one number to another whose parameters a module has after those of operations up to
        a third one, which run later."""

    def place(self, number: int) -> tuple[int, int]:
        """Where the parameters of an operation come among those of a module, to sort by."""
        places = [end for first, last, end in self.later if first < number < last]
        return max(places, default=number), number


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
    """A parameter, or the input of a stage, and its gradient.

    Args:
        casts: bytes of its gradient over those of what backward makes, where PyTorch first changes the number
            format of that; else 0.
        behind: an operation of its own hands on what backward makes.
    """

    __slots__ = ("behind", "casts", "gradient", "kind")

    def __init__(
        self,
        gradient: Storage | None = None,
        kind: int = GRADIENTS,
        casts: float = 0.0,
        behind: bool = False,
    ) -> None:
        self.gradient, self.kind, self.casts, self.behind = gradient, kind, casts, behind

    def cast(self, gradient: Storage) -> Storage:
        """What backward has made in the number format of the gradient."""
        name, factor = gradient.size
        return Storage(gradient.tape, (name, factor * self.casts)) if self.casts else gradient

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

    def __init__(self, casts: float = 0.0) -> None:
        super().__init__(casts=casts)
        self.taken: list[Storage] = []

    def accumulate(self, gradient: Storage) -> None:
        gradient.become(self.kind)
        self.taken.append(gradient)


class SharedLeaf(Leaf):
    """What has two uses, whose gradients are summed before they are taken or added."""

    __slots__ = ("waiting",)

    def __init__(
        self,
        gradient: Storage | None = None,
        waiting: Storage | None = None,
        casts: float = 0.0,
        behind: bool = False,
        kind: int = GRADIENTS,
    ) -> None:
        super().__init__(gradient, kind, casts, behind)
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

    __slots__ = ("backward", "edges", "number", "repeats", "saved", "sizes", "tape", "wanted")

    def __init__(
        self,
        tape: Tape,
        inputs: Sequence[Tensor],
        saved: Iterable[Storage],
        backward: Callable[[Node, Gradients], Gradients],
    ) -> None:
        self.tape, self.backward = tape, backward
        self.edges = [one.edge for one in inputs]
        self.sizes = [one.size for one in inputs]
        """Of the inputs, and so of their gradients, which may be parts of what holds them."""
        self.wanted = [edge is not None for edge in self.edges]
        """Inputs whose gradients are asked for, which an operation of parameters looks at."""
        self.repeats: list[int] = []
        """Inputs as long as which others are made, whose gradients are summed for that."""
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

    def gradient(self, place: int, size: Size, kind: int | None = None) -> Storage | None:
        """The gradient of one input, if it is asked for."""
        return Storage(self.tape, size, kind) if self.wanted[place] else None


Edge = tuple["Node | Leaf", int]
"""Where a gradient goes, and which of the results there it is of."""


class Tensor:
    """A result: its memory, how backward goes on from it, and its own size where it shows a part only."""

    __slots__ = ("edge", "size", "storage")

    def __init__(self, storage: Storage, edge: Edge | None = None, size: Size | None = None) -> None:
        self.storage, self.edge = storage, edge
        self.size = storage.size if size is None else size


@dataclass(frozen=True)
class Selection:
    """What a backward pass computes that does not compute everything, as torch.autograd.grad does."""

    reaches: dict[int, bool]
    """Of each node and leaf, by its id: whether it leads to one whose gradient is asked for."""
    retains: bool
    """What was saved stays for another pass."""
    before: Callable[[Node, Gradients], None] | None = None
    """Sees each node that runs and its gradients."""
    results: list[tuple[Leaf, Storage]] | None = None
    """Takes the gradients of leaves, which do not get them then."""


def reaching(starts: Iterable[Node], leaves: Collection[int]) -> dict[int, bool]:
    """Which nodes lead to one of the leaves, by their ids."""
    found: dict[int, bool] = {}
    todo = [(node, False) for node in starts]
    while todo:
        node, left = todo.pop()
        if left:
            found[id(node)] = any(found[id(edge[0])] for edge in node.edges if edge is not None)
        elif id(node) not in found:
            found[id(node)] = False
            todo.append((node, True))
            for edge in node.edges:
                if edge is not None and isinstance(edge[0], Node):
                    todo.append((edge[0], False))
                elif edge is not None:
                    found[id(edge[0])] = id(edge[0]) in leaves
    return found


def run_backward(tape: Tape, roots: list[tuple[Edge, Storage]], only: Selection | None = None) -> None:
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
                if only is not None and not only.reaches[id(reached)]:
                    continue
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
        if only is not None:
            node.wanted = [edge is not None and only.reaches[id(edge[0])] for edge in node.edges]
            if only.before is not None:
                only.before(node, grads)
        unpacked = node.unpack()
        results = node.backward(node, grads)
        del unpacked
        # Before what was saved goes (torch/csrc/autograd/engine.cpp, validate_outputs).
        for place in node.repeats:
            results[place] = node.gradient(place, node.sizes[place])
        for place, edge in enumerate(node.edges):
            if edge is not None and isinstance(edge[0], Leaf) and not edge[0].behind and node.wanted[place]:
                made = results[place]
                if made is not None:
                    results[place] = edge[0].cast(made)
                made = None
        del grads
        if only is None or not only.retains:
            node.saved = []
        accumulating: list[tuple[Leaf, Storage]] = []
        for place, edge in enumerate(node.edges):
            result, results[place] = results[place], None
            if edge is None or not node.wanted[place]:
                result = None
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
                    own[index] = Storage(tape, node.sizes[place], TEMPORARIES)
                else:
                    own[index] = result
                result = None
                del own
            missing[id(target)] -= 1
            if not missing[id(target)] and id(target) in buffers:
                heapq.heappush(ready, (-target.number, target))
        while accumulating:
            leaf, result = accumulating.pop(0)
            if leaf.behind:
                result = leaf.cast(result)
            if only is not None and only.results is not None:
                only.results.append((leaf, result))
            else:
                leaf.accumulate(result)
            result = None

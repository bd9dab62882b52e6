"""Tapes of units whose backward is split into gradients of inputs and of weights (arXiv:2401.10241).

PyTorch's stages (`torch.distributed.pipelining._backward`) compute gradients of inputs first and keep the
graph, and for every operation of parameters the gradients of its results. Later each of these operations runs
again for its parameters alone, in the order of the module's parameters (`get_param_groups`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from costmodels.bundled.experts import mixture
from costmodels.bundled.latent import LatentLayer
from costmodels.bundled.layers import Ends, Layer
from costmodels.bundled.operations import view
from costmodels.bundled.replay import (
    ACTIVATIONS,
    COMMUNICATION,
    TEMPORARIES,
    Edge,
    Gradients,
    Leaf,
    Node,
    Selection,
    Storage,
    Tape,
    Tensor,
    reaching,
    run_backward,
)
from costmodels.bundled.structure import RESIDUAL, WEIGHTS, Structure
from costmodels.bundled.tapes import ENDS, VECTORS, UnitTape, new_leaf, part_of

Operation = tuple[Node, Gradients]
"""One of parameters, and the gradients of its results."""


class Variant(NamedTuple):
    """Of the passes of one unit."""

    first: bool
    """The weights have no gradients yet."""
    top: bool
    """The stage ends with it: somebody else holds the gradient of its result."""
    bottom: bool
    """The stage begins with it: somebody else holds its input."""

    @property
    def inputs(self) -> str:
        """The name of the pass for gradients of inputs."""
        return self._named("inputs", "top", "bottom")

    @property
    def waits(self) -> str:
        """The name of the same with what happens to it at the end of the stage's."""
        return self._named("waits", "top")

    @property
    def weights(self) -> str:
        """The name of the pass for gradients of weights."""
        return self._named("weights", "top", "bottom", "first")

    def _named(self, what: str, *flags: str) -> str:
        return "_".join((*(name for name in flags if getattr(self, name)), what))


VARIANTS = [Variant(*flags) for flags in product((False, True), repeat=3)]
"""Of layers; a head never begins a stage, and has nothing above."""


@lru_cache(maxsize=256)
def split_layer_tape(structure: Structure) -> UnitTape:
    """One layer."""
    kind, inner = LatentLayer if structure.latent else Layer, mixture if structure.experts else None
    names = (*(name for name in WEIGHTS if name not in ENDS), *VECTORS)
    return _replayed(structure, names, lambda leaves, x: kind(structure, leaves, inner).forward(x))


@lru_cache(maxsize=256)
def split_head_tape(structure: Structure) -> UnitTape:
    """Final norm, output matrix and loss."""
    variants = [Variant(first, top=False, bottom=False) for first in (False, True)]
    return _replayed(
        structure, ("head", "width"), lambda leaves, x: Ends(structure, leaves).loss(x), variants
    )


def _replayed(
    structure: Structure,
    names: tuple[str, ...],
    run: Callable[[dict[str, Leaf], Tensor], Tensor],
    variants: Sequence[Variant] = VARIANTS,
) -> UnitTape:
    """The passes of a unit: its gradients of inputs, after forward, and of weights, after the former.

    The latter end where all have been computed: what is left of the graph stays until all of the stage is
    done.
    """
    passes, marks = {}, {}
    for variant in variants:
        tape = Tape()
        leaves = {name: new_leaf(tape, structure, name, variant.first, splits=True) for name in names}
        # The gradient of a stage's input is a message.
        given = Leaf(None, COMMUNICATION if variant.bottom else TEMPORARIES)
        x = Storage(tape, RESIDUAL, ACTIVATIONS)
        # A view, where parts of the gradient are summed before the input has it.
        out = run(leaves, view(Tensor(x, (given, 0))))
        size, edge = out.size, out.edge
        out.storage.become(COMMUNICATION if variant.top else ACTIVATIONS)
        del out
        held = [x] if variant.bottom else []
        del x
        assert edge is not None
        middle = len(tape.changes)
        gradient = Storage(tape, size)
        start = len(tape.changes) if variant.top else middle
        if variant.top:
            held.append(gradient)
        tape.marks.clear()
        roots = [(edge, gradient)]
        del gradient
        operations = _inputs(tape, roots, given)
        given.drop()
        marks[variant.inputs] = {name: at - start for name, at in tape.marks.items()}
        passes[variant.inputs] = part_of(tape, start)
        if variant.top or "head" in names:
            # Nobody above holds the end of the graph, once the whole stage has its gradient.
            edge = None
        turn = len(tape.changes)
        _weights(tape, operations)
        passes[variant.waits] = part_of(tape, start, turn)
        passes[variant.weights] = part_of(tape, turn)
        del edge, held
    return UnitTape(passes, marks)


def _inputs(tape: Tape, roots: list[tuple[Edge, Storage]], given: Leaf) -> list[Operation]:
    """Gradients of the input; returns the operations of parameters."""
    starts = [edge[0] for edge, _ in roots if isinstance(edge[0], Node)]
    reaches = reaching(starts, {id(given)})
    found: list[Operation] = []

    def before(node: Node, grads: Gradients) -> None:
        if any(each is not None and not reaches[id(each[0])] for each in node.edges):
            found.append((node, list(grads)))

    del starts
    run_backward(tape, roots, Selection(reaches, retains=True, before=before))
    found.sort(key=lambda one: tape.place(one[0].number))
    return found


def _weights(tape: Tape, operations: list[Operation]) -> None:
    """Gradients of the parameters of all operations, one after the other; empties the list."""
    results: list[tuple[Leaf, Storage]] = []
    while operations:
        node, grads = operations.pop(0)
        reaches = _parameters_of(node)
        roots: list[tuple[Edge, Storage]] = [
            ((node, index), grad) for index, grad in enumerate(grads) if grad is not None
        ]
        found: list[tuple[Leaf, Storage]] = []
        run_backward(tape, roots, Selection(reaches, retains=False, results=found))
        # Those of the operation before are there until these are.
        results[:] = found
        for leaf, result in found:
            leaf.accumulate(result)
            del result
        del node, grads


def _parameters_of(operation: Node) -> dict[int, bool]:
    """What leads to the parameters of one operation."""
    found = {id(operation): True}
    todo = []
    for place, edge in enumerate(operation.edges):
        if edge is None:
            continue
        found[id(edge[0])] = not operation.wanted[place]
        if not operation.wanted[place]:
            todo.append(edge[0])
    while todo:
        reached = todo.pop()
        if isinstance(reached, Node):
            for edge in reached.edges:
                if edge is not None:
                    found[id(edge[0])] = True
                    todo.append(edge[0])
    return found

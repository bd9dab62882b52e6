"""What an optimizer keeps for the parameters of a group, and makes while it updates them
(`runtime.optimizers`)."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from costmodels.layers.optimizer import UPDATES, has_matrices
from costmodels.spec.layout import Layout
from costmodels.tapes.player.heap import (
    COMMUNICATION,
    OPTIMIZER,
    TEMPORARIES,
    Heap,
    Storage,
    block_bytes,
)

WIDE = 4
"""Bytes of a number in fp32."""

QUANTISED_FROM, BLOCK = 4096, 256
"""Elements from which torchao keeps moments of a parameter in 8 bits, in blocks of this many."""

CODES = 4 * 256
"""Bytes of the values that codes of 8 bits stand for, of each parameter and moment."""


class Updated(NamedTuple):
    """A parameter as an optimizer sees it."""

    name: str
    sides: tuple[int, ...]
    """Of the part here."""
    whole: tuple[int, ...]
    """Of all ranks together."""
    is_layer: bool
    """It belongs to a layer, not to embedding or head."""

    @property
    def elements(self) -> int:
        """Here."""
        return _product(self.sides)

    @property
    def is_orthogonalised(self) -> bool:
        """Muon updates it."""
        return self.is_layer and has_matrices(self.name, self.whole)


def state_of(layout: Layout, parameters: Sequence[Updated]) -> list[Storage]:
    """What the optimizer keeps on the device."""
    if layout.offload_optimizer:
        return []
    sizes: list[int] = []
    for one in parameters:
        sizes += _state(layout, one)
    return [Storage(OPTIMIZER, block_bytes(size)) for size in sizes]


def _state(layout: Layout, one: Updated) -> list[int]:
    """Bytes of the state of one parameter."""
    moment = WIDE * one.elements
    adam = [WIDE, moment, moment]
    match layout.optimizer:
        case "adam":
            return adam
        case "muon":
            return [moment] if one.is_orthogonalised else adam
        case "adafactor":
            if len(one.sides) == 1:
                return [moment]
            return _means(one)
        case "came":
            if len(one.sides) == 1:
                return [moment, moment]
            return [moment, *_means(one), *_means(one)]
        case "adam8bit":
            if one.elements < QUANTISED_FROM or one.elements % BLOCK:
                return [moment, moment]
            return 2 * [one.elements, WIDE * one.elements // BLOCK, CODES]
    each = UPDATES[layout.optimizer].layers if one.is_layer else UPDATES[layout.optimizer].ends
    return [round(each * one.elements)]


def _means(one: Updated) -> list[int]:
    """Bytes of a mean for each row and for each column of a matrix."""
    moment = WIDE * one.elements
    return [moment // one.sides[-1], moment // one.sides[-2]]


def step(heap: Heap, layout: Layout, groups: Sequence[Sequence[Updated]]) -> None:
    """The update of all parameters, their states and gradients being there."""
    heap.enter("optimizer")
    if layout.optimizer == "muon":
        for one in _unlike(groups):
            if one.is_orthogonalised:
                _during(heap, _orthogonalising(layout, one))
    if layout.optimizer in ("adafactor", "came") and not layout.offload_optimizer:
        sums = Storage(TEMPORARIES, sum(size for group in groups for one in group for size in _sums(one)))
        heap.allocate(sums)
        for one in _unlike(groups):
            # CAME divides a matrix by the factors of its estimate, one after the other.
            factors = layout.optimizer == "came" and len(one.sides) > 1
            _during(
                heap,
                [Storage(TEMPORARIES, block_bytes(max(_means(one)) if factors else WIDE * one.elements))],
            )
        heap.free(sums)


def _unlike(groups: Sequence[Sequence[Updated]]) -> Iterator[Updated]:
    """The parameters of groups without those that are the same objects again."""
    for group in {id(group): group for group in groups}.values():
        yield from group


def _during(heap: Heap, storages: Sequence[Storage]) -> None:
    for storage in storages:
        heap.allocate(storage)
    for storage in storages:
        heap.free(storage)


def _sums(one: Updated) -> list[int]:
    """Bytes of squares of rows and columns in a step of Adafactor or CAME, and of their sums over ranks.

    They last as long as the update.
    """
    if len(one.sides) == 1:
        return []
    found = []
    for place in (-1, -2):
        size = WIDE * one.elements // one.sides[place]
        shared = one.is_layer and one.sides[place] < one.whole[place]
        found += [block_bytes(size)] * (1 + shared)
    return found


def _orthogonalising(layout: Layout, one: Updated) -> list[Storage]:
    """Muon's update (`runtime.optimizers.muon.orthogonalise`).

    The update of the shard in fp32, unless that is done on the host; the whole matrix, which the ranks that
    share it have gathered, the one before a Newton-Schulz step and the one after it; the product with its
    transpose and its polynomial. A matrix that ranks split by rows is what a collective delivered.
    """
    width = WIDE if layout.precision == "fp32" else 2
    rows, columns = one.whole[-2:]
    stack = _product(one.sides[:-2])
    by_rows, by_columns = one.sides[-2] < rows, one.sides[-1] < columns
    whole = width * stack * rows * columns
    square = width * stack * min(rows, columns) ** 2
    found = [Storage(TEMPORARIES, block_bytes(size)) for size in (whole, whole, square, square)]
    if not layout.offload_optimizer:
        found.append(Storage(TEMPORARIES, block_bytes(WIDE * one.elements)))
    if by_rows or by_columns or width < WIDE or layout.offload_optimizer:
        delivered = by_rows and not by_columns and len(one.sides) == 2
        found.append(Storage(COMMUNICATION if delivered else TEMPORARIES, block_bytes(whole)))
    return found


def _product(sides: Sequence[int]) -> int:
    result = 1
    for side in sides:
        result *= side
    return result

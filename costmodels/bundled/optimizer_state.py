"""Bytes that the optimizer keeps for the parameters of a group, and makes for a while, as
`runtime.optimizers` does."""

from __future__ import annotations

import numpy as np

from costmodels.bundled.groups import Group
from costmodels.bundled.moments import Bytes
from costmodels.bundled.replay import COMMUNICATION, KINDS, TEMPORARIES
from costmodels.layers.optimizer import UPDATES
from costmodels.spec.table import OPTIMIZERS, Bools, Floats, LayoutTable

MOMENT = 4.0
"""Bytes of one number of a state in fp32."""

QUANTISED_FROM, BLOCK = 4096, 256
"""Elements from which torchao keeps moments of a parameter in 8 bits, in blocks of this many."""

CODES = 4.0 * 256
"""Bytes of the values that codes of 8 bits stand for, of each parameter and moment."""


def state_bytes(table: LayoutTable, group: Group) -> Floats:
    """Bytes of the state on the first of the ranks that share a group, [n]."""
    each = np.array([UPDATES[kind].layers for kind in OPTIMIZERS])[table.optimizer]
    result: Floats = each * group.own
    for name, of in (("muon", _muon), ("adafactor", _adafactor), ("adam8bit", _adam8bit)):
        rows: Bools = table.optimizer == OPTIMIZERS.index(name)
        if rows.any():
            result = np.where(rows, of(group), result)
    return result


def _muon(group: Group) -> Floats:
    """A momentum of each matrix of a layer; Adam's moments of the rest."""
    total = np.zeros_like(group.whole)
    for sides in group.local_sides:
        is_matrix = len(sides) == group.matrix_sides and group.whole_shapes is not None
        total = total + MOMENT * (1 if is_matrix else 2) * np.prod(sides, axis=0)
    return total


def _adafactor(group: Group) -> Floats:
    """A mean of each row and each column of matrices, and of each element of vectors."""
    total = np.zeros_like(group.whole)
    for sides in group.local_sides:
        elements = np.prod(sides, axis=0)
        kept = elements if len(sides) == 1 else elements / sides[-1] + elements / sides[-2]
        total = total + MOMENT * kept
    return total


def _adam8bit(group: Group) -> Floats:
    """Two moments of 8 bits with a scale for each block; in fp32 of what is small or no whole blocks."""
    total = np.zeros_like(group.whole)
    for sides in group.local_sides:
        elements = np.prod(sides, axis=0)
        quantised = (elements >= QUANTISED_FROM) & (elements % BLOCK == 0)
        narrow = elements + MOMENT * elements / BLOCK + CODES
        total = total + 2 * np.where(quantised, narrow, MOMENT * elements)
    return total


def update_bytes(table: LayoutTable, group: Group) -> Bytes:
    """What there is besides parameters, gradients and state while the parameter for which that is most is
    updated: Muon's matrices, or Adafactor's estimate of squares."""
    found = np.zeros((len(KINDS), len(table)))
    rows: Bools = table.optimizer == OPTIMIZERS.index("muon")
    if rows.any():
        found += rows * _orthogonalising(table, group)
    rows = table.optimizer == OPTIMIZERS.index("adafactor")
    if rows.any():
        largest = np.max([np.prod(sides, axis=0) for sides in group.local_sides], axis=0)
        found[TEMPORARIES] += rows * ~table.offload_optimizer * MOMENT * largest
    return Bytes.of_shapes(found, np.arange(len(table)))


def sum_bytes(table: LayoutTable, group: Group) -> Bytes:
    """Adafactor's squares of the rows and columns of this step, and the sums of those that ranks share, which
    last as long as its update."""
    total = np.zeros(len(table))
    rows: Bools = (table.optimizer == OPTIMIZERS.index("adafactor")) & ~table.offload_optimizer
    if rows.any():
        for number, (shape, sides) in enumerate(zip(group.shapes, group.local_sides, strict=True)):
            if len(sides) == 1:
                continue
            # Of embedding and head: what splits their vocabulary adds too little to look for.
            whole = shape if group.whole_shapes is None else group.whole_shapes[number]
            by_row, by_column = (np.prod(sides, axis=0) / sides[at] for at in (-1, -2))
            total += by_row * (1 + (sides[-1] < whole[-1])) + by_column * (1 + (sides[-2] < whole[-2]))
    return Bytes.of_kind(TEMPORARIES, rows * MOMENT * total)


def _orthogonalising(table: LayoutTable, group: Group) -> Floats:
    """Bytes by kind, [kinds, n], of Muon's update (`runtime.optimizers.muon.orthogonalise`).

    The update of the shard in fp32, unless that is done on the host; the whole matrix, which the ranks that
    share it have gathered, the one before a Newton-Schulz step and the one after it; the product with its
    transpose and its polynomial. A matrix that ranks split by rows is what a collective delivered.
    """
    found = np.zeros((len(KINDS), len(table)))
    width = 4.0 if table.precision == "fp32" else 2.0
    for shape, whole_shape, sides in zip(
        group.shapes, group.whole_shapes or (), group.local_sides, strict=False
    ):
        if len(sides) != group.matrix_sides:
            continue
        rows, columns = (np.asarray(side, dtype=np.float64) for side in whole_shape[-2:])
        stack = sides[0] if group.any_side else np.ones(len(table))
        by_rows, by_columns = sides[-2] < rows, sides[-1] < columns
        whole = width * stack * rows * columns
        gathered = whole * (by_rows | by_columns | (width < MOMENT) | table.offload_optimizer)
        square = width * stack * np.minimum(rows, columns) ** 2
        delivered = by_rows & ~(np.asarray(shape[-1]) < columns) & (not group.any_side)
        one = np.zeros_like(found)
        one[COMMUNICATION] = gathered * delivered
        update = MOMENT * ~table.offload_optimizer * np.prod(sides, axis=0)
        one[TEMPORARIES] = update + 2 * whole + 2 * square + gathered * ~delivered
        found = np.where(one.sum(axis=0) > found.sum(axis=0), one, found)
    return found

"""Tapes of the units of a model, and their bytes for many layouts at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from costmodels.bundled.experts import mixture
from costmodels.bundled.latent import LatentLayer
from costmodels.bundled.layers import Ends, Layer
from costmodels.bundled.replay import (
    ACTIVATIONS,
    COMMUNICATION,
    GRADIENTS,
    KINDS,
    TEMPORARIES,
    Leaf,
    Leaves,
    SharedLeaf,
    Storage,
    Tape,
    Tensor,
    run_backward,
)
from costmodels.bundled.sizes import Sizes
from costmodels.bundled.structure import (
    BIASES,
    EXPERT_BIASES,
    HEAD_WIDTH,
    RESIDUAL,
    WEIGHTS,
    WIDTH,
    Structure,
)
from costmodels.spec.table import Floats


class Part:
    """Changes between two moments: of each its kind, the name of a size and a factor."""

    def __init__(self, changes: Sequence[tuple[int, str, float]]) -> None:
        self.names = tuple(dict.fromkeys(name for _, name, _ in changes))
        places = {name: place for place, name in enumerate(self.names)}
        self.name = np.array([places[name] for _, name, _ in changes], dtype=np.int64)
        self.factors = np.array([factor for *_, factor in changes])[:, None]
        kinds = np.array([kind for kind, *_ in changes], dtype=np.int64)
        self.selected = (np.arange(len(KINDS))[:, None] == kinds).astype(np.float64)
        """[kinds, changes]: 1 where a change is of a kind."""

    def changes(self, sizes: Sizes) -> Floats:
        """Bytes of each change, [changes, n]."""
        values = np.array([sizes[name] for name in self.names])
        result: Floats = self.factors * values[self.name]
        return result


@dataclass(frozen=True)
class UnitTape:
    """One unit, forward and backward; its input belongs to it, its output to the next one."""

    passes: dict[str, Part]
    """forward; backward, with weights whose gradients are there already, to which those of another micro
    batch are added in place; first_backward, with weights that have none. handed_forward: its result is a
    message. handed_backward and handed_first: somebody else holds the gradient of the result."""
    marks: dict[str, dict[str, int]]
    """Changes of a pass before something happens, by pass and what it is."""


def _end_of(tape: Tape, number: int) -> int:
    """The place of the change with which a storage ends."""
    places = enumerate(tape.changes)
    return next(place for place, (one, _, factor) in places if one == number and factor < 0)


def part_of(tape: Tape, start: int, end: int | None = None) -> Part:
    """The changes of a tape between two places."""
    return Part([(tape.kinds[number], name, factor) for number, name, factor in tape.changes[start:end]])


def highest(part: Part, changes: Floats, totals: Floats, start: int = 0, end: int | None = None) -> Floats:
    """The composition at the highest total of a part, [kinds, n].

    Args:
        changes: of the part, [changes, n].
        totals: their sums up to each.
        start: changes after which the highest total counts.
        end: and before which.
    """
    if len(totals[start:end]) == 0:
        return np.zeros((len(KINDS), changes.shape[1]))
    at = start + totals[start:end].argmax(axis=0)
    result: Floats = part.selected @ np.where(np.arange(len(changes))[:, None] <= at, changes, 0.0)
    return result


def net(part: Part, changes: Floats, end: int | None = None) -> Floats:
    """The composition after the changes of a part up to `end`, [kinds, n]."""
    result: Floats = part.selected[:, :end] @ changes[:end]
    return result


VECTORS = {
    "width": WIDTH,
    "head_width": HEAD_WIDTH,
    "shared_bias": ("shared_bias", 1.0),
    **{f"{name}_bias": size for name, size in (BIASES | EXPERT_BIASES).items()},
}
"""Gradients of small parameters."""

VARIANTS = (
    ("backward", False, False),
    ("first_backward", True, False),
    ("handed_backward", False, True),
    ("handed_first", True, True),
)
"""Backward passes: whether they are a weight's first, and whether somebody else holds the gradient."""

ALONE = (("first_backward", True, False),)
"""Those of a micro batch that is alone and differs from the first of several (`Structure.alone`)."""

ENDS = ("tokens", "positions", "head")
"""Weights that no layer has."""


@lru_cache(maxsize=1024)
def layer_tape(structure: Structure) -> UnitTape:
    """One layer."""
    kind, inner = LatentLayer if structure.latent else Layer, mixture if structure.experts else None
    names = (*(name for name in WEIGHTS if name not in ENDS), *VECTORS)
    return replayed_unit(structure, names, lambda leaves, x: kind(structure, leaves, inner).forward(x))


@lru_cache(maxsize=256)
def head_tape(structure: Structure) -> UnitTape:
    """Final norm, output matrix and loss."""
    return replayed_unit(structure, ("head", "width"), lambda leaves, x: Ends(structure, leaves).loss(x))


@lru_cache(maxsize=256)
def embedding_tape(structure: Structure, learned: bool) -> UnitTape:
    """Token and position embeddings; their input, which has no gradient, is of no size."""
    names = ("tokens", "positions") if learned else ("tokens",)

    def embed(leaves: dict[str, Leaf], x: Tensor) -> Tensor:
        return Ends(structure, leaves).embed(x)

    return replayed_unit(structure, names, embed, has_input=False)


def replayed_unit(
    structure: Structure,
    names: tuple[str, ...],
    run: Callable[[dict[str, Leaf], Tensor], Tensor],
    has_input: bool = True,
    compiled: bool = False,
) -> UnitTape:
    """The tape of a unit.

    Args:
        compiled: it has backward passes (`lowest_`) of the first unit of a stage too, where the gradient of
            the input is a message from the moment it is made: compiled functions make it before others.
    """
    passes, marks = {}, {}
    for backward, first, handed in ALONE if structure.single else VARIANTS:
        tape = Tape()
        leaves = {name: new_leaf(tape, structure, name, first, compiled=compiled) for name in names}
        if first:
            tape.drops["experts_done"] = [
                leaf.drop for name, leaf in leaves.items() if name.startswith("expert_")
            ]
        kind = ACTIVATIONS if has_input else TEMPORARIES
        x = Storage(tape, RESIDUAL if has_input else ("nothing", 1.0), kind)
        start = len(tape.changes) - 1
        # Where a ring parts a compiled layer in two, both have its input.
        parted = compiled and structure.context_form == "ring"
        given = SharedLeaf(kind=TEMPORARIES) if parted else Leaf(None, TEMPORARIES)
        out = run(leaves, Tensor(x, (given, 0) if has_input else None))
        source = x.number
        del x
        size, edge = out.size, out.edge
        out.storage.become(COMMUNICATION if handed else ACTIVATIONS)
        del out
        middle = len(tape.changes)
        assert edge is not None
        gradient = Storage(tape, size)
        turn = len(tape.changes) if handed else middle
        roots = [(edge, gradient)]
        del edge
        if not handed:
            del gradient
        run_backward(tape, roots)
        message = given.gradient.number if given.gradient is not None else None
        given.drop()
        end = len(tape.changes)
        forward = "handed_forward" if handed else "forward"
        passes[forward], passes[backward] = part_of(tape, start, middle), part_of(tape, turn, end)
        marks[forward] = {name: at - start for name, at in tape.marks.items() if at <= middle}
        marks[backward] = {name: at - turn for name, at in tape.marks.items() if at > middle}
        if compiled and message is not None:
            tape.kinds[message] = COMMUNICATION
            lowest = f"lowest_{backward}"
            # PyTorch's stage holds its input until its backward is done.
            tape.changes.append(tape.changes.pop(_end_of(tape, source)))
            passes[lowest], marks[lowest] = part_of(tape, turn, end), marks[backward]
    return UnitTape(passes, marks)


def new_leaf(
    tape: Tape, structure: Structure, name: str, first: bool, splits: bool = False, compiled: bool = False
) -> Leaf:
    """A parameter, or several small ones of a size, before the first or another backward pass.

    Args:
        splits: its gradients are computed apart from those of inputs.
        compiled: its layer is, and with it what reads its part of a DTensor, save for experts.
    """
    # FSDP2 adds to a wider gradient as it is, and widens others when it reduces them, unless DTensor sums
    # them first. It does so from its hook before a layer's backward to that after it, and none of these are
    # around gradients of weights alone.
    adds = structure.casts > 1 and (structure.single or not first) and not structure.is_whole(name)
    adds = adds and not splits
    behind = structure.is_distributed(name) and not (compiled and not structure.is_routed(name))
    casts = 0.0 if adds else structure.casts
    if first and name in VECTORS:
        return Leaves(casts)
    gradient = None if first else Storage(tape, (VECTORS | WEIGHTS)[name], GRADIENTS)
    if not structure.tied or name not in ("tokens", "head"):
        return Leaf(gradient, casts=casts, behind=behind)
    size, factor = WEIGHTS[name]
    waiting = Storage(tape, (size, factor * (casts or 1.0))) if name == "tokens" else None
    return SharedLeaf(gradient, waiting, casts, behind)

"""What a unit has done with one set of sizes: its changes of memory, storages numbered as they appear."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from costmodels.tapes.tape import INPUT, OUTPUT, OUTPUT_GRADIENT

Change = tuple[str, int, int, str]
"""What happens: "allocation", "release", "gradient", "addend" or "mark"; the storage; its bytes,
or the number of the parameter; its category, or the name of the mark."""


BORDERS = {INPUT, OUTPUT, OUTPUT_GRADIENT}


class RecordedParameter(NamedTuple):
    """One parameter of a unit, as this rank has it."""

    name: str
    shape: tuple[int, ...]
    group: str
    partial: bool
    distributed: bool
    split: tuple[int, ...] = ()


@dataclass
class Recording:
    """What a unit has done with one set of sizes."""

    parameters: list[RecordedParameter] = field(default_factory=list)
    forward: list[Change] = field(default_factory=list)
    backward: list[Change] = field(default_factory=list)
    input_gradient: int | None = None
    input_category: str = ""
    weights: list[Change] = field(default_factory=list)
    """Of a backward that is split: gradients of weights, `backward` being that of inputs."""
    forgotten: list[Change] = field(default_factory=list)
    rest: list[Change] = field(default_factory=list)

    @property
    def changes(self) -> list[Change]:
        """Of all passes."""
        return [*self.forward, *self.backward, *self.weights, *self.forgotten, *self.rest]


class UnlikeError(RuntimeError):
    """A unit does not do the same each time, so that no tape tells what it does."""


class UnitRecordings(NamedTuple):
    """A unit with whole backward passes, and with split ones."""

    whole: Recording
    split_first: Recording | None
    """Where weights have no gradients yet; None where backward is not split."""
    split: Recording | None
    end_first: Recording | None = None
    """The same two of the last unit of a stage; None where nothing ends sooner then."""
    end: Recording | None = None


def changes_alike(recording: Recording, first: Recording | None = None) -> list[Change]:
    """The changes of a recording but for gradients; those of a later one without the ends of what autograd
    has added to the gradients of the `first`."""
    gradients = {number for kind, number, *_ in (first or recording).changes if kind == "gradient"}
    return [
        (kind, number, size, "" if number in gradients else text)
        for kind, number, size, text in recording.changes
        if kind != "gradient" and not (kind == "release" and number in gradients)
    ]


def settled(changes: list[Change]) -> list[Change]:
    """The same with ends that come one after the other in the order of their storages: a compiler's sets have
    none."""
    found = list[Change]()
    for is_end, some in groupby(changes, lambda change: change[0] == "release"):
        alike = list(some)
        found += sorted(alike) if is_end else alike
    return found


def owner(category: str) -> str:
    """Who owns a byte, in the words of moments."""
    return "communication" if category == "message" else category


class Names:
    """Numbers of storages in the order of their appearance, the borders first."""

    def __init__(self, borders: dict[int, int]) -> None:
        self.known = dict(borders)
        self.next = OUTPUT_GRADIENT + 1

    def of(self, block: int) -> int:
        """The number of a storage, a new one where it has none."""
        if block not in self.known:
            self.known[block] = self.next
            self.next += 1
        return self.known[block]

"""The memory of one rank while a step is played: bytes that are allocated, by their owners, and the peaks."""

from collections.abc import Callable, Hashable
from typing import NamedTuple

from costmodels.dataclass import dataclass

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "communication",
    "temporaries",
)
"""Owners of bytes, as `runtime.dryrun.memory_trace` has them."""

PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOGITS, COMMUNICATION, TEMPORARIES = range(len(CATEGORIES))

BLOCK_BYTES = 512
"""Sizes are rounded up to a multiple of this by PyTorch's CUDA caching allocator (`kMinBlockSize`)."""

Composition = tuple[int, ...]
"""Bytes by category."""

NOTHING: Composition = (0,) * len(CATEGORIES)


def block_bytes(size: int) -> int:
    """Bytes that the caching allocator hands out for `size` bytes."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


class Storage(NamedTuple):
    """Allocated bytes with one owner."""

    category: int
    size: int


class Span(NamedTuple):
    """What some events do to memory, wherever they begin."""

    high: int
    """Most bytes above those at the beginning."""
    composition: Composition
    """What these are."""
    net: Composition
    """What is left in the end; negative for what was there before."""


class Effect(NamedTuple):
    """What something does to memory, wherever it begins."""

    peaks: tuple[tuple[str, int, Composition], ...]
    """By label the most bytes above those at the beginning, and what these are."""
    net: Composition
    is_new: bool
    """It ends in a label in which nothing has changed."""


Effects = dict[Hashable, Effect]
"""What has been played once, by what decides it."""


@dataclass(frozen=True)
class Moment:
    """What is allocated at the highest moment of a label, in bytes by category."""

    label: str
    composition: Composition

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.composition)


class Heap:
    """Allocated bytes by category, and the highest moment of each label since the beginning."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self.bytes = list(NOTHING)
        self.total = 0
        self.label = ""
        self.is_new = True
        """Nothing has changed since the label began."""
        self.peaks: dict[str, tuple[int, Composition]] = {}

    def enter(self, label: str) -> None:
        """Let what follows belong to `label`, which begins with what is there."""
        if label != self.label:
            self.label = label
            self.is_new = True

    def _begin(self) -> None:
        self.is_new = False
        if self.label not in self.peaks or self.total > self.peaks[self.label][0]:
            self.peaks[self.label] = self.total, tuple(self.bytes)

    def allocate(self, storage: Storage) -> Storage:
        """A storage begins."""
        if self.is_new:
            self._begin()
        category, size = storage
        self.bytes[category] += size
        self.total += size
        if self.total > self.peaks[self.label][0]:
            self.peaks[self.label] = self.total, tuple(self.bytes)
        return storage

    def free(self, storage: Storage) -> None:
        """A storage ends."""
        if self.is_new:
            self._begin()
        category, size = storage
        self.bytes[category] -= size
        self.total -= size

    def play(self, span: Span) -> None:
        """All of a span."""
        if self.is_new:
            self._begin()
        high, composition, net = span
        if self.total + high > self.peaks[self.label][0]:
            there = tuple(a + b for a, b in zip(self.bytes, composition, strict=True))
            self.peaks[self.label] = self.total + high, there
        self.bytes = [a + b for a, b in zip(self.bytes, net, strict=True)]
        self.total += sum(net)

    def repeat(self, effects: Effects, key: Hashable, play: Callable[[], None]) -> None:
        """Play something, or do again what it has done under the same key.

        Args:
            key: all that decides what `play` does, but for the bytes that are there and the label.
            play: leaves the label as it is.
        """
        known = self.label, key
        if known not in effects:
            effects[known] = self.effect_of(play)
        peaks, net, self.is_new = effects[known]
        for label, high, composition in peaks:
            if label not in self.peaks or self.total + high > self.peaks[label][0]:
                there = tuple(a + b for a, b in zip(self.bytes, composition, strict=True))
                self.peaks[label] = self.total + high, there
        self.bytes = [a + b for a, b in zip(self.bytes, net, strict=True)]
        self.total += sum(net)

    def effect_of(self, play: Callable[[], None]) -> Effect:
        """What `play` does to memory; nothing here changes."""
        before = self.bytes, self.total, self.peaks, self.is_new
        self.bytes, self.total, self.peaks, self.is_new = list(NOTHING), 0, {}, True
        play()
        peaks = tuple((label, *highest) for label, highest in self.peaks.items())
        found = Effect(peaks, tuple(self.bytes), self.is_new)
        self.bytes, self.total, self.peaks, self.is_new = before
        return found

    def moments(self) -> list[Moment]:
        """The highest moment of each label."""
        return [Moment(label, composition) for label, (_, composition) in self.peaks.items() if label]

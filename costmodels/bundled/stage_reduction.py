"""The reduction of the gradients of a whole pipeline stage, once all its micro batches are done."""

from __future__ import annotations

from costmodels.bundled.moments import Bytes, Count, Peak
from costmodels.bundled.pytorch import is_before
from costmodels.bundled.stage_sums import Place, Stage, Sums, Terms
from costmodels.bundled.states import GroupBytes
from costmodels.spec.table import Bools

Parts = tuple[tuple[str, Count], ...]
"""Fields of parameters, and how many times they are there."""

DONE: Parts = (("gradients", 1.0), ("held", 1.0))
"""What there is of parameters whose gradients are reduced."""


def add_reduction(peak: Peak, stage: Stage, start: Terms, happens: Bools, fresh: Count = 0.0) -> None:
    """Add the moments of a reduction: the layers from the last to the first, then embedding and head; before
    PyTorch 2.15 embedding and head, then the layers from the first to the last.

    Args:
        start: what is there besides.
        happens: where FSDP2 manages parameters.
        fresh: 1 where there are gradients besides that FSDP2 has not seen, else 0.
    """
    _Reduction(peak, stage, start, happens, fresh).add()


class _Reduction:
    def __init__(self, peak: Peak, stage: Stage, start: Terms, happens: Bools, fresh: Count) -> None:
        self.peak, self.stage, self.sums = peak, stage, Sums(stage)
        self.start, self.happens = start, happens
        self.keeps = is_before(2, 15)
        waiting: Parts = (("accumulated", 1.0), ("fresh", fresh), ("gathered", 1.0))
        self.before, self.after = (DONE, waiting) if self.keeps else (waiting, DONE)
        """What there is of the layers before the one whose gradients are reduced, and after it."""

    def add(self) -> None:
        self._ends()
        for place in self.sums.places():
            self._layer(place)

    def _ends(self) -> None:
        """Embedding and head."""
        stage = self.stage
        start = [*self.start, *(term for what, count in self.after for term in self.sums.all(what, count))]
        reading, whole = stage.roots("reducing"), stage.roots("accumulated")
        summing = [*stage.roots("gathered"), *stage.roots("summing_accumulated")]
        summing += [] if self.keeps else self.sums.lowest("reducing")
        results = [
            [*stage.roots("written"), *stage.roots("quotient")],
            [*stage.roots("reduced"), *stage.roots("gradients")],
        ]
        for part in (summing, [*reading, *stage.roots("summed_accumulated")]):
            self.peak.add("reduce", [*start, *whole, *part], self.happens)
        for result in results:
            terms = [*start, *reading, *result, *stage.roots("last_accumulated")]
            self.peak.add("reduce", terms, self.happens)

    def _layer(self, place: Place) -> None:
        kind = self.stage.kinds[place.index]
        start = [*self.start]
        for what, count in self.before:
            start += [*self.stage.roots(what, count), *self.sums.below(place, what, count)]
        for what, count in self.after:
            start += self.sums.above(place, what, count)
        happens = place.happens & self.happens
        if kind.experts is None:
            before: Terms = [] if self.keeps else self.sums.next(place, "reducing")
            self._group(kind.group, start, before, happens)
            return
        # Those of the experts come first, but last before PyTorch 2.15.
        before = [] if self.keeps else [(1.0, kind.experts.reducing)]
        self._group(kind.group, [*start, *_parts(kind.experts, self.after)], before, happens)
        self._experts(kind.experts, [*start, *_parts(kind.group, self.before)], happens)

    def _group(self, group: GroupBytes, start: Terms, before: Terms, happens: Bools) -> None:
        """The parameters of a layer.

        Args:
            before: what is still read to reduce those before it.
        """
        summing: Terms = [(1.0, group.gathered), (1.0, group.summing_accumulated), *before]
        for part in (summing, [(1.0, group.reducing), (1.0, group.summed_accumulated)]):
            self.peak.add("reduce", [*start, (1.0, group.accumulated), *part], happens)
        self._results(group, [*start, (1.0, group.reducing), (1.0, group.last_accumulated)], happens)

    def _experts(self, experts: GroupBytes, start: Terms, happens: Bools) -> None:
        state: Terms = [*start, (1.0, experts.reducing)]
        shuffled: Terms = [(1.0, experts.accumulated), (1.0, experts.shuffled_accumulated)]
        self.peak.add("reduce", [*state, *shuffled], happens)
        self._results(experts, [*state, (1.0, experts.last_accumulated)], happens)

    def _results(self, group: GroupBytes, state: Terms, happens: Bools) -> None:
        written: Terms = [(1.0, group.written), (1.0, group.quotient)]
        cast: Terms = [(1.0, group.reduced), (1.0, group.gradients)]
        for result in (written, cast):
            self.peak.add("reduce", [*state, *result], happens)


def _parts(group: GroupBytes, parts: Parts) -> Terms:
    held: list[tuple[Count, Bytes]] = [(count, getattr(group, what)) for what, count in parts]
    return held

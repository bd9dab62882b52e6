"""The moments of a step of pipeline ranks under 1F1B (`torch.distributed.pipelining.Schedule1F1B`).

Rank r of p runs at most p - r micro batches ahead. PyTorch keeps what a stage has given until it is sent,
and the last gradient that it sent until the next one. Before 2.15 it keeps what a stage has given until its
backward, the last message of each kind until the next one, and the logits of a micro batch likewise.
"""

from __future__ import annotations

import numpy as np

from costmodels.bundled.moments import Count, Peak, Term
from costmodels.bundled.pytorch import is_before
from costmodels.bundled.stage_reduction import add_reduction
from costmodels.bundled.stage_sums import (
    Place,
    Stage,
    Sums,
    Terms,
    arrivals,
    arriving,
    asked_for_next,
    backward_pass,
    first_passes,
    later_passes,
    value,
)
from costmodels.bundled.states import converts_gradients
from costmodels.spec.table import Bools, Floats, LayoutTable

FORWARD = ("forward", "handed_forward")
"""Passes of a layer whose result is its own, or a message."""


def pipeline_peak(
    table: LayoutTable,
    fixed: Terms,
    stage: Stage,
    is_first: Bools,
    is_last: Bools,
    ahead: Floats,
    wraps: Bools,
) -> Peak:
    """Moments of the ranks of rows with 1F1B, [n, k].

    Args:
        fixed: what is there from the start of the step to its end.
        is_first, is_last: ranks with embedding, and with head and loss.
        ahead: micro batches whose activations a rank holds at most.
        wraps: rows whose parameters FSDP2 manages.
    """
    step = _Step(table, fixed, stage, is_first, is_last, ahead, wraps)
    step.forward()
    step.backward()
    step.reduce()
    return step.peak


class _Step:
    def __init__(
        self,
        table: LayoutTable,
        fixed: Terms,
        stage: Stage,
        is_first: Bools,
        is_last: Bools,
        ahead: Floats,
        wraps: Bools,
    ) -> None:
        self.stage, self.sums = stage, Sums(stage)
        self.first, self.last = is_first * 1.0, is_last * 1.0
        self.is_last = is_last
        self.peak = Peak(is_first.shape)
        self.wraps = wraps[:, None]
        self.frees = self.wraps & (table.zero_stage == 3)[:, None]
        self.stays = self.wraps & ~self.frees
        self.micro_batches = table.micro_batches[:, None].astype(np.float64)
        self.held = np.minimum(self.micro_batches, ahead)
        self.more = self.micro_batches > self.held
        self.several = self.micro_batches > 1
        self.converts = converts_gradients(table)
        self.keeps = is_before(2, 15)
        self.fixed = fixed
        self.start: Terms = [*fixed, *stage.roots("gathered", 1.0 * self.wraps)]
        self.accumulated: Terms = [*self.sums.all("accumulated"), *stage.roots("accumulated")]

    def others(self, count: Count) -> Terms:
        """What `count` micro batches keep from forward to backward."""
        stage = self.stage
        return [
            *self.sums.all("kept", count),
            (count * self.first, stage.first.kept),
            (count * self.last, stage.last.kept),
            (count * (1 - self.last) * self.keeps, stage.message),
            (count * self.last, stage.logits),
        ]

    def exchanged(self, came: Count) -> Terms:
        """The last messages: the gradient that was sent, and the one that came, if that is there."""
        return [(1 - self.first, self.stage.message), (came * (1 - self.last), self.stage.message)]

    def forward(self) -> None:
        """With as many others as there can be, before any backward and after one; and the very first."""
        stage, sums = self.stage, self.sums
        others = self.held - 1
        gathered = sums.all("gathered", self.stays)
        held: Terms = [*self.start, *self.others(others)]
        grown: Terms = [*held, *self.accumulated, *self.exchanged(1.0 * self.keeps)]
        after: Terms = [*grown, (self.last * self.keeps, stage.logits)]
        # What the micro batch before has given is on its way.
        before: Terms = [*held, (np.minimum(others, 1.0) * (1 - self.last) * (not self.keeps), stage.message)]
        for place in sums.places():
            kind = stage.kinds[place.index]
            below: Terms = [(self.first, stage.first.kept), *sums.below(place, "kept")]
            whole: Term = (1.0 * self.frees, value(kind, "gathered"))
            running = self.running(place, [later_passes(kind, 1.0 * self.frees, field) for field in FORWARD])
            for part in running:
                self.peak.add("forward", [*before, *below, *part, *gathered], place.happens & ~self.frees)
            first: Terms = [*sums.below(place, "gathered", self.stays, own=1.0), whole]
            for part in self.running(place, [first_passes(kind, 1.0 * self.frees, one) for one in FORWARD]):
                self.peak.add("forward", [*before, *below, *part, whole], place.happens & self.frees)
                self.peak.add("forward", [*self.start, *below, *part, *first], place.happens & ~self.frees)
            there: Terms = [(1.0, stage.saved), *sums.below(place, "gathered", self.stays)]
            for part in arrivals(sums, place):
                self.peak.add("forward", [*self.start, *below, *there, *part], place.happens)
            # ZeRO 3 has gathered all in backward, and frees them one after the other.
            rest: Terms = [*sums.above(place, "gathered", self.frees), whole, *gathered]
            for part in running:
                self.peak.add("forward", [*after, *below, *part, *rest], place.happens & self.more)
        scores: Terms = [(self.first, stage.first.kept), *sums.all("kept"), (1.0, stage.last.scores)]
        loss: Terms = [(self.first, stage.first.kept), *sums.all("kept"), (1.0, stage.last.forward)]
        self.peak.add("forward", [*before, *scores, *gathered, *sums.highest("tail")], self.is_last)
        self.peak.add("forward", [*after, *scores, *gathered], self.is_last & self.more)
        self.peak.add("forward", [*before, *loss, *gathered], self.is_last)
        self.peak.add("forward", [*grown, *loss, *gathered], self.is_last & self.more)

    def running(self, place: Place, passes: list[list[Terms]]) -> list[Terms]:
        """Forward of one layer: its passes as they are, and those of the last one, which gives a message."""
        is_top = self.tops(place) * (1 - self.last)
        return [
            [
                *((count * (1 - is_top), held) for count, held in own),
                *((count * is_top, held) for count, held in given),
            ]
            for own, given in zip(*passes, strict=True)
        ]

    def tops(self, place: Place) -> Floats:
        """1 for the last layer of a stage, else 0."""
        kinds = self.stage.kinds
        above = sum((later.count for later in kinds[place.index + 1 :]), np.zeros(self.peak.shape))
        result: Floats = (above + kinds[place.index].count - place.below == 1) * 1.0
        return result

    def backward(self) -> None:
        """Of the first micro batch, of one that finds gradients, and of one that follows another at once."""
        first = "first_backward" if self.converts else "backward"
        handed = "handed_first" if self.converts else "handed_backward"
        later_left = "left" if self.converts else "added"
        states = [
            (self.held, False, "first_backward", "handed_first", "left", self.held > 0),
            (self.held, True, first, handed, later_left, self.more),
            (self.held - 1, True, first, handed, later_left, self.several & (self.held > 1)),
        ]
        unwrapped = (None, True, "backward", "handed_backward", "added", None)
        for held, grown, unit, handed_unit, left, happens in states:
            self._backward(held, grown, unit, handed_unit, left, happens & (self.wraps | (not grown)))
        if self.converts and not self.wraps.all():
            for held, _, _, _, _, happens in states[1:]:
                _, grown, unit, handed_unit, left, _ = unwrapped
                self._backward(held, grown, unit, handed_unit, left, happens & ~self.wraps)
        elif not self.wraps.all():
            for held, grown, unit, handed_unit, left, happens in states[1:]:
                self._backward(held, grown, unit, handed_unit, left, happens & ~self.wraps)

    def _backward(self, held: Floats, grown: bool, unit: str, handed: str, left: str, happens: Bools) -> None:
        stage, sums = self.stage, self.sums
        start: Terms = [*self.start, *self.others(held - 1)]
        start += self.exchanged(1.0) if grown else [(1 - self.last, stage.message)]
        # What the stage gave, and what of it is there until its backward has ended.
        start += [((1 - self.last) * self.keeps, stage.message), (self.last, stage.logits)]
        start.append((self.first, stage.first.kept))
        start += self.accumulated if grown else []
        # What the backward before has gathered is still there, unless a forward has freed it.
        follows = held is not self.held
        gathered = sums.all("gathered", self.wraps if follows else self.stays)
        gathers = self.frees & (not follows)
        loss: Terms = [*sums.all("kept"), (1.0, stage.last.kept)]
        matrix = (1.0, stage.last.first_matrix if unit == "first_backward" else stage.last.matrix)
        for part in ([(1.0, stage.last.scoring)], [matrix, *sums.highest("buffer", 1.0 * gathers)]):
            self.peak.add("backward", [*start, *loss, *gathered, *part], happens & self.is_last)
        if grown and self.keeps:
            # The next gradient comes while the last one is still there.
            coming: Terms = [*start, *sums.all("kept"), *gathered, (1.0, stage.message)]
            self.peak.add("backward", coming, happens & ~self.is_last)
        head: Term = (self.last, getattr(stage.last, left))
        for place in sums.places():
            kind = stage.kinds[place.index]
            is_handed = (self.tops(place) > 0) & ~self.is_last
            lowest = sums.is_lowest(place) * (1 - self.first)
            state: Terms = [*start, head, *sums.below(place, "kept", own=1.0), *gathered]
            state += [] if grown else sums.above(place, "accumulated")
            state += sums.above(place, "gathered", gathers)
            arrived: Terms = [(1.0, kind.group.gathered), (1.0 * ~is_handed, stage.residual)]
            # Its parameters are copied, and before anything else those that come next are asked for.
            for part in (arriving(kind.group), asked_for_next(sums, place)):
                self.peak.add("backward", [*state, *arrived, *part], happens & place.happens & gathers)
            for fields, more in self._phases(place, unit, handed, grown, gathers):
                own: Terms = [
                    *backward_pass(kind, fields[1], 1.0 * is_handed, lowest),
                    *backward_pass(kind, fields[0], 1.0 * ~is_handed, lowest),
                ]
                self.peak.add("backward", [*state, *more, *own], happens & place.happens)
            state += [
                (1.0 * self.frees, value(kind, "gathered")),
                *sums.previous(place, "buffer", self.frees),
            ]
            if not grown and self.converts:
                terms = [
                    *state,
                    (1.0, stage.residual),
                    (1.0, kind.group.accumulated),
                    (1.0, kind.group.converted),
                ]
                terms += sums.below(place, "kept", -1.0, own=1.0) + sums.below(place, "kept")
                self.peak.add("reduce", terms, happens & place.happens & self.wraps & self.several)
        ends: Terms = [*start, head, *gathered, *sums.all("gathered", gathers)]
        ends += [] if grown else sums.all("accumulated")
        self.peak.add("backward", [*ends, (1.0, getattr(stage.first, unit))], happens & (self.first > 0))
        if not grown and self.converts:
            terms = [*ends, *stage.roots("accumulated"), *stage.roots("converted"), (-1.0, head[1])]
            terms[-1] = (-self.last, getattr(stage.last, left))
            self.peak.add("reduce", terms, happens & self.wraps & self.several)

    def _phases(
        self, place: Place, unit: str, handed: str, grown: bool, gathers: Bools
    ) -> list[tuple[tuple[str, str], Terms]]:
        """Parts of the backward of a layer, as it is and with a gradient that is handed to it, and what is
        gathered and has been accumulated of its experts then."""
        kind, gathering = self.stage.kinds[place.index], 1.0 * gathers
        whole: Term = (gathering, value(kind, "gathered"))
        if kind.experts is None:
            return [((unit, handed), [whole, *self.sums.previous(place, "tail", gathering)])]
        more: Terms = [whole, *self.sums.previous(place, "buffer", gathering)]
        after: Terms = []
        if not grown:
            after = [(1.0, kind.experts.accumulated)]
        coming: Terms = [(gathering * count, held) for count, held in arriving(kind.experts)]
        early: Terms = [(gathering, kind.group.gathered), (gathering, kind.experts.buffer)]
        return [
            ((f"{unit}_early", f"{handed}_early"), early),
            ((f"{unit}_start", f"{handed}_start"), [whole, *coming]),
            ((f"{unit}_late", f"{handed}_late"), more),
            ((f"{unit}_after", f"{handed}_after"), [*more, *after]),
        ]

    def reduce(self) -> None:
        """At the end of the step."""
        stage, sums = self.stage, self.sums
        start: Terms = [*self.fixed, *self.exchanged(1.0 * (self.keeps | self.several))]
        start += [(self.last * self.keeps, stage.logits), ((1 - self.last) * self.keeps, stage.message)]
        start.append((1 - self.first, stage.saved))
        add_reduction(self.peak, stage, start, self.wraps)
        parts: Terms = [*self.fixed, *sums.all("gradients"), *stage.roots("gradients")]
        whole: Terms = [*self.fixed, *self.accumulated]
        for label in ("reduce", "optimizer"):
            self.peak.add(label, parts, self.wraps)
            self.peak.add(label, whole, ~self.wraps)

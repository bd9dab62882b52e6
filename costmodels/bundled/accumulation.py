"""The moments of a step of one pipeline rank that holds the whole model (`executor.Accumulation`)."""

from __future__ import annotations

from costmodels.bundled.moments import Peak, Term
from costmodels.bundled.stage_sums import (
    Place,
    Stage,
    Sums,
    Terms,
    arrivals,
    arriving,
    asked_for_next,
    first_backward_passes,
    first_passes,
    value,
)
from costmodels.bundled.states import converts_gradients
from costmodels.spec.table import Bools, LayoutTable


def accumulation_peak(table: LayoutTable, fixed: Terms, stage: Stage, wraps: Bools) -> Peak:
    """Moments of rows without pipeline parallelism, [n, 1].

    Args:
        fixed: what is there from the start of the step to its end.
        wraps: rows whose parameters FSDP2 manages.
    """
    step = _Step(table, fixed, stage, wraps)
    step.forward()
    step.backward()
    step.reduce()
    return step.peak


class _Step:
    def __init__(self, table: LayoutTable, fixed: Terms, stage: Stage, wraps: Bools) -> None:
        self.fixed, self.stage, self.sums = fixed, stage, Sums(stage)
        self.peak = Peak((len(table), 1))
        self.wraps = wraps[:, None]
        self.frees = self.wraps & (table.zero_stage == 3)[:, None]
        self.stays = self.wraps & ~self.frees
        micro_batches = table.micro_batches[:, None]
        self.single, self.several, self.many = micro_batches == 1, micro_batches > 1, micro_batches > 2
        self.alone = self.wraps & (self.single | self.frees)
        self.converts = converts_gradients(table)

    def forward(self) -> None:
        """Of the first micro batch, which gathers, and of one that finds gradients of another one."""
        stage, sums = self.stage, self.sums
        root = stage.roots("gathered", 1.0 * self.wraps)
        whole: Terms = [*sums.all("accumulated", ~self.frees), *stage.roots("accumulated", 1.0 * ~self.frees)]
        parts: Terms = [*sums.all("gradients", self.frees), *stage.roots("gradients", 1.0 * self.frees)]
        start = [*self.fixed, *root, (1.0, stage.first.kept)]
        self.peak.add("forward", [*self.fixed, *root, (1.0, stage.first.forward), *stage.roots("buffer")])
        for place in sums.places():
            kind = stage.kinds[place.index]
            state = [*start, *sums.below(place, "kept")]
            gathering: Terms = [
                *sums.below(place, "gathered", self.stays, own=1.0),
                (1.0 * self.frees, value(kind, "gathered")),
            ]
            running: Term = (1.0, kind.unit.forward)
            for part in first_passes(kind, 1.0 * self.frees):
                self.peak.add("forward", [*state, *gathering, *part], place.happens)
                terms = [*state, *parts, *gathering, *part]
                self.peak.add("forward", terms, place.happens & self.frees & self.several)
            there: Terms = [*state, (1.0, stage.saved), *sums.below(place, "gathered", self.stays)]
            for part in arrivals(sums, place):
                self.peak.add("forward", [*there, *part], place.happens & self.wraps)
                self.peak.add("forward", [*there, *parts, *part], place.happens & self.frees & self.several)
            stays = [*sums.all("gathered", self.stays), *whole, running]
            self.peak.add("forward", [*state, *stays], place.happens & ~self.frees & self.several)
        state = [*start, *sums.all("kept"), *sums.all("gathered", self.stays)]
        self.peak.add("forward", [*state, (1.0, stage.last.forward)])
        self.peak.add("forward", [*state, *whole, *parts, (1.0, stage.last.forward)], self.several)
        state += [*sums.highest("tail"), (1.0, stage.last.scores)]
        self.peak.add("forward", state, self.wraps)
        self.peak.add("forward", [*state, *parts], self.frees & self.several)

    def backward(self) -> None:
        """Of the first, a middle and the last micro batch."""
        stage, sums = self.stage, self.sums
        first = "first_backward" if self.converts else "backward"
        root = stage.roots("gathered", 1.0 * self.wraps)
        start: Terms = [*self.fixed, *root, (1.0, stage.first.kept)]
        stays = sums.all("gathered", self.stays)
        whole: Terms = [*sums.all("accumulated"), *stage.roots("accumulated")]
        head, alone_head = (1.0, stage.last.left), (1.0, stage.last.left_alone)
        later_head: Term = (1.0, stage.last.left if self.converts else stage.last.added)
        loss: Terms = [*start, *sums.all("kept"), (1.0, stage.last.kept), *stays]
        parts: Terms = [*sums.all("gradients"), *stage.roots("gradients")]
        # Once backward reaches the head, its last layer is on its way.
        matrix: Terms = [*sums.highest("buffer", 1.0 * self.frees), (1.0, stage.last.alone_matrix)]
        for scores in (stage.last.scoring, stage.last.first_matrix):
            self.peak.add("backward", [*loss, (1.0, scores)], ~self.alone)
        for part in ([(1.0, stage.last.scoring)], matrix):
            self.peak.add("backward", [*loss, *part], self.alone)
            self.peak.add("backward", [*loss, *parts, *part], self.frees & self.several)
        self.peak.add(
            "backward", [*loss, *whole, (1.0, getattr(stage.last, first))], self.stays & self.several
        )
        self.peak.add("backward", [*loss, *whole, (1.0, stage.last.backward)], ~self.wraps & self.several)
        for place in sums.places():
            kind = stage.kinds[place.index]
            state: Terms = [*start, *sums.below(place, "kept", own=1.0)]
            later, happens = (1.0, getattr(kind.unit, first)), place.happens
            # The first of several; without FSDP2 also one alone.
            for part in first_backward_passes(kind):
                terms = [*state, *stays, head, *sums.above(place, "accumulated"), *part]
                self.peak.add("backward", terms, happens & ~self.frees & (self.several | ~self.wraps))
            # A middle one; without FSDP2, any but the first.
            middle = [*state, *stays, *whole]
            self.peak.add("backward", [*middle, later_head, later], happens & self.stays & self.many)
            terms = [*middle, (1.0, stage.last.added), (1.0, kind.unit.backward)]
            self.peak.add("backward", terms, happens & ~self.wraps & self.several)
            # The last one reduces layer by layer.
            held = sums.below(place, "gathered", self.stays, own=1.0)
            above_it: Terms = [*sums.above(place, "gradients"), *sums.above(place, "held")]
            own = sums.below(place, "accumulated", own=1.0)
            for field, reduced in self._phases(place, "alone_backward"):
                terms = [*state, *held, alone_head, *above_it, *reduced, (1.0, value(kind, field))]
                self.peak.add("backward", terms, happens & self.stays & self.single)
            for field, reduced in self._phases(place, first, accumulated=True):
                terms = [*state, *held, *own, *above_it, *reduced, (1.0, value(kind, field))]
                terms += [*stage.roots("accumulated"), later_head]
                self.peak.add("backward", terms, happens & self.stays & self.several)
            # ZeRO 3 gathers the layer before, and reduces after each micro batch.
            again: Terms = [*parts, *sums.above(place, "stuck"), alone_head]
            for field, reduced, now, added in self._freeing_phases(place):
                terms = [*state, *reduced, (1.0, value(kind, field))]
                self.peak.add("backward", [*terms, *now, *above_it, alone_head], happens & self.frees)
                self.peak.add("backward", [*terms, *added, *again], happens & self.frees & self.several)
            arrived: Terms = [(1.0, kind.group.gathered), (1.0, stage.residual)]
            arrived += [*self._reducing_next(place), alone_head]
            for part in (arriving(kind.group), asked_for_next(sums, place)):
                terms = [*state, *arrived, *part]
                self.peak.add("backward", [*terms, *above_it], happens & self.frees)
                terms += [*parts, *sums.above(place, "stuck")]
                self.peak.add("backward", terms, happens & self.frees & self.several)
        ends: Terms = [*self.fixed, *root, (1.0, stage.first.kept)]
        alone, later = (1.0, stage.first.alone_backward), (1.0, getattr(stage.first, first))
        terms = [*ends, *stays, head, *sums.all("accumulated"), (1.0, stage.first.first_backward)]
        self.peak.add("backward", terms, ~self.frees & (self.several | ~self.wraps))
        self.peak.add("backward", [*ends, *stays, *whole, later_head, later], self.stays & self.many)
        terms = [*ends, *whole, (1.0, stage.last.added), (1.0, stage.first.backward)]
        self.peak.add("backward", terms, ~self.wraps & self.several)
        lowest = sums.lowest("reducing")
        terms = [*ends, *sums.all("gradients"), *sums.all("held"), *lowest]
        self.peak.add("backward", [*terms, alone_head, alone], self.alone)
        terms += [*stage.roots("accumulated"), later_head]
        self.peak.add("backward", [*terms, later], self.stays & self.several)
        again = [*parts, *lowest, *sums.all("stuck")]
        self.peak.add("backward", [*ends, alone_head, *again, alone], self.frees & self.several)

    def _reducing_next(self, place: Place) -> Terms:
        """What the layer after one still reads from to reduce its gradients."""
        return self.sums.next(place, "reducing")

    def _phases(self, place: Place, field: str, accumulated: bool = False) -> list[tuple[str, Terms]]:
        """Backward of a layer whose gradients are reduced, and what is reduced then.

        In a layer with experts their gradients come first, then those of the rest.
        """
        kind = self.stage.kinds[place.index]
        experts = kind.experts
        if experts is None:
            return [(field, self._reducing_next(place))]
        done: Terms = [(1.0, experts.reducing), (1.0, experts.gradients), (1.0, experts.held)]
        done.append((-1.0, experts.gathered))
        if accumulated:
            done.append((-1.0, experts.accumulated))
        return [(f"{field}_before", self._reducing_next(place)), (f"{field}_after", done)]

    def _freeing_phases(self, place: Place) -> list[tuple[str, Terms, Terms, Terms]]:
        """The same with ZeRO 3 and what is gathered; what has been reduced for the first time, and again."""
        kind, sums = self.stage.kinds[place.index], self.sums
        own: Term = (1.0, kind.group.gathered)
        if kind.experts is None:
            before = sums.previous(place, "tail")
            return [("alone_backward", [own, *before, *self._reducing_next(place)], [], [])]
        before = sums.previous(place, "buffer")
        early: Terms = [own, (1.0, kind.experts.buffer), *self._reducing_next(place)]
        there: Terms = [own, (1.0, kind.experts.gathered), *before, *self._reducing_next(place)]
        late: Terms = [own, *before, (1.0, kind.experts.reducing)]
        first: Terms = [(1.0, kind.experts.gradients), (1.0, kind.experts.held)]
        coming: Terms = [(1.0, kind.experts.gathered), *arriving(kind.experts)]
        return [
            ("alone_backward_early", early, [], []),
            ("alone_backward_start", [own, *coming, *self._reducing_next(place)], [], []),
            ("alone_backward_late", there, [], []),
            ("alone_backward_after", late, first, [(1.0, kind.experts.stuck)]),
        ]

    def reduce(self) -> None:
        """Of the last micro batch, layer by layer, then embedding and head; and what is left of it."""
        stage, sums = self.stage, self.sums
        root = stage.roots("gathered", 1.0 * self.wraps)
        start: Terms = [*self.fixed, *root, (1.0, stage.first.kept), (1.0, stage.residual)]
        head, alone_head = (1.0, stage.last.left), (1.0, stage.last.left_alone)
        later_head: Term = (1.0, stage.last.left if self.converts else stage.last.added)
        parts: Terms = [*sums.all("gradients"), *stage.roots("gradients")]
        accumulated = stage.roots("accumulated")
        for place in sums.places():
            kind, happens = stage.kinds[place.index], place.happens
            group = kind.group
            state: Terms = [*start, *sums.below(place, "kept")]
            state += sums.previous(place, "buffer", self.frees)
            done: Terms = [*sums.above(place, "gradients"), *sums.above(place, "held")]
            gathered = sums.below(place, "gathered", self.stays)
            reading: Term = (1.0, group.reducing)
            written: Terms = [reading, (1.0, group.written), (1.0, group.quotient)]
            cast: Terms = [reading, (1.0, group.reduced), (1.0, group.gradients)]
            alone = [*state, *gathered, alone_head, *done]
            again = [*state, alone_head, *parts, *sums.above(place, "stuck")]
            copied: Terms = [reading, (1.0, group.fresh), (1.0, group.summed_fresh)]
            self.peak.add("reduce", [*alone, *copied], happens & self.alone)
            self.peak.add("reduce", [*again, *copied], happens & self.frees & self.several)
            last = [*state, *gathered, later_head, *done, *accumulated]
            before = self._reducing_next(place) if kind.experts is None else [(1.0, kind.experts.reducing)]
            terms = [(1.0, group.gathered), *before, (1.0, group.fresh), (1.0, group.summing_fresh)]
            self.peak.add("reduce", [*alone, *terms], happens & self.alone)
            self.peak.add("reduce", [*again, *terms], happens & self.frees & self.several)
            terms = [*last, *sums.below(place, "accumulated", own=1.0)]
            terms += [(1.0, group.gathered), *before, (1.0, group.summing_accumulated)]
            self.peak.add("reduce", terms, happens & self.stays & self.several)
            for more in ([(1.0, group.added), (1.0, group.quotient)], [(1.0, group.added_cast)]):
                terms = [*again, reading, *more, (1.0, group.last_fresh)]
                self.peak.add("reduce", terms, happens & self.frees & self.several)
            for result in (written, cast):
                fresh: Terms = [*result, (1.0, group.last_fresh)]
                self.peak.add("reduce", [*alone, *fresh], happens & self.alone)
                terms = [*last, *sums.below(place, "accumulated"), *result, (1.0, group.last_accumulated)]
                self.peak.add("reduce", terms, happens & self.stays & self.several)
            terms = [*last, *sums.below(place, "accumulated", own=1.0), reading]
            terms.append((1.0, group.summed_accumulated))
            self.peak.add("reduce", terms, happens & self.stays & self.several)
            if kind.experts is not None:
                self._reduce_experts(place, gathered, alone_head, later_head, parts)
            # Gradients of the first micro batch change to the format that they are reduced in.
            terms = [*state, *sums.all("gathered", self.stays), head, *sums.above(place, "accumulated")]
            terms += [(1.0, group.accumulated), (1.0, group.converted)]
            self.peak.add("reduce", terms, happens & self.stays & self.several)
        layers: Terms = [*self.fixed, *sums.all("gradients"), *sums.all("held")]
        of_roots, stuck = stage.roots("reducing"), sums.all("stuck")
        summing = [*root, *sums.lowest("reducing")]
        for what, reading_roots in (("summing", summing), ("summed", of_roots)):
            terms = [*reading_roots, *stage.roots("fresh"), *stage.roots(f"{what}_fresh")]
            self.peak.add("reduce", [*layers, *terms], self.alone)
            self.peak.add("reduce", [*self.fixed, *parts, *stuck, *terms], self.frees & self.several)
            terms = [*reading_roots, *stage.roots("accumulated"), *stage.roots(f"{what}_accumulated")]
            self.peak.add("reduce", [*layers, *terms], self.stays & self.several)
        written = [*stage.roots("written"), *stage.roots("quotient")]
        for result in (written, [*stage.roots("reduced"), *stage.roots("gradients")]):
            state = [*of_roots, *result]
            fresh = [*state, *stage.roots("last_fresh")]
            self.peak.add("reduce", [*layers, *fresh], self.alone)
            terms = [*layers, *state, *stage.roots("last_accumulated")]
            self.peak.add("reduce", terms, self.stays & self.several)
        again = [*self.fixed, *parts, *stuck, *of_roots, *stage.roots("last_fresh")]
        for added in ([*stage.roots("added"), *stage.roots("quotient")], stage.roots("added_cast")):
            self.peak.add("reduce", [*again, *added], self.frees & self.several)
        converting = [*self.fixed, *root, *sums.all("gathered", self.stays), *sums.all("accumulated")]
        self.peak.add(
            "reduce",
            [*converting, *stage.roots("accumulated"), *stage.roots("converted")],
            self.stays & self.several,
        )
        self.peak.add("reduce", [*self.fixed, *sums.all("accumulated"), *accumulated], ~self.wraps)
        self.peak.add("reduce", [*self.fixed, *parts], self.wraps)
        self.peak.add("optimizer", [*self.fixed, *sums.all("accumulated"), *accumulated], ~self.wraps)
        self.peak.add("optimizer", [*self.fixed, *parts], self.wraps)

    def _reduce_experts(
        self, place: Place, gathered: Terms, alone_head: Term, later_head: Term, parts: Terms
    ) -> None:
        """Of the last micro batch, the experts of a layer in the middle of its backward."""
        stage, sums = self.stage, self.sums
        kind, happens = stage.kinds[place.index], place.happens
        experts, field = kind.experts, "first_backward" if self.converts else "backward"
        assert experts is not None
        start: Terms = [*self.fixed, *stage.roots("gathered", 1.0 * self.wraps), (1.0, stage.first.kept)]
        state: Terms = [*start, *sums.below(place, "kept", own=1.0), *gathered, (1.0, kind.group.gathered)]
        state += sums.previous(place, "buffer", self.frees)
        done: Terms = [*sums.above(place, "gradients"), *sums.above(place, "held"), (1.0, experts.reducing)]
        results: list[Terms] = [
            [(1.0, experts.written), (1.0, experts.quotient)],
            [(1.0, experts.reduced), (1.0, experts.gradients)],
        ]
        at: Term = (1.0, value(kind, "alone_backward_at"))
        single = happens & self.alone
        shuffled: Term = (1.0, experts.shuffled_fresh)
        self.peak.add("reduce", [*state, *done, alone_head, at, shuffled], single)
        left: Terms = [(-1.0, experts.fresh), (1.0, experts.last_fresh)]
        for result in results:
            self.peak.add("reduce", [*state, *done, alone_head, at, *left, *result], single)
        again: Terms = [*parts, *sums.above(place, "stuck"), (1.0, experts.reducing), alone_head, at]
        several = happens & self.frees & self.several
        self.peak.add("reduce", [*state, *again, shuffled], several)
        for more in ([(1.0, experts.added), (1.0, experts.quotient)], [(1.0, experts.added_cast)]):
            self.peak.add("reduce", [*state, *again, *left, *more], several)
        own: Terms = [*sums.below(place, "accumulated", own=1.0), *stage.roots("accumulated"), later_head]
        at = (1.0, value(kind, f"{field}_at"))
        if self.converts:
            own.append((-1.0, experts.fresh))
        happens = happens & self.stays & self.several
        self.peak.add("reduce", [*state, *done, *own, at, (1.0, experts.shuffled_accumulated)], happens)
        left = [(-1.0, experts.accumulated), (1.0, experts.last_accumulated)]
        for result in results:
            self.peak.add("reduce", [*state, *done, *own, at, *left, *result], happens)

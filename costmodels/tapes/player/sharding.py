"""FSDP2 as memory sees it: parameters that are gathered, freed, and whose gradients are reduced.

Names and order of what happens are those of `FSDPParamGroup` in
`torch.distributed.fsdp._fully_shard._fsdp_param_group`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from costmodels.tapes.player.bundle import MASTER, Bundle, free_all, replace
from costmodels.tapes.player.casts import Manner
from costmodels.tapes.player.heap import TEMPORARIES, Heap, Storage

Since = Literal["before", "begun", "held", "earlier"]
"""When new gradients were made that FSDP2 comes to: before it comes to all; in the pass of gradients of
weights that runs, to whose end they do not last, as gradients do, and perhaps just before, so that the pass
still has them in hand; or in an earlier pass, and this one has listed what was there
(`stage_backward_weight`)."""


class Traffic:
    """What the groups of one root share (`FSDPCommContext`)."""

    def __init__(self) -> None:
        self.gathered_last: Storage | None = None
        """The buffer of the last all-gather of forward."""
        self.reduced_last: list[Storage] = []
        """What reduce-scatters read from."""
        self.listed: list[Storage] = []
        """Gradients that nobody needs any more, and that a pass of those of weights has listed."""

    def end_list(self, heap: Heap) -> None:
        """End the list of gradients that were there before a pass."""
        free_all(heap, self.listed)
        self.listed.clear()

    def let_go(self, heap: Heap) -> None:
        """End the buffer of the last all-gather of forward."""
        if self.gathered_last is not None:
            heap.free(self.gathered_last)
            self.gathered_last = None


State = tuple[bool, bool, bool, bool, bool, bool, bool, bool, tuple[int, ...], tuple[int, ...]]


class Group:
    """`FSDPParamGroup`: a bundle of parameters in the course of a step."""

    def __init__(self, heap: Heap, traffic: Traffic, bundle: Bundle, is_root: bool, wraps: bool) -> None:
        """`wraps`: FSDP2 manages it; else its parameters are there, and gradients are added up, beside those
        of the optimizer where these are wider (`runtime.parallel.working_copies`)."""
        self.heap, self.traffic, self.bundle, self.ways = heap, traffic, bundle, bundle.ways
        self.wraps = wraps and len(bundle.parts) > 0
        self.copies = not wraps and bundle.policy.width != MASTER
        self.reduces = not wraps and bundle.policy.holders > 1
        """Ranks sum its gradients in one buffer."""
        self.casts = self.wraps and bundle.ways.casts_gradients and bundle.policy.converts
        """Autograd casts gradients."""
        self.sees = self.wraps and bundle.policy.converts and not self.casts
        """FSDP2 changes gradients that it comes to amid a pass."""
        self.frees = bundle.policy.frees and not is_root
        self.before: Group | None = None
        """The group whose forward ends before that of this one."""
        self.is_gathered = False
        self.is_gathering = False
        """Nobody has waited for the all-gather."""
        self.has_fresh = False
        """Autograd has made gradients."""
        self.has_sums = False
        """They are there in the number format in which they are reduced."""
        self.late: tuple[int, ...] = ()
        """Parameters whose gradients alone are fresh, where FSDP2 has come to those of the others."""
        self.lacking: tuple[int, ...] = ()
        """Those that have no sums yet, where the others do."""
        self.has_gradient = False
        """Gradients of shards are there."""
        self.has_all_reduced = False
        """What an all-reduce keeps is there."""
        self.has_copies = False
        """Copies are there."""
        self.has_wide = False
        """Gradients of what copies are made of are there."""
        self.is_done = False
        """Backward has passed here."""

    @property
    def state(self) -> State:
        """All that lasts from one pass to the next."""
        return (
            self.is_gathered,
            self.is_gathering,
            self.has_fresh,
            self.has_sums,
            self.has_gradient,
            self.has_copies,
            self.has_wide,
            self.has_all_reduced,
            self.late,
            self.lacking,
        )

    @state.setter
    def state(self, state: State) -> None:
        (
            self.is_gathered,
            self.is_gathering,
            self.has_fresh,
            self.has_sums,
            self.has_gradient,
            self.has_copies,
            self.has_wide,
            self.has_all_reduced,
            self.late,
            self.lacking,
        ) = state

    # Gathering.

    def unshard(self) -> None:
        """Begin to gather."""
        if not self.wraps or self.is_gathering or self.is_gathered:
            return
        self.is_gathering = True
        if self.bundle.policy.shards > 1:
            self.heap.repeat(self.bundle.effects, "send", lambda: self.bundle.send(self.heap))

    def wait(self, in_forward: bool) -> None:
        """Copy what was gathered to where it is used."""
        if not self.is_gathering:
            return
        heap, traffic, bundle = self.heap, self.traffic, self.bundle
        if in_forward and not self.ways.keeps_locals:
            traffic.let_go(heap)
        heap.repeat(bundle.effects, "copy out", lambda: bundle.copy_out(heap))
        if in_forward:
            traffic.let_go(heap)
        if bundle.policy.shards > 1:
            if in_forward:
                traffic.gathered_last = bundle.buffer
            else:
                heap.free(bundle.buffer)
        self.is_gathering, self.is_gathered = False, True

    def reshard(self) -> None:
        """Free what was gathered."""
        if self.is_gathered:
            self.heap.free(self.bundle.gathered)
            self.is_gathered = False

    # Hooks around modules.

    def pre_forward(self) -> None:
        """Before forward of a module."""
        self.unshard()
        self.wait(in_forward=True)

    def post_forward(self) -> None:
        """After it."""
        if self.frees:
            self.reshard()

    def pre_backward(self) -> None:
        """Before backward of a module; gathers those of the module before it too."""
        self.unshard()
        self.wait(in_forward=False)
        if self.before is not None:
            self.before.unshard()

    def manner(self, is_last: bool) -> Manner:
        """How autograd will give gradients to parameters that are not `late`
        (`FSDPParamGroup._set_unsharded_grad_dtypes`).

        Args:
            is_last: they are reduced after this backward.
        """
        if (self.has_fresh and not self.late) or (self.casts and self.has_sums):
            return "adds"
        # What is reduced at once is cast on its way to the other ranks.
        return "casts" if self.casts and not (is_last and self.bundle.policy.widens) else "makes"

    def come(self, manner: Manner) -> None:
        """Autograd has given gradients."""
        if manner == "casts":
            self.has_sums = True
        elif manner == "makes":
            self.has_fresh, self.late = True, ()

    def see(self, given: Collection[int], is_first: bool, last: Collection[int] = ()) -> bool:
        """FSDP2 comes to gradients of parameters that autograd has given so far, before it gives the others
        (`FSDPState._root_post_backward_final_callback`), and to those of an earlier pass.

        Args:
            is_first: of this pass.
            last: of those given, which the pass still has in hand.

        Returns:
            Whether anything is done with them.
        """
        heap, every = self.heap, range(len(self.bundle.parts))
        earlier = self._fresh if is_first and self.has_fresh else ()
        there = [number for number in every if number in given or number in earlier]
        if not self.sees or not there:
            return False
        label = heap.label
        heap.enter("reduce")
        lacking = self.lacking if self.has_sums else every
        # What is added to sums comes before what becomes one.
        for number in sorted(there, key=lambda one: one in lacking):
            self._add([number], "held" if number in last else "begun" if number in given else "earlier")
        free_all(heap, [self.bundle.made[one]._replace(category=TEMPORARIES) for one in last])
        self.lacking = tuple(number for number in lacking if number not in there)
        self.late = tuple(number for number in (every if is_first else self._fresh) if number not in given)
        self.has_sums, self.has_fresh = True, len(self.late) > 0
        heap.enter(label)
        return True

    @property
    def _fresh(self) -> Sequence[int]:
        """The parameters whose new gradients are there, if any are."""
        return self.late or range(len(self.bundle.parts))

    def _add(self, numbers: Iterable[int], since: Since) -> None:
        """Add new gradients of parameters to their sums, or make these of them."""
        for number in numbers:
            made = self.bundle.made[number]
            if not self.has_sums or number in self.lacking:
                self.heap.allocate(self.bundle.sums[number])
            if since == "earlier":
                self.traffic.listed.append(made)
            elif since != "held":
                self.heap.free(made._replace(category=TEMPORARIES) if since == "begun" else made)

    def _settle(self, is_last: bool, since: Since) -> None:
        """Add what is new to the sums; what has none is reduced as it is."""
        if not (self.has_sums and self.has_fresh):
            return
        self._add((number for number in self._fresh if not (is_last and number in self.lacking)), since)
        self.late = self.lacking = self.lacking if is_last else ()
        self.has_fresh = len(self.late) > 0

    def post_backward(self, is_last: bool, reshards: bool, since: Since = "before") -> None:
        """After it: accumulate gradients, or reduce them where this backward is the last one.

        Args:
            since: when new ones were made.
        """
        self.is_done = True
        if not self.wraps:
            self.add_up()
            if self.reduces and is_last:
                self.free_copies()
            return
        heap, traffic, bundle = self.heap, self.traffic, self.bundle
        label = heap.label
        heap.enter("reduce")
        self._settle(is_last, since)
        if not is_last:
            if reshards:
                self.reshard()
            if bundle.policy.converts and self.has_fresh:
                if since == "before":
                    heap.repeat(bundle.effects, "convert", lambda: bundle.convert(heap))
                else:
                    self._add(range(len(bundle.parts)), since)
                self.has_fresh, self.has_sums = False, True
            heap.enter(label)
            return
        gradients: list[Storage] = []
        if self.has_sums or self.has_fresh:
            gradients = list(bundle.sums if self.has_sums else bundle.made)
            for number in self.lacking:
                gradients[number] = bundle.made[number]
            gradients = bundle.sum_partial(heap, gradients)
        if reshards:
            self.reshard()
        free_all(heap, traffic.reduced_last)
        traffic.reduced_last.clear()
        if gradients:
            self._end_all_reduce()
            is_new = not self.has_gradient and not bundle.policy.offloads
            heap.repeat(
                bundle.effects,
                ("reduce", self.has_sums, self.lacking, is_new),
                lambda: bundle.reduce(heap, gradients, is_new),
            )
            traffic.reduced_last.append(bundle.source)
            self.has_gradient = self.has_gradient or is_new
            self.has_all_reduced = bundle.keeps_all_reduced(is_new)
            self.has_sums = self.has_fresh = False
            self.late = self.lacking = ()
        heap.enter(label)

    def _end_all_reduce(self) -> None:
        if self.has_all_reduced:
            bundle = self.bundle
            self.heap.free(bundle.written)
            self.has_all_reduced = False

    def finalize(self) -> None:
        """The end of the backward that reduces."""
        self._end_all_reduce()
        if self.is_gathering:
            if self.bundle.policy.shards > 1:
                self.heap.free(self.bundle.buffer)
            self.is_gathering = False

    def fill_copies(self) -> None:
        """The beginning of a step."""
        if self.copies:
            self.heap.allocate(self.bundle.copies)
            self.has_copies = True

    def free_copies(self) -> None:
        """The end of what computes with them."""
        if self.has_copies:
            self.heap.free(self.bundle.copies)
            self.has_copies = False

    def add_up(self) -> None:
        """Add gradients of copies up (`GradientSums.add`)."""
        adds = self.reduces or (self.copies and self.bundle.policy.converts)
        if not (adds and self.has_fresh):
            return
        heap, bundle, label = self.heap, self.bundle, self.heap.label
        heap.enter("reduce")
        if self.has_sums:
            free_all(heap, bundle.made)
        elif self.reduces:
            heap.allocate(bundle.joined)
            free_all(heap, bundle.made)
        else:
            heap.repeat(bundle.effects, "convert", lambda: bundle.convert(heap))
        self.has_fresh, self.has_sums = False, True
        heap.enter(label)

    def hand_over(self) -> None:
        """The end of the passes of a step: gradients as the optimizer sees them."""
        if not (self.copies or self.reduces):
            return
        heap, bundle = self.heap, self.bundle
        self.add_up()
        narrow = self.has_sums and bundle.policy.reduced != MASTER
        if self.has_fresh:
            replace(heap, bundle.made, bundle.wide)
        elif narrow and self.reduces:
            for one in bundle.wide:
                heap.allocate(one)
            heap.free(bundle.joined)
        elif narrow:
            replace(heap, bundle.sums, bundle.wide)
        self.has_wide, self.has_fresh, self.has_sums = self.has_fresh or self.has_sums, False, False

    def drop_gradients(self) -> None:
        """The end of a step."""
        if self.has_gradient:
            self.heap.free(self.bundle.gradient)
        if self.has_fresh:
            free_all(self.heap, [self.bundle.made[number] for number in self._fresh])
        if self.has_wide:
            joined = self.reduces and self.bundle.policy.reduced == MASTER
            free_all(self.heap, [self.bundle.joined] if joined else self.bundle.wide)
        self.has_gradient = self.has_fresh = self.has_wide = False
        self.late = ()

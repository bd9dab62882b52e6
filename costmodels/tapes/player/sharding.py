"""FSDP2 as memory sees it: parameters that are gathered, freed, and whose gradients are reduced.

Names and order of what happens are those of `torch.distributed.fsdp._fully_shard`: `FSDPParamGroup`
(`_fsdp_param_group.py`) and `foreach_all_gather`, `foreach_all_gather_copy_out` and `foreach_reduce`
(`_fsdp_collectives.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from costmodels.spec.layout import SPLIT_BACKWARD, Layout
from costmodels.tapes.player.heap import (
    COMMUNICATION,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    Effects,
    Heap,
    Storage,
    block_bytes,
)
from costmodels.tapes.player.optimizer import Updated
from costmodels.tapes.player.units import Parameter

MASTER = 4
"""Bytes of a parameter, and of its gradient, as the optimizer sees it."""

WIDTHS = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
"""Bytes of an element that computes, by precision."""


class Policy(NamedTuple):
    """What a layout asks of FSDP2 for one group of parameters."""

    shards: int
    """Ranks over which each parameter is split."""
    holders: int
    """Ranks that have copies of it, whole or in parts."""
    all_reduces: bool
    """Its mesh has replicas, be it one."""
    frees: bool
    """Parameters are freed after forward (ZeRO 3)."""
    width: int
    """Bytes of an element that computes."""
    reduced: int
    """Bytes of an element of a gradient that is reduced."""
    converts: bool
    """Gradients are reduced in another number format than backward makes them in."""
    offloads: bool
    """The optimizer and its parameters are in host memory."""
    any_side: bool
    """Parameters are split along the first side that can be split evenly."""


def wraps_parameters(layout: Layout, has_experts: bool) -> bool:
    """Whether FSDP2 manages parameters (`runtime.parallel.data.needs_data_parallel`)."""
    shares = layout.data_parallel * layout.context_parallel > 1
    if has_experts:
        shares = shares or expert_holders(layout) > 1
    return shares or layout.precision not in ("fp32", "tf32") or layout.offload_optimizer


def expert_holders(layout: Layout) -> int:
    """Ranks that have copies of the same experts."""
    stage = layout.world_size // layout.pipeline_parallel
    return stage // (layout.expert_parallel * layout.expert_tensor_parallel)


def policy_of(layout: Layout, experts: bool) -> Policy:
    """The policy of routed experts, or of all other parameters (`runtime.parallel.data.data_parallel`)."""
    holders = layout.data_parallel * layout.context_parallel
    shards = layout.zero_shards
    if experts:
        holders = expert_holders(layout)
        shards = max(1, holders // layout.zero_replicas) if layout.zero_stage else 1
    made = {"tf32": "fp32", "fp8": "bf16"}.get(layout.precision, layout.precision)
    return Policy(
        shards=shards,
        holders=holders,
        all_reduces=layout.zero_stage == 0 or holders > shards,
        # `runtime.parallel.pipeline._keep_gathered`
        frees=layout.zero_stage == 3 and layout.schedule not in SPLIT_BACKWARD,
        width=WIDTHS[layout.precision],
        reduced=WIDTHS[layout.gradient_reduction],
        converts=made != layout.gradient_reduction,
        offloads=layout.offload_optimizer,
        any_side=experts,
    )


class Sharded(NamedTuple):
    """One parameter of a group on the first of the ranks that share it."""

    whole: int
    """Elements before it is split."""
    shard: int
    """Elements here, filled up to those of the first rank."""
    sides: tuple[int, ...]
    """Of the shard."""
    moved: bool
    """It is split along another side than the first, and copied on its way."""
    parameter: Parameter


def sharded(parameter: Parameter, policy: Policy) -> Sharded:
    """A parameter split over ranks (`FSDPParam._init_sharded_param`)."""
    sides, shards = list(parameter.sides), policy.shards
    along = 0
    if policy.any_side:
        along = next((dim for dim, side in enumerate(sides) if side % shards == 0), 0)
    sides[along] = -(-sides[along] // shards)
    elements = 1
    for side in sides:
        elements *= side
    return Sharded(parameter.elements, elements, tuple(sides), along > 0 and shards > 1, parameter)


class Bundle:
    """Parameters that are gathered and reduced together; those of equal layers are the same object."""

    def __init__(self, parameters: Sequence[Parameter], made: Sequence[Storage], policy: Policy) -> None:
        """`made`: gradients as autograd makes them; of no bytes where it makes none."""
        self.policy = policy
        self.parts = [sharded(one, policy) for one in parameters]
        self.made = made
        width, shards = policy.width, policy.shards
        self.outputs = [_communication(width * one.shard * shards) for one in self.parts]
        self.gathered = Storage(COMMUNICATION, sum(one.size for one in self.outputs))
        self.buffer = _communication(width * shards * sum(one.shard for one in self.parts))
        self.sums = [
            Storage(GRADIENTS, block_bytes(policy.reduced * one.whole) if storage.size else 0)
            for one, storage in zip(self.parts, made, strict=True)
        ]
        """Gradients in the number format in which they are reduced."""
        elements = sum(one.shard for one, storage in zip(self.parts, made, strict=True) if storage.size)
        self.source = _communication(policy.reduced * shards * elements)
        """What a reduce-scatter reads from."""
        self.written = _communication(policy.reduced * elements)
        """What it writes."""
        self.gradient = Storage(GRADIENTS, block_bytes(MASTER * elements))
        """Of all shards."""
        masters = 0 if policy.offloads else sum(block_bytes(MASTER * one.shard) for one in self.parts)
        self.masters = Storage(PARAMETERS, masters)
        """Parameters as the optimizer sees them, on the device."""
        self.updated: Sequence[Updated] = ()
        """As the optimizer sees them."""
        self.optimizer = Storage(OPTIMIZER, 0)
        """Its state."""
        self.effects: Effects = {}

    def send(self, heap: Heap) -> None:
        """`foreach_all_gather`: leaves the buffer."""
        policy = self.policy
        sent: list[Storage] = []
        if policy.offloads:
            for one in self.parts:
                sent += self._arrived(heap, one)
        elif policy.width != MASTER:
            elements = sum(one.shard for one in self.parts)
            sent = [heap.allocate(_communication(policy.width * elements))]
        heap.allocate(self.buffer)
        _free(heap, sent)

    def _arrived(self, heap: Heap, one: Sharded) -> list[Storage]:
        """A shard in the number format that computes, where it is not the parameter itself."""
        policy = self.policy
        found = _communication(policy.width * one.shard)
        if policy.width == MASTER:
            return [heap.allocate(found)] if policy.offloads else []
        copied = _communication(MASTER * one.shard * policy.offloads)
        heap.allocate(copied)
        heap.allocate(found)
        heap.free(copied)
        return [found]

    def copy_out(self, heap: Heap) -> None:
        """`foreach_all_gather_copy_out`, or what there is instead with one rank."""
        held: list[Storage] = []
        for one, output in zip(self.parts, self.outputs, strict=True):
            if self.policy.shards == 1:
                # The variable lets go of the one before.
                arrived = self._arrived(heap, one)
                _free(heap, held)
                held = arrived
            heap.allocate(output)
            if one.moved:
                held.append(heap.allocate(output))
        _free(heap, held)

    def convert(self, heap: Heap) -> None:
        """`FSDPParam.to_accumulated_grad_if_needed` of all."""
        for fresh, sums in zip(self.made, self.sums, strict=True):
            heap.allocate(sums)
            heap.free(fresh)

    def sum_partial(self, heap: Heap, gradients: Sequence[Storage]) -> list[Storage]:
        """Gradients with sums over tensor-parallel ranks instead of their parts."""
        found = list(gradients)
        for number, (one, gradient) in enumerate(zip(self.parts, gradients, strict=True)):
            if one.parameter.partial:
                found[number] = heap.allocate(Storage(COMMUNICATION, gradient.size))
                heap.free(gradient)
        return found

    def reduce(self, heap: Heap, gradients: Sequence[Storage], is_new: bool) -> None:
        """`foreach_reduce`: leaves what the reduce-scatter reads from, the gradient if it is new, and what an
        all-reduce keeps besides it.

        Args:
            is_new: the result becomes the gradient, and is not added to one.
        """
        policy = self.policy
        listed, held = self._in_order_of_ranks(heap, gradients)
        heap.allocate(self.source)
        _free(heap, listed)
        output, result = self.written, self.gradient if is_new else _communication(self.gradient.size)
        if policy.reduced == MASTER:
            output = result
        heap.allocate(output)
        if policy.shards == 1 and policy.holders > 1:
            # A factor makes PyTorch before 2.15 divide a copy.
            heap.allocate(self.source)
            heap.free(self.source)
        if policy.reduced != MASTER:
            heap.allocate(result)
            if not policy.all_reduces:
                heap.free(output)
        _free(heap, held)
        if not is_new and not (policy.all_reduces and result is output):
            heap.free(result)

    def keeps_all_reduced(self, is_new: bool) -> bool:
        """Whether an all-reduce keeps something besides the gradient."""
        return self.policy.all_reduces and not (is_new and self.policy.reduced == MASTER)

    def _in_order_of_ranks(
        self, heap: Heap, gradients: Sequence[Storage]
    ) -> tuple[list[Storage], list[Storage]]:
        """What is copied to be reduced, and what local variables keep to the end besides."""
        listed: list[Storage] = []
        chunks: Storage | None = None
        moved = False
        for one, gradient in zip(self.parts, gradients, strict=True):
            if not gradient.size:
                continue
            moved = one.moved
            if moved:
                if chunks is not None:
                    heap.free(chunks)
                chunks = gradient
                gradient = heap.allocate(Storage(COMMUNICATION, gradient.size))
            listed.append(gradient)
        held = [] if chunks is None else [chunks]
        if self.policy.shards > 1 and not moved:
            # The loop's variable, before PyTorch 2.15.
            held.append(listed.pop())
        return listed, held


def _communication(size: int) -> Storage:
    return Storage(COMMUNICATION, block_bytes(size))


def _free(heap: Heap, storages: Sequence[Storage]) -> None:
    for storage in storages:
        heap.free(storage)


class Traffic:
    """What the groups of one root share (`FSDPCommContext`)."""

    def __init__(self) -> None:
        self.gathered_last: Storage | None = None
        """The buffer of the last all-gather of forward."""
        self.reduced_last: list[Storage] = []
        """What reduce-scatters read from."""


State = tuple[bool, ...]


class Group:
    """`FSDPParamGroup`: a bundle of parameters in the course of a step."""

    def __init__(self, heap: Heap, traffic: Traffic, bundle: Bundle, is_root: bool, wraps: bool) -> None:
        """`wraps`: FSDP2 manages it; else its parameters are there, and gradients are added up."""
        self.heap, self.traffic, self.bundle = heap, traffic, bundle
        self.wraps = wraps and len(bundle.parts) > 0
        self.frees = bundle.policy.frees and not is_root
        self.before: Group | None = None
        """The group whose forward ends before that of this one."""
        self.is_gathered = False
        self.is_gathering = False
        """Nobody has waited for the all-gather."""
        self.has_fresh = False
        """Autograd has made gradients."""
        self.has_sums = False
        """They have been added up in the number format in which they are reduced."""
        self.has_gradient = False
        """Gradients of shards are there."""
        self.has_all_reduced = False
        """What an all-reduce keeps is there."""
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
            self.has_all_reduced,
        )

    @state.setter
    def state(self, state: State) -> None:
        (
            self.is_gathered,
            self.is_gathering,
            self.has_fresh,
            self.has_sums,
            self.has_gradient,
            self.has_all_reduced,
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
        before = traffic.gathered_last if in_forward else None
        heap.repeat(bundle.effects, "copy out", lambda: bundle.copy_out(heap))
        if before is not None:
            # A local variable keeps it until here, before PyTorch 2.15.
            heap.free(before)
            traffic.gathered_last = None
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

    def post_backward(self, is_last: bool, reshards: bool) -> None:
        """After it: accumulate gradients, or reduce them where this backward is the last one."""
        self.is_done = True
        if not self.wraps:
            return
        heap, traffic, bundle = self.heap, self.traffic, self.bundle
        label = heap.label
        heap.enter("reduce")
        if self.has_sums and self.has_fresh:
            _free(heap, bundle.made)
            self.has_fresh = False
        if not is_last:
            if reshards:
                self.reshard()
            if bundle.policy.converts and self.has_fresh:
                heap.repeat(bundle.effects, "convert", lambda: bundle.convert(heap))
                self.has_fresh, self.has_sums = False, True
            heap.enter(label)
            return
        gradients: list[Storage] = []
        if self.has_sums or self.has_fresh:
            gradients = bundle.sum_partial(heap, bundle.sums if self.has_sums else bundle.made)
        if reshards:
            self.reshard()
        _free(heap, traffic.reduced_last)
        traffic.reduced_last.clear()
        if gradients:
            self._end_all_reduce()
            is_new = not self.has_gradient and not bundle.policy.offloads
            heap.repeat(
                bundle.effects,
                ("reduce", self.has_sums, is_new),
                lambda: bundle.reduce(heap, gradients, is_new),
            )
            traffic.reduced_last.append(bundle.source)
            self.has_gradient = self.has_gradient or is_new
            self.has_all_reduced = bundle.keeps_all_reduced(is_new)
            self.has_sums = self.has_fresh = False
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

    def drop_gradients(self) -> None:
        """The end of a step."""
        if self.has_gradient:
            self.heap.free(self.bundle.gradient)
        if self.has_fresh:
            _free(self.heap, self.bundle.made)
        self.has_gradient = self.has_fresh = False

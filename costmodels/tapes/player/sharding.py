"""FSDP2 as memory sees it: parameters that are gathered, freed, and whose gradients are reduced.

Names and order of what happens are those of `torch.distributed.fsdp._fully_shard`: `FSDPParamGroup`
(`_fsdp_param_group.py`) and `foreach_all_gather`, `foreach_all_gather_copy_out` and `foreach_reduce`
(`_fsdp_collectives.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from costmodels.spec.layout import Layout
from costmodels.tapes.player.heap import (
    COMMUNICATION,
    GRADIENTS,
    PARAMETERS,
    Heap,
    Storage,
    block_bytes,
)
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
        frees=layout.zero_stage == 3,
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


@dataclass
class Traffic:
    """What the groups of one root share (`FSDPCommContext`)."""

    gathered_last: Storage | None = None
    """The buffer of the last all-gather of forward."""
    reduced_last: list[Storage] = field(default_factory=list)
    """What reduce-scatters read from."""
    order: list[Group] = field(default_factory=list)
    """Groups in the order in which their forward ended."""


class Group:
    """A group of parameters that are gathered and reduced together."""

    def __init__(
        self,
        heap: Heap,
        traffic: Traffic,
        parameters: Sequence[Parameter],
        policy: Policy,
        is_root: bool,
        wraps: bool,
    ) -> None:
        """`wraps`: FSDP2 manages it; else its parameters are there, and gradients are added up."""
        self.heap, self.traffic, self.policy = heap, traffic, policy
        self.wraps = wraps and len(parameters) > 0
        self.parts = [sharded(one, policy) for one in parameters]
        self.frees = policy.frees and not is_root
        self.is_gathered = False
        self.gathering: Storage | None = None
        """The buffer of an all-gather that nobody has waited for; of no bytes where there is one rank."""
        self.fresh: list[Storage | None] = [None] * len(self.parts)
        """Gradients that autograd has made."""
        self.accumulated: list[Storage | None] = [None] * len(self.parts)
        """Sums of gradients in the number format in which they are reduced."""
        self.gradient: Storage | None = None
        """Of all shards."""
        self.all_reduced: Storage | None = None
        self.is_last = True
        """This backward reduces."""
        self.places: list[int] = []
        self.is_done = False
        """Backward has passed here."""
        width = policy.width
        self.outputs = [
            Storage(COMMUNICATION, block_bytes(width * one.shard * policy.shards)) for one in self.parts
        ]
        self.buffer = Storage(
            COMMUNICATION, block_bytes(width * policy.shards * sum(one.shard for one in self.parts))
        )

    # State of the step.

    def masters(self) -> list[Storage]:
        """Parameters as the optimizer sees them, on the device."""
        if self.policy.offloads:
            return []
        return [Storage(PARAMETERS, block_bytes(MASTER * one.shard)) for one in self.parts]

    # Gathering.

    def unshard(self) -> None:
        """Begin to gather."""
        if not self.wraps or self.gathering is not None or self.is_gathered:
            return
        if self.policy.shards == 1:
            self.gathering = Storage(COMMUNICATION, 0)
            return
        heap, policy = self.heap, self.policy
        sent: list[Storage] = []
        if policy.offloads:
            for one in self.parts:
                sent += self._arrived(one)
        elif policy.width != MASTER:
            sent = [Storage(COMMUNICATION, block_bytes(policy.width * sum(one.shard for one in self.parts)))]
            heap.allocate(sent[0])
        self.gathering = heap.allocate(self.buffer)
        for storage in sent:
            heap.free(storage)

    def _arrived(self, one: Sharded) -> list[Storage]:
        """A shard in the number format that computes, where it is not the parameter itself."""
        heap, policy = self.heap, self.policy
        found = Storage(COMMUNICATION, block_bytes(policy.width * one.shard))
        if policy.width == MASTER:
            return [heap.allocate(found)] if policy.offloads else []
        copied = Storage(COMMUNICATION, block_bytes(MASTER * one.shard) * policy.offloads)
        heap.allocate(copied)
        heap.allocate(found)
        heap.free(copied)
        return [found]

    def wait(self, in_forward: bool) -> None:
        """Copy what was gathered to where it is used."""
        if self.gathering is None:
            return
        heap, traffic = self.heap, self.traffic
        before = traffic.gathered_last if in_forward else None
        if self.policy.shards == 1:
            last: list[Storage] = []
            for one, output in zip(self.parts, self.outputs, strict=True):
                arrived = self._arrived(one)
                for storage in last:
                    heap.free(storage)
                last = arrived
                heap.allocate(output)
            for storage in last:
                heap.free(storage)
        else:
            between = []
            for one, output in zip(self.parts, self.outputs, strict=True):
                heap.allocate(output)
                if one.moved:
                    between.append(heap.allocate(output))
            for storage in between:
                heap.free(storage)
        self.is_gathered = True
        if before is not None:
            # A local variable keeps it until here, before PyTorch 2.15.
            heap.free(before)
            traffic.gathered_last = None
        if in_forward and self.policy.shards > 1:
            traffic.gathered_last = self.gathering
        else:
            heap.free(self.gathering)
        self.gathering = None

    def reshard(self) -> None:
        """Free what was gathered."""
        if self.is_gathered:
            for output in self.outputs:
                self.heap.free(output)
            self.is_gathered = False

    # Hooks around modules.

    def pre_forward(self) -> None:
        """Before forward of a module."""
        self.unshard()
        self.wait(in_forward=True)

    def post_forward(self) -> None:
        """After it."""
        if not self.wraps:
            return
        if self.frees:
            self.reshard()
        self.places.append(len(self.traffic.order))
        self.traffic.order.append(self)

    def pre_backward(self) -> None:
        """Before backward of a module; gathers those of the module before it too."""
        self.is_done = False
        self.unshard()
        self.wait(in_forward=False)
        if self.places:
            place = self.places.pop()
            if place > 0:
                self.traffic.order[place - 1].unshard()

    def post_backward(self, reshards: bool) -> None:
        """After it: accumulate gradients, or reduce them where this backward is the last one."""
        self.is_done = True
        if not self.wraps:
            return
        heap, traffic = self.heap, self.traffic
        label = heap.label
        heap.enter("reduce")
        for number, (sums, fresh) in enumerate(zip(self.accumulated, self.fresh, strict=True)):
            if sums is not None and fresh is not None:
                heap.free(fresh)
                self.fresh[number] = None
        if not self.is_last:
            if reshards:
                self.reshard()
            self._convert()
            heap.enter(label)
            return
        gradients = self._summed()
        if reshards:
            self.reshard()
        while traffic.reduced_last:
            heap.free(traffic.reduced_last.pop(0))
        if gradients:
            if self.all_reduced is not None:
                heap.free(self.all_reduced)
                self.all_reduced = None
            self._reduce(gradients)
        heap.enter(label)

    def _convert(self) -> None:
        """`FSDPParam.to_accumulated_grad_if_needed`."""
        if not self.policy.converts:
            return
        for number, (one, fresh) in enumerate(zip(self.parts, self.fresh, strict=True)):
            if fresh is not None:
                sums = Storage(GRADIENTS, block_bytes(self.policy.reduced * one.whole))
                self.accumulated[number] = self.heap.allocate(sums)
                self.heap.free(fresh)
                self.fresh[number] = None

    def _summed(self) -> list[tuple[Sharded, Storage]]:
        """Gradients to reduce; sums over tensor-parallel ranks instead of their parts."""
        found = []
        for number, one in enumerate(self.parts):
            for gradients in (self.accumulated, self.fresh):
                gradient = gradients[number]
                if gradient is None:
                    continue
                if one.parameter.partial:
                    total = self.heap.allocate(Storage(COMMUNICATION, gradient.size))
                    self.heap.free(gradient)
                    gradient = total
                found.append((one, gradient))
                gradients[number] = None
                break
        return found

    def _reduce(self, gradients: list[tuple[Sharded, Storage]]) -> None:
        """`foreach_reduce`."""
        heap, policy = self.heap, self.policy
        listed, held = self._in_order_of_ranks(gradients)
        elements = sum(one.shard for one, _ in gradients)
        source = Storage(COMMUNICATION, block_bytes(policy.reduced * elements * policy.shards))
        heap.allocate(source)
        for storage in listed:
            heap.free(storage)
        is_new = self.gradient is None and not policy.offloads
        kept = GRADIENTS if is_new else COMMUNICATION
        output = Storage(
            kept if policy.reduced == MASTER else COMMUNICATION, block_bytes(policy.reduced * elements)
        )
        heap.allocate(output)
        if policy.shards == 1 and policy.holders > 1:
            # A factor makes PyTorch before 2.15 divide a copy.
            heap.allocate(source)
            heap.free(source)
        result = output
        if policy.reduced != MASTER:
            result = heap.allocate(Storage(kept, block_bytes(MASTER * elements)))
            if not policy.all_reduces:
                heap.free(output)
        for storage in held:
            heap.free(storage)
        if is_new:
            self.gradient = result
        elif result is not output or not policy.all_reduces:
            heap.free(result)
        if policy.all_reduces and self.gradient is not output:
            self.all_reduced = output
        self.traffic.reduced_last.append(source)

    def _in_order_of_ranks(
        self, gradients: list[tuple[Sharded, Storage]]
    ) -> tuple[list[Storage], list[Storage]]:
        """What is copied to be reduced, and what local variables keep to the end besides."""
        listed, chunks = [], None
        for one, gradient in gradients:
            if one.moved:
                if chunks is not None:
                    self.heap.free(chunks)
                chunks = gradient
                gradient = self.heap.allocate(Storage(COMMUNICATION, gradient.size))
            listed.append(gradient)
        held = [] if chunks is None else [chunks]
        if self.policy.shards > 1 and not gradients[-1][0].moved:
            # The loop's variable, before PyTorch 2.15.
            held.append(listed.pop())
        return listed, held

    def finalize(self) -> None:
        """The end of the backward that reduces."""
        if self.all_reduced is not None:
            self.heap.free(self.all_reduced)
            self.all_reduced = None
        if self.gathering is not None:
            self.heap.free(self.gathering)
            self.gathering = None
        self.places.clear()

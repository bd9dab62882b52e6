"""Parameters that FSDP2 gathers and reduces together, and what that takes.

Names and order of what happens are those of `foreach_all_gather`, `foreach_all_gather_copy_out` and
`foreach_reduce` in `torch.distributed.fsdp._fully_shard._fsdp_collectives`.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from costmodels.spec.layout import SPLIT_BACKWARD, Layout
from costmodels.tapes.player.casts import Cast, Casts
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
from costmodels.tapes.player.ways import Ways
from costmodels.tapes.tape import Tape

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
    widens: bool
    """In one of more bytes."""
    offloads: bool
    """The optimizer and its parameters are in host memory."""
    any_side: bool
    """Parameters are split along the first side that can be split evenly."""


def wraps_parameters(layout: Layout) -> bool:
    """Whether FSDP2 manages parameters (`runtime.parallel.data.wraps_stages`)."""
    return layout.zero_stage > 0 or layout.offload_optimizer


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
        widens=WIDTHS[layout.gradient_reduction] > WIDTHS[layout.precision],
        offloads=layout.offload_optimizer,
        any_side=experts,
    )


def casts_of(
    tape: Tape,
    own: Sequence[Parameter],
    whole: Sequence[Parameter],
    policies: Mapping[bool, Policy],
    layout: Layout,
) -> Casts:
    """The gradients of a unit that autograd casts (`FSDPParamGroup._init_mp_dtypes` from PyTorch 2.15 on).

    Args:
        own: its parameters.
        whole: the same where no matrix is split.
        policies: of routed experts, and of all other parameters.
    """
    found: dict[int, Cast] = {}
    for number, (one, other) in enumerate(zip(own, whole, strict=True)):
        policy = policies[one.is_expert]
        if policy.converts:
            splits = not one.is_expert or layout.expert_tensor_parallel > 1
            # What all ranks of a mesh have, they may have to sum.
            is_whole = tape.parameters[number].distributed and splits and one.sides == other.sides
            size = block_bytes(policy.reduced * one.elements)
            found[number] = Cast(size, is_whole or not policy.widens)
    return found


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

    def __init__(
        self, parameters: Sequence[Parameter], made: Sequence[Storage], policy: Policy, ways: Ways
    ) -> None:
        """`made`: gradients as autograd makes them; of no bytes where it makes none."""
        self.policy, self.ways = policy, ways
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
        self.copies = Storage(PARAMETERS, sum(one.size for one in self.outputs))
        """Parameters in the number format that computes, where FSDP2 does not manage them."""
        self.wide = [
            Storage(GRADIENTS, block_bytes(MASTER * one.whole) if storage.size else 0)
            for one, storage in zip(self.parts, made, strict=True)
        ]
        """Gradients as the optimizer sees them, there."""
        self.joined = Storage(GRADIENTS, block_bytes(policy.reduced * sum(one.whole for one in self.parts)))
        """The sums there, where ranks add them up."""
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
        free_all(heap, sent)

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
                free_all(heap, held)
                held = arrived
            heap.allocate(output)
            if one.moved:
                held.append(heap.allocate(output))
        free_all(heap, held)

    def convert(self, heap: Heap) -> None:
        """`FSDPParam.to_accumulated_grad_if_needed` of all."""
        replace(heap, self.made, self.sums)

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
        free_all(heap, listed)
        output, result = self.written, self.gradient if is_new else _communication(self.gradient.size)
        if policy.reduced == MASTER:
            output = result
        heap.allocate(output)
        if self.ways.divides_copies and policy.shards == 1 and policy.holders > 1:
            heap.allocate(self.source)
            heap.free(self.source)
        if policy.reduced != MASTER:
            heap.allocate(result)
            if not policy.all_reduces:
                heap.free(output)
        free_all(heap, held)
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
        if not self.ways.keeps_locals:
            free_all(heap, held)
            return listed, []
        if self.policy.shards > 1 and not moved:
            # The loop's variable.
            held.append(listed.pop())
        return listed, held


def replace(heap: Heap, old: Sequence[Storage], new: Sequence[Storage]) -> None:
    """Make one after the other, each in the place of one that ends."""
    for before, after in zip(old, new, strict=True):
        heap.allocate(after)
        heap.free(before)


def _communication(size: int) -> Storage:
    return Storage(COMMUNICATION, block_bytes(size))


def free_all(heap: Heap, storages: Sequence[Storage]) -> None:
    """End several storages."""
    for storage in storages:
        heap.free(storage)

"""A tracker of every tensor's memory from its first use to its last."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._guards import CompileContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from runtime.dryrun import repeats
from runtime.dryrun.course import BUILD, Course, Kind
from runtime.dryrun.memory_trace import Moment, block_bytes
from runtime.parallel.summing_linear import Place, place_of
from runtime.parallel.summing_products import GROUPED, SCALED

Category = str

STRENGTH = {
    "temporaries": 0,
    "message": 1,
    "activations": 2,
    "logits": 3,
    "communication": 4,
    "parameters": 5,
    "gradients": 5,
    "optimizer": 5,
}
"""Strengths of the roles of a storage; the strongest role wins.

A tensor saved by forward is an activation even if a collective made it, such as a gathered input. But
parameters gathered by FSDP2 stay communication although every GEMM saves them. "message" is the weak form of
communication: a tensor delivered by a collective or the pipeline.
"""

COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d")
"""Namespaces of communication operators."""


SCALAR = torch.ops.aten._local_scalar_dense.default
"""The operator that reads a number from the device."""


NO_LAYER = "other"
"""The label of work outside of layers."""

DEVICE = torch.ops.prim.device.default

SET_STORAGE = (torch.ops.aten.set_.source_Storage, torch.ops.aten.set_.source_Storage_storage_offset)

FUSED_SGD = torch.ops.aten._fused_sgd_.default

IN_KERNELS = tuple(f"planner::{name}" for name in (GROUPED, SCALED))
"""Names of GEMMs that add to sums by kernels, which a device may do without."""

ADD_WEIGHT_GRADIENT = {
    torch.ops.planner.add_weight_gradient.default,
    *(getattr(torch.ops.planner, name.split("::")[1]).default for name in IN_KERNELS),
}
"""GEMMs that add to sums."""

GRADIENT_BYTES = 2
"""Bytes of an element of a gradient that is added to a sum."""


@dataclass
class Block:
    """One storage on the device."""

    size: int
    category: Category
    layer: str
    phase: str


class Tracker(TorchDispatchMode):
    """A record of all storages that operations make while it is active.

    Memory counts from the operation that makes a storage to the end of the last tensor that uses it, as in
    the caching allocator. Views and in-place operations make no storage. Temporary memory within a kernel is
    not seen.
    """

    def __init__(self, on_gpu: bool, fake: bool = True) -> None:
        """Make a tracker; with `fake`, tensors have no content."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = fake
        self.on_gpu = on_gpu
        self.blocks: list[Block] = []
        self.alive: dict[int, tuple[int, Any]] = {}
        """Live storages by the address of their owner: the block, and a reference that tells its end."""
        self.numbers: list[int] = []
        self.deltas: list[int] = []
        self.labels: list[str] = []
        """Block, bytes and phase of each change, in three lists."""
        self.host = self.host_peak = 0
        self.category: Category | None = None
        self.layer = NO_LAYER
        self.phase: str | None = None
        self.operations = 0
        self.first = 0
        self.beside: dict[Place, list[int]] = {}
        """Memory of gradients that devices without a kernel have beside their sums, by their places."""
        self.pauses = 0
        """Above 0 while PyTorch plays with tensors that no device would hold."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is DEVICE:
            # By far the most frequent, and nothing that takes memory.
            (tensor,) = args
            if type(tensor) is FakeTensor and not tensor.fake_mode.in_kernel_invocation:
                return tensor.fake_device
            return func(*args)
        if any(map(is_wrapper, types)):
            # The tensors inside come here one by one.
            return NotImplemented
        if func is SCALAR and self.fake and args[0].dtype == torch.bool:
            # The runtime asks for a truth value only to learn whether gradients are finite.
            return True
        if func is FUSED_SGD and self.fake:
            # The operator works in place, and PyTorch has no fake form of it.
            return None
        if func in ADD_WEIGHT_GRADIENT and self.fake and not is_compiling():
            # Uncompiled layers come here; the fake form of the operator has no sum.
            place = place_of(args[-1])
            with self:
                self.add_to_sum(place, func.name())
            return place.gradient
        if func in SET_STORAGE and self.fake:
            # The cache of fake tensors would keep the storage.
            with without_cache(args[0]):
                result = func(*args, **(kwargs or {}))
        elif self.fake and not is_compiling():
            result = repeats.call(func, args, kwargs or {})
        else:
            result = func(*args, **(kwargs or {}))
        self.operations += 1
        if isinstance(result, Tensor):
            self.note(result, func)
        elif isinstance(result, (tuple, list)):
            for part in result:
                if isinstance(part, Tensor):
                    self.note(part, func)
        return result

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Ignore the compiler's own operations while this mode is active."""
        return True

    def note(self, tensor: Tensor, func: Any = None) -> None:
        """Count the storage of `tensor` if it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if self.pauses or key in self.alive or is_compiling():
            return
        device = tensor.device.type
        if device == "meta":
            return
        size = storage.nbytes()
        if self.on_gpu and device == "cpu":
            self._note_on_host(key, storage, size)
            return
        category = self.category
        if category is None:
            category = "message" if func is not None and func.namespace in COLLECTIVES else "temporaries"
        number = len(self.blocks)
        phase = self.now()
        self.blocks.append(Block(size, category, self.layer, phase))
        self._change(number, size, phase)
        self.alive[key] = number, weakref.ref(storage, self._forgetter(key, number))

    def open(self, size: int) -> int:
        """Count memory without a tensor; returns its number for `close`."""
        number, phase = len(self.blocks), self.now()
        self.blocks.append(Block(size, self.category or "temporaries", self.layer, phase))
        self._change(number, size, phase)
        return number

    def close(self, number: int) -> None:
        """End the memory counted by `open`."""
        self._change(number, -self.blocks[number].size, self.now())
        self.blocks[number].size = 0

    def add_to_sum(self, place: Place, name: str) -> None:
        """Have memory for a sum to which the operator `name` adds.

        Where kernels add, a gradient in 16 bits counts beside it until the sums of the layer are complete. A
        device may be faster with additions of their own, which no trace knows. The estimate holds for both.
        """
        total, _ = place.receive()
        if name in IN_KERNELS:
            with self.scope(category="gradients"):
                self.beside.setdefault(place, []).append(self.open(GRADIENT_BYTES * total.numel()))

    def end_gradients(self, places: Iterable[Place]) -> None:
        """End the memory of the gradients beside sums."""
        for place in places:
            for number in self.beside.pop(place, ()):
                self.close(number)

    def resized(self, storage: torch.UntypedStorage, before: int) -> None:
        """Record that `storage`, of `before` bytes, now has another size."""
        known = self.alive.get(storage._cdata)
        if known is None or known[0] < 0:
            return
        number, size = known[0], storage.nbytes()
        self._change(number, -before, self.now())
        self._change(number, size, self.now())
        self.blocks[number].size = size

    def _note_on_host(self, key: int, storage: torch.UntypedStorage, size: int) -> None:
        self.host += size
        self.host_peak = max(self.host_peak, self.host)

        def forget(_: Any) -> None:
            self.alive.pop(key, None)
            self.host -= size

        self.alive[key] = -1, weakref.ref(storage, forget)

    def _forgetter(self, key: int, number: int) -> Callable[[Any], None]:
        def forget(_: Any) -> None:
            self.alive.pop(key, None)
            self.close(number)

        return forget

    def _change(self, number: int, delta: int, phase: str) -> None:
        if delta:
            self.numbers.append(number)
            self.deltas.append(delta)
            self.labels.append(phase)

    def now(self) -> str:
        """The current phase of the step."""
        if self.phase is not None:
            return self.phase
        return "schedule" if torch._C._current_graph_task_id() == -1 else "backward"

    def tag(self, tensor: Tensor | None, category: Category, layer: str | None = None) -> None:
        """Set the role of the storage of `tensor`, unless a stronger role is known."""
        for part in inner_tensors(tensor):
            number, _ = self.alive.get(part.untyped_storage()._cdata, (-1, None))
            if number < 0:
                continue
            block = self.blocks[number]
            if STRENGTH[category] > STRENGTH[block.category]:
                block.category = category
                if layer or self.layer != NO_LAYER:
                    block.layer = layer or self.layer

    @contextmanager
    def scope(
        self, category: Category | None = None, layer: str | None = None, phase: str | None = None
    ) -> Iterator[None]:
        """Give memory that is made within this context this category, layer or phase."""
        before = self.category, self.layer, self.phase
        self.category, self.layer, self.phase = (
            category or self.category,
            layer or self.layer,
            phase or self.phase,
        )
        try:
            yield
        finally:
            self.category, self.layer, self.phase = before

    def mark(self) -> None:
        """Forget the highest moments so far, except that of the build, and search for new ones from now
        on."""
        self.first = len(self.numbers)

    def moments(self) -> dict[str, Moment]:
        """The highest moment of each phase since the mark, and of the build."""
        return self.course().moments()

    def course(self) -> Course:
        """Held bytes after each change of memory since the mark, and after those of the build."""
        numbers, live = np.array(self.numbers, dtype=np.int64), np.array(self.deltas, dtype=np.int64)
        rounded = np.sign(live) * np.array([block_bytes(abs(d)) for d in self.deltas], dtype=np.int64)
        kinds: dict[Kind, int] = {}
        of_block = np.array([kinds.setdefault(kind_of(block), len(kinds)) for block in self.blocks])
        places, labels = of_block[numbers], np.array(self.labels)
        is_kept = (np.arange(len(numbers)) >= self.first - 1) | (labels == BUILD)
        labels[: self.first][labels[: self.first] != BUILD] = ""
        held = [
            np.array([np.where(places == place, sizes, 0).cumsum()[is_kept] for place in kinds.values()])
            for sizes in (rounded if self.on_gpu else live, live)
        ]
        return Course(
            labels=labels[is_kept],
            changes=live[is_kept],
            places=places[is_kept],
            kinds=tuple(kinds),
            allocated=held[0],
            live=held[1],
            host_bytes=self.host_peak,
            operations=self.operations,
        )


def kind_of(block: Block) -> Kind:
    """The category of a block, and the layer that saved it."""
    category = "communication" if block.category == "message" else block.category
    return category, block.layer if category == "activations" else NO_LAYER


def is_wrapper(kind: type) -> bool:
    """Return whether tensors of this class wrap other tensors."""
    return hasattr(kind, "__tensor_flatten__")


def inner_tensors(tensor: object) -> Iterator[Tensor]:
    """The plain tensors inside `tensor`."""
    if not isinstance(tensor, Tensor):
        return
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from inner_tensors(getattr(tensor, name))
    else:
        yield tensor


@contextmanager
def without_cache(tensor: Any) -> Iterator[None]:
    """Run without the fake-tensor cache of `tensor`'s mode."""
    mode, before = tensor.fake_mode, tensor.fake_mode.cache_enabled
    mode.cache_enabled = False
    try:
        yield
    finally:
        mode.cache_enabled = before


def is_compiling() -> bool:
    """Return whether a compiler is running; its fake tensors use no memory."""
    return CompileContext.try_get() is not None

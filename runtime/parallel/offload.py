"""Offloading of attention's tensors for backward to host memory (MindSpeed's swap-attention).

During forward, side streams copy the saved tensors of a layer's attention to pinned memory: its input,
queries, keys and values, and the output of its core. These are e (h + 2q + 2k) bytes per token in the symbols
of `runtime.parallel.recomputation`, less e h if norms are recomputed. In backward, each layer starts the
copies back for the layer before it. Statistics, rotary tables and parameters stay on the device. The
exception are key and value weights that tensor-parallel ranks share and gather for each use. With one
pipeline rank the last layer of the stage keeps everything, as its backward follows at once. PyTorch rounds
every piece of pinned memory up to a power of two.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from costmodels import Layout
from runtime.model.transformer import Transformer
from runtime.parallel.accelerator import device_module
from runtime.parallel.recomputation import Packed, is_plain, memory_of, pack, recomputed_blocks, unpack

Forward = Callable[[Tensor], Tensor]

SMALLEST = 1024
"""Least bytes of a tensor that is offloaded; smaller copies are not worth their time."""


def offload_activations(stage: Transformer, layout: Layout) -> None:
    """Offload attention's tensors for backward to host memory, and prefetch them.

    A fully recomputed layer has no tensor to offload. In compiled layers attention runs uncompiled.
    """
    blocks = stage.blocks
    if layout.recompute == "full":
        blocks = [block for block in blocks if block not in recomputed_blocks(stage, layout)]
    transfers = _Transfers()
    for number, block in enumerate(blocks):
        first = number == 0
        at_once = layout.pipeline_parallel == 1 and block is stage.blocks[-1]
        wrap = _fetch_before if at_once else partial(_offload, first=first)
        wrap(block.attention, transfers)
        _tell_apart(block.attention)


def _tell_apart(attention: Any) -> None:
    kind: Any = type(attention)
    attention.__class__ = _offloading(kind)


@cache
def _offloading(kind: Any) -> Any:
    """A separate class for attention that offloads. At a graph break torch.compile only considers the class
    of the callee, so with the same class it would also break in the other layers."""
    return type(f"Offloading{kind.__name__}", (kind,), {})


class _Transfers:
    """The copies of one stage."""

    def __init__(self) -> None:
        self.last: Callable[[], _Layer | None] = _nothing
        """The layer that ran last in this forward pass."""
        self.device = torch.device("cpu")
        """The device of the activations; the storages of fake tensors do not tell."""
        self.streams: tuple[torch.Stream, torch.Stream] | None = None

    def streams_of(self, device: torch.device) -> tuple[torch.Stream, torch.Stream]:
        """The streams of copies to host memory and back, as links transfer in both directions at once."""
        if self.streams is None:
            self.streams = _stream(device), _stream(device)
        return self.streams


def _stream(device: torch.device) -> torch.Stream:
    stream: torch.Stream = device_module(device).Stream(device)
    return stream


def _nothing() -> None:
    return None


def _uncompiled(forward: Forward) -> Forward:
    plain: Forward = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]
    return plain


def _offload(attention: nn.Module, transfers: _Transfers, first: bool) -> None:
    forward: Forward = attention.forward

    def offloading(x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(x)
        layer = _Layer(transfers, _nothing if first else transfers.last, _storages(attention))
        with saved_tensors_hooks(layer.pack, unpack):
            result = forward(x)
        layer.close()
        transfers.last = weakref.ref(layer)
        return result

    attention.forward = _uncompiled(offloading)  # type: ignore[method-assign]


def _fetch_before(attention: nn.Module, transfers: _Transfers) -> None:
    """Keep all tensors of this layer, but start the copies back of the layer before it."""
    forward: Forward = attention.forward

    def fetching(x: Tensor) -> Tensor:
        result = forward(x)
        if result.requires_grad:
            last = transfers.last

            def fetch(gradient: Tensor) -> None:
                _start(last)

            result.register_hook(fetch)  # type: ignore[no-untyped-call]
        return result

    attention.forward = _uncompiled(fetching)  # type: ignore[method-assign]


def _start(reference: Callable[[], _Layer | None]) -> None:
    layer = reference()
    if layer is not None:
        layer.fetch()


def _storages(module: nn.Module) -> set[int]:
    """The memory of the parameters of `module`; under FSDP2, of the currently gathered ones."""
    parameters = (p.to_local() if isinstance(p, DTensor) else p for p in module.parameters())
    return {memory_of(parameter) for parameter in parameters}


class _Layer:
    """Activations that one attention call sent to host memory."""

    def __init__(
        self, transfers: _Transfers, previous: Callable[[], _Layer | None], staying: set[int]
    ) -> None:
        self.transfers = transfers
        self.previous = previous
        self.staying = staying
        self.copies: dict[int, _Copy] = {}
        self.sources: list[torch.UntypedStorage] = []
        """Storages held until the call ends, so that no new one has the same address."""
        self.fetched = False

    def pack(self, tensor: Tensor) -> Packed:
        """The packed form of a saved tensor: the tensor itself, or a function that fetches it."""
        packed = pack(tensor)
        if not isinstance(packed, Tensor) or not self._leaves(tensor):
            return packed
        memory = memory_of(tensor)
        copy = self.copies.get(memory)
        if copy is None:
            storage = tensor.untyped_storage()
            self.transfers.device = tensor.device
            copy = self.copies[memory] = _Copy(storage, self.transfers)
            self.sources.append(storage)
        copy.views += 1
        return partial(
            self._view, copy, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
        )

    def close(self) -> None:
        """Free the tensors that only this finished call used."""
        self.sources.clear()

    def fetch(self) -> None:
        """Start all copies back, in the order in which backward needs the tensors."""
        if not self.fetched:
            self.fetched = True
            for copy in reversed(self.copies.values()):
                copy.fetch()

    def _leaves(self, tensor: Tensor) -> bool:
        if not is_plain(tensor) or not tensor.requires_grad:
            return False
        return tensor.untyped_storage().nbytes() >= SMALLEST and memory_of(tensor) not in self.staying

    def _view(
        self, copy: _Copy, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], offset: int
    ) -> Tensor:
        self.fetch()
        _start(self.previous)
        memory = copy.take()
        return torch.empty(0, dtype=dtype, device=memory.device).set_(
            memory.untyped_storage(), offset, tuple(shape), tuple(stride)
        )


class _Copy:
    """One storage in host memory, which is also on the device from the start of its copy back to its last
    use."""

    def __init__(self, storage: torch.UntypedStorage, transfers: _Transfers) -> None:
        self.transfers = transfers
        self.views = 0
        self.used = 0
        self.memory: Tensor | None = None
        self.device = transfers.device
        source = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
        if self.device.type == "cpu":
            self.host = source.clone()
            return
        self.host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
        leaving, _ = transfers.streams_of(self.device)
        leaving.wait_stream(device_module(self.device).current_stream(self.device))
        with device_module(self.device).stream(leaving):
            self.host.copy_(source, non_blocking=True)
        # The device memory may serve others once this copy has ended.
        source.record_stream(leaving)
        self.done = leaving.record_event()

    def fetch(self) -> None:
        """Start the copy back."""
        if self.memory is not None:
            return
        if self.device.type == "cpu":
            self.memory = self.host.clone()
            return
        _, returning = self.transfers.streams_of(self.device)
        self.memory = torch.empty(self.host.shape, dtype=torch.uint8, device=self.device)
        # The operators that run now may still use this memory under its former owner.
        returning.wait_stream(device_module(self.device).current_stream(self.device))
        returning.wait_event(self.done)
        with device_module(self.device).stream(returning):
            self.memory.copy_(self.host, non_blocking=True)
        self.memory.record_stream(returning)
        self.done = returning.record_event()

    def take(self) -> Tensor:
        """The bytes on the device, ready on the current stream; they are freed with their last view."""
        self.fetch()
        assert self.memory is not None
        memory = self.memory
        if self.device.type != "cpu":
            device_module(self.device).current_stream(self.device).wait_event(self.done)
        self.used += 1
        if self.used == self.views:
            self.used, self.memory = 0, None
        return memory

"""GPU tensors on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor

CPP_DEVICE = torch.device("lazy", 0)
"""The device that PyTorch's C++ code sees; Python sees `GPU`.

For a CUDA device the autograd engine needs streams, which a PyTorch build without CUDA does not have; for a
device of this type it needs none.
"""

GPU = torch.device("cuda", 0)

_cache: dict[Any, Any] = {}
"""The cache of `FakeTensorMode` for operations, shared by all dry runs of a process."""

MOST_OPERATIONS = 20_000
"""Most operations cached when a dry run begins; with more, the cache is cleared."""


def cpp_device(device: Any) -> Any:
    """The device that C++ code should see instead of another; other values are unchanged."""
    if isinstance(device, torch.device):
        return CPP_DEVICE if device.type == "cuda" else device
    return CPP_DEVICE if isinstance(device, str) and device.partition(":")[0] == "cuda" else device


def kernel_device(device: Any) -> Any:
    """The device whose operators autograd uses; every PyTorch build has it.

    For a device without kernels, PyTorch would decompose operators such as `silu_backward`.
    """
    return torch.device("cpu") if cpp_device(device) == CPP_DEVICE else device


class Stream(torch.cpu.Stream):
    """A stream on which nothing runs."""

    stream_id = device_index = device_type = 0
    """The id that PyTorch passes to the allocator with other fields."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def record_event(self, event: Any = None) -> Event:  # type: ignore[override]
        return Event()


class Event(torch.cpu.Event):
    """An event that has always completed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


@contextmanager
def fake_gpu() -> Iterator[None]:
    """Within this context `FakeTensorMode` makes tensors on device "cuda", also differentiable ones, with or
    without a GPU.

    `torch.cuda` reports no GPU; streams and events do nothing.
    """
    make, shown = Tensor._make_subclass, FakeTensor.device
    wrap = Tensor._make_wrapper_subclass

    def device(self: Any) -> torch.device:
        found: torch.device = shown.fget(self)  # type: ignore[attr-defined]
        return GPU if found.type == CPP_DEVICE.type else found

    def device_of_wrapper(self: Any) -> torch.device:
        found: torch.device = known.__get__(self)
        return GPU if found.type == CPP_DEVICE.type else found

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        kwargs = {key: cpp_device(part) for key, part in kwargs.items()}
        return wrap(*(cpp_device(part) for part in args), **kwargs)

    def place(self: Any, device: Any) -> None:
        self._fake_device = cpp_device(torch.device(device))

    def subclass(*args: Any, **kwargs: Any) -> Any:
        if "device_for_backend_keys" in kwargs:
            kwargs["device_for_backend_keys"] = kernel_device(kwargs["device_for_backend_keys"])
        return make(*args, **kwargs)

    def is_cuda(self: Any) -> bool:
        return bool(self.fake_device.type == CPP_DEVICE.type)

    stream, known = Stream(), torch._C.TensorBase.device
    cuda: dict[str, Any] = {
        "current_device": lambda: GPU.index,
        "current_stream": lambda device=None: stream,
        "stream": torch.cpu.stream,
        "synchronize": lambda device=None: None,
        "Stream": Stream,
        "Event": Event,
    }
    if torch.cuda.is_available():
        # The compiler takes PyTorch's own function for a constant.
        cuda["is_available"] = torch.compiler.assume_constant_result(lambda: False)  # type: ignore[no-untyped-call]
    with ExitStack() as stack:
        stack.enter_context(patch.object(FakeTensor, "device", property(device, shown.fset)))  # type: ignore[attr-defined]
        stack.enter_context(patch.object(Tensor, "_make_subclass", staticmethod(subclass)))
        held = property(lambda self: self._fake_device, place)
        stack.enter_context(patch.object(FakeTensor, "fake_device", held, create=True))
        stack.enter_context(patch.object(FakeTensor, "is_cuda", property(is_cuda), create=True))
        stack.enter_context(patch.object(Tensor, "device", property(device_of_wrapper), create=True))
        stack.enter_context(patch.object(Tensor, "_make_wrapper_subclass", staticmethod(wrapper)))
        stack.enter_context(patch.multiple(torch.cuda, **cuda))
        if len(_cache) > MOST_OPERATIONS:
            _cache.clear()
        # PyTorch's own cache must not see tensors on this device.
        stack.enter_context(patch.object(fake_tensor.FakeTensorMode, "cache", _cache))
        yield

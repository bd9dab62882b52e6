"""The accelerators of this machine under any PyTorch name (`cuda`, `npu`, `xpu`), and their collectives."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist

WITHOUT_RANKS = ("mps", "meta")
"""Accelerators without collectives between processes."""


def accelerator_type() -> str | None:
    """PyTorch's name for this machine's accelerators, such as `cuda`; None without accelerators.

    Devices of an extension exist after its import; PyTorch imports torch_npu by itself.
    """
    device = torch.accelerator.current_accelerator()
    return None if device is None or device.type in WITHOUT_RANKS else device.type


def accelerator_count() -> int:
    """Number of usable accelerators of this machine."""
    name = accelerator_type()
    if name is None:
        return 0
    module: Any = torch.get_device_module(name)
    return int(module.device_count()) if module.is_available() else 0


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device has its own memory and streams."""
    return device.type not in ("cpu", "meta")


def kind_of(device: torch.device) -> Literal["cpu", "accelerator"]:
    """The kind of a device in this package, independent of PyTorch's name; measurements are chosen by it."""
    return "accelerator" if is_accelerator(device) else "cpu"


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished its queued work."""
    if is_accelerator(device):
        device_module(device).synchronize(device)


def device_module(device: torch.device) -> ModuleType:
    """PyTorch's module for devices of a kind, such as `torch.cuda`."""
    module: ModuleType = torch.get_device_module(device)
    return module


def collective_backend(device: torch.device) -> str:
    """The backend of `torch.distributed` for a device: nccl, hccl, xccl, gloo."""
    backend: str = dist.get_default_backend_for_device(device.type)
    return backend

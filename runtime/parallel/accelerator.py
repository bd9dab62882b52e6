"""The devices of this machine, whatever PyTorch calls them: `cuda`, `npu`, `xpu`; and their collectives."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist

WITHOUT_RANKS = ("mps", "meta")
"""Accelerators whose processes have no collectives."""


def accelerator_type() -> str | None:
    """The name that PyTorch has for this machine's accelerators, such as `cuda`; None where it has none.

    What an extension brings is there once that is imported; PyTorch does it by itself (torch_npu).
    """
    device = torch.accelerator.current_accelerator()
    return None if device is None or device.type in WITHOUT_RANKS else device.type


def accelerator_count() -> int:
    """Accelerators of this machine that processes can use; 0 where there are none."""
    name = accelerator_type()
    if name is None:
        return 0
    module: Any = torch.get_device_module(name)
    return int(module.device_count()) if module.is_available() else 0


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device has memory and streams of its own, beside the host's."""
    return device.type not in ("cpu", "meta")


def kind_of(device: torch.device) -> Literal["cpu", "accelerator"]:
    """The kind of a device, by which its measurements are chosen, whatever PyTorch calls it."""
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

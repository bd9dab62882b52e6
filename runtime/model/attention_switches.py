"""PyTorch's switches among the kernels of scaled_dot_product_attention on a CUDA device.

The operator is chosen when it is called, and where a layer is compiled, when the layer is traced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import NamedTuple

import torch
import torch.compiler.config
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    "fa3": SDPBackend.FLASH_ATTENTION,
    "fa4": SDPBackend.FLASH_ATTENTION,
}
"""PyTorch's backends by the names of kernels; FlashAttention 3 and 4 take the place of the flash kernel."""


class Package(NamedTuple):
    """A package of kernels that PyTorch can use for its flash operators."""

    implementation: str
    """PyTorch's name."""
    module: str
    majors: tuple[int, ...]
    """First numbers of the compute capabilities of its devices."""


PACKAGES = {
    "fa3": Package("FA3", "flash_attn_interface", (9,)),
    "fa4": Package("FA4", "flash_attn", (10,)),
}


def offered_kernels(device: torch.device, replaces_flash: bool) -> list[str]:
    """Names of kernels that may run on a device, without a trial.

    Args:
        replaces_flash: a package may replace the flash operators, which the job calls in no other form.
    """
    major, _ = torch.cuda.get_device_capability(device)
    found = ["flash", "efficient"] if torch.version.hip is not None else ["flash", "cudnn", "efficient"]
    for name, package in PACKAGES.items():
        if replaces_flash and major in package.majors and find_spec(package.module) is not None:
            found.append(name)
    return found


def default_kernel(q: Tensor, k: Tensor, v: Tensor) -> str:
    """The name of the kernel that PyTorch runs for causal attention of these operands."""
    chosen = torch._fused_sdp_choice(q, k, v, None, 0.0, True, enable_gqa=q.shape[1] != k.shape[1])
    return next((name for name, backend in BACKENDS.items() if backend.value == chosen), "math")


@contextmanager
def only(kernel: str) -> Iterator[None]:
    """Within this context attention runs by one kernel, or raises RuntimeError."""
    with nn.attention.sdpa_kernel(BACKENDS[kernel]):
        if kernel not in PACKAGES:
            yield
            return
        _activate(kernel)
        try:
            yield
        finally:
            _restore()


class Preference:
    """The kernel that this process prefers, until it is changed."""

    def __init__(self) -> None:
        self.kernel: str | None = None
        self.order: list[int] = []
        self.tag = ""

    def use(self, kernel: str | None) -> None:
        """Prefer a kernel where it takes the operands; None for PyTorch's own order.

        PyTorch sets its order in the first call on a device, which must have been made.
        """
        if self.kernel is not None:
            torch._C._set_sdp_priority_order(self.order)
            torch.compiler.config.cache_key_tag = self.tag
            if self.kernel in PACKAGES:
                _restore()
            self.kernel = None
        if kernel is None:
            return
        if kernel in PACKAGES:
            _activate(kernel)
        self.kernel = kernel
        self.order, self.tag = list(torch._C._get_sdp_priority_order()), torch.compiler.config.cache_key_tag
        first = BACKENDS[kernel].value
        torch._C._set_sdp_priority_order(list(dict.fromkeys((first, *self.order))))
        # The caches of the compiler know layers by their code before the operator is chosen.
        torch.compiler.config.cache_key_tag = f"{self.tag}attention={kernel};"


PREFERENCE = Preference()


def settle_order(device: torch.device) -> None:
    """Let PyTorch set its order of kernels for a device, which would replace a later one otherwise."""
    q = torch.empty(1, 1, 16, 64, dtype=torch.float16, device=device)
    torch._fused_sdp_choice(q, q, q)


def _activate(kernel: str) -> None:
    nn.attention.activate_flash_attention_impl(PACKAGES[kernel].implementation)


def _restore() -> None:
    if nn.attention.current_flash_attention_impl() is not None:
        nn.attention.restore_flash_attention_impl()

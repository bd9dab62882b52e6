"""The kernels of flash-linear-attention (package `fla`), if it is installed and the device is a CUDA GPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

TAKEN = ("q", "k", "v", "g", "beta", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel")
"""Parameters of the kernel that are passed; a version without one of them is not used."""

NARROW = (torch.float16, torch.bfloat16)


@cache
def chunked_kernel() -> Callable[..., Any] | None:
    """The gated delta rule of the installed `fla`; None where this machine cannot run it, or its parameters
    differ."""
    if not torch.cuda.is_available() or find_spec("fla") is None:
        return None
    try:
        kernel: Callable[..., Any] = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        parameters = inspect.signature(kernel).parameters
    except (ImportError, AttributeError, RuntimeError, ValueError):
        return None
    first = parameters.get("head_first")
    if any(name not in parameters for name in TAKEN) or (first is not None and first.default is not False):
        return None
    return kernel


def takes(v: Tensor) -> bool:
    """True if the kernel exists and supports these values: on a CUDA device, in 16 bits, with memory."""
    return v.device.type == "cuda" and v.dtype in NARROW and not isinstance(v, FakeTensor)


def flash_delta_rule(
    q_BKSH: Tensor, k_BKSH: Tensor, v_BNSZ: Tensor, decay_BNS: Tensor, strength_BNS: Tensor
) -> Tensor:
    """Output values of `delta_rule` from a zero state, [B, N, S, Z], computed by Triton kernels.

    The call is like that of transformers: key heads are repeated, and the kernel normalises them.
    """
    kernel = chunked_kernel()
    assert kernel is not None
    repeats = v_BNSZ.shape[1] // q_BKSH.shape[1]
    q, k = (x.transpose(1, 2).repeat_interleave(repeats, dim=2) for x in (q_BKSH, k_BKSH))
    read_BSNZ, _ = kernel(
        q=q,
        k=k,
        v=v_BNSZ.transpose(1, 2).contiguous(),
        g=decay_BNS.transpose(1, 2).contiguous(),
        beta=strength_BNS.transpose(1, 2).contiguous(),
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=True,
    )
    result: Tensor = read_BSNZ.transpose(1, 2)
    return result

"""8-bit GEMMs: their layers and their recipes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn

from costmodels.errors import InputError
from costmodels.spec.hardware import Precision
from costmodels.spec.layout import Fp8Recipe
from runtime.model.number_formats import FLOAT8_SIDES, MXFP8_BLOCK
from runtime.model.transformer import Transformer
from runtime.parallel.local_tensors import local_part
from runtime.parallel.narrow_weight import TENSORWISE, use_multiply

LEAST_CAPABILITY = {"fp8": (8, 9), "mxfp8": (10, 0)}
"""The compute capability of NVIDIA's first GPUs with each format: Ada and Blackwell."""

AMD_DEVICES: dict[str, tuple[str, ...]] = {"fp8": ("gfx942", "gfx950"), "mxfp8": ()}
"""AMD's GPUs with each format: MI300 and MI350; their kernels read MXFP8 scales in another order."""

SINCE = {
    "fp8": "NVIDIA has them since compute capability 8.9, AMD since MI300",
    "mxfp8": "NVIDIA has them since Blackwell",
}
"""Devices that have each format, in words."""

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x [..., K], weight [N, K] and bias [N] or None -> [..., N], as torch.nn.functional.linear."""


def check_float8(device: torch.device, precision: Precision = "fp8") -> None:
    """Raise `InputError` when `device` does not support these 8-bit GEMMs; the result must be the same on all
    ranks."""
    instead, products = "pin precision=bf16", f"{precision} GEMMs"
    if device.type != "cuda":
        raise InputError(f"precision {precision}: device {device} has no {products}; {instead}")
    name = torch.cuda.get_device_name(device)
    if torch.version.hip is not None:
        able = torch.cuda.get_device_properties(device).gcnArchName.startswith(AMD_DEVICES[precision])
    else:
        able = torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY[precision]
    if not able:
        raise InputError(f"precision {precision}: {name} has no {products} ({SINCE[precision]}); {instead}")
    if precision == "fp8" and find_spec("torchao") is None:
        raise InputError(f"precision fp8: torchao is not installed; run `pip install torchao`, or {instead}")


def float8(stage: Transformer, recipe: Fp8Recipe | Literal["mxfp8"] = "default") -> None:
    """Let the linear layers of the blocks of `stage` multiply in fp8, the head in bf16.

    "tensorwise", the default, has one scale for all that a rank holds of an operand
    (`runtime.parallel.float8_tensorwise`). "rowwise" scales every row of the left and every column of the
    right operand of a GEMM by a power of two of its own. No scale depends then on the values of another rank
    or sequence. "rowwise_with_gw_hp" does the same, but computes weight gradients in bf16. Both are
    torchao's.
    "mxfp8" has one scale for each 32 elements that a GEMM sums over (`runtime.parallel.mxfp8`). What goes in
    and comes out is bf16. On a CPU, fp32 GEMMs of the rounded operands stand in.

    Routed experts, and GEMMs with a side that is not a multiple of 16 (of 32 in mxfp8), stay in bf16. A
    layer whose forward is its own (one that tensor parallelism has split) finds what multiplies as its
    attribute `product`.
    """
    product, multiple = _product(recipe), MXFP8_BLOCK if recipe == "mxfp8" else FLOAT8_SIDES
    for block in stage.blocks:
        for module in block.modules():
            if isinstance(module, nn.Linear) and _fits(module, multiple):
                module.product = product  # type: ignore[assignment]
                use_multiply(module)
        if recipe in TENSORWISE:
            from runtime.parallel.float8_bounds import bound_operands

            bound_operands(block)


def _fits(linear: nn.Linear, multiple: int) -> bool:
    rows, columns = local_part(linear.weight).shape
    # Ranks that share a head join its rows before they multiply.
    rows *= linear.__dict__.get("sharers", 1)
    return rows % multiple == 0 and columns % multiple == 0


def _product(recipe: Fp8Recipe | Literal["mxfp8"]) -> Product:
    """GEMMs of our own, which bring PyTorch's compiler, or of torchao's."""
    if recipe in TENSORWISE:
        from runtime.parallel.float8_tensorwise import fuse_long_chains, tensorwise_linear

        fuse_long_chains()
        return tensorwise_linear
    if recipe == "mxfp8":
        from runtime.parallel.mxfp8 import mxfp8_linear

        return mxfp8_linear
    return _of_torchao(recipe)


def _of_torchao(recipe: Fp8Recipe) -> Product:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

    # Tokens are an inner dimension of the GEMMs that make weight gradients.
    config = replace(Float8LinearConfig.from_recipe_name(recipe), pad_inner_dim=True)
    settings: dict[bool, Any] = {}
    for on_gpu in (True, False):
        of_kind = replace(config, emulate=not on_gpu)
        with torch.device("meta"):
            # torchao readies the compiler when it converts a module.
            sample = nn.Sequential(nn.Linear(FLOAT8_SIDES, FLOAT8_SIDES))
            (linear,) = convert_to_float8_training(sample, config=of_kind)
        assert isinstance(linear, Float8Linear)
        settings[on_gpu] = linear.linear_mm_config, linear.config

    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        result: Tensor = matmul_with_hp_or_float8_args.apply(x, weight.t(), *settings[x.is_cuda])
        return result if bias is None else result + bias

    return product

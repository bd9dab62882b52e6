"""Matrix products in 8 bits: which layers have them, and by which recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from costmodels.errors import InputError
from costmodels.spec.layout import Fp8Recipe
from runtime.model.number_formats import FLOAT8_SIDES
from runtime.model.transformer import Transformer
from runtime.parallel.local_tensors import local_part

LEAST_CAPABILITY = (8, 9)
"""NVIDIA's first GPUs with fp8: Ada, then Hopper and Blackwell."""

AMD_FP8 = ("gfx942", "gfx950")
"""AMD's GPUs with fp8: MI300 and MI350."""

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x [..., K], weight [N, K] and bias [N] or None -> [..., N], as torch.nn.functional.linear."""


def check_float8(device: torch.device) -> None:
    """Raise `InputError` when fp8 cannot be trained with on `device`; all ranks should agree on it."""
    instead = "pin precision=bf16"
    if device.type != "cuda":
        raise InputError(f"precision fp8: device {device} has no fp8 matrix products; {instead}")
    name = torch.cuda.get_device_name(device)
    if torch.version.hip is not None:
        able = torch.cuda.get_device_properties(device).gcnArchName.startswith(AMD_FP8)
    else:
        able = torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY
    if not able:
        raise InputError(
            f"precision fp8: {name} has no fp8 matrix products (NVIDIA has them since compute capability "
            f"8.9, AMD since MI300); {instead}"
        )
    if find_spec("torchao") is None:
        raise InputError(f"precision fp8: torchao is not installed; run `pip install torchao`, or {instead}")


def float8(stage: Transformer, recipe: Fp8Recipe = "default") -> None:
    """Let the linear layers of the blocks of `stage` multiply in fp8, the head in bf16.

    "rowwise", the default, scales every row of the left and every column of the right operand of a product by
    a power of two of its own, so that no scale depends on what another rank or sequence holds;
    "rowwise_with_gw_hp" does so too, but for gradients of weights, which are products in bf16. Both are
    torchao's. "tensorwise" has one scale for all that a rank holds of an operand
    (`runtime.parallel.float8_tensorwise`). What goes in and comes out is bf16. On a CPU, fp32 products of the
    rounded operands stand in.

    Routed experts, and products with a side that is not a multiple of 16, stay in bf16. A layer whose forward
    is its own (one that tensor parallelism has split) finds what multiplies as its attribute `product`.
    """
    product = _tensorwise() if recipe == "tensorwise" else _product(recipe)
    for block in stage.blocks:
        for module in block.modules():
            if isinstance(module, nn.Linear) and _fits(module):
                module.product = product  # type: ignore[assignment]
                if "forward" not in module.__dict__:
                    module.forward = _forward(module, product)  # type: ignore[assignment,method-assign]


def _fits(linear: nn.Linear) -> bool:
    rows, columns = local_part(linear.weight).shape
    # Ranks that share a head join its rows before they multiply.
    rows *= linear.__dict__.get("sharers", 1)
    return rows % FLOAT8_SIDES == 0 and columns % FLOAT8_SIDES == 0


def _forward(linear: nn.Linear, product: Product) -> Callable[[Tensor], Tensor]:
    return lambda x: product(x, linear.weight, linear.bias)


def _tensorwise() -> Product:
    """Products of our own, which bring PyTorch's compiler."""
    from runtime.parallel.float8_tensorwise import tensorwise_linear

    return tensorwise_linear


def _product(recipe: Fp8Recipe) -> Product:
    """Products of a recipe of torchao's."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

    # Tokens are an inner dimension of the products that make weight gradients.
    name = "rowwise" if recipe == "default" else recipe
    config = replace(Float8LinearConfig.from_recipe_name(name), pad_inner_dim=True)
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

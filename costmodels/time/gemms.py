"""Seconds of GEMMs on one device: a roofline, waves of tiles, and a launch."""

from typing import NamedTuple

import numpy as np

from costmodels.errors import InputError
from costmodels.layers.operators import Gemm
from costmodels.layers.shapes import element_bytes
from costmodels.memory.states import reduction_element_bytes
from costmodels.spec.constants import GemmConstants
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import NARROW, Device, Precision
from costmodels.spec.layout import WIDE_WEIGHT_GRADIENTS, Fp8Recipe
from costmodels.spec.table import Floats, LayoutTable

TILE = 128 * 128
"""Output elements that one multiprocessor computes at a time."""

SUM_SHARPNESS = 1.4
"""Exponent of the p-norm of a weight-gradient GEMM and of the traffic of the sum that it adds to.

It is fitted to 208 shapes on B200 and A100, profiled with and without a sum in fp32; 24 of them are grouped
GEMMs of experts (github MooreThreads/SimuMax, configs/system at 4dcaae51). The median error is 0.1 %, the
median absolute error 4 %. With both times added, they are 9 and 10 %.
"""


def peak_flops(device: Device, precision: Precision) -> float:
    """Data-sheet FLOP/s of GEMMs in `precision`.

    Raises:
        InputError: the device does not compute in that format.
    """
    if precision not in device.peak_flops:
        raise InputError(
            f"precision {precision}: device {device.name} has no peak for it; "
            f"use {', '.join(device.peak_flops)}"
        )
    return device.peak_flops[precision]


def wide_peak_flops(device: Device, precision: Precision) -> float:
    """Peak FLOP/s of the GEMMs that an fp8 recipe leaves in 16 bits: attention and the head."""
    if precision not in NARROW:
        return peak_flops(device, precision)
    wide: tuple[Precision, ...] = ("bf16", "fp16")
    return max(device.peak_flops.get(name, 0.0) for name in wide) or peak_flops(device, precision)


class GemmRates(NamedTuple):
    """Rates of GEMMs on one device, and the overheads of each GEMM."""

    flops: float
    """FLOP/s of a large GEMM."""
    wide_flops: float
    """FLOP/s of large GEMMs that an fp8 recipe leaves in 16 bits."""
    bandwidth: float
    """Bytes per second of memory."""
    element: int
    """Bytes of an element."""
    launch: float = 0.0
    """Least seconds of a kernel of any size."""
    wave: float = 0.0
    """Wasted output elements in the last wave of tiles."""
    half_width: float = 0.0
    """Inner width k at which a GEMM has half of the full rate."""
    grouped: bool = False
    """True if several GEMMs of one shape, those of experts, are one kernel."""
    padding: float = 0.0
    """Wasted rows in each of several GEMMs of one shape."""


def gemm_seconds(gemms: tuple[Gemm, ...], rates: GemmRates, sum_bytes: float = 0.0) -> Floats | float:
    """Seconds of GEMMs.

    The formula is sqrt(arithmetic^2 + traffic^2) + launch. A GEMM that is bound by both takes longer than the
    larger of the two. It is fitted to 44,000 kernels on A100 and H100 (Vidur's profiles, arXiv:2405.05465).
    The median error is 4 to 6 % for m of 256 and more; repeated measurements of a shape differ by 4.6 %.

    Args:
        sum_bytes: traffic of the accumulation of weight gradients for each weight, if the GEMMs are those of
            weight gradients and add to the sum of earlier microbatches. Some of it hides behind the
            arithmetic of other tiles: both together take their p-norm with exponent `SUM_SHARPNESS`.
    """
    total: Floats | float = 0.0
    for m, k, n, times, wide, _ in gemms:
        flops = rates.wide_flops if wide else rates.flops
        # Tiles of one kernel fill the same waves, whichever of its products they are of.
        kernels = 1.0 if rates.grouped else times
        elements = times * m * n + kernels * rates.wave
        if rates.padding:
            elements = elements + (times - 1.0) * rates.padding * n
        arithmetic = 2.0 * (k + rates.half_width) * elements / flops
        traffic = times * rates.element * (m * k + k * n + m * n) / rates.bandwidth
        # Neither is so large or small that its square is not a number, which `np.hypot` takes time to see to.
        seconds = np.sqrt(arithmetic * arithmetic + traffic * traffic) + kernels * rates.launch
        if sum_bytes:
            sums = times * sum_bytes * k * n / rates.bandwidth
            seconds = (seconds**SUM_SHARPNESS + sums**SUM_SHARPNESS) ** (1 / SUM_SHARPNESS)
        total = total + seconds
    return total


def sums_in_gemms(engine: Engine) -> bool:
    """Return whether the price of weight-gradient GEMMs includes the sum of earlier microbatches.

    Sums beside FSDP2 are priced apart, also where GEMMs add to them (`fuses_plain`).
    """
    return engine.gemm.fused_accumulation and not engine.sharding.fully_sharded


def accumulation_bytes(engine: Engine, table: LayoutTable) -> float:
    """Traffic of each weight's sum in its weight-gradient GEMM: one read and one write."""
    return 2 * reduction_element_bytes(engine, table) if sums_in_gemms(engine) else 0.0


def cast_bytes(
    gemms: tuple[Gemm, ...],
    constants: GemmConstants,
    recipe: Fp8Recipe = "default",
    weights: tuple[Floats | float, Floats | float] = (1.0, 1.0),
) -> tuple[Floats | float, Floats | float]:
    """Bytes of casts of GEMM operands: of forward GEMMs, and of the two backward GEMMs of each, or of the
    single one in 8 bits.

    Args:
        constants: those of the recipe.
        weights: share of the weights that each forward pass casts, and each backward pass.
    """
    of_weight = constants.fp8_cast_bytes
    own = constants.fp8_activation_cast_bytes
    of_activation = of_weight if own is None else own
    twice = recipe not in WIDE_WEIGHT_GRADIENTS
    forward: Floats | float = 0.0
    backward: Floats | float = 0.0
    for m, k, n, times in (gemm[:4] for gemm in gemms if not (gemm.wide or gemm.cast)):
        forward = forward + times * (of_activation * m * k + of_weight * weights[0] * k * n)
        activations = m * n + twice * (m * n + m * k)
        backward = backward + times * (of_activation * activations + of_weight * weights[1] * k * n)
    return forward, backward


def gemm_rates(
    device: Device, engine: Engine, precision: Precision, wide: bool, recipe: Fp8Recipe = "default"
) -> GemmRates:
    """The rates of an engine's GEMMs on a device.

    Args:
        recipe: recipe of GEMMs in fp8.
        wide: True if an fp8 recipe leaves the GEMMs in 16 bits.
    """
    wide_peak = wide_peak_flops(device, precision)
    narrow = precision in NARROW and not wide
    share = engine.gemm.of_recipe(recipe).fp8_efficiency if narrow else None
    if narrow and precision == "nvfp4" and engine.gemm.fp4_efficiency is not None:
        share = engine.gemm.fp4_efficiency
    if precision in ("fp32", "tf32"):
        share = engine.gemm.fp32_efficiency
    return GemmRates(
        flops=(wide_peak if wide else peak_flops(device, precision))
        * (engine.gemm.efficiency if share is None else share),
        wide_flops=wide_peak * engine.gemm.efficiency,
        bandwidth=device.memory_bandwidth * engine.elementwise.efficiency,
        element=element_bytes(precision),
        launch=engine.gemm.launch,
        wave=engine.gemm.wave * device.cores * TILE,
        half_width=engine.gemm.fp8_half_width if narrow else 0.0,
        grouped=engine.experts.grouped,
        padding=engine.experts.padding,
    )

"""The cost of a layout: pure functions on arrays, in seconds and bytes. The package never imports torch."""

from typing import TYPE_CHECKING

from costmodels.exports import on_demand

if TYPE_CHECKING:
    from costmodels.pricing import Prices, estimate, price
    from costmodels.spec.engine import Engine, MemoryPolicy
    from costmodels.spec.estimate import Estimate, StageMemory, StepTime
    from costmodels.spec.hardware import Cluster, Device, Link, MeasuredCollective, Precision
    from costmodels.spec.layout import SHORT_NAMES, Layout, Recompute, Schedule, even_split
    from costmodels.spec.model import ModelSpec
    from costmodels.spec.model_parts import LatentAttention, Lora, MultiTokenPrediction, RopeScaling, Router

__all__ = [
    "SHORT_NAMES",
    "Cluster",
    "Device",
    "Engine",
    "Estimate",
    "LatentAttention",
    "Layout",
    "Link",
    "Lora",
    "MeasuredCollective",
    "MemoryPolicy",
    "ModelSpec",
    "MultiTokenPrediction",
    "Precision",
    "Prices",
    "Recompute",
    "RopeScaling",
    "Router",
    "Schedule",
    "StageMemory",
    "StepTime",
    "estimate",
    "even_split",
    "price",
]

_NAMES = {
    "costmodels.pricing": ("Prices", "estimate", "price"),
    "costmodels.spec.engine": ("Engine", "MemoryPolicy"),
    "costmodels.spec.estimate": ("Estimate", "StageMemory", "StepTime"),
    "costmodels.spec.hardware": ("Cluster", "Device", "Link", "MeasuredCollective", "Precision"),
    "costmodels.spec.layout": ("SHORT_NAMES", "Layout", "Recompute", "Schedule", "even_split"),
    "costmodels.spec.model": ("ModelSpec",),
    "costmodels.spec.model_parts": (
        "LatentAttention",
        "Lora",
        "MultiTokenPrediction",
        "RopeScaling",
        "Router",
    ),
}

__getattr__ = on_demand(__name__, {name: home for home, names in _NAMES.items() for name in names})

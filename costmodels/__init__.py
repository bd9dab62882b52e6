"""What a layout costs: pure functions on arrays, in seconds and bytes. Never imports torch."""

from costmodels.engine import Engine, MemoryPolicy
from costmodels.estimate import Estimate, StageMemory, StepTime
from costmodels.hardware import Cluster, Device, Link, MeasuredCollective, Precision
from costmodels.layout import SHORT_NAMES, Layout, Recompute, Schedule, even_split
from costmodels.model_spec import LatentAttention, ModelSpec, RopeScaling, Router
from costmodels.pricing import Prices, estimate, price

__all__ = [
    "SHORT_NAMES",
    "Cluster",
    "Device",
    "Engine",
    "Estimate",
    "LatentAttention",
    "Layout",
    "Link",
    "MeasuredCollective",
    "MemoryPolicy",
    "ModelSpec",
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

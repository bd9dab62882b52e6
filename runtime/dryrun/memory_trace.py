"""Memory of a training step: the highest moments, and the tensors that were alive then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

DeviceKind = Literal["cuda", "cpu"]
"""The kind of device whose kernels a dry run describes."""

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "communication",
    "temporaries",
)
"""Owners of a byte.

parameters: weights as the optimizer sees them, and buffers;
gradients: of weights, whole or sharded;
optimizer: its state;
activations: tensors that forward saved for backward;
logits: the head's output and tensors that the loss makes of it, forward and backward;
communication: gathered parameters, buffers of collectives and messages of the pipeline;
temporaries: all else.
"""

BLOCK_BYTES = 512
"""Sizes are rounded up to a multiple of this by PyTorch's CUDA caching allocator (`kMinBlockSize`)."""


def block_bytes(size: int) -> int:
    """Bytes that the caching allocator hands out for `size` bytes."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


@dataclass(frozen=True)
class Moment:
    """Tensors that are alive at one moment of a step; all sizes in bytes."""

    label: str
    """forward, backward, reduce, optimizer, schedule for what is between them (messages of the pipeline, the
    losses), or build for what comes before the first step."""
    allocated: Mapping[str, int]
    """Bytes by category, each tensor rounded up as the allocator does; on a CPU as it is."""
    live: Mapping[str, int]
    """Bytes by category, without rounding."""
    layers: Mapping[str, int]
    """The activations of `allocated` by the kind of layer that saved them."""

    @property
    def total(self) -> int:
        """Allocated bytes: what `torch.cuda.max_memory_allocated` counts."""
        return sum(self.allocated.values())

    @property
    def live_total(self) -> int:
        """Bytes without rounding."""
        return sum(self.live.values())

    def as_json(self) -> dict[str, Any]:
        """The moment as JSON has it."""
        return {
            "moment": self.label,
            "bytes": self.total,
            "live_bytes": self.live_total,
            "composition": dict(self.allocated),
            "live_composition": dict(self.live),
            "activations_by_layer": dict(self.layers),
        }


@dataclass(frozen=True)
class MemoryTrace:
    """The memory of one rank over the training steps of a dry run."""

    rank: int
    pipeline_rank: int
    device: DeviceKind
    compiled: bool
    """The layers were compiled; a compiled layer saves other tensors than an eager one."""
    peak: Moment
    """The highest moment of all steps."""
    moments: Mapping[str, Moment]
    """The highest moment of each label."""
    host_bytes: int
    """Most bytes that were in host memory at once; 0 on a CPU, whose memory is the device's."""
    micro_batches: int
    """Microbatches that were traced: as many as the schedule needs to reach its steady state."""
    operations: int = field(default=0, compare=False)
    """PyTorch operations that were traced."""

    def as_json(self) -> dict[str, Any]:
        """The trace as JSON has it."""
        return {
            "rank": self.rank,
            "pipeline_rank": self.pipeline_rank,
            "device": self.device,
            "compiled": self.compiled,
            "peak": self.peak.as_json(),
            "moments": {label: moment.as_json() for label, moment in self.moments.items()},
            "host_bytes": self.host_bytes,
            "micro_batches": self.micro_batches,
        }

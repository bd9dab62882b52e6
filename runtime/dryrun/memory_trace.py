"""Memory of a training step: the highest moments, with the tensors alive at these moments."""

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
"""Categories of bytes. parameters: weights in the optimizer's form, and buffers; gradients: weight gradients,
whole or sharded; optimizer: optimizer state; activations: tensors that forward saved for backward; logits:
the head's output and the loss's tensors from it, forward and backward; communication: gathered parameters,
buffers of collectives and pipeline messages; temporaries: all other tensors.
"""

BLOCK_BYTES = 512
"""Bytes to a multiple of which PyTorch's CUDA caching allocator rounds sizes up (`kMinBlockSize`)."""


def block_bytes(size: int) -> int:
    """Bytes that the caching allocator uses for `size` bytes."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


@dataclass(frozen=True)
class Moment:
    """Tensors that are alive at one moment of a step; all sizes in bytes."""

    label: str
    """The phase: forward, backward, reduce, optimizer, schedule (between these: pipeline messages, losses),
    or build (before the first step)."""
    allocated: Mapping[str, int]
    """Bytes by category, each tensor with the allocator's rounding; without rounding on a CPU."""
    live: Mapping[str, int]
    """Bytes by category, without rounding."""
    layers: Mapping[str, int]
    """Bytes of the activations in `allocated` by the kind of layer that saved them."""

    @property
    def total(self) -> int:
        """Allocated bytes, as counted by `torch.cuda.max_memory_allocated`."""
        return sum(self.allocated.values())

    @property
    def live_total(self) -> int:
        """Bytes of live tensors without rounding."""
        return sum(self.live.values())

    def as_json(self) -> dict[str, Any]:
        """The moment as a record for JSON."""
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
    """True if the layers were compiled; a compiled layer saves other tensors than an eager one."""
    peak: Moment
    """The highest moment of all steps."""
    moments: Mapping[str, Moment]
    """The highest moment of each label."""
    host_bytes: int
    """Peak bytes in host memory; 0 on a CPU, where host memory is device memory."""
    micro_batches: int
    """Number of traced microbatches, enough for the schedule's steady state."""
    operations: int = field(default=0, compare=False)
    """Number of traced PyTorch operations."""

    def as_json(self) -> dict[str, Any]:
        """The trace as a record for JSON."""
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

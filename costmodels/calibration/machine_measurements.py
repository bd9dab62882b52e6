"""Measurements of one machine's devices, for `costmodels.calibration.machine_fit`."""

from __future__ import annotations

from costmodels.spec.hardware import Collective, Precision
from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from costmodels.spec.record import Count, CountOrZero, NonNegative, Positive, Record


class ProductTime(Record):
    """Seconds of a GEMM of [m, k] by [k, n]."""

    m: Count
    k: Count
    n: Count
    forward_s: Positive
    backward_s: Positive
    """Seconds of the GEMMs of both gradients."""


class AttentionTime(Record):
    """Seconds of causal core attention of `batch` sequences."""

    batch: Count
    heads: Count
    seq: Count
    head_dim: Count
    forward_s: Positive
    backward_s: Positive


class CallTime(Record):
    """Seconds of one call of a collective, in groups of `devices` ranks that all call at once."""

    collective: Collective
    devices: Count
    nodes: Count = 1
    message_bytes: Count
    """Bytes of the whole summed, gathered or exchanged tensor, by nccl-tests' definition."""
    seconds: Positive


class StepTime(Record):
    """Seconds of an optimizer step of a layout."""

    model: ModelSpec
    layout: Layout
    seconds: Positive
    peak_bytes: CountOrZero = 0
    """Logged peak bytes of the fullest rank; 0 where unknown."""


class Measurements(Record):
    """Measurements with one number of ranks on one machine."""

    ranks: Count
    nodes: Count = 1
    precision: Precision
    products: tuple[ProductTime, ...] = ()
    attention: tuple[AttentionTime, ...] = ()
    copy_bytes_per_s: Positive
    """Bytes per second that one rank reads and writes while all ranks copy."""
    host_bytes_per_s: Positive | None = None
    """Bytes per second between the device and host memory in one direction; None where both are the same
    memory."""
    layer_host_s: Positive
    """Seconds of the forward pass of a tiny layer."""
    update_s: NonNegative = 0.0
    """Optimizer seconds for each parameter of a large model."""
    rank_bytes: NonNegative = 0.0
    """Resident bytes of a rank before it has a model; 0 on devices with their own memory."""
    calls: tuple[CallTime, ...] = ()
    steps: tuple[StepTime, ...] = ()
    others: NonNegative = 0.0
    """Largest share of the cores that other processes used during the measurements."""

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
    """Both gradients."""


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
    """The whole of what is summed, gathered or exchanged, as nccl-tests count it."""
    seconds: Positive


class StepTime(Record):
    """Seconds of an optimizer step of a layout."""

    model: ModelSpec
    layout: Layout
    seconds: Positive
    peak_bytes: CountOrZero = 0
    """Peak bytes of the fullest rank, as a run logs them; 0 where they are not known."""


class Measurements(Record):
    """Measurements of some ranks of one machine, all taken at once."""

    ranks: Count
    nodes: Count = 1
    precision: Precision
    products: tuple[ProductTime, ...] = ()
    attention: tuple[AttentionTime, ...] = ()
    copy_bytes_per_s: Positive
    """Read and written, of one rank while all copy."""
    host_bytes_per_s: Positive | None = None
    """Between the device and its host's memory, one direction; None where they are the same."""
    layer_host_s: Positive
    """Forward pass of a layer of next to no size."""
    update_s: NonNegative = 0.0
    """Seconds of the optimizer for each parameter of many."""
    rank_bytes: NonNegative = 0.0
    """Resident bytes of a rank before it has a model; 0 on devices with memory of their own."""
    calls: tuple[CallTime, ...] = ()
    steps: tuple[StepTime, ...] = ()
    others: NonNegative = 0.0
    """Largest share of the cores that other processes took meanwhile."""

"""`Estimate`: the predicted seconds and bytes of a layout."""

from typing import Any

from pydantic import model_validator

from costmodels.spec.record import NonNegative, Positive, Record


class StepTime(Record):
    """Parts of one optimizer step on the critical path, in seconds; they add up to the step."""

    compute: NonNegative
    """Seconds of GEMMs of layers and head, forward and backward."""
    attention: NonNegative
    """Seconds of core attention: scores, softmax and their products with values."""
    elementwise: NonNegative
    """Seconds of norms, activation functions, residual sums and the loss, from their memory traffic."""
    recompute: NonNegative
    """Seconds of forward work that backward repeats."""
    launch: NonNegative = 0.0
    """Seconds in which the device is idle while the host launches the kernels of small layers."""
    tensor_parallel: NonNegative
    """Seconds of tensor-parallel collectives that computation does not hide."""
    context_parallel: NonNegative = 0.0
    """Seconds of context-parallel communication (keys and values, or heads) that attention does not hide."""
    expert_parallel: NonNegative = 0.0
    """Seconds of dispatch: tokens sent to their experts and back."""
    offload: NonNegative = 0.0
    """Seconds of transfers of activations to host memory and back that computation does not hide."""
    pipeline_parallel: NonNegative
    """Seconds by which sends between stages delay the pipeline, and of the all-reduce of a tied embedding's
    gradients."""
    bubble: NonNegative
    """Seconds that the pipeline's slowest rank waits for others, without message times."""
    data_parallel: NonNegative
    """Seconds of gradient reduction and parameter gathering that computation does not hide."""
    accumulation: NonNegative = 0.0
    """Seconds of gradient accumulation, and of copies to and from buffers of collectives."""
    optimizer: NonNegative
    """Seconds of the optimizer step; with the optimizer in host memory, also of transfers of gradients and
    parameters."""

    @property
    def total(self) -> float:
        """Seconds of one optimizer step."""
        return float(sum(getattr(self, part) for part in type(self).model_fields))


class StageMemory(Record):
    """Bytes on one device of one pipeline rank at the peak of the step."""

    parameters: NonNegative
    """Bytes of weights in the format of GEMMs, with second copies."""
    gradients: NonNegative
    """Bytes of accumulated gradients."""
    optimizer: NonNegative
    """Bytes of the master copy of the weights, and of the optimizer's state."""
    activations: NonNegative
    """Bytes of tensors that layers keep for backward, for all microbatches in flight."""
    logits: NonNegative
    """Bytes of logits, their gradient and copies of the loss."""
    communication: NonNegative = 0.0
    """Bytes of buffers of collectives that the training job itself allocates."""
    temporaries: NonNegative = 0.0
    """Bytes of library workspaces, and of all other tensors at the peak."""
    reserve: NonNegative = 0.0
    """Bytes that the allocator also holds but cannot use."""
    context: NonNegative = 0.0
    """Bytes of driver context and kernels, outside of the allocator."""
    communicators: NonNegative = 0.0
    """Bytes of the communication library's buffers for all process groups, outside of the allocator."""
    margin: NonNegative = 0.0
    """Bytes that the user sets aside instead of `reserve`, `context` and `communicators`."""
    doubt: NonNegative = 0.0
    """Half the width of the range of tensor bytes."""
    absent: NonNegative = 0.0
    """Bytes by which a device of this kind has less than `Cluster.memory_bytes`, on nodes of two kinds; they
    count as used, so that all totals have the same limit."""

    @model_validator(mode="before")
    @classmethod
    def _of_one_overhead(cls, values: Any) -> Any:
        # Plans that were saved before its parts were told apart.
        if isinstance(values, dict) and "overhead" in values:
            rest = {name: value for name, value in values.items() if name != "overhead"}
            return {**rest, "margin": values["overhead"]}
        return values

    @property
    def allocated(self) -> float:
        """Bytes of tensors, as `torch.cuda.max_memory_allocated` counts them."""
        return self.total - self.overhead - self.doubt

    @property
    def reserved(self) -> float:
        """Bytes that the allocator takes from the device, as `torch.cuda.max_memory_reserved` counts them."""
        return self.allocated + self.reserve

    @property
    def overhead(self) -> float:
        """Bytes besides tensors: `reserve`, `context` and `communicators`, or `margin` instead of these; and
        `absent`."""
        return float(self.reserve + self.context + self.communicators + self.margin + self.absent)

    @property
    def total(self) -> float:
        """Bytes that the device needs at the peak: `reserved`, `context`, `communicators` and `doubt`."""
        return float(sum(getattr(self, part) for part in type(self).model_fields))


class Estimate(Record):
    """Predicted cost of one layout."""

    step_time_s: Positive
    """Seconds of one optimizer step."""
    step_time_low_s: Positive
    """Lower end of the 80 % prediction interval, seconds; `step_time_high_s` is the upper one."""
    step_time_high_s: Positive
    """Upper end of the 80 % prediction interval, seconds."""
    time: StepTime
    """Seconds of the parts of the step."""
    memory: tuple[StageMemory, ...]
    """Bytes of each pipeline rank, one entry per rank."""
    peak_memory_bytes: Positive
    """The largest `StageMemory.total` of the pipeline ranks. It is the upper end of the expected range of the
    dry run, and must not exceed a device's memory."""
    peak_memory_low_bytes: NonNegative = 0.0
    """Lower end of the range for the same pipeline rank. For engines with fitted peaks it is the lower end of
    the 80 % prediction interval. 0 in older plan files."""
    peak_memory_high_bytes: NonNegative = 0.0
    """Upper end of the 80 % prediction interval of the peak, bytes; 0 where `peak_memory_bytes` is the upper
    end."""
    tokens_per_s: Positive
    """Tokens per second of all devices together."""
    tokens_per_s_per_device: Positive
    """Tokens per second of one device."""
    tflops_per_device: Positive
    """Model TFLOP/s by `costmodels.spec.model_flops` (no recomputation, causal attention)."""
    mfu: Positive
    """Model FLOPs over the peak of the layout's precision, 0 to 1."""

    @model_validator(mode="before")
    @classmethod
    def _of_older_versions(cls, values: Any) -> Any:
        # Plans that were saved before estimates had a range, or when some of their memory was played.
        if isinstance(values, dict) and "step_time_s" in values:
            point = {"step_time_low_s": values["step_time_s"], "step_time_high_s": values["step_time_s"]}
            return {**point, **{name: value for name, value in values.items() if name != "exact"}}
        return values

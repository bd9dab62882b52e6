"""`Estimate`: what a layout costs."""

from typing import Any

from pydantic import model_validator

from costmodels.spec.record import NonNegative, Positive, Record


class StepTime(Record):
    """Parts of one optimizer step on the critical path, in seconds; they add up to the step."""

    compute: NonNegative
    """GEMMs of layers and head, forward and backward."""
    attention: NonNegative
    """Core attention: scores, softmax and their products with values."""
    elementwise: NonNegative
    """Norms, activation functions, residual sums and the loss, by bytes of memory traffic."""
    recompute: NonNegative
    """Forward work that backward repeats."""
    launch: NonNegative = 0.0
    """Device idle while the host launches the kernels of small layers."""
    tensor_parallel: NonNegative
    """Collectives of tensor parallelism that computation does not hide."""
    context_parallel: NonNegative = 0.0
    """Keys and values, or heads, of other ranks, as far as attention does not hide their way."""
    expert_parallel: NonNegative = 0.0
    """Tokens sent to their experts and back."""
    offload: NonNegative = 0.0
    """Activations on their way to host memory and back that compute does not hide."""
    pipeline_parallel: NonNegative
    """Sends of activations and gradients between stages, as far as they delay it; the gradients of a tied
    embedding, summed."""
    bubble: NonNegative
    """Wait of the pipeline's slowest rank for others, were messages to take no time."""
    data_parallel: NonNegative
    """Gradient reduction and parameter gathering that compute does not hide."""
    accumulation: NonNegative = 0.0
    """Adding up the gradients of microbatches; copies to and from buffers of collectives."""
    optimizer: NonNegative
    """The optimizer step; with the optimizer in host memory, gradients and parameters on their way too."""

    @property
    def total(self) -> float:
        """Seconds of one optimizer step."""
        return float(sum(getattr(self, part) for part in type(self).model_fields))


class StageMemory(Record):
    """Bytes on one device of one pipeline rank at the peak of the step."""

    parameters: NonNegative
    """Weights in the format of GEMMs, with second copies."""
    gradients: NonNegative
    """Accumulated gradients."""
    optimizer: NonNegative
    """Master copy of the weights, and the optimizer's state."""
    activations: NonNegative
    """Tensors that layers keep for backward, of all microbatches in flight."""
    logits: NonNegative
    """Logits, their gradient and copies of the loss."""
    communication: NonNegative = 0.0
    """Buffers of collectives that the training job itself allocates."""
    temporaries: NonNegative = 0.0
    """Workspaces of libraries, and all else that is alive at the peak."""
    reserve: NonNegative = 0.0
    """Bytes that the allocator holds besides and cannot use."""
    context: NonNegative = 0.0
    """Driver context and kernels, outside of the allocator."""
    communicators: NonNegative = 0.0
    """Buffers of the communication library for all process groups, outside of the allocator."""
    margin: NonNegative = 0.0
    """Bytes that the user sets aside instead of the last three."""
    doubt: NonNegative = 0.0
    """Bytes by which tensors may be more than said before, or fewer: half the width of their range."""
    absent: NonNegative = 0.0
    """Bytes that a device of this kind has less than `Cluster.memory_bytes` on nodes of two kinds; they count
    as taken, so that all totals have one limit."""

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
        """Bytes besides tensors: `reserve`, `context` and `communicators` or the `margin` in their place, and
        what is `absent`."""
        return float(self.reserve + self.context + self.communicators + self.margin + self.absent)

    @property
    def total(self) -> float:
        """Bytes that the device must have at the peak: reserved ones, context, communicators and `doubt`."""
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
    """Parts of the step."""
    memory: tuple[StageMemory, ...]
    """One entry for each pipeline rank."""
    peak_memory_bytes: Positive
    """The largest `StageMemory.total` of the pipeline ranks: what must be within the memory of a device, as
    the upper end of the range in which the dry run is expected."""
    peak_memory_low_bytes: NonNegative = 0.0
    """Lower end of that range, of the same pipeline rank; of engines whose peaks others measured, of the
    range that holds four of five. 0 in plans that do not say."""
    peak_memory_high_bytes: NonNegative = 0.0
    """Upper end of the 80 % prediction interval of the peak, bytes; 0 where `peak_memory_bytes` is it."""
    tokens_per_s: Positive
    """Tokens of all devices together."""
    tokens_per_s_per_device: Positive
    """Tokens of one device."""
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

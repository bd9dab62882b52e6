"""`Layout`: how a job is split. The planner ranks it and the runtime executes it."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from costmodels.errors import InputError
from costmodels.hardware import Precision
from costmodels.words import Count, Record

Recompute = Literal["none", "selective", "full"]
"""Activations that backward computes again: none, core attention only, or whole layers."""

Schedule = Literal["1f1b", "interleaved"]
"""Order of forward and backward passes in a pipeline."""

SHORT_NAMES = {
    "tp": "tensor_parallel",
    "sp": "sequence_parallel",
    "pp": "pipeline_parallel",
    "vpp": "virtual_pipeline_parallel",
    "cp": "context_parallel",
    "ep": "expert_parallel",
    "etp": "expert_tensor_parallel",
    "dp": "data_parallel",
    "zero": "zero_stage",
    "mbs": "micro_batch_size",
    "gbs": "global_batch_size",
}
"""Abbreviations of the field for the fields of `Layout`."""


class Layout(Record):
    """One way to split a training job over `world_size` devices.

    Ranks are placed in the order tp, cp, dp, pp, the first varying fastest (Megatron-LM's
    `tp-cp-ep-dp-pp`): rank = tp + TP * (cp + CP * (dp + DP * pp)). Experts are spread over dp x cp.
    """

    tensor_parallel: Count = 1
    sequence_parallel: bool = False
    """Norms and residuals are split over the sequence inside the tensor-parallel group."""
    pipeline_parallel: Count = 1
    virtual_pipeline_parallel: Count = 1
    """Model chunks on each pipeline rank; above 1 the schedule is interleaved."""
    context_parallel: Count = 1
    expert_parallel: Count = 1
    expert_tensor_parallel: Count = 1
    data_parallel: Count = 1
    zero_stage: Literal[0, 1, 2, 3] = 0
    """Split over data-parallel ranks: 1 optimizer state, 2 and gradients, 3 and parameters."""
    schedule: Schedule = "1f1b"
    layers_per_stage: tuple[Count, ...]
    """Layers of each stage; stage i runs on pipeline rank i mod pp as its chunk i div pp."""
    micro_batch_size: Count = 1
    """Sequences of one forward pass on one data-parallel rank."""
    global_batch_size: Count
    """Sequences of one optimizer step over all ranks."""
    recompute: Recompute = "none"
    precision: Precision = "bf16"

    @model_validator(mode="after")
    def _check(self) -> Layout:
        stages = self.pipeline_parallel * self.virtual_pipeline_parallel
        if len(self.layers_per_stage) != stages:
            raise ValueError(
                f"layers_per_stage has {len(self.layers_per_stage)} entries, but pipeline_parallel x "
                f"virtual_pipeline_parallel is {stages}"
            )
        if self.global_batch_size % (self.micro_batch_size * self.data_parallel):
            raise ValueError(
                f"global_batch_size {self.global_batch_size} is not divisible by micro_batch_size "
                f"{self.micro_batch_size} times data_parallel {self.data_parallel}"
            )
        if (self.schedule == "interleaved") != (self.virtual_pipeline_parallel > 1):
            raise ValueError(
                f"schedule {self.schedule} does not go with virtual_pipeline_parallel "
                f"{self.virtual_pipeline_parallel}; interleaved needs at least 2, 1f1b exactly 1"
            )
        if self.virtual_pipeline_parallel > 1 and self.pipeline_parallel == 1:
            raise ValueError("virtual_pipeline_parallel above 1 needs pipeline_parallel of at least 2")
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError("sequence_parallel needs tensor_parallel of at least 2")
        if self.zero_stage and self.data_parallel * self.context_parallel == 1:
            raise ValueError(f"zero_stage {self.zero_stage} needs data_parallel of at least 2")
        return self

    @property
    def world_size(self) -> int:
        """Devices that the layout occupies."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel * self.data_parallel

    @property
    def micro_batches(self) -> int:
        """Micro batches that each data-parallel rank runs in one step."""
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel)

    def stages_of(self, pipeline_rank: int) -> tuple[int, ...]:
        """Indices of the stages that `pipeline_rank` holds, first chunk first."""
        return tuple(range(pipeline_rank, len(self.layers_per_stage), self.pipeline_parallel))

    def layer_range(self, stage: int) -> range:
        """Global indices of the layers of `stage`."""
        start = sum(self.layers_per_stage[:stage])
        return range(start, start + self.layers_per_stage[stage])

    def describe(self) -> str:
        """A short form such as `tp=8+sp pp=2 dp=4 zero=1 mbs=1 x 8 recompute=selective`."""
        parts = [f"tp={self.tensor_parallel}" + ("+sp" if self.sequence_parallel else "")]
        parts.append(f"pp={self.pipeline_parallel}")
        if self.virtual_pipeline_parallel > 1:
            parts.append(f"vpp={self.virtual_pipeline_parallel}")
        for short in ("cp", "ep", "etp"):
            value = getattr(self, SHORT_NAMES[short])
            if value > 1:
                parts.append(f"{short}={value}")
        parts.append(f"dp={self.data_parallel}")
        parts.append(f"zero={self.zero_stage}")
        parts.append(f"mbs={self.micro_batch_size} x {self.micro_batches}")
        parts.append(f"recompute={self.recompute}")
        return " ".join(parts)


def even_split(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage when `stages` share `layers` as evenly as possible.

    The first stages take the remainder: the last stage also computes the output head.

    >>> even_split(30, 4)
    (8, 8, 7, 7)

    Raises:
        InputError: a stage would be empty, or there is none.
    """
    if not 1 <= stages <= layers:
        raise InputError(
            f"{stages} stages cannot share {layers} layers: each needs at least one; use 1 to {layers} stages"
        )
    return tuple(layers // stages + (stage < layers % stages) for stage in range(stages))

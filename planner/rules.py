"""What makes a layout illegal: a table of named rules, the same for one layout and for a million.

A rule sees `Degrees`, whose fields are arrays that broadcast against each other, so that a rule about
two degrees of freedom is evaluated on their two axes only. For one layout the fields are 0-d arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import numpy as np

from costmodels.layout import Layout
from costmodels.model_spec import ModelSpec
from costmodels.table import RECOMPUTE_KINDS, Bools, Ints


@dataclass(frozen=True)
class Degrees:
    """The degrees of freedom of one layout or of a grid of them; named as the fields of `Layout`."""

    tensor_parallel: Ints
    sequence_parallel: Bools
    pipeline_parallel: Ints
    virtual_pipeline_parallel: Ints
    context_parallel: Ints
    expert_parallel: Ints
    expert_tensor_parallel: Ints
    data_parallel: Ints
    zero_stage: Ints
    micro_batch_size: Ints
    global_batch_size: Ints
    """Sequences of one step; the maximum itself where not even one micro batch per rank fits under it."""
    recompute: Ints
    entries: Ints
    """Entries of `layers_per_stage`."""
    layers: Ints
    """Layers that the stages hold together."""

    @property
    def stages(self) -> Ints:
        """Pipeline stages: ranks times chunks."""
        return self.pipeline_parallel * self.virtual_pipeline_parallel

    @property
    def micro_batches(self) -> Ints:
        """Whole micro batches of each data-parallel rank in one step."""
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel)

    @classmethod
    def of(cls, layout: Layout) -> Degrees:
        """The degrees of one layout."""
        same = {field.name for field in fields(cls)} - {"recompute", "entries", "layers"}
        return cls(
            **{name: np.asarray(getattr(layout, name)) for name in same},
            recompute=np.asarray(RECOMPUTE_KINDS.index(layout.recompute)),
            entries=np.asarray(len(layout.layers_per_stage)),
            layers=np.asarray(sum(layout.layers_per_stage)),
        )


@dataclass(frozen=True)
class Rule:
    """One reason why a layout is not considered further."""

    name: str
    broken: Callable[[ModelSpec, Degrees], Bools]
    """True where the rule is broken; the shape broadcasts to that of the grid."""
    message: Callable[[ModelSpec, Degrees], str]
    """What is wrong with one layout: its numbers, and what would be right."""
    redundant: bool = False
    """The layout would run, but the search covers one that is at least as good."""


def divisors(number: int) -> list[int]:
    """All divisors of `number`, ascending."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return low + [number // d for d in reversed(low) if d * d != number]


def tensor_parallel_choices(model: ModelSpec) -> str:
    """The tensor-parallel degrees that a model's shape allows, as text."""
    common = math.gcd(model.heads, model.kv_heads, model.ffn, model.hidden, _expert_width(model))
    return ", ".join(str(degree) for degree in divisors(common))


def _expert_width(model: ModelSpec) -> int:
    """The width that routed and shared experts are split over; 0 for a dense model."""
    return math.gcd(model.expert_ffn, model.shared_expert_ffn)


def _expert_split(d: Degrees) -> Ints:
    """Devices that share one expert: without expert parallelism, the tensor-parallel group."""
    return np.where(d.expert_parallel > 1, d.expert_tensor_parallel, d.tensor_parallel)


def _divides(name: str, size: Callable[[ModelSpec], int], what: str) -> Rule:
    return Rule(
        name,
        lambda model, d: size(model) % d.tensor_parallel != 0,
        lambda model, d: (
            f"tensor_parallel {d.tensor_parallel} does not divide {size(model)} {what}; "
            f"use {tensor_parallel_choices(model)}"
        ),
    )


RULES: tuple[Rule, ...] = (
    _divides("tensor_parallel_heads", lambda model: model.heads, "heads"),
    # Keys and values are split, never replicated.
    _divides("tensor_parallel_kv_heads", lambda model: model.kv_heads, "kv_heads"),
    _divides("tensor_parallel_ffn", lambda model: model.ffn, "columns of the MLP (ffn)"),
    _divides("tensor_parallel_hidden", lambda model: model.hidden, "columns of the residual (hidden)"),
    Rule(
        "tensor_parallel_experts",
        lambda model, d: _expert_width(model) % _expert_split(d) != 0,
        lambda model, d: (
            f"{_expert_split(d)} devices cannot share experts of width {model.expert_ffn} (shared: "
            f"{model.shared_expert_ffn}); use a divisor of {_expert_width(model)}"
        ),
    ),
    Rule(
        "expert_parallel",
        lambda model, d: (
            (d.expert_parallel > 1) & ((model.experts == 0) | (model.experts % d.expert_parallel != 0))
        ),
        lambda model, d: (
            f"expert_parallel {d.expert_parallel} does not divide {model.experts} experts; "
            f"use {', '.join(map(str, divisors(max(1, model.experts))))}"
        ),
    ),
    Rule(
        "expert_parallel_group",
        lambda model, d: (
            d.tensor_parallel
            * d.context_parallel
            * d.data_parallel
            % (d.expert_parallel * d.expert_tensor_parallel)
            != 0
        ),
        lambda model, d: (
            f"expert_parallel {d.expert_parallel} x expert_tensor_parallel {d.expert_tensor_parallel} "
            f"does not divide the {d.tensor_parallel * d.context_parallel * d.data_parallel} devices "
            "of a stage"
        ),
    ),
    # Causal attention is balanced by giving each rank one chunk from either end of the sequence.
    Rule(
        "context_parallel",
        lambda model, d: (d.context_parallel > 1) & (model.seq % (2 * d.context_parallel) != 0),
        lambda model, d: (
            f"context_parallel {d.context_parallel} needs a sequence that {2 * d.context_parallel} divides, "
            f"not {model.seq}"
        ),
    ),
    Rule(
        "sequence_parallel_group",
        lambda model, d: d.sequence_parallel & (d.tensor_parallel == 1),
        lambda model, d: "sequence_parallel needs tensor_parallel of at least 2, not 1",
    ),
    Rule(
        "sequence_parallel_length",
        lambda model, d: d.sequence_parallel & (model.seq % (d.tensor_parallel * d.context_parallel) != 0),
        lambda model, d: (
            f"sequence_parallel: tensor_parallel {d.tensor_parallel} x context_parallel "
            f"{d.context_parallel} does not divide seq {model.seq}; use sequence_parallel=false"
        ),
    ),
    Rule(
        "virtual_pipeline_group",
        lambda model, d: (d.virtual_pipeline_parallel > 1) & (d.pipeline_parallel == 1),
        lambda model, d: (
            f"virtual_pipeline_parallel {d.virtual_pipeline_parallel} needs pipeline_parallel "
            "of at least 2, not 1"
        ),
    ),
    Rule(
        "pipeline_stages",
        lambda model, d: d.stages > model.layers,
        lambda model, d: (
            f"pipeline_parallel {d.pipeline_parallel} x virtual_pipeline_parallel "
            f"{d.virtual_pipeline_parallel} is {d.stages} stages, but there are {model.layers} layers; "
            f"use at most {model.layers} stages"
        ),
    ),
    Rule(
        "layers_per_stage",
        lambda model, d: d.entries != d.stages,
        lambda model, d: (
            f"layers_per_stage has {d.entries} entries, but pipeline_parallel {d.pipeline_parallel} x "
            f"virtual_pipeline_parallel {d.virtual_pipeline_parallel} is {d.stages} stages"
        ),
    ),
    Rule(
        "layers_total",
        lambda model, d: d.layers != model.layers,
        lambda model, d: (
            f"layers_per_stage adds up to {d.layers} layers, but {model.name} has {model.layers}"
        ),
    ),
    # Unequal chunks stall the interleaved schedule at the longest one in every round.
    Rule(
        "virtual_pipeline_chunks",
        lambda model, d: (d.virtual_pipeline_parallel > 1) & (d.layers % d.stages != 0),
        lambda model, d: (
            f"virtual_pipeline_parallel {d.virtual_pipeline_parallel} x pipeline_parallel "
            f"{d.pipeline_parallel} does not divide {model.layers} layers into equal chunks; use a "
            "virtual_pipeline_parallel that does, or 1"
        ),
        redundant=True,
    ),
    Rule(
        "batch_too_small",
        lambda model, d: d.micro_batch_size * d.data_parallel > d.global_batch_size,
        lambda model, d: (
            f"micro_batch_size {d.micro_batch_size} x data_parallel {d.data_parallel} exceeds the global "
            f"batch of {d.global_batch_size}; use a batch of at least {d.micro_batch_size * d.data_parallel}"
        ),
    ),
    Rule(
        "batch_divisibility",
        lambda model, d: d.global_batch_size % (d.micro_batch_size * d.data_parallel) != 0,
        lambda model, d: (
            f"global_batch_size {d.global_batch_size} is not divisible by micro_batch_size "
            f"{d.micro_batch_size} x data_parallel {d.data_parallel}; "
            f"use a multiple of {d.micro_batch_size * d.data_parallel}"
        ),
    ),
    # torch.distributed.pipelining's Schedule1F1B refuses fewer micro batches than stages.
    Rule(
        "pipeline_micro_batches",
        lambda model, d: d.micro_batches < d.pipeline_parallel,
        lambda model, d: (
            f"{d.micro_batches} micro batches do not fill pipeline_parallel {d.pipeline_parallel}; use a "
            f"global batch of at least {d.micro_batch_size * d.data_parallel * d.pipeline_parallel} "
            "or fewer stages"
        ),
    ),
    # Interleaving runs the micro batches in rounds of one for each pipeline rank.
    Rule(
        "interleaved_micro_batches",
        lambda model, d: (d.virtual_pipeline_parallel > 1) & (d.micro_batches % d.pipeline_parallel != 0),
        lambda model, d: (
            f"the interleaved schedule needs micro batches in multiples of pipeline_parallel "
            f"{d.pipeline_parallel}, not {d.micro_batches}"
        ),
    ),
    Rule(
        "zero_group",
        lambda model, d: (d.zero_stage > 0) & (d.data_parallel * d.context_parallel == 1),
        lambda model, d: f"zero_stage {d.zero_stage} needs data_parallel of at least 2, not 1",
    ),
    # Under a pipeline the gradients of all micro batches accumulate before they are reduced once.
    Rule(
        "zero2_pipeline",
        lambda model, d: (d.zero_stage == 2) & (d.pipeline_parallel > 1),
        lambda model, d: (
            f"zero_stage 2 with pipeline_parallel {d.pipeline_parallel} keeps whole gradients until the last "
            "micro batch, as zero_stage 1 does; use 1 or 3"
        ),
        redundant=True,
    ),
)
"""In the order in which they are applied: a layout is counted under the first rule that it breaks."""

DEVICE_MEMORY = "device_memory"
"""Name under which legal layouts that need more memory than a device has are counted."""


def violations(model: ModelSpec, degrees: Degrees) -> Iterator[tuple[Rule, Bools]]:
    """Each rule with the mask of where it is broken, in order."""
    for rule in RULES:
        yield rule, rule.broken(model, degrees)


def first_illegal(model: ModelSpec, layout: Layout) -> str | None:
    """Message of the first rule that forbids `layout`; None when it is legal."""
    degrees = Degrees.of(layout)
    for rule, broken in violations(model, degrees):
        if not rule.redundant and bool(broken):
            return rule.message(model, degrees)
    return None

"""Rules that make a layout illegal: a table of named rules, the same for one layout and for a million.

A rule gets a `LayoutTable` whose arrays broadcast against each other, so a rule about two degrees is
evaluated on their two axes only. For one layout the arrays are 0-d.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from costmodels.spec.layout import IN_ROUNDS, NOTHING_TO_OFFLOAD, SPLIT_BACKWARD, V_SCHEDULES, Layout
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import (
    FULL,
    NONE,
    RECOMPUTE_KINDS,
    RECOMPUTE_METHODS,
    SCHEDULES,
    SELECTIVE,
    UNIFORM,
    Bools,
    LayoutTable,
)
from planner.space.graph_rules import GRAPH_RULES
from planner.space.lora_rules import LORA_RULES
from planner.space.mesh_rules import MESH_RULES
from planner.space.rule import Rule, divisors

LONGEST_CHUNK = 1.02
"""Largest ratio of the longest chunk of a virtual pipeline to the mean, such as 126 layers in 64 chunks of
one or two."""


RULES: tuple[Rule, ...] = (
    *MESH_RULES,
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
    # The rank with the longest chunks takes longer than the mean: few such layouts are among the first.
    Rule(
        "virtual_pipeline_chunks",
        lambda model, d: (
            (d.virtual_pipeline_parallel > 1)
            & (-(-d.layers // d.stages) * d.stages > LONGEST_CHUNK * d.layers)
        ),
        lambda model, d: (
            f"virtual_pipeline_parallel {d.virtual_pipeline_parallel} x pipeline_parallel "
            f"{d.pipeline_parallel} does not divide {model.layers} layers into chunks that are equal to "
            f"{LONGEST_CHUNK - 1:.0%}; use a virtual_pipeline_parallel that does, or 1"
        ),
        redundant=True,
        reserve=True,
        lifted_by=(("virtual_pipeline_parallel", "pipeline_parallel"),),
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
    # torch.distributed.pipelining's Schedule1F1B refuses fewer microbatches than stages.
    Rule(
        "pipeline_micro_batches",
        lambda model, d: d.micro_batches < d.pipeline_parallel,
        lambda model, d: (
            f"{d.micro_batches} microbatches do not fill pipeline_parallel {d.pipeline_parallel}; use a "
            f"global batch of at least {d.micro_batch_size * d.data_parallel * d.pipeline_parallel} "
            "or fewer stages"
        ),
    ),
    # Interleaving runs the microbatches in rounds of one for each pipeline rank.
    Rule(
        "interleaved_micro_batches",
        lambda model, d: d.runs(*IN_ROUNDS) & (d.micro_batches % d.pipeline_parallel != 0),
        lambda model, d: (
            f"the {SCHEDULES[int(d.schedule)]} schedule needs microbatches in multiples of "
            f"pipeline_parallel {d.pipeline_parallel}, not {d.micro_batches}"
        ),
    ),
    # ScheduleDualPipeV refuses fewer; ScheduleZBVZeroBubble is made for as many, less one.
    Rule(
        "v_micro_batches",
        lambda model, d: d.runs(*V_SCHEDULES) & (d.micro_batches < 2 * d.pipeline_parallel),
        lambda model, d: (
            f"the {SCHEDULES[int(d.schedule)]} schedule needs a microbatch for each of its "
            f"{2 * d.pipeline_parallel} stages, not {d.micro_batches}; use a global batch of at least "
            f"{d.micro_batch_size * d.data_parallel * 2 * d.pipeline_parallel} or fewer stages"
        ),
    ),
    Rule(
        "zero_group",
        lambda model, d: (d.zero_stage > 0) & (d.replicas == 1),
        lambda model, d: f"zero_stage {d.zero_stage} needs data_parallel of at least 2, not 1",
    ),
    Rule(
        "zero_replicas",
        lambda model, d: (
            (d.zero_replicas > 1) & ((d.replicas % d.zero_replicas != 0) | (d.zero_replicas == d.replicas))
        ),
        lambda model, d: (
            f"zero_replicas {d.zero_replicas} does not divide the {d.replicas} ranks of data_parallel x "
            "context_parallel into groups of at least 2; use "
            f"{', '.join(map(str, divisors(int(d.replicas))[:-1] or [1]))}"
        ),
    ),
    Rule(
        "zero_replicas_stage",
        lambda model, d: (d.zero_replicas > 1) & (d.zero_stage == 0),
        lambda model, d: f"zero_replicas {d.zero_replicas} needs zero_stage of at least 1, not 0",
    ),
    Rule(
        "zero_replicas_experts",
        lambda model, d: d.expert_replicas % np.clip(d.zero_replicas, 1, d.expert_replicas) != 0,
        lambda model, d: (
            f"zero_replicas {d.zero_replicas} does not divide the {d.expert_replicas} devices that hold the "
            f"same experts; use {', '.join(map(str, divisors(int(d.expert_replicas))))}"
        ),
    ),
    # Under a pipeline the gradients of all microbatches accumulate before they are reduced once, and what a
    # backward pass has gathered stays for the forward pass that comes next.
    Rule(
        "zero_pipeline",
        lambda model, d: (d.zero_stage >= 2) & (d.pipeline_parallel > 1),
        lambda model, d: (
            f"zero_stage {d.zero_stage} with pipeline_parallel {d.pipeline_parallel} keeps gradients and "
            "parameters whole until the last microbatch, as zero_stage 1 does; use 1"
        ),
        redundant=True,
        lifted_by=(("zero_stage",),),
    ),
    Rule(
        "recompute_layers",
        lambda model, d: (
            ((d.recompute_method != UNIFORM) | (d.recompute_num_layers > 1))
            & ((d.recompute == NONE) | ((d.recompute == SELECTIVE) & (d.recompute_method == UNIFORM)))
        ),
        lambda model, d: (
            f"recompute_num_layers {d.recompute_num_layers} with recompute_method "
            f"{RECOMPUTE_METHODS[int(d.recompute_method)]} does not go with recompute "
            f"{RECOMPUTE_KINDS[int(d.recompute)]}; uniform chunks need full, block full or selective"
        ),
    ),
    Rule(
        "recompute_depth",
        lambda model, d: (d.recompute_num_layers > 1) & (d.recompute_num_layers > d.deepest),
        lambda model, d: (
            f"recompute_num_layers {d.recompute_num_layers} is more than the {d.deepest} layers of any "
            f"stage; use at most {d.deepest}"
        ),
        redundant=True,
        lifted_by=(("recompute_num_layers", "pipeline_parallel"),),
    ),
    # Backward of weights comes apart from that of inputs, and each of them would compute the layers again.
    Rule(
        "recompute_split_backward",
        lambda model, d: (d.recompute == FULL) & d.runs(*SPLIT_BACKWARD),
        lambda model, d: (
            f"recompute full with schedule {SCHEDULES[int(d.schedule)]} computes every layer twice again; "
            "use recompute selective, or schedule interleaved"
        ),
        redundant=True,
        lifted_by=(("recompute", "schedule"),),
    ),
    Rule(
        "offload_recompute",
        lambda model, d: d.offload_activations & (d.recompute == FULL) & (d.recompute_method == UNIFORM),
        lambda model, d: NOTHING_TO_OFFLOAD,
    ),
    Rule(
        "expert_halves_group",
        lambda model, d: d.expert_halves & (d.expert_parallel == 1),
        lambda model, d: "expert_halves needs expert_parallel of at least 2, not 1: no token travels",
        of_mesh=True,
    ),
    *LORA_RULES,
    *GRAPH_RULES,
)
"""Rules in the order of their use; a layout is counted under the first rule that it breaks."""

DEVICE_MEMORY = "device_memory"
"""Name of the count of legal layouts that need more memory than a device has."""


def violations(model: ModelSpec, degrees: LayoutTable) -> Iterator[tuple[Rule, Bools]]:
    """Each rule, in order, with the mask of the layouts that break it."""
    for rule in RULES:
        yield rule, rule.broken(model, degrees)


def first_violation(model: ModelSpec, layout: Layout) -> str | None:
    """Message of the first rule that forbids `layout`; None when it is legal."""
    degrees = LayoutTable.one(layout)
    for rule, broken in violations(model, degrees):
        if not rule.redundant and bool(broken):
            return rule.message(model, degrees)
    return None

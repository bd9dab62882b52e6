"""The structures that layouts of a model use: which tapes are worth recording, the usual ones first."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from costmodels.tapes.structure import Structure, structure_of, units_of_stage

MODULES = ("core_attention", "mlp", "norm", "activation")

USUAL: tuple[dict[str, Any], ...] = ({}, {"recompute": "full"}, {"recompute": "selective"})
"""Recomputation that the search enumerates."""

SELECTED: tuple[dict[str, Any], ...] = tuple(
    {"recompute": "selective", "recompute_modules": modules}
    for size in range(1, len(MODULES) + 1)
    for modules in combinations(MODULES, size)
    # The MLP has the activation function in it.
    if not {"mlp", "activation"} <= set(modules)
)
"""Recomputation that is solved for where layouts need it to fit."""

TENSOR_PARALLEL = (1, 2, 4, 8, 16)

CONTEXT_PARALLEL: tuple[dict[str, Any], ...] = (
    {"context_parallel": 2},
    {"context_parallel": 2, "context_parallel_form": "all_to_all"},
    *({"context_parallel": ranks, "context_parallel_form": "ring"} for ranks in (2, 4, 8)),
)
"""Of gathered keys and exchanged heads any number of ranks does the same."""


def structures_of_model(
    model: ModelSpec, compiled: bool, selections: bool = False, context: bool = False
) -> Iterator[Structure]:
    """The structures of the units of a model under layouts of one sequence or more, each once.

    Args:
        compiled: layers are compiled.
        selections: of every selection of modules that recompute too.
        context: of context parallelism too.
    """
    seen: set[Structure] = set()
    for fields in _layouts(model, selections, context):
        layout = Layout.model_validate({"layers_per_stage": (model.layers,), **fields})
        for unit in dict.fromkeys(units_of_stage(model, layout, 0)):
            structure = structure_of(model, layout, unit, compiled)
            if structure not in seen:
                seen.add(structure)
                yield structure


def _layouts(model: ModelSpec, selections: bool, context: bool) -> Iterator[dict[str, Any]]:
    """Fields of layouts, those that most jobs have first."""
    experts = (1, 2) if model.experts else (1,)
    kinds: list[tuple[Any, Any]] = [*product(USUAL, [{}])]
    kinds += product(SELECTED, [{}]) if selections else ()
    kinds += product(USUAL, CONTEXT_PARALLEL) if context else ()
    for recomputation, over_context in kinds:
        for tp, rows, ep in product(TENSOR_PARALLEL, (1, 2), experts):
            if not _is_split(model, tp):
                continue
            for sequence_parallel in (False, True)[: 1 + (tp > 1)]:
                yield {
                    "tensor_parallel": tp,
                    "sequence_parallel": sequence_parallel,
                    "expert_parallel": ep,
                    "data_parallel": ep,
                    "micro_batch_size": rows,
                    "global_batch_size": rows * ep,
                    **recomputation,
                    **over_context,
                }


def _is_split(model: ModelSpec, tp: int) -> bool:
    """Whether tensor-parallel ranks can have equal parts of a model."""
    return not (model.heads % tp or model.ffn % tp or (model.kv_heads % tp and tp % model.kv_heads))

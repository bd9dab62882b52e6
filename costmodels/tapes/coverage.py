"""The structures that layouts of a model use: which tapes are worth recording, the usual ones first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

from costmodels.spec.hardware import Precision
from costmodels.spec.layout import Fp8Recipe, Layout
from costmodels.spec.model import ModelSpec
from costmodels.tapes.structure import Structure, structure_of, units_of_stage


class Choice(NamedTuple):
    """Fields of a layout, and how seldom the first plans of searches have them."""

    rarity: float
    """Minus the logarithm of their number, over that of the most usual choice; `python -m benchmarks.tapes`
    counts them."""
    fields: dict[str, Any]


def _recomputes(rarity: float, *modules: str) -> Choice:
    return Choice(rarity, {"recompute": "selective", "recompute_modules": modules})


RECOMPUTATION = (
    Choice(0.0, {}),
    _recomputes(1.6, "activation"),
    _recomputes(1.7, "core_attention"),
    Choice(1.7, {"recompute": "full"}),
    _recomputes(2.4, "norm", "activation"),
    _recomputes(3.3, "norm"),
    _recomputes(3.6, "mlp", "norm"),
    _recomputes(4.7, "mlp"),
    _recomputes(5.0, "core_attention", "norm", "activation"),
    _recomputes(5.6, "core_attention", "activation"),
    _recomputes(6.3, "core_attention", "mlp", "norm"),
    _recomputes(8.3, "core_attention", "norm"),
    _recomputes(8.6, "core_attention", "mlp"),
)
"""All that the search enumerates or solves for; the MLP has the activation function in it."""

# Of rings each number of ranks does other things; of the others only sides of 1 do.
CONTEXT_PARALLEL = (
    Choice(0.0, {}),
    *(
        Choice(rarity, {"context_parallel": ranks, "context_parallel_form": "all_to_all"})
        for rarity, ranks in ((0.8, 2), (1.5, 8), (2.5, 32))
    ),
    Choice(1.0, {"context_parallel": 2}),
    *(
        Choice(rarity, {"context_parallel": ranks, "context_parallel_form": "ring"})
        for rarity, ranks in ((1.4, 2), (3.0, 4), (4.6, 8), (5.0, 16))
    ),
)

TENSOR_PARALLEL = (
    Choice(0.0, {}),
    *(
        Choice(rarity + more, {"tensor_parallel": ranks, "sequence_parallel": sequence})
        for rarity, sequence in ((0.5, True), (2.1, False))
        for more, ranks in ((0.0, 2), (0.0, 4), (0.0, 8), (2.0, 16))
    ),
)

EXPERT_PARALLEL = (
    Choice(0.0, {"expert_parallel": 2}),
    Choice(1.4, {"zero_stage": 1}),
    Choice(1.4, {}),
    Choice(3.9, {"expert_parallel": 2, "expert_tensor_parallel": 2}),
    Choice(4.1, {"expert_tensor_parallel": 2, "zero_stage": 1}),
    Choice(4.1, {"expert_tensor_parallel": 2}),
)
"""Compiled layers whose experts nothing wraps are one graph; how seldom they are is not counted apart."""

ROWS = tuple(
    Choice(rarity, {"micro_batch_size": rows}) for rarity, rows in ((0.0, 2), (1.0, 1), (1.0, 4), (2.0, 8))
)
"""More than 2 differ in the chunks of the loss alone."""


def structures_of_model(
    model: ModelSpec, compiled: bool, precision: Precision = "bf16", fp8_recipe: Fp8Recipe = "default"
) -> Iterator[Structure]:
    """The structures of the units of a model, each once, those that most plans have first.

    Args:
        compiled: layers are compiled.
    """
    seen: set[Structure] = set()
    for fields in _layouts(model):
        layout = Layout.model_validate(
            {
                "layers_per_stage": (model.layers,),
                **fields,
                "precision": precision,
                "fp8_recipe": fp8_recipe,
            }
        )
        for unit in dict.fromkeys(units_of_stage(model, layout, 0)):
            structure = structure_of(model, layout, unit.unit, compiled, attention=unit.attention)
            if structure not in seen:
                seen.add(structure)
                yield structure


def _layouts(model: ModelSpec) -> Iterator[dict[str, Any]]:
    """Fields of layouts, those that most plans have first."""
    experts: Sequence[Choice] = EXPERT_PARALLEL if model.experts else (Choice(0.0, {}),)
    every = product(RECOMPUTATION, CONTEXT_PARALLEL, TENSOR_PARALLEL, experts, ROWS)
    for choices in sorted(every, key=lambda choices: sum(choice.rarity for choice in choices)):
        fields: dict[str, Any] = {}
        for choice in choices:
            fields |= choice.fields
        if not _is_split(model, fields):
            continue
        data_parallel = fields.get("expert_parallel", 1) * fields.get("expert_tensor_parallel", 1)
        data_parallel *= 2 if "zero_stage" in fields else 1
        rows = fields.get("micro_batch_size", 1)
        yield fields | {"data_parallel": data_parallel, "global_batch_size": rows * data_parallel}


def _is_split(model: ModelSpec, fields: dict[str, Any]) -> bool:
    """Whether ranks can have equal parts of a model."""
    tp, cp = fields.get("tensor_parallel", 1), fields.get("context_parallel", 1)
    if model.heads % tp or model.ffn % tp or (model.kv_heads % tp and tp % model.kv_heads):
        return False
    sizes, form = model.linear_attention, fields.get("context_parallel_form")
    if sizes is not None and "linear" in model.attention_pattern and (cp > 1 or sizes.key_heads % tp):
        return False
    if form == "ring" and (model.attention_gate or model.attention_sinks or model.attention_softcap):
        return False
    if form == "all_to_all" and model.heads // tp % cp:
        return False
    return not (model.experts and model.experts % fields.get("expert_parallel", 1))

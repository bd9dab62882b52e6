"""Bytes of the units of a model under the layouts of a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from costmodels.bundled.moments import Bytes
from costmodels.bundled.replay import KINDS
from costmodels.bundled.sizes import Sizes, tensor_sizes
from costmodels.bundled.structure import Structure
from costmodels.bundled.tapes import UnitTape, embedding_tape, head_tape, highest, layer_tape, net
from costmodels.model_spec import ModelSpec
from costmodels.shapes import kept_heads_width, key_value_width
from costmodels.table import (
    CONTEXT_FORMS,
    RECOMPUTE_KINDS,
    RECOMPUTE_MODULES,
    Bools,
    Floats,
    Ints,
    LayoutTable,
    distinct,
)

GROUPED_MULTIPLE = 8
"""Elements in 16 bits that rows of matrices must be multiples of in PyTorch's grouped product."""


class UnitBytes:
    """One kind of unit; what each moment adds to what was there before the unit, by name.

    The highest moments of the passes of `UnitTape`, backward besides `kept`; `kept` from forward to
    backward; `left`, what a first backward leaves, and `added`, what another one does. Of the head: `scores`
    before the loss, `scoring` before the gradient of its logits is there, `matrix` and `first_matrix` after
    that. Of a layer with experts: passes before (`_before`) and after (`_after`) the experts' parameters are
    gathered in forward or done with in backward, what is there then (`_at`), and when backward reaches the
    experts (`_start`).
    """

    def __init__(self, held: dict[str, Bytes]) -> None:
        self.held = held

    def take(self, rows: Ints) -> UnitBytes:
        """Of some rows."""
        return UnitBytes({name: one.take(rows) for name, one in self.held.items()})

    def __getattr__(self, name: str) -> Bytes:
        try:
            found: Bytes = self.held[name]
        except KeyError:
            raise AttributeError(name) from None
        return found


def structures_of(model: ModelSpec, table: LayoutTable, moe: bool) -> tuple[list[Structure], Ints]:
    """The structures of the layers of a table, and which of them each row has."""
    mla = model.latent_attention
    wide = table.precision in ("fp32", "tf32")
    pads = np.array([model.padded_vocab(int(tp)) // tp > model.vocab for tp in table.tensor_parallel])
    shares = (table.tensor_parallel > model.kv_heads) & (mla is None)
    columns: list[Ints | Bools] = [
        table.tensor_parallel > 1,
        table.sequence_parallel,
        table.micro_batch_size > 1,
        shares,
        table.pipeline_parallel == 1,
        pads,
        table.expert_parallel > 1,
        _local_experts(model, table) * moe,
        table.expert_tensor_parallel,
        table.context_parallel > 1,
        table.context_parallel_form,
        kept_heads_width(model, table) > key_value_width(model, table),
        table.recompute,
        table.recompute_modules,
    ]
    first, code = distinct(columns)
    found = [
        Structure(
            layernorm=model.norm == "layernorm",
            bias=model.linear_bias,
            qkv_bias=model.linear_bias or model.qkv_bias,
            qk_norm=model.qk_norm,
            rotates=model.position == "rope",
            gated=model.gated,
            activation=model.activation,
            wide=wide,
            latent=mla is not None,
            latent_queries=mla is not None and mla.q_lora_rank > 0,
            longer=_longer(model),
            scales_scores=mla is not None and _scales_scores(model),
            float8=table.precision == "fp8",
            tensor_parallel=bool(table.tensor_parallel[row] > 1),
            sequence_parallel=bool(table.sequence_parallel[row]),
            several=bool(table.micro_batch_size[row] > 1),
            shares_heads=bool(shares[row]),
            tied=model.tied and bool(table.pipeline_parallel[row] == 1),
            pads=bool(pads[row]),
            context_form=(
                CONTEXT_FORMS[int(table.context_parallel_form[row])]
                if table.context_parallel[row] > 1
                else None
            ),
            repeats_heads=bool((kept_heads_width(model, table) > key_value_width(model, table))[row]),
            recompute=_recomputed(table, int(row)),
            **(_experts(model, table, int(row)) if moe else {}),
        )
        for row in first
    ]
    return found, code


def _without_recomputation(table: LayoutTable) -> LayoutTable:
    none = np.zeros_like(table.recompute)
    return replace(table, recompute=none, recompute_modules=none)


def takes_grouped(model: ModelSpec, table: LayoutTable) -> Bools:
    """Rows in which one kernel computes the products of all experts."""
    sides = [np.full(len(table), model.hidden), model.expert_ffn // table.expert_tensor_parallel]
    aligned: Bools = np.all([side % GROUPED_MULTIPLE == 0 for side in sides], axis=0)
    return aligned & (table.precision in ("bf16", "fp8"))


def _local_experts(model: ModelSpec, table: LayoutTable) -> Ints:
    """Experts of one rank where they are computed one after the other, else 1."""
    result: Ints = np.where(
        takes_grouped(model, table), 1, np.maximum(model.experts // table.expert_parallel, 1)
    )
    return result


def _experts(model: ModelSpec, table: LayoutTable, row: int) -> dict[str, Any]:
    """How the experts of one row work."""
    ep, etp = int(table.expert_parallel[row]), int(table.expert_tensor_parallel[row])
    return {
        "experts": True,
        "exchanges": ep > 1,
        "gathers_tokens": ep == 1 and etp > 1,
        "expert_ranks": etp,
        "local_experts": int(_local_experts(model, table)[row]),
        "grouped": bool(takes_grouped(model, table)[row]),
        "shared_experts": model.shared_expert_ffn > 0,
        "shared_gate": model.shared_expert_gate,
        "normalised": model.router.normalised,
        "scaled": model.router.scale != 1.0,
        "biased": model.router.expert_bias,
        "limited": model.router.capacity_factor > 0,
    }


def _longer(model: ModelSpec) -> str:
    """Whose heads are larger."""
    mla = model.latent_attention
    keys = 0 if mla is None else mla.qk_nope_head_dim + mla.qk_rope_head_dim
    values = 0 if mla is None else mla.v_head_dim
    return "" if keys == values else "keys" if keys > values else "values"


def _scales_scores(model: ModelSpec) -> bool:
    """`runtime.rotary.score_factor` is not 1."""
    scaling = model.rope_scaling
    return scaling is not None and scaling.mscale_all_dim > 0 and scaling.factor > 1


def _recomputed(table: LayoutTable, row: int) -> frozenset[str]:
    """What the layers of one row compute again."""
    kind = RECOMPUTE_KINDS[int(table.recompute[row])]
    modules = int(table.recompute_modules[row])
    chosen = (name for bit, name in enumerate(RECOMPUTE_MODULES) if modules >> bit & 1)
    return frozenset({"none": (), "selective": chosen, "full": ("full",)}[kind])


def units_of(model: ModelSpec, table: LayoutTable) -> dict[str, UnitBytes]:
    """Units by the name of what they are: kinds of layers, first (the embedding) and last (head and loss)."""
    learned = model.position == "learned"
    makers: dict[str, Callable[[Structure], UnitTape]] = {
        "dense": layer_tape,
        "first": lambda structure: embedding_tape(structure, learned),
        "last": head_tape,
    }
    if table.recompute_method.any():
        makers["dense_plain"] = layer_tape
    if model.moe_layers:
        makers |= {name.replace("dense", "moe"): layer_tape for name in makers if name.startswith("dense")}
    first, shape = distinct(
        [
            table.tensor_parallel,
            table.sequence_parallel,
            table.context_parallel,
            table.context_parallel_form,
            table.expert_parallel,
            table.expert_tensor_parallel,
            table.micro_batch_size,
            table.recompute,
            table.recompute_modules,
            table.pipeline_parallel == 1,
        ]
    )
    shapes = table.take(first)
    sizes = tensor_sizes(model, shapes)
    sizes["nothing"] = np.zeros(len(shapes))
    found = {}
    for name, maker in makers.items():
        some = _without_recomputation(shapes) if name.endswith("_plain") else shapes
        structures, code = structures_of(model, some, moe=name.startswith("moe"))
        tapes = [maker(structure) for structure in structures]
        found[name] = _bytes_of(tapes, code, sizes, shape)
    return found


def _bytes_of(tapes: list[UnitTape], code: Ints, sizes: Sizes, shape: Ints) -> UnitBytes:
    """Bytes of a unit; `code` tells the tape of each shape, and `shape` the shape of each row."""
    held: dict[str, Floats] = {}
    for number, tape in enumerate(tapes):
        own = code == number
        some = {name: values[own] for name, values in sizes.items()}
        for name, values in _moments(tape, some).items():
            held.setdefault(name, np.zeros((len(KINDS), len(code))))[:, own] = values
    return UnitBytes({name: Bytes.of_shapes(values, shape) for name, values in held.items()})


def _moments(tape: UnitTape, sizes: Sizes) -> dict[str, Floats]:
    found, nets = {}, {}
    for name, part in tape.passes.items():
        changes = part.changes(sizes)
        totals = changes.cumsum(axis=0)
        found[name], nets[name] = highest(part, changes, totals), net(part, changes)
        marks = tape.marks[name]
        mark = marks.get("experts_done" if "forward" not in name else "experts_gather")
        if mark is not None:
            after = marks.get("experts_done_after", mark)
            found[f"{name}_before"] = highest(part, changes, totals, 0, mark)
            found[f"{name}_at"] = net(part, changes, mark)
            found[f"{name}_start"] = net(part, changes, marks.get("experts_start", mark))
            found[f"{name}_after"] = highest(part, changes, totals, after)
        if "scores" in marks:
            found["scores"] = highest(part, changes, totals, 0, marks["scores"])
        if "scored" in marks and "backward" in name:
            if name == "backward":
                found["scoring"] = highest(part, changes, totals, 0, marks["scored"])
            if name in MATRIX:
                found[MATRIX[name]] = highest(part, changes, totals, marks["scored"])
    kept = nets["forward"]
    return found | {"kept": kept, "left": kept + nets["first_backward"], "added": kept + nets["backward"]}


MATRIX = {"backward": "matrix", "first_backward": "first_matrix"}
"""Passes of the head, and what they are called from the gradient of the logits on."""

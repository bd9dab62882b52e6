"""Bytes of the units of a model under the layouts of a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from costmodels.bundled.compiled_tapes import compiled_layer_tape
from costmodels.bundled.moments import Bytes
from costmodels.bundled.replay import KINDS
from costmodels.bundled.ring import ROUNDS
from costmodels.bundled.sizes import Sizes, scores_attention, tensor_sizes
from costmodels.bundled.split_tapes import split_head_tape, split_layer_tape
from costmodels.bundled.states import casts_of_gradients, wraps_parameters
from costmodels.bundled.structure import Structure
from costmodels.bundled.tapes import UnitTape, embedding_tape, head_tape, highest, layer_tape, net
from costmodels.layers.shapes import key_value_width, whole_heads_width
from costmodels.spec.layout import SPLIT_BACKWARD
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import (
    CONTEXT_FORMS,
    RECOMPUTE_KINDS,
    RECOMPUTE_MODULES,
    SCHEDULES,
    Bools,
    Floats,
    Ints,
    LayoutTable,
    distinct_rows,
)

SPLIT = [SCHEDULES.index(schedule) for schedule in SPLIT_BACKWARD]
"""Codes of schedules that split backward."""

RING, EXCHANGE = CONTEXT_FORMS.index("ring"), CONTEXT_FORMS.index("all_to_all")

GROUPED_MULTIPLE = 8
"""Elements in 16 bits that rows of matrices must be multiples of in PyTorch's grouped product."""


class UnitBytes:
    """One kind of unit; what each moment adds to what was there before the unit, by name.

    The highest moments of the passes of `UnitTape`, backward besides `kept`; alone_backward, a first_backward
    without another micro batch to come; `kept` from forward to backward; `left` and `left_alone`, what these
    two leave, and `added`, what another one does. Of the head: `scores` before the loss, `scoring` before the
    gradient of its logits is there, `matrix`, `first_matrix` and `alone_matrix` after that. Of a layer with
    experts: passes before (`_before`) and after (`_after`) the experts' parameters are gathered in forward or
    done with in backward, and what is there then (`_at`); backward before (`_early`) it reaches the experts,
    what is there then (`_start`), and from then until it is done with them (`_late`); forward until their
    parameters can be freed (`_until`), of that what comes after they are gathered (`_use`), and what comes
    after it (`_freed`).
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
    casts = casts_of_gradients(table, wraps_parameters(table, model.experts > 0))
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
        np.where(table.context_parallel_form == RING, table.context_parallel, table.context_parallel > 1),
        scores_attention(model, table),
        np.equal(model.heads, table.tensor_parallel),
        np.less_equal(model.kv_heads, table.tensor_parallel),
        table.context_parallel_form,
        whole_heads_width(model, table) > key_value_width(model, table),
        table.recompute,
        table.recompute_modules,
        casts > 0,
    ]
    first, code = distinct_rows(columns)
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
            **_heads(model, table, int(row)),
            repeats_heads=bool((whole_heads_width(model, table) > key_value_width(model, table))[row]),
            recompute=_recomputed(table, int(row)),
            casts=float(casts[row]),
            **(_experts(model, table, int(row)) if moe else {}),
        )
        for row in first
    ]
    return found, code


def _heads(model: ModelSpec, table: LayoutTable, row: int) -> dict[str, Any]:
    """Of one row: how attention works that orders gradients by heads."""
    ranks, tp = int(table.context_parallel[row]), int(table.tensor_parallel[row])
    in_ring = ranks > 1 and int(table.context_parallel_form[row]) == RING
    exchanges = ranks > 1 and int(table.context_parallel_form[row]) == EXCHANGE
    scores = bool(scores_attention(model, table)[row])
    if exchanges:
        return {
            "one_head": model.heads == tp * ranks,
            "one_key_head": ranks % max(model.kv_heads // tp, 1) == 0,
        }
    if not in_ring and not scores:
        return {}
    return {
        "ring_ranks": min(ranks, ROUNDS) if in_ring else 1,
        "scores_attention": scores,
        "one_head": model.heads == tp,
        "one_key_head": model.kv_heads <= tp,
    }


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
        "grouped_choice": model.router.groups > 1,
        "one_choice": model.top_k == 1,
        "limited": model.router.capacity_factor > 0,
    }


def _longer(model: ModelSpec) -> str:
    """Whose heads are larger."""
    mla = model.latent_attention
    keys = 0 if mla is None else mla.qk_nope_head_dim + mla.qk_rope_head_dim
    values = 0 if mla is None else mla.v_head_dim
    return "" if keys == values else "keys" if keys > values else "values"


def _scales_scores(model: ModelSpec) -> bool:
    """`runtime.model.rotary.score_factor` is not 1."""
    scaling = model.rope_scaling
    return scaling is not None and scaling.mscale_all_dim > 0 and scaling.factor > 1


def _recomputed(table: LayoutTable, row: int) -> frozenset[str]:
    """What the layers of one row compute again."""
    kind = RECOMPUTE_KINDS[int(table.recompute[row])]
    modules = int(table.recompute_modules[row])
    chosen = (name for bit, name in enumerate(RECOMPUTE_MODULES) if modules >> bit & 1)
    return frozenset({"none": (), "selective": chosen, "full": ("full",)}[kind])


def units_of(model: ModelSpec, table: LayoutTable, compiled: bool = False) -> dict[str, UnitBytes]:
    """Units by the name of what they are: kinds of layers, first (the embedding) and last (head and loss).

    Args:
        compiled: layers are compiled.
    """
    learned, layer = model.position == "learned", compiled_layer_tape if compiled else layer_tape
    makers: dict[str, Callable[[Structure], UnitTape]] = {
        "dense": layer,
        "first": lambda structure: embedding_tape(structure, learned),
        "last": head_tape,
    }
    if table.recompute_method.any():
        makers["dense_plain"] = layer
    if model.moe_layers:
        makers |= {name.replace("dense", "moe"): layer for name in makers if name.startswith("dense")}
    first, shape = distinct_rows(
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
            casts_of_gradients(table, wraps_parameters(table, model.experts > 0)) > 0,
        ]
    )
    shapes, splits = table.take(first), np.isin(table.schedule, SPLIT).any()
    sizes = tensor_sizes(model, shapes)
    sizes["nothing"] = np.zeros(len(shapes))
    found = {}
    for name, maker in makers.items():
        some = _without_recomputation(shapes) if name.endswith("_plain") else shapes
        structures, code = structures_of(model, some, moe=name.startswith("moe"))
        tapes = [_with_alone(maker, structure) for structure in structures]
        found[name] = _bytes_of(tapes, code, sizes, shape)
        if splits and name != "first":
            make = split_head_tape if name == "last" else split_layer_tape
            tapes = [make(structure) for structure in structures]
            found[name].held.update(_bytes_of(tapes, code, sizes, shape, _split_moments).held)
    return found


def _with_alone(maker: Callable[[Structure], UnitTape], structure: Structure) -> UnitTape:
    """The tape of a unit, and alone_backward."""
    tape, alone = maker(structure), maker(structure.alone)
    return UnitTape(
        tape.passes | {"alone_backward": alone.passes["first_backward"]},
        tape.marks | {"alone_backward": alone.marks["first_backward"]},
    )


def _bytes_of(
    tapes: list[UnitTape],
    code: Ints,
    sizes: Sizes,
    shape: Ints,
    moments: Callable[[UnitTape, Sizes], dict[str, Floats]] | None = None,
) -> UnitBytes:
    """Bytes of a unit; `code` tells the tape of each shape, and `shape` the shape of each row."""
    held: dict[str, Floats] = {}
    for number, tape in enumerate(tapes):
        own = code == number
        some = {name: values[own] for name, values in sizes.items()}
        for name, values in (moments or _moments)(tape, some).items():
            held.setdefault(name, np.zeros((len(KINDS), len(code))))[:, own] = values
    return UnitBytes({name: Bytes.of_shapes(values, shape) for name, values in held.items()})


def _split_moments(tape: UnitTape, sizes: Sizes) -> dict[str, Floats]:
    """The highest moments of the passes of `split_tapes`, and what each leaves (`_net`)."""
    found = {}
    for name, part in tape.passes.items():
        changes = part.changes(sizes)
        totals = changes.cumsum(axis=0)
        found[name], found[f"{name}_net"] = highest(part, changes, totals), net(part, changes)
        done = tape.marks.get(name, {}).get("experts_done")
        if done is not None:
            found[f"{name}_before"] = highest(part, changes, totals, 0, done)
            found[f"{name}_after"] = highest(part, changes, totals, done)
    return found


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
            start = marks.get("experts_start", mark)
            found[f"{name}_start"] = net(part, changes, start)
            found[f"{name}_early"] = highest(part, changes, totals, 0, start)
            found[f"{name}_late"] = highest(part, changes, totals, start, mark)
            found[f"{name}_after"] = highest(part, changes, totals, after)
        if "experts_free" in marks:
            free = marks["experts_free"]
            found[f"{name}_until"] = highest(part, changes, totals, 0, free)
            found[f"{name}_use"] = highest(part, changes, totals, marks["experts_gather"], free)
            found[f"{name}_freed"] = highest(part, changes, totals, free)
        if "scores" in marks:
            found["scores"] = highest(part, changes, totals, 0, marks["scores"])
        if "scored" in marks and "backward" in name:
            if name == "backward":
                found["scoring"] = highest(part, changes, totals, 0, marks["scored"])
            if name in MATRIX:
                found[MATRIX[name]] = highest(part, changes, totals, marks["scored"])
    kept = nets["forward"]
    left = {name: kept + nets[one] for name, one in LEFT.items()}
    return found | left | {"kept": kept}


LEFT = {"left": "first_backward", "left_alone": "alone_backward", "added": "backward"}
"""What is there of forward and of one of the passes after it."""

MATRIX = {"backward": "matrix", "first_backward": "first_matrix", "alone_backward": "alone_matrix"}
"""Passes of the head, and what they are called from the gradient of the logits on."""

"""The search against brute force: every layout of small problems built, judged and priced one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from costmodels import Layout, ModelSpec, even_split
from costmodels.pricing import peak_memory, price
from costmodels.spec.constants import MemoryRangeConstants
from costmodels.spec.layout import SPLIT_BACKWARD
from costmodels.spec.record import GIB
from costmodels.spec.table import ARRAY_FIELDS, RECOMPUTE_MODULES, LayoutTable, code_of
from planner import search
from planner.inputs.batch import Batch
from planner.inputs.cluster import resolve_cluster
from planner.inputs.engine import DEFAULT_ENGINE, resolve_engine
from planner.space.grid import micro_batch_sizes
from planner.space.rules import RULES, first_violation

# Without ranges of memory: they are wider where more is recomputed, so that of two layouts the one that keeps
# less may need more. What is solved is then the best but for the width of a range.
ENGINE = resolve_engine(DEFAULT_ENGINE).model_copy(update={"memory_range": MemoryRangeConstants()})

REDUNDANT = [rule for rule in RULES if rule.redundant]

MIXTURE = {"experts": 2, "top_k": 1, "expert_ffn": 64}

PLAIN = ["offload_activations=false", "offload_optimizer=false", "cuda_graphs=false"]

KINDS = ("none", "selective", "full")

SETS = [
    modules
    for size in range(1, len(RECOMPUTE_MODULES) + 1)
    for modules in combinations(RECOMPUTE_MODULES, size)
]

FORMS = ("all_gather", "all_to_all", "ring")


CLUSTERS = {world: resolve_cluster("a100-80g", world) for world in (1, 2, 3, 4)}


@dataclass(frozen=True)
class Brute:
    """Layouts that plain loops find."""

    considered: int
    legal: list[Layout]
    """The layouts without the redundant ones."""
    redundant: list[Layout]


def chunks_of(layers: int) -> list[tuple[int, str]]:
    """Numbers of chunks and the schedules that run them."""
    several = [
        (count, name) for count in range(2, layers // 2 + 1) for name in ("interleaved", "interleaved_zb")
    ]
    return [(1, "1f1b"), *several, *([(2, "zbv"), (2, "dualpipev")] if layers >= 4 else [])]


def batch_of(batch: Batch, unit: int, rounds: int) -> int:
    """The largest batch that a schedule runs; one that breaks a rule where there is none."""
    if not batch.maximum:
        return batch.size
    for whole in (rounds, unit):
        if whole <= batch.size:
            return batch.size // whole * whole
    return batch.size


def layout_of(model: ModelSpec, values: dict[str, Any]) -> Layout | None:
    """A layout that breaks no rule, or None."""
    stages = values["pipeline_parallel"] * values["virtual_pipeline_parallel"]
    if stages > model.layers:
        return None
    try:
        layout = Layout(layers_per_stage=even_split(model.layers, stages), **values)
    except ValidationError:
        return None
    return layout if first_violation(model, layout) is None else None


def brute(model: ModelSpec, world: int, batch: Batch, micro_batches: Sequence[int] = ()) -> Brute:
    """Every layout of all degrees, one by one, with the enumerated microbatches unless given."""
    sizes = range(1, world + 1)
    meshes = [
        (tp, pp, cp, form, world // (tp * pp * cp))
        for tp, pp, cp in product(sizes, sizes, sizes)
        if world % (tp * pp * cp) == 0
        for form in (FORMS if cp > 1 else FORMS[:1])
    ]
    spreads = [ep for ep in range(1, model.experts + 1) if model.experts % ep == 0] or [1]
    mixes = [
        (*mesh, ep, etp)
        for mesh in meshes
        for ep in spreads
        for etp in ({1, mesh[0]} if model.experts else {1})
    ]
    others = list(product(micro_batches or micro_batch_sizes(batch), (False, True), range(4), KINDS))
    found = Brute(0, [], [])
    considered = 0
    for (tp, pp, cp, form, dp, ep, etp), (vpp, schedule) in product(mixes, chunks_of(model.layers)):
        considered += len(others)
        for mbs, sp, zero, recompute in others:
            rounds = mbs * dp * (pp if schedule.startswith("interleaved") else 1)
            values = {
                "tensor_parallel": tp,
                "sequence_parallel": sp,
                "pipeline_parallel": pp,
                "virtual_pipeline_parallel": vpp,
                "context_parallel": cp,
                "context_parallel_form": form,
                "expert_parallel": ep,
                "expert_tensor_parallel": etp,
                "data_parallel": dp,
                "zero_stage": zero,
                "schedule": schedule,
                "micro_batch_size": mbs,
                "global_batch_size": batch_of(batch, mbs * dp, rounds),
                "recompute": recompute,
            }
            layout = layout_of(model, values)
            if layout is not None:
                degrees = LayoutTable.one(layout)
                covered = any(bool(rule.broken(model, degrees)) for rule in REDUNDANT)
                (found.redundant if covered else found.legal).append(layout)
    return replace(found, considered=considered)


def with_less_recomputation(layouts: list[Layout]) -> LayoutTable:
    """Every set of modules, and whole layers, in every number of layers of each stage."""
    plain = LayoutTable.of([layout for layout in layouts if layout.recompute == "none"])
    deepest = np.array([max(split) for split in plain.splits])[plain.split]
    parts = []
    for kind, modules in [("full", ()), *(("selective", some) for some in SETS)]:
        for layers in range(1, int(deepest.max()) + 1):
            # All layers at once are what the method "uniform" says.
            rows = (deepest >= layers) & ~(plain.runs(*SPLIT_BACKWARD) & (kind == "full"))
            some = plain.take(rows)
            every = np.ones(len(some), dtype=np.int64)
            parts.append(
                replace(
                    some,
                    recompute=every * code_of("recompute", kind),
                    recompute_modules=every * code_of("recompute_modules", modules),
                    recompute_method=every * (deepest[rows] > layers),
                    recompute_num_layers=np.where(deepest[rows] > layers, layers, 1),
                )
            )
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in ARRAY_FIELDS
    }
    return replace(plain, **columns)


def with_one_turn(table: LayoutTable) -> LayoutTable:
    """Rows whose gradients are made in the step's only turn of microbatches, and so hold less."""
    turn = np.where(table.runs("interleaved"), table.pipeline_parallel, 1)
    some = ((table.pipeline_parallel == 1) | table.runs("interleaved")) & (table.micro_batches > turn)
    fewer = table.take(some)
    return replace(fewer, global_batch_size=fewer.micro_batch_size * fewer.data_parallel * turn[some])


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
# Memory is short by the bytes that the last layer recomputes beside the loss.
@example(layers=2, heads=(3, 1), seq=64, vocab=100, job=(4, {}), size=3, maximum=True, share=0.0)
@given(
    layers=st.integers(1, 4),
    heads=st.sampled_from([(8, 8), (4, 2), (3, 1)]),
    seq=st.sampled_from([64, 64, 12, 7]),
    vocab=st.sampled_from([100, 50000]),
    job=st.sampled_from([(1, {}), (2, {}), (3, {}), (4, {}), (4, {}), (1, MIXTURE), (2, MIXTURE)]),
    size=st.integers(1, 5),
    maximum=st.booleans(),
    share=st.floats(0, 1),
)
def test_the_search_finds_what_brute_force_finds(
    layers: int,
    heads: tuple[int, int],
    seq: int,
    vocab: int,
    job: tuple[int, dict[str, Any]],
    size: int,
    maximum: bool,
    share: float,
) -> None:
    """Brute force and the search count the same layouts, and find the same speed on a device of any size.

    Of recomputation every alternative is tried. Gradients of a recomputed layer are reduced beside the next
    one, so that less recomputation may need some bytes less than all of it. The search need not find such
    layouts where all of it does not fit. Unequal stages, CUDA graphs and copies of ZeRO's shards,
    which the search may find to be faster, are left to tests of their own.
    """
    world, experts = job
    heads_sizes: dict[str, Any] = {
        "heads": heads[0],
        "kv_heads": heads[1],
        "head_dim": 8,
        "hidden": 96,
        "ffn": 192,
    }
    model = ModelSpec(name="tiny", layers=layers, vocab=vocab, seq=seq, **heads_sizes, **experts)
    batch, cluster = Batch(size, maximum), CLUSTERS[world]
    sizes: dict[str, Any] = {str(batch).split()[0]: size}
    found = brute(model, world, batch)
    if not found.legal:
        return
    where = model, cluster, ENGINE
    table = LayoutTable.of(found.legal)
    memory = peak_memory(*where, table)
    # Sums of other rows may differ in the last digit.
    limit = float(np.quantile(memory, share)) * (1 + 1e-12) / GIB
    result = search(
        model,
        world_size=world,
        device="a100-80g",
        device_memory_gib=limit,
        engine=ENGINE,
        pin=PLAIN,
        **sizes,
    )
    fits = memory <= limit * GIB
    assert (result.considered - result.solutions, result.legal - result.solutions) == (
        found.considered,
        len(table),
    )
    assert result.feasible - result.solutions == np.count_nonzero(fits) > 0
    assert result.offloads is False
    alternatives = [table.take(fits)]
    if found.redundant:
        alternatives.append(LayoutTable.of(found.redundant))
    plain = [one for one in found.legal if one.recompute == "none"]
    whole = LayoutTable.of([one.model_copy(update={"recompute": "full"}) for one in plain])
    held = (peak_memory(*where, whole) <= limit * GIB) | whole.runs(*SPLIT_BACKWARD)
    less = with_less_recomputation(plain)
    alternatives.append(less)
    if maximum:
        odd = [some for some in range(1, size + 1) if some not in micro_batch_sizes(batch)]
        further = brute(model, world, batch, odd).legal if odd else []
        if further:
            alternatives += [LayoutTable.of(further), with_less_recomputation(further)]
        alternatives += [with_one_turn(some) for some in (table, *alternatives[1:])]

    def best_of(parts: list[LayoutTable]) -> float:
        fitting = (part.take(peak_memory(*where, part) <= limit * GIB) for part in parts if len(part))
        return max((float(price(*where, some).tokens_per_s.max(initial=0)) for some in fitting), default=0.0)

    best = best_of(alternatives)
    if not held.all():
        sure = [plain[row] for row in np.flatnonzero(held)]
        kept = [part for part in alternatives if part is not less]
        least = best_of([*kept, *([with_less_recomputation(sure)] if sure else [])])
    else:
        least = best
    chosen = result.table.take(result.fitting)
    speeds = price(*where, chosen).tokens_per_s
    splits = [chosen.splits[split] for split in chosen.split]
    even = np.array([split == even_split(layers, len(split)) for split in splits])
    even &= chosen.zero_replicas == 1
    # The rows that are left out may be chosen among nearly equal speeds.
    assert least * (1 - (1e-9 if held.all() else 1e-4)) <= speeds[even].max() <= best * (1 + 1e-9)
    assert (peak_memory(*where, chosen) <= limit * GIB).all()
    for row in range(result.legal - result.solutions, result.legal):
        assert first_violation(model, result.table.layout(row)) is None

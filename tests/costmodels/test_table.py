"""Tables of layouts: every field survives the way into columns and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels import Layout, even_split
from costmodels.ranks.reductions import row_maximum
from costmodels.spec import row_blocks
from costmodels.spec.layout import schedule_takes
from costmodels.spec.table import (
    OPTIMIZERS,
    RECOMPUTE_MODULES,
    SCHEDULES,
    LayoutTable,
    combined_key,
    distinct_numbers,
    distinct_rows,
)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Layouts that use any field."""
    tp, cp, dp, pp = (draw(st.sampled_from([1, 2, 4])) for _ in range(4))
    ep = draw(st.sampled_from([1, 2])) if tp * cp * dp > 1 else 1
    chunks = draw(st.integers(1, 3)) if pp > 1 else 1
    schedule = draw(st.sampled_from([name for name in SCHEDULES if schedule_takes(name, chunks)]))
    zero: Any = draw(st.integers(0, 3)) if dp * cp > 1 else 0
    recompute: Any = draw(st.sampled_from(["none", "selective", "full"]))
    offloads = draw(st.booleans())
    modules = draw(st.sets(st.sampled_from(RECOMPUTE_MODULES), min_size=1))
    fields: dict[str, Any] = {
        "recompute_modules": tuple(name for name in RECOMPUTE_MODULES if name in modules),
    }
    if recompute != "none":
        # Whole layers that are recomputed leave nothing to offload.
        block_only = recompute == "full" and offloads
        method = "block" if block_only else draw(st.sampled_from(["uniform", "block"]))
        several = method == "block" or recompute == "full"
        number = draw(st.integers(1, 4)) if several else 1
        fields |= {"recompute_method": method, "recompute_num_layers": number}
    if recompute != "selective":
        del fields["recompute_modules"]
    return Layout(
        tensor_parallel=tp,
        sequence_parallel=draw(st.booleans()) if tp > 1 else False,
        pipeline_parallel=pp,
        virtual_pipeline_parallel=chunks,
        context_parallel=cp,
        context_parallel_form=draw(st.sampled_from(["all_gather", "all_to_all", "ring"]))
        if cp > 1
        else "all_gather",
        expert_parallel=ep,
        expert_tensor_parallel=draw(st.sampled_from([1, 2])) if tp * cp * dp // ep > 1 else 1,
        data_parallel=dp,
        zero_stage=zero,
        zero_replicas=draw(st.sampled_from([1, 2])) if zero else 1,
        schedule=schedule,
        layers_per_stage=even_split(24, pp * chunks),
        micro_batch_size=draw(st.integers(1, 2)),
        global_batch_size=8 * dp,
        recompute=recompute,
        offload_activations=offloads,
        offload_optimizer=draw(st.booleans()),
        optimizer=draw(st.sampled_from(OPTIMIZERS)),
        precision="fp16",
        gradient_reduction="bf16",
        **fields,
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(layouts(), min_size=1, max_size=5))
def test_every_field_survives_the_table(several: list[Layout]) -> None:
    table = LayoutTable.of(several)
    assert [table.layout(row) for row in range(len(table))] == several
    reversed_rows = table.take(np.arange(len(several))[::-1])
    assert [reversed_rows.layout(row) for row in range(len(table))] == several[::-1]
    assert table.micro_batches.tolist() == [layout.micro_batches for layout in several]
    assert table.zero_shards.tolist() == [layout.zero_shards for layout in several]
    for module in RECOMPUTE_MODULES:
        expected = [module in layout.recompute_modules for layout in several]
        assert table.recomputes(module).tolist() == expected


def test_a_table_holds_one_precision_and_one_gradient_reduction() -> None:
    usual = Layout(layers_per_stage=(4,), global_batch_size=8)
    others: list[dict[str, object]] = [
        {"precision": "fp8"},
        {"gradient_reduction": "bf16"},
        {"fp8_recipe": "tensorwise"},
        {"fp8_param_gather": True},
    ]
    for other in others:
        with pytest.raises(ValueError, match="one precision and one gradient reduction"):
            LayoutTable.of([usual, usual.model_copy(update=other)])


def test_combined_columns_order_rows_as_the_columns_do_however_large() -> None:
    rng = np.random.default_rng(0)
    columns = [rng.integers(0, 1 << 20, 50) for _ in range(5)]
    columns[0][:25] = columns[0][25:]
    assert np.argsort(combined_key(columns)).tolist() == np.lexsort(columns[::-1]).tolist()
    first, code = distinct_rows([np.array([3, 1, 3, 1]), np.array([True, False, True, True])])
    assert first[code].tolist() == [0, 1, 0, 3]


@pytest.mark.parametrize("columns", [1, 2, 16, 17])
def test_the_highest_of_each_row_is_found_for_few_columns_and_for_many(columns: int) -> None:
    held = np.random.default_rng(columns).normal(size=(50, columns))
    assert (row_maximum(held) == held.max(axis=1)).all()
    assert (row_maximum(np.broadcast_to(held[:1], held.shape)) == held[0].max()).all()


def test_blocks_are_the_rows_that_are_asked_for_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_blocks, "BLOCK", 3)
    some = [
        Layout(micro_batch_size=size, layers_per_stage=(4,), global_batch_size=8 * size)
        for size in range(1, 9)
    ]
    table, rows = LayoutTable.of(some), np.array([7, 0, 3, 3])

    def sizes(block: LayoutTable) -> list[int]:
        return block.micro_batch_size.tolist()  # type: ignore[no-any-return]

    assert [*row_blocks.block_results(sizes, table)] == [[1, 2, 3], [4, 5, 6], [7, 8]]
    assert [*row_blocks.block_results(sizes, table, rows)] == [[8, 1, 4], [4]]
    assert [*row_blocks.block_results(sizes, table, rows[:0])] == [[]]
    assert distinct_numbers(table.micro_batch_size[rows]) == [1, 4, 8]

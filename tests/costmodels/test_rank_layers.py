"""Closed forms of the pipeline against schedules played out slot by slot."""

from dataclasses import fields
from operator import itemgetter
from typing import Any

import numpy as np
import pytest

from costmodels import Layout, price
from costmodels.catalogue import load_model
from costmodels.ranks.rank_layers import Ranks, all_ranks, critical_ranks, in_flight
from costmodels.spec.layout import even_split
from costmodels.spec.table import LayoutTable
from costmodels.time.bubble import bubble_seconds, message_seconds


def played_in_flight(split, pipeline, micro_batches, rank):
    """Most layer activations alive on `rank` in Megatron-LM's 1F1B or interleaved schedule."""
    chunks = len(split) // pipeline
    total = micro_batches * chunks
    group = pipeline if chunks > 1 else 1
    order = [slot // group % chunks for slot in range(total)]
    warm_up = 2 * (pipeline - rank - 1) + (chunks - 1) * pipeline if chunks > 1 else pipeline - rank - 1
    warm_up = min(warm_up, total)
    steps = [(1, chunk) for chunk in order[:warm_up]]
    backward = [chunks - 1 - chunk for chunk in order]
    for slot in range(total - warm_up):
        steps += [(1, order[warm_up + slot]), (-1, backward[slot])]
    alive = np.cumsum([sign * split[chunk * pipeline + rank] for sign, chunk in steps])
    return alive.max()


@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize(("pipeline", "chunks", "layers"), [(4, 1, 32), (4, 1, 30), (4, 2, 32), (8, 3, 48)])
def test_activations_in_flight_match_the_schedule(pipeline, chunks, layers, rounds):
    split = even_split(layers, pipeline * chunks)
    micro_batches = np.float64(rounds * pipeline)
    found = in_flight(all_ranks(split, pipeline, layers), micro_batches)["dense"]
    expected = [played_in_flight(split, pipeline, int(micro_batches), rank) for rank in range(pipeline)]
    assert found.tolist() == expected


def test_few_micro_batches_keep_few_activations():
    alive = in_flight(all_ranks((4, 4, 4, 4), 4, 16), np.float64(2))
    assert {kind: layers.tolist() for kind, layers in alive.items()} == {"dense": [8, 8, 8, 4]}


def test_ranks_know_their_chunks_and_their_dense_layers():
    ranks = all_ranks((3, 2, 1, 2), 2, 4)  # stages 0 and 2 on rank 0, 1 and 3 on rank 1
    assert ranks.dense.tolist() == [3, 1]
    assert ranks.moe.tolist() == [1, 3]
    assert (ranks.first.tolist(), ranks.last.tolist()) == ([1, 0], [0, 1])


def test_few_ranks_decide_for_all(mixture, layout):
    rng = np.random.default_rng(0)
    layouts = []
    for pp, vpp in [(1, 1), (4, 1), (8, 1), (2, 4), (4, 2), (16, 1)]:
        for _ in range(4):
            cuts = np.sort(rng.choice(np.arange(1, 16), pp * vpp - 1, replace=False))
            split = tuple(np.diff([0, *cuts, 16]).tolist())
            layouts.append(layout(mixture, pp=pp, vpp=vpp, m=pp * 2, layers_per_stage=split))
    table = LayoutTable.of(layouts)
    deciding, _ = critical_ranks(mixture, table)
    names = [field.name for field in fields(Ranks) if field.name != "count"]
    for row, each in enumerate(layouts):
        every = all_ranks(each.layers_per_stage, each.pipeline_parallel, mixture.dense_layers)
        row_ranks = deciding.each(itemgetter(row))
        assert deciding.count[row].sum() == each.pipeline_parallel
        assert (deciding.count[row] @ deciding.dense[row]) == mixture.dense_layers
        assert (deciding.count[row] @ deciding.layers[row]) == mixture.layers
        for _ in range(20):
            weights = rng.random(len(names))
            best = sum(w * getattr(every, name) for w, name in zip(weights, names, strict=True)).max()
            kept = sum(w * getattr(row_ranks, name) for w, name in zip(weights, names, strict=True)).max()
            assert kept == pytest.approx(best)


def test_equal_stages_have_the_bubble_of_the_textbook():
    seconds, count = np.full((2, 1), 3.0), np.array([[8.0], [8.0]])
    assert bubble_seconds(seconds, count, np.array([1.0, 4.0])).tolist() == [21.0, 5.25]


def test_an_equal_pipeline_takes_as_long_as_when_played_out():
    """(m + pp - 1) (f + b) for 1F1B with equal stages, from its dependencies alone."""
    pp, m, f, b = 4, 8, 1.0, 2.0
    done: dict[Any, Any] = {}
    orders = []
    for rank in range(pp):
        warm_up = pp - rank - 1
        order = [("f", i) for i in range(warm_up)]
        for i in range(m - warm_up):
            order += [("f", warm_up + i), ("b", i)]
        orders.append(order + [("b", i) for i in range(m - warm_up, m)])
    clock, position = [0.0] * pp, [0] * pp
    while any(position[rank] < len(orders[rank]) for rank in range(pp)):
        for rank in range(pp):
            if position[rank] == len(orders[rank]):
                continue
            kind, i = orders[rank][position[rank]]
            before = (kind, i, rank - 1) if kind == "f" else (kind, i, rank + 1)
            if kind == "b" and rank == pp - 1:
                before = ("f", i, rank)
            if 0 <= before[2] < pp and before not in done:
                continue
            clock[rank] = max(clock[rank], done.get(before, 0.0)) + (f if kind == "f" else b)
            done[(kind, i, rank)] = clock[rank]
            position[rank] += 1
    bubble = bubble_seconds(np.array([[f + b]]), np.array([[float(pp)]]), np.ones(1))[0]
    assert max(clock) == pytest.approx(m * (f + b) + bubble)


def test_sequence_parallel_stages_send_their_part(gpt, cluster, layout, engine):
    table = LayoutTable.of([layout(gpt, tp=4, sp=sp, pp=4, m=8) for sp in (False, True)])
    whole, part = message_seconds(
        gpt, cluster(16), engine("megatron", network_scatters_messages=False), table
    )
    latency = 5e-6
    assert whole - latency == pytest.approx(4 * (part - latency))
    # Megatron-LM's tensor-parallel ranks send a part each without it, too.
    scattered, same = message_seconds(gpt, cluster(16), engine("megatron"), table)
    assert scattered == same == part


def test_layers_add_up_where_only_some_kinds_have_any(cluster, engine):
    """Block recomputation of the first layer, a dense one, of a mixture of experts recomputes no experts."""
    deepseek = load_model("deepseek-v2-lite")
    split = even_split(deepseek.layers, 1)
    block: dict[str, Any] = {"recompute": "full", "recompute_method": "block", "recompute_num_layers": 1}
    layouts = [
        Layout(data_parallel=8, layers_per_stage=split, global_batch_size=batch, **block) for batch in (8, 16)
    ]
    table = LayoutTable.of(layouts)
    for layers in critical_ranks(deepseek, table)[0].layers:
        assert layers.tolist() == [deepseek.layers]
    prices = price(deepseek, cluster(8), engine("bundled"), table)
    for row, one in enumerate(layouts):
        alone = price(deepseek, cluster(8), engine("bundled"), LayoutTable.of([one]))
        assert prices.step_time_s[row] == pytest.approx(alone.step_time_s[0])

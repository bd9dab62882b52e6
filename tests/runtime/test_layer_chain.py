"""Compiled layers that run as chains compute what they compute one by one."""

from __future__ import annotations

import shutil

import pytest

from tests.support.layouts import parse_layout
from tests.support.models import llama
from tests.support.ranks.chains import Both, chained_and_apart
from tests.support.worker_pool import WorkerPool

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")

SPEC = llama("llama-5", layers=5, hidden=32, heads=4, ffn=64, vocab=64, seq=16)

CHAINED = 4 * 2 - 3
"""Micro batches of two steps, less the most that find out how layers are compiled and that they are alike."""


def both(pool: WorkerPool, text: str, other_tables: int | None = None) -> Both:
    layout = parse_layout(f"mbs=1,{text}", SPEC)
    layout = layout.model_copy(update={"global_batch_size": 4 * layout.data_parallel})
    return pool.run(chained_and_apart, layout.world_size, SPEC, layout, other_tables)[-1]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "precision=bf16",
        "dp=2,precision=bf16",
        pytest.param("dp=2", marks=pytest.mark.slow),
        pytest.param("pp=2,layers_per_stage=2;3,precision=bf16", marks=pytest.mark.slow),
        pytest.param("tp=2,sp=1,recompute=full,precision=bf16", marks=pytest.mark.slow),
        pytest.param("tp=2", marks=pytest.mark.slow),
        pytest.param("cp=2,precision=bf16", marks=pytest.mark.slow),
    ],
)
def test_chains_train_as_layers_do_one_by_one(pool: WorkerPool, text: str) -> None:
    found = both(pool, text)
    assert found.chained.losses == found.apart.losses
    assert found.chained.norms == found.apart.norms
    for name, weight in found.apart.weights.items():
        assert (found.chained.weights[name] == weight).all(), name
    assert found.runs >= CHAINED


def test_only_layers_of_one_kind_are_chained(pool: WorkerPool) -> None:
    found = both(pool, "recompute=full,recompute_method=block,recompute_num_layers=2")
    assert found.chained.losses == found.apart.losses
    assert found.runs >= 2 * CHAINED


def test_layers_that_are_given_other_tables_are_called_one_by_one(pool: WorkerPool) -> None:
    found = both(pool, "", other_tables=3)
    assert found.chained.losses == found.apart.losses != both(pool, "").apart.losses
    assert found.runs == 0

"""Compiled layers that run as chains compute what they compute one by one."""

from __future__ import annotations

import shutil
from functools import cache

import pytest

from costmodels import ModelSpec, Router
from tests.support.layouts import parse_layout
from tests.support.models import llama
from tests.support.ranks.chains import Both, chained_and_apart, compiled_and_eager
from tests.support.worker_pool import WorkerPool

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")

SPEC = llama("llama-5", layers=5, hidden=32, heads=4, ffn=64, vocab=64, seq=16)

CHAINED = 4 * 2 - 3
"""Microbatches of two steps, less the most that find out how layers are compiled and that they are alike."""


EXPERTS = SPEC.model_copy(update={"layers": 4, "experts": 4, "top_k": 2, "expert_ffn": 32})

SHARED = EXPERTS.model_copy(
    update={
        "shared_expert_ffn": 32,
        "shared_expert_gate": True,
        "router": Router(score="sigmoid", scale=2.5, expert_bias=True),
    }
)


WITH_KERNELS = (
    "tp=2,sp=1,recompute=full,precision=bf16",
    "recompute=full,precision=bf16",
)
"""Layouts whose layers are compiled to kernels, those of others to the same functions of single operators."""


@cache
def both(pool: WorkerPool, text: str, other_tables: int | None = None, spec: ModelSpec = SPEC) -> Both:
    layout = parse_layout(f"mbs=1,{text}", spec)
    layout = layout.model_copy(update={"global_batch_size": 4 * layout.data_parallel})
    backend = "inductor" if text in WITH_KERNELS else "aot_eager"
    return pool.run(chained_and_apart, layout.world_size, spec, layout, other_tables, backend)[-1]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "precision=bf16",
        "dp=2,precision=bf16",
        "precision=fp8,fp8_recipe=tensorwise",
        pytest.param("pp=2,layers_per_stage=2;3,precision=bf16", marks=pytest.mark.slow),
        pytest.param("tp=2,sp=1,recompute=full,precision=bf16", marks=pytest.mark.slow),
        pytest.param("cp=2,precision=bf16", marks=pytest.mark.slow),
    ],
)
def test_chains_train_as_layers_do_one_by_one(pool: WorkerPool, text: str) -> None:
    if "fp8" in text:
        pytest.importorskip("torchao")
    found = both(pool, text)
    assert found.chained.losses == found.apart.losses
    assert found.chained.norms == found.apart.norms
    for name, weight in found.apart.weights.items():
        assert (found.chained.weights[name] == weight).all(), name
    assert found.runs >= CHAINED


SELECTIVE = "recompute=selective,recompute_modules="


@pytest.mark.oldest
@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (EXPERTS, ""),
        (SHARED, "recompute=full"),
        pytest.param(EXPERTS, SELECTIVE + "norm;activation", marks=pytest.mark.slow),
        pytest.param(SHARED, SELECTIVE + "core_attention;mlp", marks=pytest.mark.slow),
        pytest.param(EXPERTS, "tp=2,etp=2,recompute=full", marks=pytest.mark.slow),
        pytest.param(EXPERTS, "pp=2,dp=2", marks=pytest.mark.slow),
    ],
)
def test_chains_of_experts_train_as_layers_do_one_by_one(
    pool: WorkerPool, spec: ModelSpec, text: str
) -> None:
    """Losses of routers, z losses, and the biases that follow what was counted are the same."""
    found = both(pool, f"{text},precision=bf16" if text else "precision=bf16", spec=spec)
    assert found.chained.losses == found.apart.losses
    assert found.chained.norms == found.apart.norms
    for name, weight in found.apart.weights.items():
        assert (found.chained.weights[name] == weight).all(), name
    assert found.loads[0] == found.loads[1]
    assert found.totals[0] == pytest.approx(found.totals[1], rel=1e-12)
    assert found.totals[0][0] > 0
    assert found.totals[0][1] > 0
    assert found.runs >= CHAINED


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (EXPERTS, "ep=2"),
        (EXPERTS, "dp=2,zero=1"),
        (EXPERTS, "cp=2,cp_form=ring,recompute=full"),
        (EXPERTS, "recompute=full,recompute_method=uniform,recompute_num_layers=2"),
        (EXPERTS.model_copy(update={"router": Router(capacity_factor=1.0)}), ""),
    ],
)
def test_experts_that_are_not_one_graph_are_not_chained(pool: WorkerPool, spec: ModelSpec, text: str) -> None:
    found = both(pool, f"{text},precision=bf16" if text else "precision=bf16", spec=spec)
    assert found.chained.losses == found.apart.losses
    assert found.loads[0] == found.loads[1]
    assert found.runs == 0


@pytest.mark.oldest
@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "recompute=full", "tp=2,sp=1"])
def test_whole_layers_with_experts_count_and_train_as_eager_ones(pool: WorkerPool, text: str) -> None:
    layout = parse_layout(f"mbs=1,gbs=4,{text}" if text else "mbs=1,gbs=4", SHARED)
    backend = "inductor" if layout.tensor_parallel > 1 else "aot_eager"
    for compiled, eager in pool.run(compiled_and_eager, layout.world_size, SHARED, layout, backend):
        assert compiled.loads == eager.loads
        assert compiled.training.losses == pytest.approx(eager.training.losses, rel=1e-6)
        assert compiled.training.norms == pytest.approx(eager.training.norms, rel=1e-5)
        assert compiled.totals == pytest.approx(eager.totals, rel=1e-5)


def test_only_layers_of_one_kind_are_chained(pool: WorkerPool) -> None:
    found = both(pool, "recompute=full,recompute_method=block,recompute_num_layers=2")
    assert found.chained.losses == found.apart.losses
    assert found.runs >= 2 * CHAINED


def test_layers_that_are_given_other_tables_are_called_one_by_one(pool: WorkerPool) -> None:
    found = both(pool, "", other_tables=3)
    assert found.chained.losses == found.apart.losses != both(pool, "").apart.losses
    assert found.runs == 0

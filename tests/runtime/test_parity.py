"""No layout changes the mathematics: every one gives the losses of one rank."""

from __future__ import annotations

import math
import shutil

import pytest

from costmodels import ModelSpec
from runtime.settings.checks import check_job
from tests.support.layouts import deep_enough, parse_layout
from tests.support.models import DENSE, MODELS
from tests.support.ranks.parity import difference, losses_of, relative_difference, trained
from tests.support.ranks.planted_faults import FAULTS, wrongly_trained
from tests.support.worker_pool import WorkerPool

STEPS = 5
BATCH = "gbs=4,"
LAYOUTS = (
    "tp=2",
    "tp=2,sp=1",
    "pp=2",
    "pp=3",
    "pp=3,layers_per_stage=1;1;2",
    "pp=2,vpp=2",
    "pp=2,schedule=interleaved_zb",
    "pp=2,schedule=zbv",
    "pp=2,schedule=dualpipev",
    "cp=2,cp_form=all_gather",
    "cp=2,cp_form=all_to_all",
    "cp=2,cp_form=ring",
    "dp=2",
    "dp=4",
    "dp=2,zero=1",
    "dp=2,zero=2,mbs=2",
    "dp=2,zero=3",
    "dp=4,zero=1,zero_replicas=2",
    "dp=4,zero=3,zero_replicas=2",
    "mbs=2,recompute=selective",
    "mbs=2,recompute=selective,recompute_modules=mlp",
    "mbs=2,recompute=selective,recompute_modules=norm",
    "mbs=2,recompute=selective,recompute_modules=activation",
    "mbs=2,recompute=selective,recompute_method=block,recompute_num_layers=1",
    "mbs=2,recompute=full",
    "mbs=2,recompute=full,recompute_num_layers=2",
    "mbs=2,recompute=full,recompute_method=block,recompute_num_layers=3",
    "mbs=2,offload_activations=1",
    "dp=2,zero=1,offload_optimizer=1",
    "tp=2,sp=1,pp=2,vpp=2,recompute=full",
)
"""Every kind of parallelism and of saving memory, mostly alone; mixtures are in `test_parity_mixed`."""


@pytest.fixture(scope="module", params=DENSE)
def model(request: pytest.FixtureRequest) -> ModelSpec:
    return MODELS[request.param]


@pytest.fixture(scope="module")
def reference(pool: WorkerPool, model: ModelSpec) -> list[float]:
    return pool.run(losses_of, 1, model, parse_layout(BATCH, model), STEPS)[0]


@pytest.mark.parametrize(
    ("text", "layers", "ranks", "batch"),
    [
        ("tp=2,cp=2,schedule=interleaved,vpp=2,recompute=selective", 4, 8, 8),
        ("pp=4,schedule=dualpipev,dp=2,mbs=2", 8, 8, 32),
        ("pp=3,vpp=2", 6, 3, 9),
        ("dp=3", 4, 3, 9),
        ("gbs=16,dp=4", 4, 4, 16),
    ],
)
def test_what_a_layout_leaves_out_is_chosen_so_that_it_runs(
    text: str, layers: int, ranks: int, batch: int
) -> None:
    spec = deep_enough(text, MODELS["llama"])
    layout = parse_layout(text, spec)
    assert (spec.layers, layout.world_size, layout.global_batch_size) == (layers, ranks, batch)
    check_job(spec, layout, ranks)


def test_the_first_loss_is_that_of_a_uniform_guess(reference: list[float]) -> None:
    assert reference[0] == pytest.approx(math.log(250), rel=0.01)
    assert len(set(reference)) == STEPS


@pytest.mark.parametrize("text", LAYOUTS)
def test_layout_gives_the_losses_of_one_rank(
    pool: WorkerPool, model: ModelSpec, reference: list[float], text: str
) -> None:
    layout = parse_layout(BATCH + text, model)
    by_rank = pool.run(losses_of, layout.world_size, model, layout, STEPS)
    assert relative_difference(by_rank[0], reference) < 1e-5
    assert all(losses == by_rank[0] for losses in by_rank)


def test_tensor_parallelism_beyond_the_key_value_heads(pool: WorkerPool) -> None:
    spec = MODELS["llama"].model_copy(update={"kv_heads": 2})
    layout = parse_layout(BATCH + "tp=4", spec)
    [expected] = pool.run(losses_of, 1, spec, parse_layout(BATCH, spec), STEPS)
    assert relative_difference(pool.run(losses_of, 4, spec, layout, STEPS)[0], expected) < 1e-5


@pytest.mark.oldest
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_layers_give_the_same_losses(
    pool: WorkerPool, model: ModelSpec, reference: list[float]
) -> None:
    layout = parse_layout(BATCH + "dp=2,zero=1,recompute=selective,recompute_modules=norm", model)
    # A C++ compiler takes most of the time: one of the models has the same functions of single operators.
    backend = "inductor" if model.gated else "aot_eager"
    losses = pool.run(losses_of, 2, model, layout, STEPS, True, backend)[0]
    assert relative_difference(losses, reference) < 1e-5


def test_layers_compiled_around_a_ring_give_the_same_losses(pool: WorkerPool) -> None:
    spec = MODELS["llama"]
    layout = parse_layout(BATCH + "cp=2,cp_form=ring,recompute=full", spec)
    [expected] = pool.run(losses_of, 1, spec, parse_layout(BATCH, spec), STEPS)
    # Graphs end at the ring, whoever compiles their parts.
    losses = pool.run(losses_of, 2, spec, layout, STEPS, True, "aot_eager")[0]
    assert relative_difference(losses, expected) < 1e-5


def test_bf16_follows_fp32(pool: WorkerPool, model: ModelSpec, reference: list[float]) -> None:
    layout = parse_layout(BATCH + "dp=2,zero=1,precision=bf16", model)
    losses = pool.run(losses_of, 2, model, layout, STEPS)[0]
    assert 1e-6 < relative_difference(losses, reference) < 2e-2


def test_the_comparison_of_layouts_finds_planted_faults_and_no_others(pool: WorkerPool) -> None:
    spec, steps = MODELS["gpt2"], 8
    [alone] = pool.run(trained, 1, spec, parse_layout(BATCH, spec), steps)
    layouts = {name: parse_layout(BATCH + name, spec) for name in ("dp=2,zero=1", "tp=2,sp=1")}
    for layout in layouts.values():
        assert difference(pool.run(trained, 2, spec, layout, steps), alone).largest < 1e-5
    for fault in FAULTS:
        layout = layouts["tp=2,sp=1" if "norms not summed" in fault else "dp=2,zero=1"]
        found = difference(pool.run(wrongly_trained, 2, fault, spec, layout, steps), alone)
        assert found.largest > 1e-4, fault
        assert found.weights > 1e-4 or found.norms > 1e-4, fault

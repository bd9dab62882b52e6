"""Mixtures of experts train like one rank, however their experts and tokens are spread."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from costmodels import ModelSpec, Router
from tests.support.gradients import check_gradients
from tests.support.layouts import parse_layout
from tests.support.models import LLAMA, MODELS
from tests.support.ranks import experts as work
from tests.support.worker_pool import WorkerPool

STEPS = 3

BIASED = MODELS["gpt2"].model_copy(
    update={"name": "gpt2-experts", "layers": 2, "experts": 6, "top_k": 2, "expert_ffn": 20}
)
"""Experts with biases and without gates; more or less than two ranks can share evenly."""

ONE_SIDED = LLAMA.model_copy(
    update={
        "name": "one-sided",
        "layers": 2,
        "experts": 4,
        "top_k": 1,
        "expert_ffn": 32,
        "router": Router(score="sigmoid", normalised=False, expert_bias=True),
    }
)
"""A model whose biases can send all tokens to the same expert."""

ALL = MODELS | {"biased": BIASED, "one-sided": ONE_SIDED}

Reference = Callable[..., work.Run]


@pytest.fixture(scope="module")
def reference(pool: WorkerPool) -> Reference:
    """Results of one rank, by model, batch and options."""
    known: dict[str, work.Run] = {}

    def run(spec: ModelSpec, batch: str, steps: int, options: dict[str, Any], *rest: Any) -> work.Run:
        key = str((spec, batch, steps, options, rest))
        if key not in known:
            known[key] = pool.run(work.trained, 1, spec, parse_layout(batch, spec), steps, options, *rest)[0]
        return known[key]

    return run


def assert_like_one_rank(
    pool: WorkerPool,
    reference: Reference,
    spec: ModelSpec,
    text: str,
    bias: list[float] | None = None,
    steps: int = STEPS,
    options: dict[str, Any] | None = None,
    backend: str = "inductor",
) -> list[work.Run]:
    layout = parse_layout(text, spec)
    batch = f"gbs={layout.global_batch_size},mbs={layout.micro_batch_size}"
    given = options or {}
    alone = reference(spec, batch, steps, {**given, "compile": False}, bias)
    ranks = pool.run(work.trained, layout.world_size, spec, layout, steps, given, bias, backend)
    for rank in ranks:
        assert rank.losses == ranks[0].losses
        assert rank.losses == pytest.approx(alone.losses, rel=1e-5)
        assert rank.norm == pytest.approx(alone.norm, rel=1e-5)
        check_gradients(spec, rank.gradients, alone.gradients)
        assert rank.biases.items() <= alone.biases.items()
        assert list(rank.load.shares) == list(alone.load.shares)
        for layer, shares in alone.load.shares.items():
            assert rank.load.shares[layer] == pytest.approx(shares)
        assert rank.load.balancing_loss == pytest.approx(alone.load.balancing_loss, rel=1e-5)
        assert rank.load.z_loss == pytest.approx(alone.load.z_loss, rel=1e-4)
        assert rank.load.dropped == pytest.approx(alone.load.dropped)
    assert set(alone.gradients) <= {name for rank in ranks for name in rank.gradients}
    return ranks


CASES = (
    ("mixtral", "dp=2"),
    ("mixtral", "ep=2"),
    ("mixtral", "ep=4"),
    ("mixtral", "ep=2,tp=2"),
    ("mixtral", "etp=2,mbs=2"),
    ("mixtral", "ep=2,etp=2,dp=4,zero=3"),
    ("mixtral", "ep=2,recompute=selective,recompute_modules=norm;activation,zero=1"),
    ("mixtral", "tp=2,dp=2,zero=1"),
    ("mixtral", "ep=2,pp=2,schedule=zbv,recompute=full"),
    ("qwen", "tp=2"),
    ("qwen", "ep=2,tp=2,sp=1"),
    ("qwen", "ep=2,pp=2"),
    ("qwen", "ep=2,cp=2,cp_form=all_to_all"),
    ("qwen", "etp=2,tp=2,sp=1"),
    ("qwen", "ep=2,dp=4,zero=2,zero_replicas=2"),
    ("qwen", "dp=4,zero=3,zero_replicas=2"),
    ("qwen", "ep=2,pp=2,schedule=interleaved_zb"),
    ("qwen", "ep=2,recompute=selective,recompute_modules=mlp"),
    ("deepseek", "ep=2,tp=2,sp=1,recompute=selective,recompute_modules=norm;activation"),
    ("deepseek", "ep=2,cp=2,cp_form=all_gather"),
    ("deepseek", "ep=2,cp=2,cp_form=ring"),
    ("deepseek", "ep=2,dp=4,zero=3,recompute=full"),
    ("deepseek", "ep=2,pp=2,schedule=zbv,mbs=2,gbs=16"),
    ("deepseek", "ep=2,pp=2,schedule=dualpipev"),
    ("deepseek", "ep=2,offload_activations=1,offload_optimizer=1,zero=1"),
    ("mixtral", "ep=2,expert_halves=1,zero=1"),
    ("mixtral", "ep=2,etp=2,expert_halves=1"),
    ("qwen", "ep=2,pp=2,schedule=zbv,expert_halves=1"),
    ("deepseek", "ep=2,tp=2,sp=1,recompute=full,expert_halves=1"),
)


@pytest.mark.parametrize(("name", "text"), CASES, ids=[f"{name} {text}" for name, text in CASES])
def test_layouts_train_like_one_rank(pool: WorkerPool, reference: Reference, name: str, text: str) -> None:
    spec = MODELS[name]
    if "pp=" not in text:
        # A pipeline takes four layers and eight sequences; elsewhere fewer are as good, and quicker.
        spec, text = spec.model_copy(update={"layers": 2}), f"gbs=4,{text}"
    assert_like_one_rank(pool, reference, spec, text)


@pytest.mark.parametrize(
    "text",
    ["etp=2", "ep=2,etp=2,tp=2,dp=2", "ep=2,dp=4,zero=3", "ep=2,dp=6,zero=3,gbs=12"],
)
def test_experts_with_biases(pool: WorkerPool, reference: Reference, text: str) -> None:
    """Three experts on each of two ranks; two or three ranks that share what they cannot share evenly."""
    assert_like_one_rank(pool, reference, BIASED, text, steps=3)


@pytest.mark.parametrize("text", ["dp=3,zero=1,gbs=6", "dp=3,zero=3,gbs=6", "ep=2,dp=6,zero=2,gbs=6"])
def test_shards_of_no_even_size(pool: WorkerPool, reference: Reference, text: str) -> None:
    spec = BIASED.model_copy(update={"experts": 4})
    assert_like_one_rank(pool, reference, spec, text, steps=3)


@pytest.mark.parametrize(
    "text",
    [
        "ep=2",
        "ep=2,etp=2,zero=1,expert_halves=1",
        "ep=2,dp=4,zero=3",
        "ep=2,pp=2,schedule=zbv,recompute=full,layers_per_stage=1;1;1;1",
    ],
)
def test_ranks_without_rows(pool: WorkerPool, reference: Reference, text: str) -> None:
    """All tokens choose the first expert; forward and backward of the others' ranks meet theirs."""
    spec = ONE_SIDED.model_copy(update={"layers": 4}) if "pp" in text else ONE_SIDED
    off = {"moe_router_bias_update_rate": 0.0}
    ranks = assert_like_one_rank(pool, reference, spec, text, [9.0, 0.0, 0.0, 0.0], 3, off)
    assert list(ranks[0].load.shares.values()) == [[4.0, 0.0, 0.0, 0.0]] * spec.layers


def test_a_half_travels_while_experts_compute_the_other(pool: WorkerPool) -> None:
    """The next half, or the results of the one before, are on their way whenever experts compute."""
    spec = MODELS["deepseek"].model_copy(update={"layers": 2, "dense_layers": 0})
    for text, travelling in (("ep=2", [0]), ("ep=2,expert_halves=1", [1, 1])):
        layout = parse_layout(f"gbs=2,mbs=1,{text}", spec)
        forward, backward = pool.run(work.travelling_beside_experts, 2, spec, layout)[0]
        assert forward == backward == travelling * spec.layers


LIMITED = (
    (0.5, "ep=2,expert_halves=1"),
    (0.5, "cp=2"),
    (0.5, "tp=2"),
    (0.5, "ep=2,tp=2,cp=2"),
    (1.0, "cp=2,cp_form=all_to_all,mbs=2"),
    (1.0, "pp=2"),
    (1.25, "tp=2,sp=1"),
    (1.25, "etp=2"),
)


@pytest.mark.parametrize(("factor", "text"), LIMITED)
def test_a_limited_capacity_drops_the_same_pairs(
    pool: WorkerPool, reference: Reference, factor: float, text: str
) -> None:
    spec = MODELS["mixtral"].model_copy(update={"layers": 2, "router": Router(capacity_factor=factor)})
    [run, *_] = assert_like_one_rank(pool, reference, spec, "gbs=4," + text, steps=3)
    assert run.load.dropped > 0


@pytest.mark.parametrize("text", ["ep=2", "cp=2", "cp=2,cp_form=all_to_all", "cp=2,cp_form=ring,tp=2"])
def test_of_equal_weights_the_earlier_positions_stay(
    pool: WorkerPool, reference: Reference, text: str
) -> None:
    """The only weight of a token is 1, wherever its rank holds it."""
    spec = MODELS["mixtral"].model_copy(
        update={"layers": 2, "top_k": 1, "router": Router(capacity_factor=0.5)}
    )
    assert_like_one_rank(pool, reference, spec, "gbs=4," + text, steps=3)


def test_ranks_keep_their_share_of_the_experts(pool: WorkerPool) -> None:
    spec = BIASED
    whole = {"up": (6, 20, 64), "down": (6, 64, 20), "up_bias": (6, 20), "down_bias": (6, 64)}
    folded = {"up": (3, 10, 64), "down": (3, 64, 10), "up_bias": (3, 10), "down_bias": (3, 64)}
    sharded = {"up": (3, 10, 64), "down": (3, 32, 20), "up_bias": (3, 10), "down_bias": (3, 32)}
    shares = {
        "dp=2": whole,
        "ep=2": {name: (3, *shape[1:]) for name, shape in whole.items()},
        "etp=2": {"up": (6, 10, 64), "down": (6, 64, 10), "up_bias": (6, 10), "down_bias": (6, 64)},
        "ep=2,etp=2": folded,
        "dp=2,zero=3": {name: (3, *shape[1:]) for name, shape in whole.items()},
        "tp=2,dp=3,zero=1": {name: (1, *shape[1:]) for name, shape in whole.items()},
        "ep=2,dp=4,zero=3": sharded,
    }
    for text, expected in shares.items():
        layout = parse_layout(text, spec)
        assert pool.run(work.expert_shapes, layout.world_size, spec, layout) == [expected] * layout.world_size


@pytest.mark.parametrize("name", ["deepseek", "biased"])
def test_a_job_goes_on_under_another_layout(pool: WorkerPool, tmp_path: Path, name: str) -> None:
    spec = ALL[name]
    texts = ("ep=2", "etp=2,tp=2", "dp=2,zero=3", "ep=2,zero=1")
    layouts = [parse_layout(f"gbs=4,{text}", spec) for text in texts]
    losses = pool.run(work.moved, 2, spec, layouts, str(tmp_path / "moved"), 3)
    alone = parse_layout("gbs=4", spec)
    [expected] = pool.run(work.moved, 1, spec, [alone] * len(layouts), str(tmp_path / "alone"), 3)
    assert losses[0] == losses[1] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("text", ["ep=2,tp=2,sp=1,precision=bf16", "ep=2,dp=4,zero=3,precision=bf16"])
def test_bf16_follows_fp32(pool: WorkerPool, reference: Reference, text: str) -> None:
    spec = MODELS["qwen"].model_copy(update={"layers": 2})
    layout = parse_layout(f"gbs=4,{text}", spec)
    expected = reference(spec, "gbs=4,mbs=1", 5, {"compile": False}, None).losses
    losses = pool.run(work.trained, layout.world_size, spec, layout, 5, {})[0].losses
    assert losses != expected
    assert losses == pytest.approx(expected, rel=2e-2)


@pytest.mark.oldest
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize(
    ("text", "backend"),
    [
        ("ep=2,recompute=full", "inductor"),
        # The same functions of single operators: a C++ compiler would take most of the time.
        ("tp=2,recompute=selective,recompute_modules=mlp", "aot_eager"),
        ("ep=2,recompute=selective,recompute_modules=norm;activation", "aot_eager"),
    ],
)
def test_compiled_layers(pool: WorkerPool, reference: Reference, text: str, backend: str) -> None:
    spec = MODELS["mixtral"].model_copy(update={"layers": 2})
    assert_like_one_rank(pool, reference, spec, text, steps=2, options={"compile": True}, backend=backend)

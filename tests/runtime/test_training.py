"""Layers, gradients, initial weights and checkpoints under several layouts."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest
import torch

from costmodels import ModelSpec
from runtime.settings.training_options import TrainingOptions
from runtime.train.trainer import batch_rows
from tests.support.layouts import parse_layout
from tests.support.models import KINDS, LLAMA, MODELS
from tests.support.ranks import schedules
from tests.support.ranks import training as work
from tests.support.worker_pool import WorkerPool

DEEP = ModelSpec(name="deep", layers=30, hidden=16, heads=2, vocab=100, seq=16)
"""The depth of which Megatron-LM silently built 28 layers on four stages."""


@pytest.mark.parametrize("text", ["pp=4", "pp=2,vpp=4"])
def test_every_layer_trains_when_the_pipeline_does_not_divide_them(pool: WorkerPool, text: str) -> None:
    layout = parse_layout(text, DEEP)
    assert len(set(layout.layers_per_stage)) == 2
    by_rank = pool.run(work.trained_layers, layout.world_size, DEEP, layout)
    changed = {name: moved for part in by_rank for name, moved in part.items()}
    layers = {int(name.split(".")[1]) for name in changed if name.startswith("layers.")}
    assert layers == set(range(30))
    # A softmax ignores what every key adds to it, so a key bias has no gradient but rounding.
    assert all(moved for name, moved in changed.items() if not name.endswith("key.bias"))


@pytest.mark.parametrize("model", KINDS)
@pytest.mark.parametrize(
    "text", ["tp=2,sp=1,pp=2,gbs=4", "dp=2,zero=3,tp=2,gbs=4", "pp=2,vpp=2,dp=2,zero=1,gbs=4"]
)
def test_gradients_and_their_norm_are_those_of_one_rank(pool: WorkerPool, model: str, text: str) -> None:
    spec = MODELS[model]
    layout = parse_layout(text, spec)
    [(norm, expected)] = pool.run(work.whole_gradients, 1, spec, parse_layout("gbs=4", spec))
    assert norm == pytest.approx(sum(float(g.square().sum()) for g in expected.values()) ** 0.5, rel=1e-5)
    for other_norm, gradients in pool.run(work.whole_gradients, layout.world_size, spec, layout):
        assert other_norm == pytest.approx(norm, rel=1e-5)
        for name, gradient in gradients.items():
            whole = expected["embedding.tokens.weight" if name == "head.weight" and spec.tied else name]
            assert torch.allclose(gradient, whole, rtol=1e-4, atol=1e-7), name


def test_an_evaluation_is_the_mean_loss_also_where_the_sum_is_optimised(pool: WorkerPool) -> None:
    spec = MODELS["gpt2"]
    options = TrainingOptions(train_iters=1, lr=0.0, loss_reduction="sum")
    [(losses, valid)] = pool.run(work.losses_of_sizes, 1, spec, parse_layout("gbs=4", spec), options, [4])
    assert losses == pytest.approx(valid, rel=1e-6)


def test_initial_weights_do_not_depend_on_the_layout(pool: WorkerPool) -> None:
    spec = MODELS["gpt2"]
    [whole] = pool.run(work.initial_weights, 1, spec, parse_layout("gbs=4", spec))
    parts = pool.run(work.initial_weights, 4, spec, parse_layout("tp=2,dp=2,zero=1", spec))
    up = [part["layers.1.mlp.up.weight"] for part in parts]
    # Tensor parallelism splits the rows first, then data parallelism splits each half.
    assert torch.equal(torch.cat([up[0], up[2], up[1], up[3]]), whole["layers.1.mlp.up.weight"])
    assert not torch.equal(whole["layers.1.mlp.up.weight"], whole["layers.2.mlp.up.weight"])
    table = whole["embedding.tokens.weight"]
    assert table.shape[0] == 256
    assert table[: spec.vocab].abs().min(dim=1).values.max() > 0
    assert not table[spec.vocab :].any()


@pytest.mark.parametrize("model", KINDS)
@pytest.mark.parametrize("text", ["tp=2,pp=2", "dp=2,zero=1,tp=2", "pp=2,vpp=2,dp=2", "dp=2,zero=3"])
def test_resuming_repeats_the_losses_to_the_bit(
    pool: WorkerPool, tmp_path: Path, model: str, text: str
) -> None:
    spec = MODELS[model]
    layout = parse_layout("gbs=4," + text, spec)
    results = pool.run(work.resumed_losses, layout.world_size, spec, layout, layout, str(tmp_path), 4, 2)
    for losses, resumed in results:
        assert resumed == losses[2:]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("tp=2,pp=2", "dp=4,zero=1"),
        ("dp=4,zero=3", "pp=4"),
        ("pp=2,dp=2", "tp=4,sp=1"),
        ("cp=2,cp_form=ring,dp=2,zero=1,zero_replicas=2", "pp=2,schedule=zbv,tp=2"),
        ("pp=2,schedule=dualpipev,tp=2", "dp=2,zero=3,offload_optimizer=1,cp=2,cp_form=all_to_all"),
    ],
)
def test_a_checkpoint_loads_under_another_layout(
    pool: WorkerPool, tmp_path: Path, before: str, after: str
) -> None:
    spec = MODELS["gpt2"]
    layouts = [parse_layout("gbs=4," + text, spec) for text in (before, after)]
    [(losses, resumed), *_] = pool.run(work.resumed_losses, 4, spec, *layouts, str(tmp_path), 4, 2)
    assert resumed == pytest.approx(losses[2:], rel=1e-5)


def test_a_checkpoint_of_another_model_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    spec = MODELS["gpt2"]
    other = spec.model_copy(update={"hidden": 32, "head_dim": 8})
    [message] = pool.run(work.load_other_model, 1, spec, other, parse_layout("gbs=4", spec), str(tmp_path))
    assert "another model" in message
    assert "hidden 64" in message


@pytest.mark.parametrize(("zero", "reductions"), [(0, 1), (1, 1), (2, 1), (3, 2)])
def test_gradients_travel_after_the_last_micro_batch_unless_they_are_sharded_with_parameters(
    pool: WorkerPool, zero: int, reductions: int
) -> None:
    spec = MODELS["llama"]
    layout = parse_layout(f"dp=2,zero={zero},mbs=2", spec)
    assert layout.micro_batches == 2
    for events in pool.run(schedules.accumulation_events, 2, spec, layout):
        per_backward = [len(list(group)) for reduce, group in groupby(events, "reduce".__eq__) if reduce]
        # One collective for each layer, and one for embedding and head.
        assert sum(per_backward) == reductions * (spec.layers + 1)
        if zero < 3:
            assert "reduce" not in events[: events.index("forward", 1)]


def test_ranks_take_turns_of_a_micro_batch_in_a_global_batch() -> None:
    """Megatron-LM's order: each micro step consumes the next rows, `micro_batch_size` of every rank."""
    layout = parse_layout("mbs=2,gbs=12,dp=2", LLAMA)
    assert batch_rows(layout, 0).tolist() == [0, 1, 4, 5, 8, 9]
    assert batch_rows(layout, 1).tolist() == [2, 3, 6, 7, 10, 11]
    assert batch_rows(layout, 1, batch=4).tolist() == [2, 3]

"""Every optimizer and schedule goes on from a checkpoint as if nothing had happened, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.settings.training_options import TrainingOptions
from tests.support.layouts import parse_layout
from tests.support.models import MODELS
from tests.support.ranks import optimizers as work
from tests.support.worker_pool import WorkerPool

SPEC = MODELS["llama"].model_copy(update={"layers": 2})

WSD: dict[str, Any] = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 3, "lr_warmup_iters": 1}


@pytest.mark.parametrize("text", ["", "tp=2,dp=2,zero=1", "dp=2,zero=3,precision=bf16,offload_optimizer=1"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd", "adafactor", "muon", "adam8bit", "came"])
def test_resuming_repeats_the_losses_to_the_bit(
    pool: WorkerPool, tmp_path: Path, optimizer: str, text: str
) -> None:
    if optimizer == "adam8bit":
        pytest.importorskip("torchao")
    layout = parse_layout(f"gbs=4,{text},optimizer={optimizer}", SPEC)
    options = TrainingOptions(train_iters=5, lr=1e-2)
    for losses, resumed in pool.run(
        work.resumed_losses, layout.world_size, SPEC, layout, layout, options, str(tmp_path)
    ):
        assert resumed == losses[2:]
        assert len(set(losses)) == 5


@pytest.mark.parametrize(
    "settings",
    [
        *({"lr_decay_style": style, "lr_warmup_iters": 1} for style in ("linear", "inverse-square-root")),
        *({**WSD, "lr_wsd_decay_style": s} for s in ("exponential", "linear", "cosine", "minus_sqrt")),
        {"weight_decay_incr_style": "cosine", "start_weight_decay": 0.1, "end_weight_decay": 0.9},
        {"no_decoupled_weight_decay": True},
        {"loss_reduction": "sum", "clip_grad_value": 0.1},
        {"sgd_momentum": 0.0},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_schedules_go_on_where_they_were(pool: WorkerPool, tmp_path: Path, settings: dict[str, Any]) -> None:
    optimizer = "sgd" if "sgd_momentum" in settings else "adam"
    layout = parse_layout(f"gbs=2,optimizer={optimizer}", SPEC)
    options = TrainingOptions(train_iters=5, lr=1e-2, **settings)
    options.check()
    [(losses, resumed)] = pool.run(work.resumed_losses, 1, SPEC, layout, layout, options, str(tmp_path))
    assert resumed == losses[2:]


@pytest.mark.parametrize("optimizer", ["sgd", "adafactor", "muon", "adam8bit", "came"])
@pytest.mark.parametrize(
    ("before", "after"), [("tp=2,dp=2,zero=1", "pp=2,dp=2,zero=3"), ("dp=4,zero=2", "tp=2,dp=2")]
)
def test_a_checkpoint_loads_under_another_layout(
    pool: WorkerPool, tmp_path: Path, optimizer: str, before: str, after: str
) -> None:
    if optimizer == "adam8bit":
        pytest.importorskip("torchao")
    layouts = [parse_layout(f"gbs=4,{text},optimizer={optimizer}", SPEC) for text in (before, after)]
    options = TrainingOptions(train_iters=5, lr=1e-2)
    [(losses, resumed), *_] = pool.run(work.resumed_losses, 4, SPEC, *layouts, options, str(tmp_path))
    # Blocks of 8 bits follow the shards.
    assert resumed == pytest.approx(losses[2:], rel=2e-3 if optimizer == "adam8bit" else 1e-5)


def test_a_checkpoint_of_experts_loads_under_another_layout(pool: WorkerPool, tmp_path: Path) -> None:
    spec = MODELS["mixtral"]
    options = TrainingOptions(train_iters=4, lr=1e-2)
    for optimizer in ("adafactor", "muon", "came"):
        layouts = [
            parse_layout(f"gbs=4,{text},optimizer={optimizer}", spec)
            for text in ("dp=4,ep=2,zero=1", "tp=2,dp=2,ep=2,etp=2")
        ]
        folder = tmp_path / optimizer
        folder.mkdir()
        [(losses, resumed), *_] = pool.run(work.resumed_losses, 4, spec, *layouts, options, str(folder))
        assert resumed == pytest.approx(losses[2:], rel=1e-5)


def test_another_optimizer_is_refused_in_one_line(pool: WorkerPool, tmp_path: Path) -> None:
    layouts = [parse_layout(f"gbs=2,optimizer={name}", SPEC) for name in ("muon", "sgd")]
    with pytest.raises(RuntimeError) as refused:
        pool.run(work.resumed_losses, 1, SPEC, *layouts, TrainingOptions(train_iters=3), str(tmp_path))
    assert (
        "holds other optimizer state (exp_avg, exp_avg_sq, momentum_buffer) than that of --optimizer sgd; "
        "give the optimizer that it was trained with, or begin with a new one: --no-load-optim"
    ) in str(refused.value)


def test_weights_alone_go_on_with_a_new_optimizer(pool: WorkerPool, tmp_path: Path) -> None:
    layouts = [parse_layout(f"gbs=2,dp=2,optimizer={name}", SPEC) for name in ("adam", "sgd")]
    [(counts, after, resumed, refused), *_] = pool.run(
        work.resumed_weights, 2, SPEC, *layouts, TrainingOptions(train_iters=3), str(tmp_path)
    )
    assert counts == (2, 0) and resumed == pytest.approx(after, rel=1e-6)
    assert "holds other optimizer state (none)" in refused and "--no-load-optim" in refused
    assert not any(b"exp_avg" in path.read_bytes() for path in tmp_path.rglob(".metadata"))


@pytest.mark.parametrize("signed", [True, False])
def test_moments_of_8_bits_survive_a_checkpoint_exactly(signed: bool) -> None:
    subclass = pytest.importorskip("torchao.optim.subclass_8bit")
    from runtime.optimizers.adam8bit import moment_values, store_moment

    random = torch.Generator().manual_seed(0)
    numbers = torch.randn(4096, 256, generator=random) * torch.logspace(-12, 4, 4096).unsqueeze(-1)
    numbers[:7] = 0.0
    numbers = numbers if signed else numbers.square()
    kept, loaded = (subclass.OptimState8bit.zeros(numbers.shape, signed) for _ in range(2))
    kept.copy_(numbers)
    store_moment(loaded, moment_values(kept))
    assert torch.equal(moment_values(loaded), moment_values(kept))
    if signed:
        # torchao's own copy loses some of a block whose largest value is negative.
        loaded.copy_(moment_values(kept))
        assert not torch.equal(moment_values(loaded), moment_values(kept))


def test_moments_of_other_blocks_are_quantised_as_torchao_does() -> None:
    subclass = pytest.importorskip("torchao.optim.subclass_8bit")
    from runtime.optimizers.adam8bit import moment_values, store_moment

    numbers = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    ours, theirs = (subclass.OptimState8bit.zeros(numbers.shape, True) for _ in range(2))
    store_moment(ours, numbers)
    theirs.copy_(numbers)
    errors = [float((moment_values(one) - numbers).abs().mean()) for one in (ours, theirs)]
    assert errors[0] < 1.05 * errors[1]

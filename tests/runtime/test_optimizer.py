"""The sharded optimizers against PyTorch's own on the whole model."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from costmodels.layers.optimizer import UPDATES
from costmodels.spec.layout import Optimizer
from runtime.optimizers import update_rules
from runtime.optimizers.muon import update_scale
from runtime.optimizers.shards import ParameterShard, clip_factor, is_decayed
from runtime.settings.training_options import TrainingOptions
from runtime.train.trainer import Trainer
from tests.support.layouts import parse_layout
from tests.support.models import FORMS, MODELS
from tests.support.ranks import optimizers as work
from tests.support.ranks.training import losses_with, whole_gradients
from tests.support.worker_pool import WorkerPool

SETTINGS: dict[str, Any] = {
    "train_iters": 4,
    "lr": 1e-2,
    "lr_warmup_iters": 2,
    "weight_decay": 0.5,
    "adam_beta2": 0.95,
    # Large enough that the rounding of gradients which are zero in theory is not blown up to a step.
    "adam_eps": 1e-4,
}


def check_steps(pool: WorkerPool, model: str, text: str, **settings: Any) -> None:
    """Train under a layout: gradient norms and weights must be those of PyTorch."""
    spec = MODELS[model]
    layout = parse_layout("gbs=4" + ("," + text if text else ""), spec)
    options = TrainingOptions(**{**SETTINGS, **settings})
    for steps in pool.run(work.optimizer_steps, layout.world_size, spec, layout, options):
        assert len(steps) == 4
        for step in steps:
            assert step.norm == pytest.approx(step.expected_norm, rel=1e-5)
            assert step.norm > 0.05
            assert step.differences and max(step.differences.values()) < 2e-5, step.differences


@pytest.mark.parametrize("clip_grad", [0.05, 0.0], ids=["clipped", "unclipped"])
@pytest.mark.parametrize(
    ("model", "text"), [("gpt2", ""), ("llama", ""), ("gpt2", "dp=2,zero=1"), ("llama", "tp=2")]
)
def test_steps_are_those_of_pytorchs_adamw(pool: WorkerPool, model: str, text: str, clip_grad: float) -> None:
    check_steps(pool, model, text, clip_grad=clip_grad)


@pytest.mark.parametrize("text", ["", "tp=2"])
@pytest.mark.parametrize(
    "settings",
    [
        {"clip_grad_value": 1e-3},
        {"loss_reduction": "sum", "lr": 1e-3},
        {"loss_reduction": "sum", "lr": 1e-3, "clip_grad_value": 0.1},
        {"no_decoupled_weight_decay": True, "weight_decay": 0.01},
        {"weight_decay_incr_style": "cosine", "start_weight_decay": 0.1, "end_weight_decay": 0.9},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_options_mean_what_they_mean_in_pytorch(
    pool: WorkerPool, text: str, settings: dict[str, Any]
) -> None:
    check_steps(pool, "llama", text, **settings)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        *(
            ("mixtral", text)
            for text in ("dp=2,ep=2,tp=2,etp=2", "dp=4,ep=2,zero=1", "tp=2,dp=2,ep=4", "tp=2")
        ),
        # The last stage has a copy of the embedding: for the head, for further tokens, or for both.
        *((model, "pp=2") for model in ("gpt2", "further", "further-tied")),
        ("further", "pp=2,tp=2"),
    ],
)
def test_the_gradient_norm_counts_every_parameter_once(pool: WorkerPool, model: str, text: str) -> None:
    spec = (MODELS | FORMS)[model]
    alone, split = (parse_layout(f"gbs=4{more}", spec) for more in ("", f",{text}"))
    [(expected, _)] = pool.run(whole_gradients, 1, spec, alone)
    for norm, _ in pool.run(whole_gradients, split.world_size, spec, split):
        assert norm == pytest.approx(expected, rel=1e-5)


RULES = get_args(Optimizer)

DENSE = (
    *("", "dp=2,zero=3", "tp=2", "pp=2", "tp=2,dp=2,zero=2", "dp=2,zero=1,offload_optimizer=1"),
    # Three ranks divide no side.
    "gbs=3,dp=3,zero=1",
)

SPARSE = ("dp=4,ep=2,zero=3", "dp=2,tp=2,ep=2,etp=2")


LAYOUTS = [(("gpt2", "llama")[number % 2], text) for number, text in enumerate(DENSE)] + [
    ("mixtral", text) for text in SPARSE
]


@pytest.mark.parametrize(
    ("optimizer", "model", "text"),
    # The updates of these rules depend on other elements of the matrix, which other ranks may have.
    [(rule, *layout) for rule in ("adafactor", "muon", "came") for layout in LAYOUTS]
    + [(rule, *layout) for rule, odd in (("adam", 0), ("sgd", 1)) for layout in LAYOUTS[odd::2]],
)
def test_an_optimizer_is_that_of_pytorch_whatever_splits_the_weights(
    pool: WorkerPool, optimizer: str, model: str, text: str
) -> None:
    for differences in rule_differences(pool, model, f"{text},optimizer={optimizer}"):
        assert max(differences.values()) < 1e-6, differences
        if optimizer == "muon":
            # The same bits: what is gathered and what is not take no part in the arithmetic.
            matrices = {n: d for n, d in differences.items() if ".mlp." in n and "bias" not in n}
            assert matrices and not any(matrices.values()), matrices


def rule_differences(pool: WorkerPool, model: str, text: str, **settings: Any) -> list[dict[str, float]]:
    """Differences of the weights of all ranks to PyTorch's optimizer after four steps."""
    spec = (MODELS | FORMS)[model]
    layout = parse_layout("gbs=4," + text.lstrip(","), spec)
    growing = {"weight_decay_incr_style": "linear", "start_weight_decay": 0.1, "end_weight_decay": 0.5}
    options = TrainingOptions(**{**SETTINGS, **growing, **settings})
    found: list[dict[str, float]] = pool.run(work.rule_steps, layout.world_size, spec, layout, options)
    return found


def test_adafactors_steps_grow_shorter_below_the_learning_rate(pool: WorkerPool) -> None:
    # At most 1 / sqrt(t) of a parameter's size in step t: less than the rate from the third one on.
    settings = {"lr": 0.6, "lr_warmup_iters": 0, "lr_decay_style": "constant"}
    [differences] = rule_differences(pool, "llama", "optimizer=adafactor", **settings)
    assert max(differences.values()) < 1e-5


@pytest.mark.parametrize(
    ("optimizer", "model", "text"),
    [("adam", "sinks", ""), ("muon", "sinks", "ep=2,dp=2"), ("muon", "delta", ""), ("muon", "delta", "tp=2")],
)
def test_what_has_two_sides_and_is_no_matrix_is_updated_as_it_should_be(
    pool: WorkerPool, optimizer: str, model: str, text: str
) -> None:
    """Biases of experts do not decay. Adam has them, depthwise kernels and gates, under Muon too."""
    for differences in rule_differences(pool, model, f"{text},optimizer={optimizer}"):
        assert max(differences.values()) < 1e-6, differences
        assert any(name.endswith(work.NO_MATRICES) for name in differences)


@pytest.mark.parametrize(
    "settings",
    [
        {"muon_scale_mode": "shape_scaling", "muon_extra_scale_factor": 1.0},
        {"no_muon_nesterov": True, "muon_momentum": 0.5},
    ],
    ids=["original", "plain momentum"],
)
def test_muon_has_the_settings_of_pytorch(pool: WorkerPool, settings: dict[str, Any]) -> None:
    [differences] = rule_differences(pool, "llama", "optimizer=muon", **settings)
    assert max(differences.values()) < 1e-6


def test_muon_updates_modules_that_predict_further_tokens_as_layers(pool: WorkerPool) -> None:
    [differences] = rule_differences(pool, "further-tied", "optimizer=muon")
    assert max(differences.values()) < 1e-6
    assert {name for name in differences if name.startswith("mtp.0.") and "norm" not in name}


def test_came_has_the_settings_of_the_paper_and_of_mindformers(pool: WorkerPool) -> None:
    settings = {"came_beta1": 0.5, "came_decay_rate": 0.3, "came_beta3": 0.7, "came_clip_threshold": 0.25}
    [differences] = rule_differences(pool, "llama", "optimizer=came", **settings)
    assert max(differences.values()) < 1e-6


def test_muon_scales_updates_as_megatron_lm_does() -> None:
    modes = ("spectral", "shape_scaling", "unit_rms_norm")
    assert [update_scale(mode, 4, 16) for mode in modes] == [4.0, 1.0, 0.5]
    assert [update_scale(mode, 16, 4) for mode in modes] == [4.0, 2.0, 2.0]


def test_adam_of_8_bits_is_torchaos(pool: WorkerPool) -> None:
    pytest.importorskip("torchao")
    [differences] = rule_differences(pool, "gpt2", "optimizer=adam8bit")
    assert max(differences.values()) == 0.0


def test_layouts_of_8_bits_agree_to_the_error_of_quantisation(pool: WorkerPool) -> None:
    pytest.importorskip("torchao")
    for text in ("dp=2,zero=1", "tp=2", "pp=2"):
        for differences in rule_differences(pool, "gpt2", f"{text},optimizer=adam8bit"):
            # Four steps of at most 1e-2.
            assert max(differences.values()) < 2e-3


@pytest.mark.parametrize("optimizer", ["sgd", "adafactor", "muon", "came"])
@pytest.mark.parametrize("text", ["dp=2,zero=3", "pp=2"])
def test_losses_do_not_depend_on_the_layout(pool: WorkerPool, optimizer: str, text: str) -> None:
    spec = MODELS["gpt2"]
    split, alone = (parse_layout(f"gbs=4,optimizer={optimizer}" + more, spec) for more in (f",{text}", ""))
    options = TrainingOptions(train_iters=8, lr=1e-2)
    [expected] = pool.run(losses_with, 1, spec, alone, options)
    for losses in pool.run(losses_with, split.world_size, spec, split, options):
        assert losses == pytest.approx(expected, rel=1e-5)
    assert len(set(expected)) == 8


@pytest.mark.parametrize("optimizer", RULES)
def test_a_step_that_overflows_changes_no_state(pool: WorkerPool, optimizer: str) -> None:
    if optimizer == "adam8bit":
        pytest.importorskip("torchao")
    spec = MODELS["gpt2"]
    layout = parse_layout(f"gbs=4,dp=2,zero=1,precision=fp16,optimizer={optimizer}", spec)
    options = TrainingOptions(train_iters=4, lr=1e-2, initial_loss_scale=2.0**16)
    for skipped, changed, after in pool.run(work.overflowing_step, 2, spec, layout, options):
        assert skipped and not changed
        assert after < 6.0


def test_the_whole_gradient_is_clipped_by_value_under_a_loss_scale(pool: WorkerPool) -> None:
    spec = MODELS["gpt2"]
    options = [
        TrainingOptions(train_iters=4, lr=1e-2, clip_grad_value=1e-3, loss_scale=scale)
        for scale in (1.0, 2.0**10)
    ]
    layout = parse_layout("gbs=4,dp=2,precision=fp16,optimizer=sgd", spec)
    one, other = (pool.run(losses_with, 2, spec, layout, each)[0] for each in options)
    assert one == pytest.approx(other, rel=1e-4)


@pytest.mark.parametrize("limit", [0.0, 1.0, 10.0])
def test_gradients_lose_the_loss_scale_clipped_or_not(limit: float) -> None:
    scaled, weight = 8.0 * torch.tensor([3.0, 4.0]), torch.nn.Parameter(torch.zeros(2))
    weight.grad = scaled / 8.0
    norm = torch.nn.utils.clip_grad_norm_([weight], limit or math.inf)
    optimizer = SimpleNamespace(scale=scaled.mul_)
    trainer: Any = SimpleNamespace(optimizer=optimizer, largest_norm=limit, largest_value=None)
    Trainer._clip(trainer, norm, 8.0)
    assert torch.allclose(scaled, weight.grad, rtol=1e-6)


def test_gradients_are_clipped_as_pytorch_does() -> None:
    for norm, limit in ((10.0, 1.0), (0.5, 1.0), (1.0, 1.0), (0.0, 1.0)):
        weight = torch.nn.Parameter(torch.zeros(1))
        weight.grad = torch.tensor([norm])
        torch.nn.utils.clip_grad_norm_([weight], limit)
        assert weight.grad.item() == pytest.approx(norm * clip_factor(torch.tensor(norm), limit).item())


@pytest.mark.parametrize(
    ("name", "shape", "decayed"),
    [
        ("layers.0.mlp.up.weight", (4, 4), True),
        ("embedding.positions.weight", (4, 4), True),
        ("layers.0.mlp.up.bias", (4,), False),
        ("layers.0.mlp_norm.weight", (4,), False),
        ("norm.bias", (4,), False),
        ("layers.0.mlp.experts.up_bias", (4, 4), False),
        ("layers.0.mlp.experts.up", (4, 4, 4), True),
    ],
)
def test_weight_decay_leaves_out_biases_and_norms(name: str, shape: tuple[int, ...], decayed: bool) -> None:
    assert is_decayed(name, torch.zeros(shape)) is decayed


def test_every_optimizer_has_a_rule_and_a_cost() -> None:
    assert set(update_rules.RULES) == set(UPDATES) == set(RULES)


@pytest.mark.parametrize("optimizer", get_args(Optimizer))
def test_a_checkpoint_before_the_first_update_changes_no_update(optimizer: Optimizer) -> None:
    """Steps of a run may all have been skipped when its first checkpoint is written."""
    if optimizer == "adam8bit":
        pytest.importorskip("torchao")
    spec = MODELS["llama"]
    options = TrainingOptions(sgd_momentum=0.9, adam_beta2=0.95)
    layout = parse_layout(f"optimizer={optimizer}", spec)

    def updated(saved: bool) -> list[torch.Tensor]:
        draw = torch.Generator().manual_seed(3)
        owned = []
        for name, shape in (("matrix.weight", (16, 32)), ("norm.weight", (8,))):
            parameter = torch.nn.Parameter(torch.randn(shape, generator=draw))
            shard = torch.nn.Parameter(parameter.detach())
            shard.grad = torch.randn(shape, generator=draw)
            owned.append(ParameterShard(name, parameter, shard, True))
        setting = update_rules.Setting(spec, layout, options, torch.device("cpu"))
        rule = update_rules.RULES[optimizer](owned, setting)
        if saved:
            assert not any(state.any() for state in rule.states().values())
        rule.step(0.1, 0.0)
        return [one.shard.detach() for one in owned]

    for one, other in zip(updated(saved=False), updated(saved=True), strict=True):
        assert torch.equal(one, other)


@pytest.mark.oldest
@pytest.mark.parametrize("decoupled", [True, False])
def test_the_kernel_of_adam_multiplies_gradients_by_the_factor_of_clipping(
    pool: WorkerPool, decoupled: bool
) -> None:
    """A GPU's kernel does so; that of a CPU can, too."""
    options = TrainingOptions(**SETTINGS, clip_grad=0.05, no_decoupled_weight_decay=not decoupled)
    apart, within = (pool.run(work.clipped_steps, 1, options, takes)[0] for takes in (False, True))
    for one, other in zip(apart, within, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_values_are_clipped_after_the_factor_of_a_loss_scale(pool: WorkerPool) -> None:
    assert pool.run(work.clipped_values, 1, TrainingOptions(**SETTINGS)) == [{2.0}]

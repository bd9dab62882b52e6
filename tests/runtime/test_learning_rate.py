"""Schedules against Megatron-LM's closed forms, and the options that they refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest

from costmodels.errors import InputError
from runtime.settings.learning_rate import DECAY_STYLES, LearningRate, WeightDecay
from runtime.settings.training_options import OutputOptions, TrainingOptions
from tests.support.layouts import parse_layout
from tests.support.models import MODELS

PEAK, MINIMUM, WARMUP, DECAY = 3e-4, 3e-5, 10, 110


def schedule(style: str, warmup: int = WARMUP) -> LearningRate:
    return LearningRate(PEAK, MINIMUM, style, warmup, DECAY)


@pytest.mark.parametrize("style", DECAY_STYLES)
def test_warm_up_rises_linearly_from_zero_to_the_peak(style: str) -> None:
    rates = [schedule(style).at(iteration) for iteration in range(WARMUP + 1)]
    assert rates == pytest.approx([PEAK * step / WARMUP for step in range(WARMUP + 1)])
    assert rates[-1] == PEAK


@pytest.mark.parametrize(
    ("style", "share"),
    [("linear", lambda x: 1 - x), ("cosine", lambda x: (1 + math.cos(math.pi * x)) / 2)],
)
def test_decay_follows_its_curve_to_the_minimum_and_stays_there(style: str, share: Any) -> None:
    rate = schedule(style)
    for iteration in (WARMUP, WARMUP + 1, 35, 60, 85, DECAY - 1, DECAY):
        done = (iteration - WARMUP) / (DECAY - WARMUP)
        assert rate.at(iteration) == pytest.approx(MINIMUM + (PEAK - MINIMUM) * share(done))
    assert rate.at(60) == pytest.approx((PEAK + MINIMUM) / 2)
    assert rate.at(DECAY) == pytest.approx(MINIMUM)
    assert rate.at(DECAY + 1) == rate.at(10 * DECAY) == MINIMUM


def test_a_constant_rate_never_decays() -> None:
    assert {schedule("constant").at(iteration) for iteration in (WARMUP, 60, DECAY, 10 * DECAY)} == {PEAK}


def test_warm_up_rises_from_the_initial_rate() -> None:
    rate = LearningRate(PEAK, MINIMUM, "linear", WARMUP, DECAY, initial=1e-4)
    assert [rate.at(step) for step in (0, 5, WARMUP)] == pytest.approx([1e-4, 2e-4, 3e-4])


def test_the_inverse_square_root_falls_from_the_peak_to_the_minimum() -> None:
    rate = schedule("inverse-square-root")
    for iteration in (WARMUP + 1, 40, 90, DECAY):
        assert rate.at(iteration) == pytest.approx(PEAK * math.sqrt(WARMUP / iteration))
    assert rate.at(40) == pytest.approx(PEAK / 2)
    assert rate.at(DECAY + 1) == MINIMUM
    assert LearningRate(PEAK, PEAK / 2, "inverse-square-root", WARMUP, DECAY).at(90) == PEAK / 2
    # Without warm-up, that of the first iteration is the peak.
    alone = schedule("inverse-square-root", warmup=0)
    assert [alone.at(step) for step in (0, 1, 4)] == pytest.approx([PEAK, PEAK, PEAK / 2])


@pytest.mark.parametrize(
    ("style", "share"),
    [
        ("linear", lambda x: 1 - x),
        ("cosine", lambda x: (1 + math.cos(math.pi * x)) / 2),
        ("exponential", lambda x: 2 * 0.5**x - 1),
        ("minus_sqrt", lambda x: 1 - math.sqrt(x)),
    ],
)
def test_wsd_is_stable_until_it_decays(style: str, share: Any) -> None:
    rate = LearningRate(PEAK, MINIMUM, "WSD", WARMUP, DECAY, wsd_style=style, wsd_decay_iters=20)
    assert {rate.at(iteration) for iteration in (WARMUP, WARMUP + 1, 50, DECAY - 20)} == {PEAK}
    for iteration in (DECAY - 19, DECAY - 10, DECAY - 1, DECAY):
        done = (iteration - DECAY + 20) / 20
        assert rate.at(iteration) == pytest.approx(MINIMUM + (PEAK - MINIMUM) * share(done))
    assert rate.at(DECAY) == pytest.approx(MINIMUM)
    assert rate.at(DECAY + 1) == MINIMUM


def test_weight_decay_grows_over_the_run() -> None:
    linear, cosine = (WeightDecay(0.1, 0.5, style, 100) for style in ("linear", "cosine"))
    assert [linear.at(step) for step in (0, 25, 50, 100, 101)] == pytest.approx([0.1, 0.2, 0.3, 0.5, 0.5])
    expected = [0.1 + 0.4 * (1 + math.cos(math.pi * (1 - step / 100))) / 2 for step in (0, 25, 50, 100)]
    assert [cosine.at(step) for step in (0, 25, 50, 100)] == pytest.approx(expected)
    assert cosine.at(50) == pytest.approx(0.3)
    assert WeightDecay(0.3, 0.3, "constant", 100).at(0) == 0.3


def test_without_warm_up_the_first_iteration_is_on_the_curve() -> None:
    assert schedule("linear", warmup=0).at(1) == pytest.approx(PEAK - (PEAK - MINIMUM) / DECAY)
    assert schedule("constant", warmup=0).at(1) == PEAK


def test_flags_describe_the_schedule() -> None:
    assert TrainingOptions(train_iters=80, lr=1.0).learning_rate() == LearningRate(1.0, 0.0, "cosine", 0, 80)
    by_fraction = TrainingOptions(train_iters=80, lr_decay_iters=60, lr_warmup_fraction=0.1)
    assert (by_fraction.learning_rate().warmup_iters, by_fraction.learning_rate().decay_iters) == (6, 60)
    by_count = TrainingOptions(train_iters=80, lr_warmup_iters=7, min_lr=1e-5, lr_decay_style="linear")
    assert by_count.learning_rate() == LearningRate(6.0e-4, 1e-5, "linear", 7, 80)
    wsd = TrainingOptions(
        train_iters=80,
        lr_decay_style="WSD",
        lr_wsd_decay_iters=8,
        lr_wsd_decay_style="cosine",
        lr_warmup_iters=4,
        lr_warmup_init=1e-5,
    )
    wsd.check()
    assert wsd.learning_rate() == LearningRate(6.0e-4, 0.0, "WSD", 4, 80, 1e-5, "cosine", 8)
    assert TrainingOptions(weight_decay=0.2).weight_decays().at(7) == 0.2
    growing = TrainingOptions(
        train_iters=50, start_weight_decay=0.0, end_weight_decay=0.1, weight_decay_incr_style="linear"
    )
    growing.check()
    assert growing.weight_decays() == WeightDecay(0.0, 0.1, "linear", 50)


def test_clipping_by_value_takes_the_place_of_clipping_by_norm() -> None:
    norms = [TrainingOptions(), TrainingOptions(clip_grad=0.0), TrainingOptions(clip_grad_value=0.1)]
    assert [options.largest_norm() for options in norms] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("optimizer", ["sgd", "muon", "adafactor", "adam8bit", "came"])
def test_only_adam_has_two_forms_of_weight_decay(optimizer: str) -> None:
    options = TrainingOptions(no_decoupled_weight_decay=True)
    layout = parse_layout("", MODELS["gpt2"])
    options.check_optimizer(layout)
    with pytest.raises(InputError, match=f"optimizer {optimizer} has one form of weight decay"):
        options.check_optimizer(layout.model_copy(update={"optimizer": optimizer}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"train_iters": 0}, "--train-iters 0: must be at least 1"),
        ({"lr": 0.0}, "--lr 0.0: must be positive"),
        ({"lr": float("nan")}, "--lr nan"),
        ({"lr": float("inf")}, "--lr inf"),
        ({"lr": 1e-4, "min_lr": 1e-3}, "--min-lr 0.001: need 0 <= min-lr <= lr"),
        ({"lr_decay_style": "square"}, "--lr-decay-style square: choose one of constant, linear, cosine"),
        ({"lr_decay_iters": 0}, "--lr-decay-iters 0: must be at least 1"),
        ({"lr_warmup_iters": 100}, "warm-up of 100 iterations does not fit into 100 decay iterations"),
        ({"lr_warmup_iters": -1}, "--lr-warmup-iters -1: must be at least 0"),
        ({"lr_warmup_fraction": 1.5}, "--lr-warmup-fraction 1.5: must be at least 0 and below 1"),
        ({"lr_warmup_iters": 1, "lr_warmup_fraction": 0.1}, "exclude each other; give one"),
        ({"attention_dropout": 0.1}, "--attention-dropout 0.1: must be 0"),
        ({"hidden_dropout": 0.1}, "--hidden-dropout 0.1: must be 0"),
        ({"clip_grad": -1.0}, "--clip-grad -1.0: must be 0 (off) or positive"),
        ({"clip_grad": float("nan")}, "--clip-grad nan"),
        ({"weight_decay": -0.1}, "--weight-decay -0.1"),
        ({"adam_beta1": 1.0}, "--adam-beta1 1.0: must be at least 0 and below 1"),
        ({"adam_beta2": -0.5}, "--adam-beta2 -0.5"),
        ({"adam_eps": 0.0}, "--adam-eps 0.0: must be positive"),
        ({"init_method_std": -1.0}, "--init-method-std -1.0: must be positive"),
        ({"lr_decay_style": "WSD"}, "--lr-decay-style WSD needs --lr-wsd-decay-iters of 1 to 100"),
        (
            {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 95, "lr_warmup_iters": 6},
            "--lr-wsd-decay-iters of 1 to 94, the decay iterations that warm-up leaves",
        ),
        ({"lr_wsd_decay_iters": 5}, "--lr-wsd-decay-iters 5: needs --lr-decay-style WSD"),
        ({"lr_wsd_decay_style": "sqrt"}, "--lr-wsd-decay-style sqrt: choose one of exponential"),
        ({"lr_warmup_init": 1.0}, "--lr-warmup-init 1.0: must be at least 0 and at most --lr 0.0006"),
        ({"start_weight_decay": 0.1}, "need --weight-decay-incr-style linear or cosine"),
        ({"weight_decay_incr_style": "linear"}, "needs --start-weight-decay and an --end-weight-decay"),
        (
            {"weight_decay_incr_style": "linear", "start_weight_decay": 0.2, "end_weight_decay": 0.1},
            "--weight-decay-incr-style linear: needs --start-weight-decay and an --end-weight-decay that is",
        ),
        ({"sgd_momentum": 1.0}, "--sgd-momentum 1.0: must be at least 0 and below 1"),
        ({"muon_momentum": -0.1}, "--muon-momentum -0.1"),
        ({"came_decay_rate": 1.1}, "--came-decay-rate 1.1: must be at least 0 and at most 1"),
        ({"came_beta3": 1.0}, "--came-beta3 1.0: must be at least 0 and below 1"),
        ({"muon_num_ns_steps": 0}, "--muon-num-ns-steps 0: must be at least 1"),
        ({"muon_scale_mode": "rms"}, "--muon-scale-mode rms: choose one of spectral, shape_scaling"),
        ({"muon_extra_scale_factor": 0.0}, "--muon-extra-scale-factor 0.0: must be positive"),
        ({"loss_reduction": "none"}, "--loss-reduction none: choose one of mean, sum"),
        ({"clip_grad_value": 0.0}, "--clip-grad-value 0.0: must be positive"),
        (
            {"clip_grad_value": 0.1, "clip_grad": 1.0},
            "--clip-grad and --clip-grad-value exclude each other; give one",
        ),
        ({"moe_aux_loss_coeff": -0.1}, "--moe-aux-loss-coeff -0.1: must be 0 (off) or positive"),
        (
            {"moe_router_load_balancing_type": "x"},
            "--moe-router-load-balancing-type x: choose one of aux_loss",
        ),
        ({"rampup_batch_size": (4, 0, 8)}, "--rampup-batch-size 4 0 8: give three whole numbers above 0"),
    ],
)
def test_what_cannot_be_trained_with_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as refused:
        TrainingOptions(**values).check()
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"log_interval": 0}, "--log-interval 0: must be at least 1"),
        ({"eval_interval": 0}, "--eval-interval 0"),
        ({"save": "x", "save_interval": 0}, "--save-interval 0"),
        ({"exit_interval": -1}, "--exit-interval -1"),
        ({"eval_iters": -1}, "--eval-iters -1: must be 0 (off) or positive"),
    ],
)
def test_intervals_that_make_no_sense_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as refused:
        OutputOptions(**values).check()
    assert message in str(refused.value)


def test_the_defaults_are_accepted() -> None:
    TrainingOptions().check()
    TrainingOptions(train_iters=1, clip_grad=0.0, weight_decay=0.0).check()
    OutputOptions().check()

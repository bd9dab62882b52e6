"""Learning-rate schedules against Megatron-LM's closed forms, and the options that they refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest

from costmodels.errors import InputError
from runtime.learning_rate import LearningRate
from runtime.options import OutputOptions, TrainingOptions

PEAK, MINIMUM, WARMUP, DECAY = 3e-4, 3e-5, 10, 110


def schedule(style: str, warmup: int = WARMUP) -> LearningRate:
    return LearningRate(PEAK, MINIMUM, style, warmup, DECAY)


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
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


def test_without_warm_up_the_first_iteration_is_on_the_curve() -> None:
    assert schedule("linear", warmup=0).at(1) == pytest.approx(PEAK - (PEAK - MINIMUM) / DECAY)
    assert schedule("constant", warmup=0).at(1) == PEAK


def test_flags_describe_the_schedule() -> None:
    assert TrainingOptions(train_iters=80, lr=1.0).learning_rate() == LearningRate(1.0, 0.0, "cosine", 0, 80)
    by_fraction = TrainingOptions(train_iters=80, lr_decay_iters=60, lr_warmup_fraction=0.1)
    assert (by_fraction.learning_rate().warmup_iters, by_fraction.learning_rate().decay_iters) == (6, 60)
    by_count = TrainingOptions(train_iters=80, lr_warmup_iters=7, min_lr=1e-5, lr_decay_style="linear")
    assert by_count.learning_rate() == LearningRate(6.0e-4, 1e-5, "linear", 7, 80)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"train_iters": 0}, "--train-iters 0: must be at least 1"),
        ({"lr": 0.0}, "--lr 0.0 --min-lr 0.0: need 0 <= min-lr <= lr and lr > 0"),
        ({"lr": float("nan")}, "--lr nan"),
        ({"lr": float("inf")}, "--lr inf"),
        ({"lr": 1e-4, "min_lr": 1e-3}, "--min-lr 0.001: need 0 <= min-lr <= lr"),
        ({"lr_decay_style": "square"}, "--lr-decay-style square: choose one of constant, linear, cosine"),
        ({"lr_decay_iters": 0}, "--lr-decay-iters 0: must be at least 1"),
        ({"lr_warmup_iters": 100}, "warm-up of 100 iterations does not fit into 100 decay iterations"),
        ({"lr_warmup_iters": -1}, "warm-up of -1 iterations"),
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
        ({"save_interval": 5}, "--save-interval needs --save FOLDER"),
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

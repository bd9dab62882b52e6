"""Losses, norms and counts of a training step, beside parts that only note what they are told."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from costmodels import MultiTokenPrediction
from costmodels.catalogue import load_model
from runtime.data.boundaries import Boundaries
from runtime.faults.fault_options import FaultOptions
from runtime.faults.step_guard import StepGuard
from runtime.parallel.loss import TokenLoss
from runtime.settings.loss_scale import LossScale
from runtime.train import trainer as module
from runtime.train.trainer import Trainer, batch_rows
from tests.support.layouts import parse_layout

SEQ = 8


class Noted:
    """A trainer whose executor and optimizer note their calls."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        text: str = "gbs=4",
        loss: float = 6.0,
        squares: float = 25.0,
        depths: int = 0,
        others: float = 1.0,
    ) -> None:
        self.calls: list[tuple[Any, ...]] = []
        spec = load_model("gpt2-nano").model_copy(
            update={"vocab": 50, "seq": SEQ, "mtp": MultiTokenPrediction(depths=depths) if depths else None}
        )
        layout = parse_layout(text, spec)
        monkeypatch.setattr(module, "keep_to_own_cores", lambda device: None)
        monkeypatch.setattr(dist, "get_world_size", lambda: layout.world_size)
        # All ranks hold the same numbers.
        monkeypatch.setattr(dist, "all_reduce", lambda x: x.mul_(layout.world_size * others))
        grid: Any = SimpleNamespace(
            tp_rank=0, dp_rank=0, cp_rank=0, device=torch.device("cpu"), mesh=SimpleNamespace(get_group=str)
        )
        self.trainer = made = Trainer.__new__(Trainer)
        made.spec, made.layout, made.grid = spec, layout, grid
        made.guard, made.loss_scale, made.balance = None, None, None
        self.loss, self.squares = loss, squares
        self.token_loss = TokenLoss(spec, layout, grid)
        if depths:
            self.token_loss.further_losses = torch.full((depths,), 99.0)
        made.executor = SimpleNamespace(  # type: ignore[assignment]
            loss=self.token_loss, train=self.train, evaluate=self.evaluate, float8_gather=None, graphed=None
        )
        made.optimizer = SimpleNamespace(  # type: ignore[assignment]
            squared_norm=lambda: torch.tensor(self.squares, dtype=torch.float64),
            **{name: self.noting(name) for name in ("collect_gradients", "drop_gradients", "step")},
            **{name: self.noting(name) for name in ("scale", "clip_values")},
        )
        made.learning_rate = SimpleNamespace(at=lambda updates: 0.5 + updates)  # type: ignore[assignment]
        made.weight_decay = SimpleNamespace(at=lambda updates: 0.25 + updates)  # type: ignore[assignment]
        made.largest_norm, made.largest_value, made.sums_losses = 0.0, None, False
        made.positions = torch.arange(SEQ)
        made.boundaries = made.documents = None
        made.iteration = made.updates = 0

    def noting(self, name: str) -> Any:
        return lambda *given: self.calls.append((name, *(float(one) for one in given)))

    def train(self, tokens: Tensor, labels: Tensor) -> Tensor:
        self.seen = tokens, labels
        further = self.token_loss.further_losses
        if further is not None:
            further += torch.arange(1.0, 1 + len(further)) * self.token_loss.scale
        return torch.tensor(self.loss * self.token_loss.scale)

    def evaluate(self, tokens: Tensor, labels: Tensor) -> Tensor:
        assert self.token_loss.scale == 1.0
        return torch.tensor(self.loss)

    def samples(self) -> Any:
        return np.random.default_rng(0).integers(0, 50, (4, SEQ + 1))

    def step(self) -> Any:
        self.calls.clear()
        return self.trainer.train_step(self.samples())


def test_an_update_is_made_by_the_schedules_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted(monkeypatch)
    for number in range(3):
        found = noted.step()
        assert (float(found.loss), float(found.grad_norm)) == (6.0, 5.0)
        assert (found.learning_rate, found.loss_scale, found.skipped) == (0.5 + number, 1.0, False)
        assert found.further is None
        assert noted.calls == [("collect_gradients",), ("step", 0.5 + number, 0.25 + number)]
        assert (noted.trainer.iteration, noted.trainer.updates) == (number + 1, number + 1)
    tokens, labels = noted.seen
    assert torch.equal(tokens, torch.from_numpy(noted.samples()[:, :-1]))
    assert torch.equal(labels, torch.from_numpy(noted.samples()[:, 1:]))


@pytest.mark.parametrize(("most", "factor"), [(2.0, 2.0 / 5.0), (8.0, 1.0)])
def test_gradients_are_clipped_by_their_norm_and_by_value(
    most: float, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Noted(monkeypatch)
    noted.trainer.largest_norm, noted.trainer.largest_value = most, 0.125
    noted.step()
    [(name, by), (other, value)] = noted.calls[1:3]
    assert (name, other, value) == ("scale", "clip_values", 0.125)
    assert by == pytest.approx(factor, rel=1e-5)


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("most", [0.0, 2.0])
def test_a_loss_scale_is_taken_out_of_what_is_reported_and_of_gradients(
    sums: bool, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum of losses is the mean times the tokens, whose gradients stay as large."""
    noted = Noted(monkeypatch, squares=(8.0 * 5.0) ** 2, depths=2)
    trainer = noted.trainer
    trainer.loss_scale, trainer.sums_losses, trainer.largest_norm = LossScale(8.0, dynamic=False), sums, most
    for _ in range(2):
        found = noted.step()
        assert noted.token_loss.scale == 8.0 * (4 * SEQ if sums else 1.0)
        assert (float(found.loss), found.loss_scale) == (6.0, 8.0)
        assert float(found.grad_norm) == pytest.approx(5.0)
        assert found.further is not None and found.further.tolist() == [1.0, 2.0]
        scales = [given for name, *given in noted.calls if name == "scale"]
        assert scales == [[pytest.approx((most / 5 if most else 1.0) / 8.0, rel=1e-5)]]


def test_sums_over_ranks_have_each_loss_once(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted(monkeypatch, "gbs=4,dp=2,tp=2")
    assert float(noted.step().loss) == 4 * 6.0
    assert noted.trainer.evaluate(noted.samples()) == 4 * 6.0
    noted.trainer.grid.tp_rank = 1  # type: ignore[misc]
    found = noted.step()
    # Ranks of a group hold the same loss, and parts of the gradient.
    assert (float(found.loss), float(found.grad_norm)) == (0.0, 10.0)
    assert noted.trainer.evaluate(noted.samples()) == 0.0


def test_an_overflow_is_skipped_and_halves_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted(monkeypatch, squares=math.inf)
    ended: list[bool] = []
    noted.trainer.balance = SimpleNamespace(begin_step=lambda: None, end_step=ended.append)  # type: ignore[assignment]
    noted.trainer.loss_scale = LossScale(64.0, dynamic=True, hysteresis=1)
    found = noted.step()
    assert found.skipped and found.loss_scale == 32.0
    assert noted.calls == [("collect_gradients",), ("drop_gradients",)]
    assert (noted.trainer.iteration, noted.trainer.updates) == (1, 0)
    noted.squares = 25.0 * 32**2
    found = noted.step()
    assert not found.skipped and ended == [False, True]
    assert noted.calls[-1] == ("step", 0.5, 0.25), "schedules count updates"
    assert (noted.trainer.iteration, noted.trainer.updates) == (2, 1)


def test_a_guard_alone_skips_what_it_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted(monkeypatch, loss=math.nan)
    noted.trainer.guard = guard = StepGuard(FaultOptions(max_skipped_steps=3))
    assert noted.step().skipped and "loss" in guard.reason
    noted.loss = 6.0
    assert not noted.step().skipped and not guard.reason


@pytest.mark.parametrize(("text", "replicas"), [("gbs=8,dp=2", 2), ("gbs=8,dp=2,tp=2", 2), ("gbs=4", 1)])
def test_losses_are_means_over_the_targets_of_all_replicas(
    text: str, replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Noted(monkeypatch, text, depths=1)
    samples = noted.samples()
    noted.trainer.train_step(samples)
    assert noted.token_loss.tokens == 4 * SEQ * replicas and noted.token_loss.targets is None
    boundaries = Boundaries(eod=7, eod_mask_loss=True)
    samples[samples == 7] = 8
    samples[:, 5] = 7
    noted.trainer.boundaries = boundaries
    noted.trainer.train_step(samples)
    # The first token of the next document is predicted at no depth, and nothing after the last one.
    assert noted.token_loss.targets == (4 * (SEQ - 1) * replicas, 4 * (SEQ - 2) * replicas)
    samples[:] = 7
    noted.trainer.train_step(samples)
    assert noted.token_loss.targets[0] == 1.0, "a mean over nothing is zero"


def test_rows_of_a_batch_go_to_replicas_micro_batch_by_micro_batch() -> None:
    layout = parse_layout("gbs=12,mbs=2,dp=2", load_model("gpt2-nano"))
    assert [batch_rows(layout, rank).tolist() for rank in (0, 1)] == [
        [0, 1, 4, 5, 8, 9],
        [2, 3, 6, 7, 10, 11],
    ]
    assert batch_rows(layout, 1, 4).tolist() == [2, 3]

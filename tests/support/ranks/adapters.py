"""Short trainings of adapters on a base, with checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch

from costmodels import Layout, ModelSpec
from runtime import checkpoint
from runtime.job.initial_state import load_weights
from runtime.settings.training_options import TrainingOptions
from runtime.train.trainer import Trainer
from tests.support.ranks.training import batch_of

OPTIONS = TrainingOptions(
    train_iters=9, lr=1e-2, lr_decay_style="constant", weight_decay=0.1, clip_grad=0.0, seed=7
)


def tuned(spec: ModelSpec, layout: Layout, base: Path, folder: Path, saves: list[int]) -> list[float]:
    """Losses of training adapters of the model in `base`, or further from the newest checkpoint in `folder`.

    Checkpoints are saved at the iterations `saves`, the last of which ends the training.
    """
    trainer = Trainer(spec, layout, OPTIONS, torch.device("cpu"))
    newest = checkpoint.latest_iteration(folder)
    if newest is None:
        load_weights(base, trainer, spec, 0)
    else:
        checkpoint.load(folder, trainer, spec, newest)
    losses = []
    for iteration in range(trainer.iteration, saves[-1] + 1):
        if iteration in saves and iteration != newest:
            checkpoint.save(folder, trainer, spec, {"consumed_samples": 0})
        if iteration < saves[-1]:
            step = trainer.train_step(batch_of(spec, layout, iteration)[trainer.rows])
            losses.append(float(step.loss))
    return losses

"""Training within documents."""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch

from costmodels import Layout, ModelSpec
from runtime.data.boundaries import Boundaries
from runtime.settings.training_options import TrainingOptions
from runtime.train.trainer import Trainer
from tests.support.ranks.training import batch_gradients

EOD = 5


def samples(spec: ModelSpec, layout: Layout) -> npt.NDArray[np.int64]:
    """A global batch of short documents, the same for every layout; some rows have many, some none."""
    random = np.random.default_rng(3)
    rows = random.integers(6, spec.vocab, (layout.global_batch_size, spec.seq + 1))
    rows[random.random(rows.shape) < np.linspace(0.0, 0.4, len(rows))[:, None]] = EOD
    return rows


def losses(
    spec: ModelSpec, layout: Layout, boundaries: Boundaries, steps: int, compiled: bool = False
) -> list[float]:
    """Losses of some steps, each with the rows in another order, and of an evaluation after them."""
    options = TrainingOptions(train_iters=10, lr=1e-3, compile=compiled)
    trainer = Trainer(spec, layout, options, torch.device("cpu"))
    trainer.use_boundaries(boundaries)
    rows = samples(spec, layout)
    batches = [np.roll(rows, step, axis=0)[trainer.rows] for step in range(steps + 1)]
    return [*(float(trainer.train_step(own).loss) for own in batches[:-1]), trainer.evaluate(batches[-1])]


def of_packed(
    spec: ModelSpec,
    layout: Layout,
    rows: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    compiled: bool = False,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The loss of a global batch of packed rows before and after a step, and the step's whole gradients."""
    options = TrainingOptions(train_iters=10, lr=1e-3, clip_grad=0.0, compile=compiled)
    # Compiled to single operators: graphs are what is tried, and kernels take long to make.
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        trainer = Trainer(spec, layout, options, torch.device("cpu"))
    trainer.use_boundaries(Boundaries(None, True, True, True, hides_prompts=True))
    own = rows[trainer.rows], starts[trainer.rows]
    _, gradients = batch_gradients(trainer, *own)
    for owned in trainer.optimizer.owned:
        owned.parameter.grad = owned.shard.grad = None
    return [float(trainer.train_step(*own).loss), trainer.evaluate(*own)], gradients

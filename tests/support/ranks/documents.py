"""Training within documents."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from costmodels import Layout, ModelSpec
from runtime.data.boundaries import Boundaries
from runtime.settings.options import TrainingOptions
from runtime.train.trainer import Trainer

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
    """Losses of some steps, and of an evaluation after them."""
    options = TrainingOptions(train_iters=10, lr=1e-3, compile=compiled)
    trainer = Trainer(spec, layout, options, torch.device("cpu"))
    trainer.use_boundaries(boundaries)
    own = samples(spec, layout)[trainer.rows]
    found = [float(trainer.train_step(own).loss) for _ in range(steps)]
    return [*found, trainer.evaluate(own)]


def losses_of_rows(
    spec: ModelSpec, layout: Layout, boundaries: Boundaries, rows: list[list[int]]
) -> list[float]:
    """Losses and gradient norms of two steps on a global batch of given rows, and the loss after them."""
    trainer = Trainer(spec, layout, TrainingOptions(train_iters=10, lr=1e-3), torch.device("cpu"))
    trainer.use_boundaries(boundaries)
    own = np.array(rows, np.int64)[trainer.rows]
    steps = [trainer.train_step(own) for _ in range(2)]
    return [
        *(float(one) for step in steps for one in (step.loss, step.grad_norm)),
        trainer.evaluate(own),
    ]

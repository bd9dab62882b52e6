"""Short trainings in which an error shows, and how far two of them are apart."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from costmodels import Layout, ModelSpec

if TYPE_CHECKING:
    from runtime.train.trainer import Trainer

SEED = 1234

ROUTING: dict[str, Any] = {
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 1e-2,
    "moe_z_loss_coeff": 1e-3,
    "moe_router_bias_update_rate": 1e-2,
}
"""Options of routing, so that parity covers what they do; other kinds of balancing look at microbatches."""

BITING: dict[str, Any] = {
    "lr": 5e-3,
    "lr_decay_style": "constant",
    "weight_decay": 0.3,
    "clip_grad": 0.5,
    "adam_eps": 1e-3,
}
"""Options under which errors show. Adam divides out a wrong factor of all gradients, so that losses may hide
it: gradient norms show it, and so does an epsilon as large as small gradients are."""


def losses_of(
    spec: ModelSpec,
    layout: Layout,
    steps: int,
    compiled: bool = False,
    backend: str = "inductor",
    evaluates: bool = False,
) -> list[float]:
    """Losses of `steps` training steps on random tokens; runs on every rank of a process group.

    Args:
        compiled: layers are compiled by the backend.
        evaluates: the loss of an evaluation of the last tokens follows those of the steps.
    """
    import torch

    from runtime.settings.training_options import TrainingOptions
    from runtime.train.trainer import Trainer

    options = TrainingOptions(train_iters=steps, lr=1e-3, seed=SEED, compile=compiled, **ROUTING)
    with patch.object(torch, "compile", partial(torch.compile, backend=backend)):
        trainer = Trainer(spec, layout, options, torch.device("cpu"))
    tokens = np.random.RandomState(SEED)
    losses = []
    for _ in range(steps):
        batch = tokens.randint(0, spec.vocab, (layout.global_batch_size, spec.seq + 1)).astype(np.int64)
        losses.append(float(trainer.train_step(batch[trainer.rows]).loss))
    if evaluates:
        losses.append(trainer.evaluate(batch[trainer.rows]))
    return losses


def relative_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Largest relative difference of two loss curves."""
    # Not max(), which may overlook a NaN.
    return float(np.max(np.abs(np.subtract(losses, reference)) / np.abs(reference)))


class Training(NamedTuple):
    """Losses, norms and weights of a short training on one rank."""

    losses: list[float]
    norms: list[float]
    """Norms of the gradient, before it is clipped."""
    weights: dict[str, npt.NDArray[np.float32]]
    """Weights of this rank after the last step, whole."""


class Difference(NamedTuple):
    """Largest relative differences of two trainings."""

    losses: float
    norms: float
    weights: float
    """Norm of a tensor's difference, over the norm of the tensor."""

    @property
    def largest(self) -> float:
        """The largest of all three; NaN where one is."""
        return float(np.max(self))


def trained(
    spec: ModelSpec, layout: Layout, steps: int, compiled: bool = False, backend: str = "inductor"
) -> Training:
    """Train `steps` steps on tokens that can be learnt; runs on every rank of a process group.

    Args:
        compiled: layers are compiled by the backend.
    """
    import torch

    from runtime.settings.training_options import TrainingOptions
    from runtime.train.trainer import Trainer

    options = TrainingOptions(train_iters=steps, seed=SEED, compile=compiled, **BITING, **ROUTING)
    with patch.object(torch, "compile", partial(torch.compile, backend=backend)):
        trainer = Trainer(spec, layout, options, torch.device("cpu"))
    random, losses, norms = np.random.RandomState(SEED), [], []
    for _ in range(steps):
        result = trainer.train_step(learnable(spec, layout.global_batch_size, random)[trainer.rows])
        losses.append(float(result.loss))
        norms.append(float(result.grad_norm))
    return Training(losses, norms, _whole_weights(trainer))


def learnable(spec: ModelSpec, batch: int, random: np.random.RandomState) -> npt.NDArray[np.int64]:
    """Sequences of which each token follows from the one before, but for one in eight: [batch, S + 1]."""
    follows = np.random.RandomState(SEED).permutation(spec.vocab)
    drawn = random.randint(0, spec.vocab, (batch, spec.seq + 1))
    surprises = random.rand(batch, spec.seq + 1) < 1 / 8
    for position in range(1, spec.seq + 1):
        after = follows[drawn[:, position - 1]]
        drawn[:, position] = np.where(surprises[:, position], drawn[:, position], after)
    return drawn.astype(np.int64)


def _whole_weights(trainer: Trainer) -> dict[str, npt.NDArray[np.float32]]:
    from torch.distributed.tensor import DTensor

    # PyTorch warns of each gather that takes two steps, by which parameters are made whole here.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    whole = {}
    for owned in trainer.optimizer.owned:
        weight = owned.parameter.detach()
        full = weight.full_tensor() if isinstance(weight, DTensor) else weight
        whole[owned.name] = full.float().cpu().numpy().copy()
    return whole


def difference(by_rank: Sequence[Training], alone: Training) -> Difference:
    """Largest differences of a layout's ranks from the training of one rank."""
    weights = [0.0]
    for rank in by_rank:
        for name, found in rank.weights.items():
            # A tied head is the embedding, and vocabularies are padded for tensor parallelism.
            known = name if name in alone.weights else "embedding.tokens.weight"
            # Key biases, which a softmax cancels, move by rounding alone.
            scale = np.linalg.norm(alone.weights[known.replace("key.bias", "query.bias")])
            rows = min(len(found), len(alone.weights[known]))
            weights.append(float(np.linalg.norm(found[:rows] - alone.weights[known][:rows]) / scale))
    losses = [relative_difference(rank.losses, alone.losses) for rank in by_rank]
    norms = [relative_difference(rank.norms, alone.norms) for rank in by_rank]
    return Difference(*(float(np.max(kind)) for kind in (losses, norms, weights)))

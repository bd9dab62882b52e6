"""Short trainings on random tokens: losses, whole gradients, and what a resumed run gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from costmodels import Layout, ModelSpec
from runtime import checkpoint
from runtime.job.metrics import largest_of_ranks
from runtime.parallel.local_tensors import local_part
from runtime.settings.training_options import TrainingOptions
from runtime.train.trainer import Trainer

CPU = torch.device("cpu")


def batch_of(spec: ModelSpec, layout: Layout, step: int) -> np.ndarray:
    """Random tokens of a step, the same for every layout."""
    random = np.random.RandomState(step)
    return random.randint(0, spec.vocab, (layout.global_batch_size, spec.seq + 1)).astype(np.int64)


def trained_layers(spec: ModelSpec, layout: Layout) -> dict[str, bool]:
    """Parameters of this rank by name, and whether one step has changed each."""
    trainer = Trainer(spec, layout, TrainingOptions(train_iters=1, lr=1e-2, lr_decay_style="constant"), CPU)
    owned = trainer.optimizer.owned
    before = {o.name: o.shard.detach().clone() for o in owned}
    trainer.train_step(batch_of(spec, layout, 0)[trainer.rows])
    return {o.name: not torch.equal(before[o.name], o.shard) for o in owned}


def whole_gradients(spec: ModelSpec, layout: Layout) -> tuple[float, dict[str, torch.Tensor]]:
    """Gradient norm of one step, and the whole gradient of every parameter of this rank."""
    return step_gradients(Trainer(spec, layout, TrainingOptions(train_iters=1, clip_grad=0.0), CPU), spec, 0)


def curve_and_gradients(
    spec: ModelSpec, layout: Layout, steps: int
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of training steps, and the whole gradient of every parameter of this rank before the first."""
    trainer = Trainer(spec, layout, TrainingOptions(train_iters=100, lr=1e-3), CPU)
    _, gradients = step_gradients(trainer, spec, 0)
    for owned in trainer.optimizer.owned:
        owned.parameter.grad = owned.shard.grad = None
    losses = [
        float(trainer.train_step(batch_of(spec, layout, step)[trainer.rows]).loss) for step in range(steps)
    ]
    return losses, gradients


def step_gradients(trainer: Trainer, spec: ModelSpec, step: int) -> tuple[float, dict[str, torch.Tensor]]:
    return batch_gradients(trainer, batch_of(spec, trainer.layout, step)[trainer.rows])


def batch_gradients(
    trainer: Trainer, samples: np.ndarray, starts: np.ndarray | None = None
) -> tuple[float, dict[str, torch.Tensor]]:
    """Gradient norm of a batch, given this rank's rows of it, and the whole gradients of its parameters."""
    from torch.distributed.tensor import DTensor

    from runtime.parallel.local_tensors import like_parameter

    trainer.executor.train(*trainer._inputs(samples, starts))
    trainer.optimizer.collect_gradients()
    norm = trainer.optimizer.squared_norm()
    torch.distributed.all_reduce(norm)
    gradients = {}
    for owned in trainer.optimizer.owned:
        gradient = like_parameter(owned.shard.grad, owned.parameter)
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        gradients[owned.name] = whole.clone()
    return float(norm.sqrt()), gradients


def resumed_losses(
    spec: ModelSpec, before: Layout, after: Layout, folder: str, steps: int, save_at: int
) -> tuple[list[float], list[float]]:
    """Losses of an uninterrupted run under `before`, and of the steps after resuming under `after`."""
    options = TrainingOptions(train_iters=steps, lr=1e-2)
    first = Trainer(spec, before, options, CPU)
    losses = []
    for step in range(steps):
        losses.append(float(first.train_step(batch_of(spec, before, step)[first.rows]).loss))
        if step + 1 == save_at:
            checkpoint.save(folder, first, spec, {"consumed_samples": 0})
    second = Trainer(spec, after, options, CPU)
    iteration = checkpoint.latest_iteration(folder)
    assert iteration == save_at
    checkpoint.load(folder, second, spec, iteration)
    resumed = [
        float(second.train_step(batch_of(spec, after, step)[second.rows]).loss)
        for step in range(save_at, steps)
    ]
    return losses, resumed


def initial_weights(spec: ModelSpec, layout: Layout) -> dict[str, torch.Tensor]:
    """Local initial weights of this rank."""
    trainer = Trainer(spec, layout, TrainingOptions(), CPU)
    return {o.name: local_part(o.parameter.detach()).clone() for o in trainer.optimizer.owned}


def load_other_model(spec: ModelSpec, other: ModelSpec, layout: Layout, folder: str) -> str:
    """The message with which a checkpoint of `spec` refuses to load into `other`."""
    checkpoint.save(folder, Trainer(spec, layout, TrainingOptions(), CPU), spec, {"consumed_samples": 0})
    trainer = Trainer(other, layout, TrainingOptions(), CPU)
    try:
        checkpoint.load(Path(folder), trainer, other, 0)
    except ValueError as error:
        return str(error)
    return ""


def losses_with(spec: ModelSpec, layout: Layout, options: TrainingOptions) -> list[float]:
    """Losses of training steps."""
    trainer = Trainer(spec, layout, options, CPU)
    return [
        float(trainer.train_step(batch_of(spec, layout, step)[trainer.rows]).loss)
        for step in range(options.train_iters)
    ]


def logged_peak(bytes_of_ranks: list[int]) -> int:
    """The peak that all ranks log, when each holds what the list says."""
    return largest_of_ranks(bytes_of_ranks[torch.distributed.get_rank()], CPU)


def losses_of_sizes(
    spec: ModelSpec, layout: Layout, options: TrainingOptions, sizes: list[int]
) -> tuple[list[float], list[float]]:
    """Losses of batches of these sizes, and those of an evaluation of a full batch after each."""
    trainer = Trainer(spec, layout, options, CPU)
    losses, valid = [], []
    for step, size in enumerate(sizes):
        samples = batch_of(spec, layout.model_copy(update={"global_batch_size": size}), step)
        losses.append(float(trainer.train_step(samples[trainer.rows_of(size)]).loss))
        valid.append(trainer.evaluate(batch_of(spec, layout, 0)[trainer.rows]))
    return losses, valid


def further_losses(
    spec: ModelSpec, layout: Layout
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], float, list[float]]:
    """Weights of one rank before a step, their gradients, and the losses of the next and further tokens."""
    trainer = Trainer(spec, layout, TrainingOptions(train_iters=100, lr=0.0, clip_grad=0.0), CPU)
    [stage] = trainer.executor.stages
    weights = {name: tensor.detach().clone() for name, tensor in stage.state_dict().items()}
    _, gradients = step_gradients(trainer, spec, 0)
    for owned in trainer.optimizer.owned:
        owned.parameter.grad = owned.shard.grad = None
    result = trainer.train_step(batch_of(spec, layout, 0)[trainer.rows])
    assert result.further is not None
    return weights, gradients, float(result.loss), result.further.tolist()

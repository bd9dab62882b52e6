"""Steps of pipeline schedules: gradients, the order of actions, and what is alive."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from costmodels import Layout, ModelSpec
from runtime.parallel.local_tensors import like_parameter, local_part
from runtime.settings.training_options import TrainingOptions
from runtime.train.trainer import Trainer
from tests.support.ranks.training import CPU, batch_of

REDUCTIONS = ("_reduce_scatter_base_", "allreduce_")


class Report(NamedTuple):
    """One step as one rank sees it."""

    loss: float
    """The loss of the global batch."""
    evaluated: float
    """The loss of the global batch, from `evaluate`."""
    gradients: dict[str, torch.Tensor]
    """Whole, by parameter."""


class Trace(NamedTuple):
    """Bytes that are alive after each action, as ("F0", bytes), and that are left in the end."""

    training: list[tuple[str, int]]
    left: int
    evaluation: list[tuple[str, int]]
    left_by_evaluation: int


class Watch(TorchDispatchMode):
    """Writes down reductions, and remembers the storage of every new tensor without keeping it."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d" and function._opname in REDUCTIONS:
            self.events.append("reduce")
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if type(tensor) is torch.Tensor and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def alive(self) -> dict[int, int]:
        """Bytes of the remembered storages that still exist."""
        self.storages = {key: entry for key, entry in self.storages.items() if not entry[0].expired()}
        return {key: size for key, (_, size) in self.storages.items()}


def report(spec: ModelSpec, layout: Layout) -> Report:
    """Evaluate, take the gradients of the same batch, and evaluate once more."""
    trainer = Trainer(spec, layout, TrainingOptions(train_iters=1), CPU)
    samples = batch_of(spec, layout, 0)[trainer.rows]
    evaluated = trainer.evaluate(samples)
    loss = trainer._once(trainer.executor.train(*trainer._inputs(samples)))
    torch.distributed.all_reduce(loss)
    trainer.optimizer.collect_gradients()
    gradients = {}
    for owned in trainer.optimizer.owned:
        gradient: Any = like_parameter(owned.shard.grad, owned.parameter)
        gradients[owned.name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    again = trainer.evaluate(samples)
    assert again == evaluated
    return Report(float(loss), evaluated, gradients)


def events(spec: ModelSpec, layout: Layout) -> list[str]:
    """Events of this rank in a step: actions and the stages they are of, such as "F0", and "reduce"."""
    trainer = Trainer(spec, layout, TrainingOptions(train_iters=2), CPU)
    samples = batch_of(spec, layout, 0)[trainer.rows]
    # Ranks agree on shapes before the first step.
    trainer.train_step(samples)
    inputs = trainer._inputs(samples)
    executor: Any = trainer.executor
    with Watch() as watch, _actions(executor.schedule, watch.events.append):
        executor.train(*inputs)
    return watch.events


def accumulation_events(spec: ModelSpec, layout: Layout) -> list[str]:
    """Events of a rank without a pipeline in a step: "forward" for each microbatch, and "reduce"."""
    trainer = Trainer(spec, layout, TrainingOptions(train_iters=1), CPU)
    inputs = trainer._inputs(batch_of(spec, layout, 0)[trainer.rows])
    with Watch() as watch:
        trainer.executor.stages[0].register_forward_pre_hook(lambda *_: watch.events.append("forward"))
        trainer.executor.train(*inputs)
    return watch.events


def live_activations(spec: ModelSpec, layout: Layout) -> Trace:
    """Bytes alive during and after a step and an evaluation, weights and gradients apart."""
    trainer = Trainer(spec, layout, TrainingOptions(train_iters=2), CPU)
    samples = batch_of(spec, layout, 0)[trainer.rows]
    inputs = trainer._inputs(samples)
    # Tables of positions, and whatever else is made on first use.
    trainer.evaluate(samples)
    trainer.train_step(samples)
    gc.collect()
    gc.disable()

    def run(step: Callable[..., torch.Tensor], schedule: Any) -> tuple[list[tuple[str, int]], int]:
        trace: list[tuple[str, int]] = []
        with Watch() as watch:

            def alive(*others: torch.Tensor) -> int:
                known = {key for tensor in (*inputs, *others) for key in _storages(tensor)}
                for stage in trainer.executor.stages:
                    for parameter in stage.parameters():
                        known |= {*_storages(parameter), *_storages(parameter.grad)}
                return sum(size for key, size in watch.alive().items() if key not in known)

            with _actions(schedule, lambda event: trace.append((event, alive()))):
                loss = step(*inputs)
            return trace, alive(loss)

    executor: Any = trainer.executor
    training, left = run(executor.train, executor.schedule)
    evaluation, left_by_evaluation = run(executor.evaluate, executor.evaluation)
    gc.enable()
    return Trace(training, left, evaluation, left_by_evaluation)


def clipped(spec: ModelSpec, layout: Layout, clip_grad: float) -> dict[str, torch.Tensor]:
    """Local gradients of this rank after clipping."""
    trainer = Trainer(spec, layout, TrainingOptions(train_iters=1, clip_grad=clip_grad), CPU)
    seen: dict[str, torch.Tensor] = {}

    def step(learning_rate: float, weight_decay: float) -> None:
        seen.update(
            {o.name: o.shard.grad.clone() for o in trainer.optimizer.owned if o.shard.grad is not None}
        )

    trainer.optimizer.step = step  # type: ignore[method-assign]
    trainer.train_step(batch_of(spec, layout, 0)[trainer.rows])
    return seen


def _storages(tensor: torch.Tensor | None) -> list[int]:
    return [] if tensor is None else [local_part(tensor).untyped_storage()._cdata]


@contextmanager
def _actions(schedule: Any, note: Callable[[str], None]) -> Iterator[None]:
    """Call `note` after every forward and backward of a stage: "F0", "I0", "W0" or, not split, "B0"."""
    stages = getattr(schedule, "_stages", None) or [schedule._stage]

    def wrap(stage: Any, method: str, kind: str) -> None:
        original = getattr(stage, method)

        def noted(chunk: int, *args: Any, **kwargs: Any) -> Any:
            result = original(chunk, *args, **kwargs)
            half = kind == "B" and not kwargs.get("full_backward", True)
            note(f"{'I' if half else kind}{stage.stage_index}")
            return result

        setattr(stage, method, noted)

    for stage in stages:
        wrap(stage, "forward_one_chunk", "F")
        wrap(stage, "backward_one_chunk", "B")
        wrap(stage, "backward_weight_one_chunk", "W")
    try:
        yield
    finally:
        for stage in stages:
            for method in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
                delattr(stage, method)

"""Steps in other number formats, and what overflows, resumes and copies."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from costmodels import Layout, ModelSpec
from runtime import checkpoint
from runtime.optimizers.update_rules import ElementWise
from runtime.parallel import working_copies
from runtime.parallel.float8_tensorwise import Float8Weight
from runtime.parallel.local_tensors import local_part
from runtime.settings.training_options import TrainingOptions
from runtime.train import stages
from runtime.train.trainer import Trainer
from tests.support.ranks.parity import Training, losses_of, trained
from tests.support.ranks.training import CPU, batch_of


class Step(NamedTuple):
    """The report of one step, as numbers."""

    loss: float
    grad_norm: float
    learning_rate: float
    loss_scale: float
    skipped: bool
    further: list[float]


def steps_of(spec: ModelSpec, layout: Layout, options: TrainingOptions, batches: list[int]) -> list[Step]:
    """Train on the batches of these numbers."""
    trainer = Trainer(spec, layout, options, CPU)
    return [step_of(trainer, spec, number) for number in batches]


def step_of(trainer: Trainer, spec: ModelSpec, number: int) -> Step:
    """Train on one batch."""
    result = trainer.train_step(batch_of(spec, trainer.layout, number)[trainer.rows])
    further = [] if result.further is None else result.further.tolist()
    return Step(float(result.loss), float(result.grad_norm), *result[2:5], further)


def tensors_of(trainer: Trainer) -> dict[str, Tensor]:
    """Copies of this rank's part of weights and moments, and Adam's counts of steps."""
    optimizer = trainer.optimizer
    tensors = {o.name: o.shard.detach().clone() for o in optimizer.owned}
    tensors |= {name: local_part(t).clone() for name, t in optimizer.rule.states().items()}
    assert isinstance(optimizer.rule, ElementWise)
    adam = optimizer.rule.torch
    assert adam is not None
    counts = {f"{o.name}.step": adam.state[o.shard]["step"].clone() for o in optimizer.owned}
    return tensors | counts


def overflow(spec: ModelSpec, layout: Layout, options: TrainingOptions) -> tuple[Step, Step, Step, list[str]]:
    """Steps before, at and after an overflow, and the names of the tensors that the overflow changed."""
    trainer = Trainer(spec, layout, options, CPU)
    before = step_of(trainer, spec, 0)
    tensors = tensors_of(trainer)
    assert trainer.loss_scale is not None
    scale, trainer.loss_scale.value = trainer.loss_scale.value, 2.0**60
    at = step_of(trainer, spec, 1)
    changed = [name for name, tensor in tensors_of(trainer).items() if not torch.equal(tensor, tensors[name])]
    trainer.loss_scale.value = scale
    return before, at, step_of(trainer, spec, 1), changed


def resumed_steps(
    spec: ModelSpec, layout: Layout, options: TrainingOptions, folder: str, save_at: int
) -> tuple[list[Step], list[Step]]:
    """Steps after `save_at` of a run that goes on, and of one that resumes there."""
    first = Trainer(spec, layout, options, CPU)
    for number in range(save_at):
        step_of(first, spec, number)
    checkpoint.save(folder, first, spec, {})
    rest = range(save_at, options.train_iters)
    uninterrupted = [step_of(first, spec, number) for number in rest]
    second = Trainer(spec, layout, options, CPU)
    checkpoint.load(folder, second, spec, save_at)
    return uninterrupted, [step_of(second, spec, number) for number in rest]


def gradients_of(spec: ModelSpec, layout: Layout) -> dict[str, Tensor]:
    """This rank's part of the gradient of one step."""
    trainer = Trainer(spec, layout, TrainingOptions(train_iters=1), CPU)
    trainer.executor.train(*trainer._inputs(batch_of(spec, layout, 0)[trainer.rows]))
    trainer.optimizer.collect_gradients()
    return {o.name: o.shard.grad for o in trainer.optimizer.owned if o.shard.grad is not None}


def copies_after_loading(spec: ModelSpec, layout: Layout, folder: str) -> dict[str, Tensor]:
    """This rank's weights and moments after loading a checkpoint of other values."""
    first = Trainer(spec, layout, TrainingOptions(train_iters=2, seed=1), CPU)
    with torch.no_grad():
        for owned in first.optimizer.owned:
            owned.shard.add_(1.0)
        for tensor in first.optimizer.rule.states().values():
            local_part(tensor).add_(2.0)
    checkpoint.save(folder, first, spec, {})
    second = Trainer(spec, layout, TrainingOptions(train_iters=2, seed=2), CPU)
    checkpoint.load(folder, second, spec, 0)
    return {name: tensor for name, tensor in tensors_of(second).items() if not name.endswith("step")}


def with_and_without_fsdp(spec: ModelSpec, layout: Layout, steps: int) -> tuple[Training, Training]:
    """A training as it is, and one whose stages FSDP2 wraps; runs on every rank of a process group."""
    plain = trained(spec, layout, steps)
    with patch.object(stages, "wraps_stages", lambda *_: True):
        return plain, trained(spec, layout, steps)


class Gathered(NamedTuple):
    """Bytes that were gathered in one forward pass."""

    sent: dict[torch.dtype, int]
    """Bytes that all ranks together gave to collectives, by the format that these saw."""
    narrow: int
    """Elements of the weights that linear layers then had in 8 bits."""


class _Gathers(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d._allgather_base_.default:
            whole = args[0]
            self.sent[whole.dtype] = self.sent.get(whole.dtype, 0) + whole.nbytes
        return func(*args, **(kwargs or {}))


def gathered(spec: ModelSpec, layout: Layout) -> Gathered:
    """Bytes that an evaluation of one microbatch gathers."""
    trainer, narrow = Trainer(spec, layout, TrainingOptions(train_iters=1), CPU), [0]

    def note(module: nn.Module, inputs: Any) -> None:
        if isinstance(module.weight, Float8Weight):
            assert module.weight.elements.element_size() == 1
            narrow[0] += module.weight.elements.untyped_storage().nbytes()

    for stage in trainer.executor.stages:
        for module in stage.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(note)
    with _Gathers() as gathers:
        trainer.evaluate(batch_of(spec, layout, 0)[trainer.rows])
    return Gathered(gathers.sent, narrow[0])


def exactly_compiled_losses(spec: ModelSpec, layout: Layout, steps: int) -> list[float]:
    """Losses of compiled layers that round wherever uncompiled ones do, also amid what is fused."""
    import torch._inductor.config

    with torch._inductor.config.patch(emulate_precision_casts=True):
        return losses_of(spec, layout, steps, compiled=True)


def losses_by_gemm(spec: ModelSpec, layout: Layout, steps: int, compiled: bool = False) -> list[float]:
    """Losses, and that of an evaluation where layers are not compiled, if each GEMM casts its weight."""
    with patch.object(working_copies, "TENSORWISE", ()):
        if compiled:
            return exactly_compiled_losses(spec, layout, steps)
        return losses_of(spec, layout, steps, evaluates=True)

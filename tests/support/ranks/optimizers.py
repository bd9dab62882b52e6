"""Steps of optimizers, and the same by PyTorch's own on the whole model."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from costmodels import Layout, ModelSpec
from costmodels.errors import InputError
from runtime import checkpoint
from runtime.model.transformer import Transformer
from runtime.optimizers.factored import PADDED_NAMES
from runtime.optimizers.muon import Muon
from runtime.optimizers.update_rules import ElementWise
from runtime.parallel.local_tensors import local_part
from runtime.settings.training_options import TrainingOptions
from runtime.train.trainer import Trainer
from tests.support.layouts import parse_layout
from tests.support.models import MODELS
from tests.support.ranks.training import CPU, batch_of

NO_MATRICES = ("bias", "_conv", "shared_gate.weight")
"""Parameters with two sides that Muon leaves to Adam: biases of experts, depthwise kernels and gates."""


class StepReport(NamedTuple):
    """One step, and the same on the whole model by PyTorch's own optimizers."""

    loss: float
    norm: float
    expected_norm: float
    differences: dict[str, float]
    """Largest difference of each weight of this rank."""


def optimizer_steps(spec: ModelSpec, layout: Layout, options: TrainingOptions) -> list[StepReport]:
    """Train, and compare each step with PyTorch's own optimizer on the whole model."""
    trainer = Trainer(spec, layout, options, CPU)
    plain = Transformer(spec, spec.padded_vocab(layout.tensor_parallel))
    plain.load_state_dict(_whole_weights(trainer) | _tied_head(spec, trainer))
    weights = dict(plain.named_parameters())
    optimizers = _reference(weights, layout, options)
    results = []
    for step in range(options.train_iters):
        samples = batch_of(spec, layout, step)
        result = trainer.train_step(samples[trainer.rows])
        norm = _plain_step(plain, optimizers, torch.from_numpy(samples), spec.vocab, options, step)
        differences = {
            name: float((whole - weights[name].detach()).abs().max())
            for name, whole in _whole_weights(trainer).items()
        }
        results.append(StepReport(float(result.loss), float(result.grad_norm), norm, differences))
    return results


def _plain_step(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    samples: Tensor,
    vocab: int,
    options: TrainingOptions,
    step: int,
) -> float:
    model.zero_grad()
    logits = model(samples[:, :-1])[..., :vocab].flatten(0, 1)
    targets = samples[:, 1:].flatten()
    functional.cross_entropy(logits, targets, reduction=options.loss_reduction).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), options.largest_norm() or float("inf"))
    if options.clip_grad_value is not None:
        nn.utils.clip_grad_value_(model.parameters(), options.clip_grad_value)
    _reference_step(optimizers, options, step)
    return float(norm)


def rule_steps(spec: ModelSpec, layout: Layout, options: TrainingOptions) -> dict[str, float]:
    """Largest differences to PyTorch's optimizers on whole weights, after steps with made-up gradients.

    A gradient is a function of the weight, element by element, so that every rank knows its part of it.
    """
    trainer = Trainer(spec, layout, options, CPU)
    rule = trainer.optimizer.rule
    if isinstance(rule, Muon):
        rule.dtype = torch.bfloat16
    whole = _whole_weights(trainer)
    weights = {
        part: nn.Parameter(tensor.clone()) for part, tensor in _for_pytorch(whole, spec, layout).items()
    }
    optimizers = _reference(weights, layout, options)
    with torch.compiler.set_stance("force_eager"):
        for step in range(options.train_iters):
            for owned in trainer.optimizer.owned:
                owned.shard.grad = _made_up_gradient(owned.shard)
            for weight in weights.values():
                weight.grad = _made_up_gradient(weight)
            trainer.optimizer.step(options.learning_rate().at(step), options.weight_decays().at(step))
            _reference_step(optimizers, options, step)
    after = _whole_weights(trainer)
    # A matrix of zeros, as biases of experts, has a gradient of zeros.
    moves = [name for name in after if whole[name].any() or whole[name].ndim == 1]
    assert not [name for name in moves if torch.equal(after[name], whole[name])]
    return {
        part: float((tensor - weights[part].detach()).abs().max())
        for part, tensor in _for_pytorch(after, spec, layout).items()
    }


def _made_up_gradient(weight: Tensor) -> Tensor:
    value = weight.detach()
    # Vectors may be zero and have to move; the padding of matrices must not.
    return value - 30.0 * value * value + 0.01 * (value.ndim == 1)


def _for_pytorch(whole: dict[str, Tensor], spec: ModelSpec, layout: Layout) -> dict[str, Tensor]:
    """Weights as PyTorch's optimizers should see them, by name.

    Means of Adafactor and CAME are over the vocabulary without its padding, and Muon takes the matrix of each
    expert.
    """
    if layout.optimizer in ("adafactor", "came"):
        return {
            name: tensor[: spec.vocab if name in PADDED_NAMES else None] for name, tensor in whole.items()
        }
    if layout.optimizer == "muon":
        stacks = {name: tensor for name, tensor in whole.items() if tensor.ndim > 2}
        parts = {f"{name}.{number}": m for name, stack in stacks.items() for number, m in enumerate(stack)}
        return {name: tensor for name, tensor in whole.items() if name not in stacks} | parts
    return whole


def _reference(
    weights: dict[str, nn.Parameter], layout: Layout, options: TrainingOptions
) -> list[torch.optim.Optimizer]:
    """PyTorch's optimizers, with groups for decayed weights and others."""
    adam: dict[str, Any] = {"betas": (options.adam_beta1, options.adam_beta2), "eps": options.adam_eps}
    if layout.optimizer == "muon":
        matrices = {
            n: p
            for n, p in weights.items()
            if n.startswith(("layers.", "mtp.")) and p.ndim == 2 and not n.endswith(NO_MATRICES)
        }
        rest = {n: p for n, p in weights.items() if n not in matrices}
        adjust = "match_rms_adamw" if options.muon_scale_mode == "spectral" else "original"
        settings: dict[str, Any] = {
            "momentum": options.muon_momentum,
            "nesterov": not options.no_muon_nesterov,
        }
        muon = torch.optim.Muon(_groups(matrices), adjust_lr_fn=adjust, **settings)
        return [muon, *([torch.optim.AdamW(_groups(rest), **adam)] if rest else [])]
    if layout.optimizer == "sgd":
        return [torch.optim.SGD(_groups(weights), momentum=options.sgd_momentum)]
    if layout.optimizer == "adafactor":
        return [torch.optim.Adafactor(_groups(weights))]
    if layout.optimizer == "came":
        return [PlainCame(_groups(weights), options)]
    if layout.optimizer == "adam8bit":
        from torchao.optim import AdamW8bit

        return [AdamW8bit(_groups(weights), **adam)]
    kind = torch.optim.Adam if options.no_decoupled_weight_decay else torch.optim.AdamW
    return [kind(_groups(weights), **adam)]


class PlainCame(torch.optim.Optimizer):
    """CAME as algorithm 2 of arXiv:2307.02047 says, in fp64, with the schedule and names of MindFormers.

    MindFormers has 1 - t^-decay_rate in the place of the paper's second beta
    (mindformers/core/optim/came.py).
    """

    def __init__(self, groups: list[dict[str, Any]], options: TrainingOptions) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})
        self.options = options

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        beta1, beta3 = self.options.came_beta1, self.options.came_beta3
        for group in self.param_groups:
            for weight in group["params"]:
                kept = self.state[weight]
                kept["t"] = kept.get("t", 0) + 1
                beta2 = 1 - kept["t"] ** -self.options.came_decay_rate
                gradient = weight.grad.double()
                update = gradient / self._mean(kept, "v", gradient**2 + 1e-30, beta2).sqrt()
                rms = (update**2).mean().sqrt()
                update = update / max(1.0, float(rms) / self.options.came_clip_threshold)
                momentum = self._mean(kept, "m", update, beta1, factored=False)
                step = momentum
                if weight.ndim > 1:
                    instability = self._mean(kept, "u", (update - momentum) ** 2 + 1e-16, beta3)
                    step = momentum / instability.sqrt()
                value = weight.double()
                weight.copy_(value - group["lr"] * (group["weight_decay"] * value + step))

    def _mean(
        self, kept: dict[str, Any], name: str, new: Tensor, beta: float, factored: bool = True
    ) -> Tensor:
        """The running mean of `new`; of a matrix the outer product of its rows' and its columns' means."""

        def mean(name: str, new: Tensor) -> Tensor:
            kept[name] = beta * kept.get(name, torch.zeros_like(new)) + (1 - beta) * new
            whole: Tensor = kept[name]
            return whole

        if new.ndim < 2 or not factored:
            return mean(name, new)
        rows, columns = mean(f"{name}_row", new.mean(-1)), mean(f"{name}_col", new.mean(-2))
        return rows[..., :, None] * columns[..., None, :] / rows.mean(-1)[..., None, None]


def _groups(weights: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    """Groups with weight decay and without: biases and vectors have none."""
    matrices = {n for n, p in weights.items() if p.ndim > 1 and "bias" not in n}
    groups = [[p for n, p in weights.items() if (n in matrices) == decayed] for decayed in (True, False)]
    return [
        {"params": group, "decayed": decayed}
        for group, decayed in zip(groups, (True, False), strict=True)
        if group
    ]


def _reference_step(optimizers: list[torch.optim.Optimizer], options: TrainingOptions, step: int) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rate = options.learning_rate().at(step)
            group["lr"] = torch.tensor(rate) if isinstance(group["lr"], Tensor) else rate
            group["weight_decay"] = options.weight_decays().at(step) if group["decayed"] else 0.0
        optimizer.step()


def resumed_losses(
    spec: ModelSpec, before: Layout, after: Layout, options: TrainingOptions, folder: str
) -> tuple[list[float], list[float]]:
    """Losses of a run under `before`, and of one under `after` that goes on from its second step."""
    with torch.compiler.set_stance("force_eager"):
        first = Trainer(spec, before, options, CPU)
        losses = []
        for step in range(options.train_iters):
            if step == 2:
                checkpoint.save(folder, first, spec, {})
            losses.append(float(first.train_step(batch_of(spec, before, step)[first.rows]).loss))
        second = Trainer(spec, after, options, CPU)
        checkpoint.load(folder, second, spec, 2)
        resumed = [
            float(second.train_step(batch_of(spec, after, step)[second.rows]).loss)
            for step in range(2, options.train_iters)
        ]
    return losses, resumed


def overflowing_step(
    spec: ModelSpec, layout: Layout, options: TrainingOptions
) -> tuple[bool, list[str], float]:
    """A step whose gradient overflows: whether it was skipped, its changes, and the loss after another."""
    with torch.compiler.set_stance("force_eager"):
        trainer = Trainer(spec, layout, options, CPU)
        trainer.train_step(batch_of(spec, layout, 0)[trainer.rows])
        before = _all_state(trainer)
        assert trainer.loss_scale is not None
        scale, trainer.loss_scale.value = trainer.loss_scale.value, 2.0**60
        skipped = trainer.train_step(batch_of(spec, layout, 1)[trainer.rows]).skipped
        changed = [
            name for name, tensor in _all_state(trainer).items() if not torch.equal(tensor, before[name])
        ]
        trainer.loss_scale.value = scale
        return skipped, changed, float(trainer.train_step(batch_of(spec, layout, 1)[trainer.rows]).loss)


def _all_state(trainer: Trainer) -> dict[str, Tensor]:
    """Copies of this rank's weights and optimizer state."""
    weights = {o.name: o.shard.detach().clone() for o in trainer.optimizer.owned}
    return weights | {n: local_part(t).clone() for n, t in trainer.optimizer.rule.states().items()}


def _whole_weights(trainer: Trainer) -> dict[str, Tensor]:
    return {
        o.name: (p.full_tensor() if isinstance(p := o.parameter.detach(), DTensor) else p).clone()
        for o in trainer.optimizer.owned
    }


def _tied_head(spec: ModelSpec, trainer: Trainer) -> dict[str, Tensor]:
    return {"head.weight": _whole_weights(trainer)["embedding.tokens.weight"]} if spec.tied else {}


def resumed_weights(
    spec: ModelSpec, before: Layout, after: Layout, options: TrainingOptions, folder: str
) -> tuple[tuple[int, int], float, float, str]:
    """The state that a checkpoint without the optimizer's state gives to a run with another optimizer.

    Returns its iteration and updates, the loss of the next step in the first run and in the second one, and
    the error of loading where the checkpoint's optimizer is asked for.
    """
    with torch.compiler.set_stance("force_eager"):
        first = Trainer(spec, before, options, CPU)
        for step in range(2):
            first.train_step(batch_of(spec, before, step)[first.rows])
        saver = checkpoint.Saver(folder, with_optimizer=False, report=lambda line: None)
        saver.save(first, spec, {})
        saver.close()
        batch = batch_of(spec, before, 2)[first.rows]
        with pytest.raises(InputError) as refused:
            checkpoint.load(folder, first, spec, 2)
        second = Trainer(spec, after, options, CPU)
        checkpoint.load(folder, second, spec, 2, with_optimizer=False)
        counts = (second.iteration, second.updates)
        losses = [float(trainer.train_step(batch).loss) for trainer in (first, second)]
    return counts, losses[0], losses[1], str(refused.value)


def _adam_with_factors(options: TrainingOptions, takes_factor: bool) -> Trainer:
    spec = MODELS["llama"]
    trainer = Trainer(spec, parse_layout("gbs=4", spec), options, CPU)
    rule = trainer.optimizer.rule
    assert isinstance(rule, ElementWise) and not rule.takes_factor
    rule.takes_factor = takes_factor
    return trainer


def clipped_steps(options: TrainingOptions, takes_factor: bool) -> list[Tensor]:
    """Weights after four steps that clip gradients, within the kernel of Adam or before it."""
    trainer = _adam_with_factors(options, takes_factor)
    batch = np.random.RandomState(0).randint(0, trainer.spec.vocab, (4, trainer.spec.seq + 1))
    for _ in range(4):
        assert float(trainer.train_step(batch).grad_norm) > 0.1
        assert isinstance(trainer.optimizer.rule, ElementWise) and trainer.optimizer.rule.factor is None
    return [one.shard.detach().clone() for one in trainer.optimizer.owned]


def clipped_values(options: TrainingOptions) -> set[float]:
    """Elements of gradients of 8, times a quarter, clipped to 3."""
    optimizer = _adam_with_factors(options, takes_factor=True).optimizer
    for one in optimizer.owned:
        one.shard.grad = torch.full_like(one.shard, 8.0)
    optimizer.scale(torch.tensor(0.25))
    optimizer.clip_values(3.0)
    assert isinstance(optimizer.rule, ElementWise) and optimizer.rule.factor is None
    elements: set[float] = set()
    for one in optimizer.owned:
        assert one.shard.grad is not None
        elements.update(one.shard.grad.unique().tolist())
    return elements

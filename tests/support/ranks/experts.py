"""Trainings of mixtures of experts, with what their routers saw."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from costmodels import Layout, ModelSpec
from runtime import checkpoint
from runtime.model.transformer import Transformer
from runtime.parallel.initialisation import initialise
from runtime.parallel.local_tensors import local_part
from runtime.settings.training_options import TrainingOptions
from runtime.train.balance import Balance, Load
from runtime.train.trainer import Trainer
from tests.support.ranks.parity import ROUTING
from tests.support.ranks.training import CPU, batch_of, step_gradients


class Run(NamedTuple):
    """Losses, gradients and loads of a short training on one rank."""

    losses: list[float]
    norm: float
    """The norm of the gradient before the first step."""
    gradients: dict[str, Tensor]
    """The gradient before the first step, every parameter of this rank whole."""
    load: Load
    """Tokens of each expert over all steps."""
    biases: dict[str, list[float]]
    """Biases of experts, after the last step."""


def trained(
    spec: ModelSpec,
    layout: Layout,
    steps: int,
    options: Mapping[str, Any],
    bias: list[float] | None = None,
    backend: str = "inductor",
) -> Run:
    """Train with the options of `ROUTING` and `options`.

    Args:
        bias: that of all experts.
        backend: of layers that are compiled.
    """
    with patch.object(torch, "compile", partial(torch.compile, backend=backend)):
        trainer, balance = _built(spec, layout, options)
    for stage in trainer.executor.stages:
        for router in stage.routers.values():
            if bias is not None:
                assert router.expert_bias is not None
                router.expert_bias.copy_(torch.tensor(bias))
    norm, gradients = step_gradients(trainer, spec, 0)
    trainer.optimizer.drop_gradients()
    balance.report()
    losses = [_step(trainer, step) for step in range(steps)]
    biases = {name: bias.tolist() for name, bias in balance.biases().items()}
    return Run(losses, norm, gradients, balance.report(), biases)


def _built(spec: ModelSpec, layout: Layout, options: Mapping[str, Any]) -> tuple[Trainer, Balance]:
    chosen = TrainingOptions(**{"train_iters": 100, "lr": 1e-3, "clip_grad": 0.0, **ROUTING, **options})
    trainer = Trainer(spec, layout, chosen, CPU)
    assert trainer.balance is not None
    return trainer, trainer.balance


def _step(trainer: Trainer, step: int) -> float:
    return float(trainer.train_step(batch_of(trainer.spec, trainer.layout, step)[trainer.rows]).loss)


def moved(spec: ModelSpec, layouts: list[Layout], folder: str, steps: int) -> list[float]:
    """Losses of a job that goes through `layouts`: `steps` under each, saved and loaded in between."""
    losses: list[float] = []
    for layout in layouts:
        trainer, _ = _built(spec, layout, {})
        if losses:
            checkpoint.load(folder, trainer, spec, len(losses))
        first = len(losses)
        losses += [_step(trainer, first + step) for step in range(steps)]
        checkpoint.save(folder, trainer, spec, {})
    return losses


def expert_shapes(spec: ModelSpec, layout: Layout) -> dict[str, tuple[int, ...]]:
    """Shapes of this rank's part of the parameters of the last layer's experts."""
    trainer, _ = _built(spec, layout, {})
    start = f"layers.{spec.layers - 1}.mlp.experts."
    return {
        o.name.removeprefix(start): tuple(local_part(o.parameter).shape)
        for o in trainer.optimizer.owned
        if o.name.startswith(start)
    }


class Objective(NamedTuple):
    """Terms that the routers of one rank add to the objective of one step."""

    gradients: dict[str, Tensor]
    expected: dict[str, Tensor]
    """Gradients by autograd of the objective as `runtime.train.balance` defines it."""
    load: Load
    shares: list[list[float]]
    balancing_loss: float
    z_loss: float


def objective(spec: ModelSpec, layout: Layout, options: Mapping[str, Any]) -> Objective:
    """Gradients of one step of one rank, and those of its objective written down token by token.

    The load is that of two such steps.
    """
    trainer, balance = _built(spec, layout, options)
    for _ in range(2):
        trainer.optimizer.drop_gradients()
        _, gradients = step_gradients(trainer, spec, 0)
        balance.end_step(updated=False)
    model = Transformer(spec, spec.padded_vocab(1))
    initialise(model, spec, TrainingOptions().seed)
    seen: list[tuple[Tensor, Tensor]] = []
    for router in model.routers.values():
        router.observe = partial(_remember, seen)
    batch = torch.from_numpy(batch_of(spec, layout, 0))
    chosen = {**ROUTING, **options}
    losses, balancing, z_losses = [], [], []
    counts = torch.zeros(spec.moe_layers, spec.experts)
    for part in batch.split(layout.micro_batch_size):
        seen.clear()
        logits = model(part[:, :-1])[..., : spec.vocab]
        losses.append(F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()))
        for layer, (routed, experts) in enumerate(seen):
            counts[layer] += torch.bincount(experts.flatten(), minlength=spec.experts)
            z_losses.append(routed.exp().sum(-1).log().square().mean())
            whole = chosen["moe_router_load_balancing_type"] == "aux_loss"
            units = [slice(None)] if whole else [slice(row, row + 1) for row in range(len(part))]
            balancing += [_aux(spec, routed[unit], experts[unit]) for unit in units]
    layers = spec.moe_layers
    aux, z = torch.stack(balancing).mean(), torch.stack(z_losses).mean()
    total = torch.stack(losses).mean()
    total = total + layers * (chosen["moe_aux_loss_coeff"] * aux + chosen["moe_z_loss_coeff"] * z)
    total.backward()  # type: ignore[no-untyped-call]
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    shares = (counts / counts.sum(1, keepdim=True) * spec.experts).tolist()
    return Objective(gradients, expected, balance.report(), shares, float(aux), float(z))


def _remember(
    seen: list[tuple[Tensor, Tensor]],
    load: Tensor,
    logits: Tensor,
    scores: Tensor,
    chosen: Tensor,
    weights: Tensor,
    kept: Tensor | None,
) -> Tensor:
    seen.append((logits, chosen))
    return weights


def _aux(spec: ModelSpec, logits: Tensor, chosen: Tensor) -> Tensor:
    """E sum_i f_i P_i: the share of choices that expert i has, and the mean of its scores.

    Biases move choices but not the loss.
    """
    if spec.router.expert_bias:
        chosen = logits.topk(spec.top_k).indices
    scores = logits.softmax(-1)
    if spec.router.score == "sigmoid":
        scores = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    total = logits.new_zeros(())
    for expert in range(spec.experts):
        total = total + (chosen == expert).sum() / chosen.numel() * scores[..., expert].mean()
    return spec.experts * total


def counted(spec: ModelSpec, layout: Layout) -> list[int]:
    """Pairs that each layer has counted, over all ranks: after evaluation, and after one step besides."""
    trainer, balance = _built(spec, layout, {})
    batch = batch_of(spec, layout, 0)[trainer.rows]
    trainer.evaluate(batch)
    counts = []
    for run in (trainer.evaluate, trainer.train_step):
        run(batch)
        total = balance.counts().sum(1)
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        counts += total.tolist()
    return counts


def bias_steps(
    spec: ModelSpec, layout: Layout, steps: int = 3, reports: bool = True
) -> tuple[list[Load], list[dict[str, Tensor]]]:
    """Loads of some steps, and biases after each; the second one updates no weights.

    Args:
        reports: loads are reported after each step, not at the end alone.
    """
    trainer, balance = _built(spec, layout, {"moe_router_bias_update_rate": 0.25})
    loads, biases = [], []
    for step in range(steps):
        if step == 1:
            step_gradients(trainer, spec, step)
            trainer.optimizer.drop_gradients()
            balance.end_step(updated=False)
        else:
            _step(trainer, step)
        biases.append({name: bias.clone() for name, bias in balance.biases().items()})
        if reports or step == steps - 1:
            loads.append(balance.report())
    return loads, biases


def travelling_beside_experts(spec: ModelSpec, layout: Layout) -> tuple[list[int], list[int]]:
    """Exchanges under way each time that experts begin to compute, forward and back, in a step of one
    microbatch; runs on every rank of a process group."""
    from runtime.model.experts import Experts
    from runtime.parallel.collectives import Exchange

    send, arrived, compute = Exchange._send, Exchange._arrived, Experts.forward
    travelling = 0
    found: tuple[list[int], list[int]] = [], []

    def sent(exchange: Exchange, *arguments: Any) -> None:
        nonlocal travelling
        travelling += 1
        send(exchange, *arguments)

    def came(exchange: Exchange) -> Tensor:
        nonlocal travelling
        travelling -= 1
        return arrived(exchange)

    def computed(experts: Experts, rows: Tensor, counts: Tensor) -> Tensor:
        found[0].append(travelling)
        result = compute(experts, rows, counts)
        result.register_hook(lambda _: found[1].append(travelling))
        return result

    trainer, _ = _built(spec, layout, {})
    with (
        patch.object(Exchange, "_send", sent),
        patch.object(Exchange, "_arrived", came),
        patch.object(Experts, "forward", computed),
    ):
        _step(trainer, 0)
    return found

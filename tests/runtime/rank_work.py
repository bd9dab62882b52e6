"""More of what tests run on every rank of a worker pool: losses, optimizer steps, agreement."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from costmodels import Layout, ModelSpec
from costmodels.errors import InputError
from runtime import checkpoint, ranks
from runtime.loss import cross_entropy_sum
from runtime.model import Transformer
from runtime.options import TrainingOptions
from runtime.trainer import Trainer
from tests.runtime.distributed_work import CPU, batch_of


def split_loss(logits: Tensor, targets: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Loss and this rank's gradient of logits that are split evenly over all ranks."""
    width = logits.shape[-1] // dist.get_world_size()
    start = dist.get_rank() * width
    part = logits[..., start : start + width].clone().requires_grad_()
    loss = cross_entropy_sum(part, targets, vocab, start, dist.group.WORLD)
    (3 * loss).backward()
    assert part.grad is not None
    return loss.detach(), part.grad


def adamw_steps(
    spec: ModelSpec, layout: Layout, options: TrainingOptions
) -> list[tuple[float, float, dict[str, float]]]:
    """Per step: gradient norm, the norm that PyTorch finds, and the largest difference of each weight."""
    trainer = Trainer(spec, layout, options, CPU)
    plain = Transformer(spec, spec.padded_vocab(layout.tensor_parallel))
    plain.load_state_dict(_whole_weights(trainer) | _tied_head(spec, trainer))
    decayed = [p for p in plain.parameters() if p.ndim > 1]
    others = [p for p in plain.parameters() if p.ndim == 1]
    adam = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": options.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        betas=(options.adam_beta1, options.adam_beta2),
        eps=options.adam_eps,
    )
    results = []
    for step in range(options.train_iters):
        samples = batch_of(spec, layout, step)
        result = trainer.train_step(samples[trainer.rows])
        norm = _plain_step(plain, adam, torch.from_numpy(samples), spec.vocab, options, result.learning_rate)
        whole = _whole_weights(trainer)
        differences = {
            name: float((whole[name] - p.detach()).abs().max()) for name, p in plain.named_parameters()
        }
        results.append((float(result.grad_norm), norm, differences))
    return results


def _plain_step(
    model: nn.Module,
    adam: torch.optim.Optimizer,
    samples: Tensor,
    vocab: int,
    options: TrainingOptions,
    lr: float,
) -> float:
    adam.zero_grad()
    logits = model(samples[:, :-1])[..., :vocab]
    functional.cross_entropy(logits.flatten(0, 1), samples[:, 1:].flatten()).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), options.clip_grad or float("inf"))
    for group in adam.param_groups:
        group["lr"] = lr
    adam.step()
    return float(norm)


def _whole_weights(trainer: Trainer) -> dict[str, Tensor]:
    return {
        o.name: (p.full_tensor() if isinstance(p := o.parameter.detach(), DTensor) else p).clone()
        for o in trainer.optimizer.owned
    }


def _tied_head(spec: ModelSpec, trainer: Trainer) -> dict[str, Tensor]:
    return {"head.weight": _whole_weights(trainer)["embedding.tokens.weight"]} if spec.tied else {}


def agreement(folder: str) -> dict[str, object]:
    """What rank 0 and the other ranks get when one of them refuses, and the order of turns."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    found: dict[str, object] = {"own": ranks.together(lambda: rank)}
    found["first"] = ranks.on_first_rank(lambda: f"from {rank}")
    for refusing in (0, 1):
        try:
            ranks.together(lambda refusing=refusing: _refuse_on(refusing))  # type: ignore[misc]
        except InputError as error:
            found[f"refused by {refusing}"] = str(error)
    try:
        ranks.on_first_rank(lambda: _refuse_on(0))
    except InputError as error:
        found["refused by first"] = str(error)
    place = ranks.Ranks(rank, rank % 2, size, 2)
    found["turn"] = ranks.in_turns(place, lambda: _join_queue(folder, rank))
    return found


def _refuse_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise InputError(f"rank {rank} refuses")


def _join_queue(folder: str, rank: int) -> int:
    """Leave a file, and count those that were there before."""
    before = len(list(Path(folder).iterdir()))
    (Path(folder) / str(rank)).touch()
    return before


def save_over_a_partial(spec: ModelSpec, layout: Layout, folder: str) -> dict[str, object]:
    """Newest checkpoint before and after saving where an earlier save was killed, and what lies there."""
    partial = Path(folder) / "iter_0000000.partial"
    partial.mkdir()
    (partial / "left_over").write_text("")
    before = checkpoint.latest_iteration(folder)
    trainer = Trainer(spec, layout, TrainingOptions(), CPU)
    target = checkpoint.save(folder, trainer, spec, {"consumed_samples": 0})
    assert not (target / "left_over").exists()
    names = sorted(path.name for path in Path(folder).iterdir())
    return {"before": before, "after": checkpoint.latest_iteration(folder), "names": names}

"""Checkpoints: `FOLDER/iter_0000100`, written whole or not at all, through torch.distributed.checkpoint.

Tensors are stored under their names in the whole model, so that any layout can read what another wrote.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from costmodels import ModelSpec
from costmodels.errors import InputError
from runtime.optimizer import MOMENTS, local_part
from runtime.trainer import Trainer

TRACKER = "latest_checkpointed_iteration.txt"
"""File that names the newest complete checkpoint (Megatron-LM's name)."""

RUN_FILE = "run.json"
"""What the checkpoint is of: model, iteration, optimizer state, loss scale, and what `save` was told."""


def iteration_folder(folder: str | Path, iteration: int) -> Path:
    """Where the checkpoint of an iteration lies (Megatron-LM's name)."""
    return Path(folder) / f"iter_{iteration:07d}"


def latest_iteration(folder: str | Path) -> int | None:
    """Iteration of the newest complete checkpoint; None when there is none."""
    tracker = Path(folder) / TRACKER
    if not tracker.exists():
        return None
    text = tracker.read_text().strip()
    if not text.isdigit():
        raise InputError(f"{tracker}: {text!r} is not an iteration number; write the one to load")
    if not (iteration_folder(folder, int(text)) / RUN_FILE).exists():
        raise InputError(
            f"{tracker} names iteration {text}, but {iteration_folder(folder, int(text))} "
            "holds no complete checkpoint; write the number of one that does"
        )
    return int(text)


def save(folder: str | Path, trainer: Trainer, spec: ModelSpec, run: dict[str, Any]) -> Path:
    """Write the state of `trainer`; every rank calls it. Returns the checkpoint's folder."""
    target = iteration_folder(folder, trainer.iteration)
    partial = target.with_name(target.name + ".partial")
    if dist.get_rank() == 0 and partial.exists():
        shutil.rmtree(partial)
    dist.barrier()
    _save_tensors(trainer, spec, partial)
    if dist.get_rank() == 0:
        contents = {
            "iteration": trainer.iteration,
            "skipped_iterations": trainer.iteration - trainer.updates,
            "optimizer_state": sorted(trainer.optimizer.rule.slots),
            "loss_scale": None if trainer.loss_scale is None else trainer.loss_scale.state(),
            "model": spec.model_dump(mode="json"),
            **run,
        }
        (partial / RUN_FILE).write_text(json.dumps(contents, indent=1))
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
        tracker = target.with_name(TRACKER)
        fresh = tracker.with_name(TRACKER + ".partial")
        fresh.write_text(str(trainer.iteration))
        fresh.replace(tracker)
    dist.barrier()
    return target


def load(
    folder: str | Path,
    trainer: Trainer,
    spec: ModelSpec,
    iteration: int,
    expected: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Read a checkpoint into `trainer`; every rank calls it. Returns what `save` was given as `run`.

    Raises:
        InputError: the checkpoint is of another model or optimizer, or its run differs from `expected`.
    """
    source = iteration_folder(folder, iteration)
    run: dict[str, Any] = json.loads((source / RUN_FILE).read_text())
    stored = ModelSpec.model_validate(run.pop("model"))
    different = [
        f"{name} {getattr(stored, name)}"
        for name in ModelSpec.model_fields
        if name not in ("name", "source", "published_parameters")
        and getattr(stored, name) != getattr(spec, name)
    ]
    if different:
        raise InputError(
            f"checkpoint {source} is of another model ({', '.join(different)}); give the same model"
        )
    for name, value in (expected or {}).items():
        if run.get(name) != value:
            raise InputError(
                f"checkpoint {source} was trained with {name} {run.get(name)}, not {value}: samples would "
                "come in another order; give the same, or start anew in another folder"
            )
    slots = sorted(run.pop("optimizer_state", MOMENTS))
    if slots != sorted(trainer.optimizer.rule.slots):
        raise InputError(
            f"checkpoint {source} holds other optimizer state ({', '.join(slots) or 'none'}) than that of "
            f"--optimizer {trainer.layout.optimizer}; give the optimizer that it was trained with"
        )
    trainer.iteration = run.pop("iteration")
    trainer.updates = trainer.iteration - run.pop("skipped_iterations", 0)
    scale = run.pop("loss_scale", None)
    if scale is not None and trainer.loss_scale is not None:
        trainer.loss_scale.load(scale)
    _load_tensors(trainer, spec, source)
    return run


def _tensors(trainer: Trainer) -> dict[str, Tensor]:
    """Parameters and buffers of this rank."""
    weights: dict[str, Tensor] = {o.name: o.parameter.detach() for o in trainer.optimizer.owned}
    for stage in trainer.executor.stages:
        kept = stage.state_dict().keys()
        weights |= {name: buffer for name, buffer in stage.named_buffers() if name in kept}
    return weights


def _stored_name(name: str, spec: ModelSpec) -> str:
    """A tied head is the embedding: stored once, read by all that hold a copy."""
    return name.replace("head.weight", "embedding.tokens.weight") if spec.tied else name


def _save_tensors(trainer: Trainer, spec: ModelSpec, folder: Path) -> None:
    tensors = _tensors(trainer) | trainer.optimizer.rule.states()
    stored = {name: tensor for name, tensor in tensors.items() if _stored_name(name, spec) == name}
    save_tensors(stored, checkpoint_id=folder)


def _load_tensors(trainer: Trainer, spec: ModelSpec, folder: Path) -> None:
    states = trainer.optimizer.rule.states()
    tensors = _tensors(trainer) | states
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stored.setdefault(_stored_name(name, spec), tensor)
    load_tensors(stored, checkpoint_id=folder)
    for name, tensor in tensors.items():
        source = stored[_stored_name(name, spec)]
        if source is not tensor:
            # In a V, the first rank holds the first and the last stage: two copies, split alike.
            local_part(tensor).copy_(local_part(source))
    trainer.optimizer.rule.load(states, trainer.updates)

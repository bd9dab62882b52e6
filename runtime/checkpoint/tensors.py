"""The tensors of a trainer that a checkpoint stores, under their names in the whole model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

from costmodels import ModelSpec
from runtime.checkpoint.reader import CheckpointReader
from runtime.optimizers.factored import PADDED_NAMES
from runtime.optimizers.shards import FURTHER_EMBEDDING
from runtime.parallel.local_tensors import local_part
from runtime.parallel.quantised_base import base_weights
from runtime.parallel.ranks import run_together
from runtime.train.trainer import Trainer


def run_contents(
    trainer: Trainer, spec: ModelSpec, run: dict[str, Any], with_optimizer: bool = True
) -> dict[str, Any]:
    """Fields of run.json with the state of `trainer`, and those of `run`, which the loop adds."""
    return {
        "iteration": trainer.iteration,
        "skipped_iterations": trainer.iteration - trainer.updates,
        "optimizer_state": sorted(trainer.optimizer.rule.slots) if with_optimizer else [],
        "loss_scale": None if trainer.loss_scale is None else trainer.loss_scale.state(),
        "model": spec.model_dump(mode="json"),
        **({} if trainer.base is None else {"base": trainer.base.model_dump()}),
        **run,
    }


def stored_tensors(trainer: Trainer, spec: ModelSpec, with_optimizer: bool = True) -> dict[str, Tensor]:
    """This rank's part of the state in a checkpoint, sharing memory with the live state if possible."""
    tensors = _weights(trainer) | (trainer.optimizer.rule.states() if with_optimizer else {})
    return {name: tensor for name, tensor in tensors.items() if _stored_name(name, spec) == name}


def load_weights(trainer: Trainer, spec: ModelSpec, folder: Path) -> None:
    """Read only trained parameters and buffers: weights of another run, or adapters."""
    _read(_weights(trainer), spec, folder)


def load_state(trainer: Trainer, spec: ModelSpec, folder: Path) -> None:
    """Read all tensors; `trainer.updates` is the number of optimizer steps."""
    states = trainer.optimizer.rule.states()
    _read(_weights(trainer) | states, spec, folder)
    trainer.optimizer.rule.load(states, trainer.updates)


def load_frozen(trainer: Trainer, spec: ModelSpec, folder: Path) -> None:
    """Read the frozen weights of adapters from a checkpoint of the model `spec`, which has no adapters."""
    frozen: dict[str, Tensor] = {}
    for stage in trainer.executor.stages:
        every = stage.named_parameters(remove_duplicate=False)
        frozen |= {name: one.detach() for name, one in every if not one.requires_grad}
    _read(frozen | _buffers(trainer), spec, folder)
    # One after the other: there may be no room for all of them in more than 4 bits.
    for stage in trainer.executor.stages:
        for name, weight in base_weights(stage):
            wide = weight.empty()
            load_tensors({name: wide}, storage_reader=CheckpointReader(folder), no_dist=True)
            weight.take(local_part(wide))


def _weights(trainer: Trainer) -> dict[str, Tensor]:
    """Trained parameters of this rank, and buffers, which are frozen in models with adapters."""
    weights: dict[str, Tensor] = {o.name: o.parameter.detach() for o in trainer.optimizer.owned}
    return weights if trainer.spec.lora is not None else weights | _buffers(trainer)


def _buffers(trainer: Trainer) -> dict[str, Tensor]:
    buffers: dict[str, Tensor] = {}
    for stage in trainer.executor.stages:
        kept = stage.state_dict().keys()
        buffers |= {name: buffer for name, buffer in stage.named_buffers() if name in kept}
    return buffers


def _stored_name(name: str, spec: ModelSpec) -> str:
    """The name under which a tensor is stored; copies of the embedding, such as a tied head, share one."""
    if name.startswith(FURTHER_EMBEDDING):
        return name.replace(FURTHER_EMBEDDING, "embedding.tokens.weight")
    return name.replace("head.weight", "embedding.tokens.weight") if spec.tied else name


class _PaddedPlanner(DefaultLoadPlanner):
    """A planner that reads vocabularies with other padding: the common rows. Further rows stay zero."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        known = dict(metadata.state_dict_metadata)
        for name, tensor in state_dict.items():
            stored = known.get(name)
            if name.startswith(PADDED_NAMES) and isinstance(stored, TensorStorageMetadata):
                known[name] = dataclasses.replace(stored, size=tensor.size())
        metadata = dataclasses.replace(metadata, state_dict_metadata=known)
        super().set_up_planner(state_dict, metadata, is_coordinator)


def _read(tensors: dict[str, Tensor], spec: ModelSpec, folder: Path) -> None:
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stored.setdefault(_stored_name(name, spec), tensor)
    reader = run_together(lambda: CheckpointReader(folder))
    load_tensors(stored, storage_reader=reader, planner=_PaddedPlanner())
    with torch.no_grad():
        for name, tensor in tensors.items():
            source = stored[_stored_name(name, spec)]
            if source is not tensor:
                # In a V, the first rank holds the first and the last stage: two copies, split alike.
                local_part(tensor).copy_(local_part(source))

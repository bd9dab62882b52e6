"""The part of a model on one generating rank: layers of a pipeline stage, slices of their matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from costmodels import Layout, ModelSpec, even_split
from costmodels.errors import InputError
from runtime.generation.cache import Cache
from runtime.huggingface.mapping import EMBEDDING, HEAD
from runtime.huggingface.stored_model import ModelFiles
from runtime.model.experts import MixtureOfExperts
from runtime.model.transformer import Transformer
from runtime.parallel.collectives import gather
from runtime.parallel.expert import expert_parallel
from runtime.parallel.mesh import build_grid
from runtime.parallel.tensor import tensor_parallel
from runtime.settings.checks import check_job


@dataclass(frozen=True)
class Split:
    """Degrees of parallelism in generation."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    """Tensor-parallel ranks over which whole experts are spread; the remaining factor of ranks splits each
    expert."""

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self.tensor_parallel * self.pipeline_parallel

    def layout(self, spec: ModelSpec) -> Layout:
        """The layout for splitting a model over these ranks; raises `InputError` where that is impossible."""
        tp, pp, ep = self.tensor_parallel, self.pipeline_parallel, self.expert_parallel
        if pp > spec.layers:
            raise InputError(
                f"pipeline_parallel {pp}: {spec.name} has {spec.layers} layers; give at most that"
            )
        if spec.experts and tp % ep:
            raise InputError(
                f"expert_parallel {ep} must divide tensor_parallel {tp}, whose ranks have experts"
            )
        return Layout(
            tensor_parallel=tp,
            pipeline_parallel=pp,
            expert_parallel=ep,
            expert_tensor_parallel=tp // ep if spec.experts else 1,
            layers_per_stage=even_split(spec.layers, pp),
            # Enough microbatches to fill a pipeline in training; here one batch goes through at a time.
            global_batch_size=pp,
            precision="fp32",
        )


class GeneratingStage:
    """This rank's part of a model with its weights.

    Args:
        files: files of the weights.
        split: the split over ranks; several ranks need an initialised process group of that size.
        dtype: number format of weights and activations.
        device: device of the weights.

    Raises:
        InputError: the model cannot be split so.
    """

    def __init__(self, files: ModelFiles, split: Split, dtype: torch.dtype, device: torch.device) -> None:
        self.spec, self.split, self.dtype, self.device = _plain(files.spec), split, dtype, device
        layout = split.layout(self.spec)
        check_job(self.spec, layout, split.world_size)
        self.grid = build_grid(self.spec, layout, device) if split.world_size > 1 else None
        self.index = 0 if self.grid is None else self.grid.pp_rank
        self.is_last = self.index == split.pipeline_parallel - 1
        self.model = self._build(layout)
        _fill(self.model, self.spec, files, device)
        self.cache = Cache(self.model, device)
        self.speaker = split.tensor_parallel * (split.pipeline_parallel - 1)
        """The rank that chooses tokens: the first one of the last stage."""

    def _build(self, layout: Layout) -> Transformer:
        with torch.device("meta"):
            stage = Transformer(
                self.spec,
                self.spec.padded_vocab(layout.tensor_parallel),
                layout.layer_range(self.index),
                with_embedding=self.index == 0,
                with_head=self.is_last,
            )
        for parameter in stage.parameters():
            parameter.data = parameter.data.to(self.dtype)
        if self.grid is not None:
            if layout.tensor_parallel > 1:
                tensor_parallel(stage, layout, self.grid)
            expert_parallel(stage, layout, self.grid)
            _fill_up_tokens(stage, layout.tensor_parallel)
        stage.to_empty(device=self.device)
        stage.tie()
        return stage.eval().requires_grad_(False)

    @torch.no_grad()
    def logits(self, tokens: Tensor, last: Tensor) -> Tensor | None:
        """Logits [B, V] of the next token of each row, on the ranks of the last stage; None on other ranks.

        Args:
            tokens: [B, S] ids at the cache's positions.
            last: [B] places of the rows' last tokens among the S.
        """
        x = self._receive(tokens) if self.index else tokens
        if self.model.embedding is not None:
            x = self.model.embedding(x)
        x = self.model.run_layers(x)
        if not self.is_last:
            dist.send(x.contiguous(), dist.get_rank() + self.split.tensor_parallel)
            return None
        assert self.model.norm is not None
        x = x[torch.arange(len(last), device=self.device), last].unsqueeze(1)
        logits = self.model.logits(self.model.norm(x))
        if self.grid is not None and self.split.tensor_parallel > 1:
            logits = gather(logits, 2, self.grid.mesh.get_group("tp"))
        return logits[:, 0, : self.spec.vocab]  # type: ignore[no-any-return]

    def agree(self, tokens: Tensor | None, rows: int) -> Tensor:
        """The tokens [B] chosen by the deciding rank, on every rank."""
        if self.grid is None:
            assert tokens is not None
            return tokens
        if tokens is None:
            tokens = torch.empty(rows, dtype=torch.int64, device=self.device)
        dist.broadcast(tokens, self.speaker)
        return tokens

    def _receive(self, tokens: Tensor) -> Tensor:
        x = torch.empty(*tokens.shape, self.spec.hidden, dtype=self.dtype, device=self.device)
        dist.recv(x, dist.get_rank() - self.split.tensor_parallel)
        return x


def _plain(spec: ModelSpec) -> ModelSpec:
    """The model without features of training: multi-token prediction, and a limited capacity of experts.

    The capacity depends on later tokens; here experts process all tokens.
    """
    router = spec.router.model_copy(update={"capacity_factor": 0.0})
    return spec.model_copy(update={"router": router, "mtp": None})


def _fill_up_tokens(stage: Transformer, ranks: int) -> None:
    """Pad sequences so that the `ranks` that divide tokens before experts can divide them evenly."""
    for block in stage.blocks:
        if isinstance(block.mlp, MixtureOfExperts):
            filled: Any = _filled_up(block.mlp.forward, ranks)
            block.mlp.forward = filled  # type: ignore[method-assign]


def _filled_up(forward: Callable[[Tensor], Tensor], ranks: int) -> Callable[[Tensor], Tensor]:
    def filled(x: Tensor) -> Tensor:
        tokens = x.shape[1]
        return forward(F.pad(x, (0, 0, 0, -tokens % ranks)))[:, :tokens]

    return filled


@torch.no_grad()
def _fill(stage: Transformer, spec: ModelSpec, files: ModelFiles, device: torch.device) -> None:
    """Read this rank's part of each tensor; padded entries of the vocabulary are zero."""
    for router in stage.routers.values():
        router.to_device(device)
    kept = stage.state_dict().keys()
    buffers = {name: buffer for name, buffer in stage.named_buffers() if name in kept}
    for name, target in (dict(stage.named_parameters()) | buffers).items():
        whole = files.read_ours(EMBEDDING if spec.tied and name == HEAD else name)
        whole = whole.to(target.dtype)
        if name in (EMBEDDING, HEAD):
            whole = F.pad(whole, (0, 0, 0, target.shape[0] - whole.shape[0]))
        if isinstance(target, DTensor):
            part = distribute_tensor(
                whole.to(device), target.device_mesh, target.placements, src_data_rank=None
            )
            target.to_local().copy_(part.to_local())
        else:
            target.copy_(whole)

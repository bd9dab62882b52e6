"""Tensors that recomputation and offload keep and move, on ranks and without them."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from costmodels import Layout, ModelSpec
from runtime.model.transformer import Transformer
from runtime.parallel import offload
from runtime.parallel.initialisation import initialise
from runtime.parallel.mesh import build_grid
from runtime.train.stages import build_executor, build_stage
from tests.support.jobs import TIMEOUT_S
from tests.support.ranks.training import CPU

BATCH = 2


class Storages(TorchDispatchMode):
    """Watches every storage that an operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves(args) if isinstance(t, Tensor)}
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in given:
                    self.seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return results

    def alive(self) -> int:
        """Bytes of storages that something still refers to."""
        return sum(size for reference, size in self.seen.values() if not reference.expired())


def kept(model: Transformer, x: Tensor, patience: float = 0.0, expected: float = 0.0) -> tuple[float, float]:
    """Bytes per token after the layers' forward pass, their output included; then after backward.

    Gradients of `x` and of the weights are made outside of the count. What is more than `expected`
    gets `patience` seconds to go away.
    """
    tokens = BATCH * x.shape[1]
    storages = Storages()
    with storages:
        output = model.run_layers(x)
    end = time.monotonic() + patience
    while storages.alive() > expected * tokens and time.monotonic() < end:
        time.sleep(0.01)
    forward = storages.alive()
    inputs = [x, *model.parameters()]
    gradients = torch.autograd.grad(output, inputs, torch.ones_like(output), allow_unused=True)
    assert gradients[0] is not None
    del output, gradients
    return forward / tokens, storages.alive() / tokens


def kept_on_rank(spec: ModelSpec, layout: Layout, expected: float) -> float:
    """Bytes that the layers of one stage keep on this rank for every token of the whole sequence.

    Gloo's threads hold what they have sent for a moment: they get time to come to `expected`.
    """
    grid = build_grid(spec, layout, CPU)
    stage = build_stage(spec, layout, grid, grid.pp_rank, compiled=False)
    stage.to_empty(device="cpu")
    initialise(stage, spec, seed=1, std=0.3)
    shards = layout.tensor_parallel if layout.sequence_parallel else 1
    x = torch.randn(BATCH, spec.seq // shards, spec.hidden, requires_grad=True)
    return kept(stage, x, patience=TIMEOUT_S, expected=expected * shards)[0] / shards


def bytes_that_leave(spec: ModelSpec, layout: Layout) -> list[int]:
    """Sizes of tensors that one microbatch of one sequence sends to host memory on this rank."""
    left: list[int] = []

    class Counted(offload._Copy):
        def __init__(self, storage: torch.UntypedStorage, transfers: Any) -> None:
            super().__init__(storage, transfers)
            left.append(storage.nbytes())

    plain, offload._Copy = offload._Copy, Counted  # type: ignore[misc]
    try:
        grid = build_grid(spec, layout, CPU)
        executor = build_executor(spec, layout, grid, seed=1)
        tokens = torch.zeros(1, spec.seq, dtype=torch.int64)
        executor.loss.labels = tokens
        executor.stages[0](tokens)
    finally:
        offload._Copy = plain  # type: ignore[misc]
    return left

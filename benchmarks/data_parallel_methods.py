"""One GPT-2, trained by each way to share a batch: one device, parameter server, DDP, FSDP2, Horovod.

All start from the same weights and see the same tokens, and all clip and update alike: only the place of the
weights and the exchange of gradients differ. S is the sequence, B the global batch.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from costmodels import Layout, ModelSpec, Precision
from runtime.job.devices import torch_device
from runtime.job.metrics import peak_memory_bytes
from runtime.model.number_formats import DTYPES
from runtime.model.transformer import Transformer
from runtime.parallel.initialisation import initialise
from runtime.parallel.ranks import Ranks
from runtime.settings.training_options import TrainingOptions
from runtime.train.trainer import Trainer
from tests.support.ranks.parity import SEED

LEARNING_RATE = 3e-4
CLIP_GRAD = 1.0
LOSS_SCALE = 2.0**16
"""First dynamic loss scale of fp16, that of torch.amp.GradScaler."""

ONE_DEVICE = "one device"
SERVER = "parameter server"
DDP = "DDP all-reduce"

Tokens = npt.NDArray[np.int64]
Step = Callable[[Tokens], Tensor]
"""Trains on the global batch [B, S + 1], of which it takes its share; gives the mean loss of that share, or
of the whole batch."""


@dataclass(frozen=True)
class Job:
    """The job that every method trains."""

    spec: ModelSpec
    workers: int
    batch_size: int
    precision: Precision
    on_cpu: bool


@dataclass(frozen=True)
class Curve:
    """Losses, seconds and memory that one process saw."""

    losses: list[float]
    seconds: list[float]
    """Seconds of each step."""
    peak_bytes: int
    """Most memory: of the process on a CPU, of the fullest device on GPUs."""
    idle_bytes: int
    """Bytes that the process held before the model was made."""


@dataclass(frozen=True)
class Method:
    """A way to train on several workers."""

    make: Callable[[Job, torch.device], Step]
    one_process: bool = False
    """One process does all; else each worker has its own."""


class LanguageModel(nn.Module):
    """The runtime's transformer and its loss: tokens [B, S + 1] -> mean loss [1], so that a gather stacks."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.precision = job.precision
        self.vocab = job.spec.vocab
        self.transformer = Transformer(job.spec, job.spec.padded_vocab(1))
        initialise(self.transformer, job.spec, SEED)

    def forward(self, tokens: Tensor) -> Tensor:
        # Here and not around the call: autocast is a matter of the thread, and replicas run in their own.
        mixed = self.precision != "fp32"
        with torch.autocast(tokens.device.type, DTYPES[self.precision], enabled=mixed):
            logits = self.transformer(tokens[:, :-1])
        labels = tokens[:, 1:]
        real = logits[..., : self.vocab].flatten(0, 1).float()
        return F.cross_entropy(real, labels.flatten()).unsqueeze(0)


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)


def _loop(
    job: Job,
    device: torch.device,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int = 0,
    ranks: int = 1,
    reduce: Callable[[], None] = lambda: None,
    update: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Step:
    """A plain PyTorch step on the share of `rank`.

    `reduce` completes the gradients after backward, `update` surrounds the optimizer's step.
    """
    scaler = torch.amp.GradScaler(device.type, init_scale=LOSS_SCALE, enabled=job.precision == "fp16")

    def step(batch: Tokens) -> Tensor:
        share = len(batch) // ranks
        loss: Tensor = model(torch.from_numpy(batch[rank * share :][:share]).to(device)).mean()
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        reduce()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD)
        with update():
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _one_device(job: Job, device: torch.device) -> Step:
    model = LanguageModel(job).to(device)
    return _loop(job, device, model, _adam(model))


def _parameter_server(job: Job, device: torch.device) -> Step:
    """Weights go out and gradients come in, all through the server (torch.nn.DataParallel)."""
    server = LanguageModel(job).to(device)
    if device.type == "cuda":
        return _loop(job, device, DataParallel(server, list(range(job.workers))), _adam(server))
    return _threads(job, server)


def _threads(job: Job, server: LanguageModel) -> Step:
    """The method of DataParallel, on CPUs: a replica for each thread, the first one the server's own."""
    copies = [copy.deepcopy(server) for _ in range(job.workers - 1)]
    replicas = [server, *copies]
    weights, *others = [_tensors(replica.parameters()) for replica in replicas]
    optimizer = _adam(server)
    # PyTorch's count of threads for one operation is a matter of the thread too.
    pool = ThreadPoolExecutor(job.workers, initializer=torch.set_num_threads, initargs=(1,))

    def backward(replica: LanguageModel, tokens: Tensor) -> Tensor:
        loss: Tensor = replica(tokens).squeeze(0) / job.workers
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def step(batch: Tokens) -> Tensor:
        with torch.no_grad():
            for other in others:
                torch._foreach_copy_(other, weights)
        losses = list(pool.map(backward, replicas, torch.from_numpy(batch).chunk(job.workers)))
        for replica, other in zip(copies, others, strict=True):
            torch._foreach_add_(_tensors(one.grad for one in weights), _tensors(one.grad for one in other))
            replica.zero_grad()
        nn.utils.clip_grad_norm_(weights, CLIP_GRAD)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum()

    return step


def _tensors(found: Iterable[Tensor | None]) -> list[Tensor]:
    return [one for one in found if one is not None]


def _ddp(job: Job, device: torch.device) -> Step:
    """Every rank has the weights; buckets of gradients are summed while backward runs (arXiv:2006.15704)."""
    devices = [device] if device.type == "cuda" else None
    model = DistributedDataParallel(
        LanguageModel(job).to(device), device_ids=devices, gradient_as_bucket_view=True
    )
    return _loop(job, device, model, _adam(model), dist.get_rank(), job.workers)


def _fsdp(zero: Literal[0, 1, 3]) -> Callable[[Job, torch.device], Step]:
    """The runtime: FSDP2 that splits nothing, the optimizer state, or the weights too (arXiv:1910.02054)."""

    def make(job: Job, device: torch.device) -> Step:
        layout = Layout(
            data_parallel=job.workers,
            zero_stage=zero,
            layers_per_stage=(job.spec.layers,),
            micro_batch_size=job.batch_size // job.workers,
            global_batch_size=job.batch_size,
            precision=job.precision,
        )
        # Not compiled, as the other methods are not.
        options = TrainingOptions(
            train_iters=10**6,
            lr=LEARNING_RATE,
            lr_decay_style="constant",
            weight_decay=0.0,
            clip_grad=CLIP_GRAD,
            seed=SEED,
            initial_loss_scale=LOSS_SCALE,
            no_compile=True,
        )
        trainer = Trainer(job.spec, layout, options, device)
        return lambda batch: trainer.train_step(batch[trainer.rows]).loss

    return make


METHODS: dict[str, Method] = {
    ONE_DEVICE: Method(_one_device, one_process=True),
    SERVER: Method(_parameter_server, one_process=True),
    DDP: Method(_ddp),
    "FSDP2, ZeRO 0": Method(_fsdp(0)),
    "FSDP2, ZeRO 1": Method(_fsdp(1)),
    "FSDP2, ZeRO 3": Method(_fsdp(3)),
}
"""All methods that PyTorch provides, in the order of the table."""


def train(name: str, job: Job, batches: list[Tokens]) -> Curve:
    """Train by the method `name`; runs on every rank of a process group."""
    device = torch_device(job.on_cpu, Ranks.from_environment())
    return _train(METHODS[name].make, job, device, batches)


def train_by_horovod(job: Job, batches: list[Tokens]) -> Curve:
    """Train by Horovod (arXiv:1802.05799); runs on every process that `horovod.run` starts."""
    import horovod.torch as hvd  # type: ignore[import-not-found]

    hvd.init()
    torch.set_num_threads(1)
    here = Ranks(hvd.rank(), hvd.local_rank(), hvd.size(), hvd.local_size())

    def make(job: Job, device: torch.device) -> Step:
        model = LanguageModel(job).to(device)
        optimizer = hvd.DistributedOptimizer(_adam(model), named_parameters=model.named_parameters())
        # Gradients are clipped between their sum and the update, which must then not sum again.
        return _loop(
            job,
            device,
            model,
            optimizer,
            here.rank,
            here.world_size,
            reduce=optimizer.synchronize,
            update=optimizer.skip_synchronize,
        )

    return _train(make, job, torch_device(job.on_cpu, here), batches)


def _train(
    make: Callable[[Job, torch.device], Step], job: Job, device: torch.device, batches: list[Tokens]
) -> Curve:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    idle = _peak_bytes(device)
    step = make(job, device)
    losses, seconds = [], []
    for batch in batches:
        _settle(device)
        started = time.perf_counter()
        loss = step(batch)
        _settle(device)
        seconds.append(time.perf_counter() - started)
        losses.append(float(loss))
    return Curve(losses, seconds, _peak_bytes(device), idle)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak_bytes(device: torch.device) -> int:
    """Most memory so far: of this process on a CPU, of its fullest device on GPUs."""
    if device.type == "cpu":
        return peak_memory_bytes(device)
    return max(peak_memory_bytes(torch.device("cuda", index)) for index in range(torch.cuda.device_count()))

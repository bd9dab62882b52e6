"""Run the real training step of one rank on fake tensors, and track its memory."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from math import ceil
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.pipelining import PipelineStage, schedules

from costmodels import Layout, ModelSpec
from costmodels.errors import InputError
from costmodels.spec.layout import SPLIT_BACKWARD
from runtime.dryrun.alike_passes import UnlikePassesError, alike_passes
from runtime.dryrun.compiled_layers import compiled_layers
from runtime.dryrun.course import BUILD, Course, UnlikeError, of_more_layers
from runtime.dryrun.experts import even_load
from runtime.dryrun.fake_gpu import fake_gpu
from runtime.dryrun.few_layers import FewLayers, few_layers
from runtime.dryrun.kernels import cpu_kernels, gpu_kernels
from runtime.dryrun.lazy_chunks import lazy_chunks
from runtime.dryrun.memory_trace import DeviceKind, MemoryTrace
from runtime.dryrun.quiet import collector_off, logs_from
from runtime.dryrun.roles import label_layers, roles, tag_optimizer_state, tag_state
from runtime.dryrun.steady import enough_micro_batches, fewest_micro_batches
from runtime.dryrun.tracker import Tracker
from runtime.model.transformer import Transformer
from runtime.parallel.context import local_positions
from runtime.parallel.data import wraps_stages
from runtime.parallel.mesh import build_grid
from runtime.parallel.pipeline import Pipeline
from runtime.settings.training_options import TrainingOptions
from runtime.train import stages
from runtime.train import trainer as training
from runtime.train.executor import Executor

# Any: what it holds differs between the versions of PyTorch that this runs with.
_schedules: Any = schedules


def trace(
    spec: ModelSpec,
    layout: Layout,
    *,
    pipeline_rank: int = 0,
    rank: int | None = None,
    compiled: bool = False,
    device: DeviceKind = "cuda",
    options: TrainingOptions | None = None,
    whole: bool = False,
) -> MemoryTrace:
    """The memory of one rank over a training step after the first, which makes the optimizer's state.

    For a model with many equal layers, models with few layers are run, and their memory is extrapolated.

    Args:
        pipeline_rank: pipeline rank whose first rank is traced if no `rank` is given.
        rank: the rank to trace.
        compiled: trace compiled layers.
        device: device whose kernels are described.
        whole: always run all layers, and each microbatch.

    Raises:
        InputError: the runtime does not run the layout, or there is no such rank.
    """
    if rank is None:
        rank = pipeline_rank * (layout.world_size // layout.pipeline_parallel)
    if not 0 <= rank < layout.world_size:
        raise InputError(f"rank {rank}: the layout has ranks 0 to {layout.world_size - 1}")
    options = replace(options or TrainingOptions(), compile=compiled, no_compile=not compiled)
    pipeline_rank = rank // (layout.world_size // layout.pipeline_parallel)
    few = None if whole else few_layers(spec, layout, pipeline_rank)
    with dry_rank(spec, layout, rank, compiled, device, options, whole) as run:
        course = run(spec, layout) if few is None else _from_few(run, few)
        if course is None:
            course = run(spec, layout)
    found = course.moments()
    step = [moment for label, moment in found.items() if label != BUILD]
    return MemoryTrace(
        rank=rank,
        pipeline_rank=pipeline_rank,
        device=device,
        compiled=compiled,
        peak=max(step, key=lambda moment: moment.total),
        moments=found,
        host_bytes=course.host_bytes,
        micro_batches=short_layout(layout, pipeline_rank).micro_batches,
        operations=course.operations,
    )


Run = Callable[[ModelSpec, Layout], Course]
"""A function that runs the steps of a model."""


def _from_few(run: Run, few: FewLayers) -> Course | None:
    """The course of a whole model from those with few layers; None where this is not possible."""
    base = run(*few.few)
    try:
        return of_more_layers(base, [(run(spec, layout), periods) for spec, layout, periods in few.more])
    except UnlikeError:
        return None


@contextmanager
def dry_rank(
    spec: ModelSpec,
    layout: Layout,
    rank: int,
    compiled: bool,
    device: DeviceKind,
    options: TrainingOptions,
    whole: bool = False,
) -> Iterator[Run]:
    """A function that runs the steps of one rank, for models that differ from `spec` only in their layers.

    Args:
        whole: run each microbatch, even equal ones.
    """
    pipeline_rank = rank // (layout.world_size // layout.pipeline_parallel)
    trackers: list[Tracker] = []
    with ExitStack() as stack:
        stack.enter_context(frozen_objects())
        stack.enter_context(fake_process_group(layout.world_size, rank))
        if layout.optimizer == "adam8bit":
            _prepare_maps()
        if device == "cuda":
            stack.enter_context(fake_gpu())
        # A mesh is made of real numbers.
        grid = build_grid(spec, layout, torch.device(device))
        stack.enter_context(patch.object(training, "build_grid", lambda *_: grid))
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        stack.enter_context(meta_builds(fake))
        stack.enter_context(fake)
        stack.enter_context(isolated_pipeline())
        stack.enter_context(even_load(spec))
        stack.enter_context(lazy_chunks())
        if device == "cuda":
            stack.enter_context(gpu_kernels(fake))
        else:
            stack.enter_context(cpu_kernels())
        if compiled:
            stack.enter_context(compiled_layers(lambda: trackers[-1]))

        def run_all(model: ModelSpec, split: Layout, repeats: bool) -> Course:
            tracker = Tracker(on_gpu=device == "cuda")
            trackers[:] = [tracker]
            with alike_passes(tracker) if repeats else nullcontext():
                _run_steps(tracker, model, split, pipeline_rank, compiled, options)
            return tracker.course()

        def run(model: ModelSpec, split: Layout) -> Course:
            # Copies in host memory depend on those that earlier microbatches left there.
            repeats = split.pipeline_parallel > 1 and split.schedule not in SPLIT_BACKWARD
            if repeats and not (whole or split.offload_activations):
                with suppress(UnlikePassesError):
                    return run_all(model, split, repeats=True)
            return run_all(model, split, repeats=False)

        yield run


PASSES_TO_CHAIN = 3
"""Passes of a microbatch before compiled layers run as a chain (`runtime.parallel.layer_chain`)."""


def _run_steps(
    tracker: Tracker,
    spec: ModelSpec,
    layout: Layout,
    pipeline_rank: int,
    compiled: bool,
    options: TrainingOptions,
) -> None:
    """Run the build and the steps of a model under `tracker`."""
    short = short_layout(layout, pipeline_rank)
    warm_up = fewest_micro_batches(short)
    device = torch.device("cuda" if tracker.on_gpu else "cpu")
    with roles(tracker), tracker:
        with tracker.scope(phase=BUILD):
            trainer = training.Trainer(spec, short, options, device)
            tag_state(tracker, trainer.executor)
        label_layers(tracker, trainer.executor, compiled, stages.compiles_in_two(layout))
        samples = np.zeros((layout.micro_batches * layout.micro_batch_size, spec.seq + 1), np.int64)
        with collector_pause():
            # The first makes the optimizer's state.
            steps = 1 + (ceil(PASSES_TO_CHAIN / warm_up) if compiled and not wraps_stages(layout) else 1)
            for number in range(steps):
                is_last = number == steps - 1
                if is_last:
                    tracker.mark()
                micro_batches = short.micro_batches if is_last else warm_up
                left_out = layout.micro_batches - micro_batches if is_last else 0
                with _rows_of(trainer, micro_batches), _held(left_out, trainer.executor):
                    trainer.train_step(samples)
                tag_optimizer_state(tracker)


def short_layout(layout: Layout, pipeline_rank: int) -> Layout:
    """`layout` with the fewest microbatches that show the peak of a step."""
    per_rank = enough_micro_batches(layout, pipeline_rank)
    batch = per_rank * layout.micro_batch_size * layout.data_parallel
    return layout.model_copy(update={"global_batch_size": batch})


@contextmanager
def _rows_of(trainer: training.Trainer, micro_batches: int) -> Iterator[None]:
    """Let a step run only the first microbatches, while the device holds the whole batch."""
    rows = micro_batches * trainer.layout.micro_batch_size
    inputs = type(trainer)._inputs

    def first(self: Any, samples: Any, starts: Any = None) -> tuple[Tensor, ...]:
        return tuple(part[:rows] for part in inputs(self, samples, starts))

    with patch.object(training.Trainer, "_inputs", first):
        yield


@contextmanager
def _held(losses: int, executor: Executor) -> Iterator[None]:
    """Allocate the losses of skipped microbatches, as the pipeline keeps one for each."""
    train = executor.train

    def holding(tokens: Tensor, labels: Tensor) -> Tensor:
        scalars = [torch.empty((), dtype=torch.float32, device=tokens.device) for _ in range(losses)]
        result = train(tokens, labels)
        scalars.clear()
        return result

    if isinstance(executor, Pipeline) and executor.is_last:
        with patch.object(executor, "train", holding):
            yield
    else:
        yield


@contextmanager
def frozen_objects() -> Iterator[None]:
    """Exclude existing objects from garbage collections, as PyTorch alone has a million."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def collector_pause() -> Iterator[None]:
    """Pause garbage collection, as the runtime's loop does."""
    gc.collect()
    with collector_off():
        yield


@contextmanager
def fake_process_group(world_size: int, rank: int) -> Iterator[None]:
    """A process group of ranks that do not exist."""
    from torch.distributed.tensor import debug
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("a dry run needs a process without a process group")
    # Each process group puts its rank before what this process reports, and leaves it there.
    with patch.object(sys, "excepthook", sys.excepthook):
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        try:
            yield
        finally:
            # The cache remembers meshes, whose groups end here.
            forget: Any = debug._clear_sharding_prop_cache
            forget()
            dist.destroy_process_group()
            gc.collect()


def _prepare_maps() -> None:
    """Let torchao compute its constants before tensors become fake."""
    from torchao.optim import subclass_8bit

    subclass_8bit.get_qmap_signed()
    subclass_8bit.get_qmap_unsigned()


@contextmanager
def meta_builds(fake: FakeTensorMode) -> Iterator[None]:
    """Build stages on the real meta device, so that modules can replace its tensors by fake ones."""
    build, place = stages.build_stage, Transformer.place

    def built(*args: Any) -> Transformer:
        with unset_fake_temporarily():
            return build(*args)

    def fake_positions(*args: Any) -> Tensor:
        with fake:
            return local_positions(*args)

    def placed(stage: Transformer, at: Tensor) -> None:
        with fake:
            place(stage, at)

    with (
        patch.object(stages, "build_stage", built),
        patch.object(stages, "local_positions", fake_positions),
        patch.object(Transformer, "place", placed),
    ):
        yield


@contextmanager
def isolated_pipeline() -> Iterator[None]:
    """Let the pipeline start without messages to its neighbours, and without a device's random numbers."""

    def agree(_: Any, stages_here: list[Any], *args: Any) -> None:
        for stage in stages_here:
            stage._inference_mode = _schedules.InferenceMode.STATIC

    with ExitStack() as stack:
        # Compilers copy meshes, and complain of those of traces before this one.
        stack.enter_context(logs_from("torch.distributed.device_mesh", logging.ERROR))
        stack.enter_context(patch.object(torch.random, "fork_rng", lambda *args, **kwargs: nullcontext()))
        if hasattr(PipelineStage, "_output_slot_is_releasable"):
            stack.enter_context(patch.object(PipelineStage, "_output_slot_is_releasable", _is_released))
        if hasattr(schedules._PipelineSchedule, "_warmup_p2p"):
            stack.enter_context(patch.object(schedules._PipelineSchedule, "_warmup_p2p", agree))
        yield


def _is_released(of_stage: Any, _: object) -> tuple[bool, str]:
    """True if a stage frees an output after sending it, otherwise False with the reason.

    This is PyTorch's answer for plain tensors; for other classes, such as fake tensors, PyTorch keeps
    outputs.
    """
    return not of_stage.is_last, "last-stage output" if of_stage.is_last else ""

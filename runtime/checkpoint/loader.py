"""Loading of checkpoints; an incomplete one, or one of another model, is not used at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from costmodels import ModelSpec
from costmodels.errors import InputError
from runtime.checkpoint.base import base_in, check_base
from runtime.checkpoint.folders import iteration_folder, reload_advice
from runtime.checkpoint.manifest import check_files, read_manifest, reader_lock
from runtime.checkpoint.run_file import RunFile, check_same_model, read_run
from runtime.checkpoint.tensors import load_frozen, load_state, load_weights
from runtime.data.identity import difference
from runtime.parallel.ranks import run_on_first_rank, run_together
from runtime.settings.adapter_base import Base
from runtime.train.trainer import Trainer

Result = TypeVar("Result")


def load(
    folder: str | Path,
    trainer: Trainer,
    spec: ModelSpec,
    iteration: int,
    expected: Mapping[str, Any] | None = None,
    with_optimizer: bool = True,
) -> dict[str, Any]:
    """Read a checkpoint into `trainer`; every rank calls it. Returns the `run` that `save` was given.

    Args:
        expected: settings that the saved run must have, so that samples come in the same order.
        with_optimizer: read the optimizer's state too. Without it the iteration continues, but the optimizer,
            its schedules and the loss scale start anew, as with Megatron-LM's `--no-load-optim`.

    Raises:
        InputError: a file is missing or damaged, the checkpoint is of another model or optimizer, or its run
            differs from `expected`.
    """
    source = iteration_folder(folder, iteration)
    with reader_lock(source):
        run = _checked(source, iteration)
        told = run.run_state()
        check_same_model(source, run, spec)
        _check_data(source, told, expected or {})
        for name, value in (expected or {}).items():
            if name != "data" and told.get(name) != value:
                raise InputError(
                    f"checkpoint {source} was trained with {name} {told.get(name)}, not {value}: samples "
                    "would come in another order; give the same, or start anew in another folder"
                )
        trainer.iteration = run.iteration
        if not with_optimizer:
            trainer.updates = 0
            _read(source, lambda: load_weights(trainer, spec, source))
            return told
        if sorted(run.optimizer_state) != sorted(trainer.optimizer.rule.slots):
            raise InputError(
                f"checkpoint {source} holds other optimizer state "
                f"({', '.join(run.optimizer_state) or 'none'}) than that of --optimizer "
                f"{trainer.layout.optimizer}; give the optimizer that it was trained with, or begin with a "
                "new one: --no-load-optim"
            )
        trainer.updates = run.iteration - run.skipped_iterations
        if run.loss_scale is not None and trainer.loss_scale is not None:
            trainer.loss_scale.load(run.loss_scale.model_dump())
        _read(source, lambda: load_state(trainer, spec, source))
    if run.base is not None:
        _load_base(source, run.base, trainer)
    return told


def load_weights_only(folder: str | Path, trainer: Trainer, spec: ModelSpec, iteration: int) -> RunFile:
    """Read only the weights of a checkpoint into `trainer`, which otherwise starts anew; every rank calls it.

    The weights are frozen if `trainer` has adapters and the checkpoint has none.

    Raises:
        InputError: a file is missing or damaged, or the checkpoint is of another model.
    """
    source = iteration_folder(folder, iteration)
    is_base = trainer.spec.lora is not None and spec.lora is None
    with reader_lock(source):
        run = _checked(source, iteration)
        check_same_model(source, run, spec)
        load_them = load_frozen if is_base else load_weights
        _read(source, lambda: load_them(trainer, spec, source))
    if is_base:
        trainer.base = run_on_first_rank(lambda: base_in(folder, iteration))
    elif run.base is not None:
        _load_base(source, run.base, trainer)
    return run


def _load_base(source: Path, base: Base, trainer: Trainer) -> None:
    where = run_on_first_rank(lambda: check_base(source, base))
    with reader_lock(where):
        run = _checked(where, base.iteration)
        _read(where, lambda: load_frozen(trainer, run.model, where))
    trainer.base = base


def _checked(source: Path, iteration: int) -> RunFile:
    """The run.json of a checkpoint, after one rank has verified all of its files."""
    try:
        manifest = run_on_first_rank(lambda: read_manifest(source))
        by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name].bytes, name))
        own = by_size[dist.get_rank() :: dist.get_world_size()]
        run_together(lambda: check_files(source, {name: manifest.files[name] for name in own}))
        run = run_on_first_rank(lambda: read_run(source))
        if run.iteration != iteration:
            raise InputError(f"{source} holds iteration {run.iteration}: the folder has been renamed")
    except InputError as error:
        advice = run_on_first_rank(lambda: reload_advice(source.parent, iteration))
        raise InputError(f"{error}; {advice}") from None
    return run


def _check_data(source: Path, told: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Refuse different data; a checkpoint without checksums of its data is accepted."""
    same_length = told.get("tokens") == expected.get("tokens")
    other = difference(told["data"], expected["data"]) if {"data"} <= told.keys() & expected.keys() else None
    if other is not None and same_length:
        raise InputError(
            f"checkpoint {source} was trained on other data: {other}; give the same files, or go on with "
            "these at the same count of samples: --allow-data-change"
        )


def _read(source: Path, work: Callable[[], None]) -> None:
    try:
        work()
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        if isinstance(cause, InputError):
            raise cause from None
        reason = (str(cause).splitlines() or [type(cause).__name__])[0]
        raise InputError(f"checkpoint {source} cannot be loaded: {reason}") from error

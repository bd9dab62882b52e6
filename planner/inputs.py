"""What callers may write for a model, a cluster, an engine or a batch, resolved into the vocabulary."""

from __future__ import annotations

import os
from pathlib import Path
from typing import get_args

from costmodels.catalogue import load_device, load_engine, load_model
from costmodels.catalogue.yaml_files import build
from costmodels.engine import Engine
from costmodels.errors import InputError
from costmodels.hardware import Cluster, Device, Precision
from costmodels.model_spec import ModelSpec
from costmodels.words import GIB
from planner.space import Batch

DEFAULT_DEVICE = "a100-80g"
"""Device that is assumed when none is named."""

DEFAULT_ENGINE = "bundled"

MEMORY_VARIABLE = "DEVICE_MEMORY_GB"
"""Environment variable that overrides the memory of one device.

Cards are sold by GB and hold GiB (an "80 GB" A100 has 80 GiB of HBM), so the number counts GiB.
"""


def resolve_model(model: ModelSpec | str | Path, seq: int | None = None) -> ModelSpec:
    """A model from itself, a catalogue name, a YAML file, or a Hugging Face config.json (or its folder).

    `seq`, in tokens, replaces the sequence length; a model whose positions end earlier is extended.
    """
    if isinstance(model, ModelSpec):
        return with_seq(model, seq)
    if is_hf_config(model):
        from planner.hf_config import model_from_hf_config  # Only few runs read such a file.

        return model_from_hf_config(model, seq=seq)
    return with_seq(load_model(str(model)), seq)


def is_hf_config(model: str | Path) -> bool:
    """Whether a model is given as a Hugging Face config.json or its folder."""
    path = Path(model)
    return path.suffix == ".json" or (path / "config.json").is_file()


def with_seq(model: ModelSpec, seq: int | None) -> ModelSpec:
    """`model` trained on sequences of `seq` tokens; its positions grow where they were fewer."""
    if seq is None or seq == model.seq:
        return model
    values = model.model_dump() | {"seq": seq, "max_positions": max(seq, model.max_positions)}
    return build(ModelSpec, values, f"model {model.name}")


def resolve_cluster(
    device: Device | str | None,
    world_size: int,
    local_world_size: int | None = None,
    device_memory_gib: float | None = None,
) -> Cluster:
    """The cluster of `world_size` devices, `local_world_size` in each node.

    A node holds as many as the device's usual server when that is not given. Memory is the device's
    own, unless `device_memory_gib` or the environment's `DEVICE_MEMORY_GB` replaces it.
    """
    for name, value in (("world_size", world_size), ("local_world_size", local_world_size)):
        if value is not None and value < 1:
            raise InputError(f"{name} {value}: expected a whole number of at least 1")
    wanted = DEFAULT_DEVICE if device is None else device
    if wanted == "cpu":
        # One rank's share of this machine depends on how many ranks share it.
        local_world_size = local_world_size or world_size
        resolved = load_device("cpu", ranks=local_world_size)
    else:
        resolved = load_device(wanted) if isinstance(wanted, str) else wanted
    memory = _memory_gib(device_memory_gib)
    values = {
        "device": resolved,
        "world_size": world_size,
        "devices_per_node": local_world_size or min(world_size, resolved.devices_per_node),
        "memory_bytes": resolved.memory_bytes if memory is None else memory * GIB,
    }
    return build(Cluster, values, "cluster")


def _memory_gib(given: float | None) -> float | None:
    source, value = "device_memory_gib", given
    text = os.environ.get(MEMORY_VARIABLE, "").strip()
    if value is None and text:
        source = MEMORY_VARIABLE
        try:
            value = float(text)
        except ValueError:
            raise InputError(f"{source}={text}: expected a number of GiB such as 80") from None
    if value is not None and not 0 < value < 2**30:
        raise InputError(f"{source}={value:g}: expected a number of GiB above 0, such as 80")
    return value


def resolve_engine(engine: Engine | str) -> Engine:
    """An engine from itself or its catalogue name."""
    return engine if isinstance(engine, Engine) else load_engine(engine)


def resolve_batch(global_batch_size: int | None, max_global_batch_size: int | None) -> Batch:
    """The batch of a step in sequences: exactly one of the two must be given."""
    if global_batch_size is not None and max_global_batch_size is not None:
        raise InputError(
            f"global_batch_size {global_batch_size} and max_global_batch_size {max_global_batch_size}: "
            "give one of the two"
        )
    maximum = global_batch_size is None
    size = max_global_batch_size if maximum else global_batch_size
    if size is None:
        raise InputError("no batch size: give global_batch_size or max_global_batch_size")
    if size < 1:
        raise InputError(f"{Batch(size, maximum)}: expected a whole number of at least 1")
    return Batch(size, maximum)


def resolve_precision(precision: str | None, device: Device, engine: Engine) -> Precision:
    """The number format of matrix products: the device's default unless given."""
    wanted = precision or device.default_precision
    able = [kind for kind in get_args(Precision) if kind in device.peak_flops and kind in engine.memory]
    for kind in get_args(Precision):
        if kind == wanted and kind in able:
            return kind  # type: ignore[no-any-return]
    choices = ", ".join(able) or "no precision"
    raise InputError(f"precision {wanted}: {device.name} with engine {engine.name} trains in {choices}")

"""Memory and speed of `planner convert`: `python -m benchmarks.convert --gigabytes 4`.

Writes a Hugging Face model of random bf16 weights with the tensors of a Llama, and converts it there and back
in processes of their own. Compares every tensor, and prints the largest memory of each process beyond its
imports.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from torch import Tensor

from costmodels import ModelSpec
from planner.options.flags import run
from runtime import convert
from runtime.huggingface.companions import write_config
from runtime.huggingface.configs import config_for, with_dtype
from runtime.huggingface.files import PlannedTensor, file_size, write_files
from runtime.huggingface.mapping import mapping, our_shapes
from runtime.huggingface.model_folder import HuggingFaceModel

HIDDEN, FFN, HEADS, VOCAB = 2048, 8192, 16, 32000


class Measured(NamedTuple):
    """One conversion."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    """Most resident memory beyond that of the imports."""


def model_of(size: float) -> ModelSpec:
    """A Llama whose bf16 weights take about `size` bytes."""
    fields = {
        "name": "synthetic", "hidden": HIDDEN, "heads": HEADS, "kv_heads": HEADS // 4, "ffn": FFN,
        "vocab": VOCAB, "seq": 2048, "gated": True, "activation": "silu", "norm": "rmsnorm",
        "position": "rope", "tied": False, "linear_bias": False,
    }  # fmt: skip
    one, two = (ModelSpec.model_validate(fields | {"layers": layers}) for layers in (1, 2))
    layer = two.parameters - one.parameters
    layers = max(1, round((size / 2 - one.parameters) / layer) + 1)
    return ModelSpec.model_validate(fields | {"layers": layers})


def write_model(spec: ModelSpec, folder: Path, largest_file: int) -> int:
    """Write random weights under Hugging Face's names; returns their bytes."""
    config = with_dtype(config_for(spec), torch.bfloat16)
    shapes = our_shapes(spec)
    planned = [
        PlannedTensor(
            entry.theirs, entry.shape(shapes), torch.bfloat16, partial(_random, number, entry.shape(shapes))
        )
        for number, entry in enumerate(mapping(config["model_type"], spec))
    ]
    write_config(folder, config)
    write_files(folder, planned, largest_file)
    return sum(one.bytes for one in planned)


def _random(seed: int, shape: tuple[int, ...]) -> Tensor:
    # Bits of bf16 numbers of all sizes; drawing normal ones takes longer than to convert them.
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 2**14, shape, dtype=torch.int16, generator=generator)
    return bits.view(torch.bfloat16)


def peak_bytes() -> int:
    """Most resident memory of this process so far; on Linux in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(work: Callable[[], object]) -> Measured:
    """Seconds and memory of `work` in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measure, (work,))


def _measure(work: Callable[[], object]) -> Measured:
    before, start, cpu = peak_bytes(), time.perf_counter(), time.process_time()
    work()
    return Measured(time.perf_counter() - start, time.process_time() - cpu, peak_bytes() - before)


def copy_files(source: Path, target: Path) -> None:
    """Copy a model's files on the disk, for the least time that a conversion can take."""
    target.mkdir()
    for file in source.iterdir():
        copy = target / file.name
        shutil.copyfile(file, copy)
        with copy.open("rb") as written:
            os.fsync(written.fileno())
    shutil.rmtree(target)


def same_tensors(one: Path, other: Path) -> bool:
    """Return whether two models have the same tensors, to the bit."""
    first, second = HuggingFaceModel(one), HuggingFaceModel(other)
    if first.tensors.keys() != second.tensors.keys():
        return False
    return all(
        torch.equal(first.read(entry).view(torch.int16), second.read(entry).view(torch.int16))
        for entry in first.entries
    )


def main(
    gigabytes: Annotated[float, typer.Option(help="Size of the model's weights.")] = 2.0,
    max_shard_size: Annotated[str, typer.Option(help="Largest safetensors file.")] = "1GB",
    folder: Annotated[str | None, typer.Option(help="Where to write; three times the size.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Convert a model of random weights there and back, and print time and memory."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        theirs, ours, back = (Path(name) / part for part in ("theirs", "ours", "back"))
        theirs.mkdir()
        spec = model_of(gigabytes * 1e9)
        size = write_model(spec, theirs, file_size(max_shard_size))
        plain = measure(partial(copy_files, theirs, back))
        there = measure(partial(convert.from_hugging_face, theirs, ours))
        again = measure(partial(convert.to_hugging_face, ours, back, max_shard_size=max_shard_size))
        same = same_tensors(theirs, back)
    rows = {"Hugging Face to ours": there, "ours to Hugging Face": again, "copying the files": plain}
    if as_json:
        figures = {name: row._asdict() for name, row in rows.items()}
        print(json.dumps({"bytes": size, "same": same, **figures}))
    else:
        print(f"{spec.layers} layers, {size / 1e9:.2f} GB, files of {max_shard_size}: same bits: {same}")
        print(f"{'':22} {'seconds':>8} {'of CPU':>8} {'GB/s':>6} {'peak MB':>8} {'of the model':>13}")
        for name, row in rows.items():
            share = row.peak_bytes / size
            print(
                f"{name:22} {row.seconds:8.1f} {row.cpu_seconds:8.1f} {size / 1e9 / row.seconds:6.2f} "
                f"{row.peak_bytes / 1e6:8.0f} {share:12.1%}"
            )
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command()(main)
    run(app, "benchmarks.convert")

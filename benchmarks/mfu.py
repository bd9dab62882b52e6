"""Speed and memory of one device that trains: tokens a second, TFLOP/s, MFU, peak GiB.

python -m benchmarks.mfu --model llama3-8b --num-layers 16 --seq-length 8192 [--layout mbs=2,gbs=4] [--json]

With fewer layers, the work of each layer is unchanged, and a model that needs several devices can run on one.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Annotated, Any

import numpy as np
import typer

from costmodels import Layout, ModelSpec
from costmodels.errors import InputError
from costmodels.spec.model_flops import flops_per_sequence
from costmodels.spec.record import GIB
from planner.options.flags import run
from planner.options.model import ModelOptions
from runtime.settings.checks import check_job
from tests.support.layouts import parse_layout
from tests.support.ranks.parity import SEED

WARM_UP = 3
"""Steps before the clock starts: the allocator and compiled kernels settle."""


def measure(spec: ModelSpec, layout: Layout, steps: int, compiled: bool | None) -> dict[str, Any]:
    """Seconds of training steps on random tokens, and the figures from their median; needs one rank."""
    import torch

    from runtime.job.devices import detect_device, local_device_count, torch_device
    from runtime.job.metrics import peak_memory_bytes
    from runtime.parallel.ranks import Ranks, start_process_group
    from runtime.settings.training_options import TrainingOptions
    from runtime.train.trainer import Trainer

    alone = Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1)
    device = torch_device(not local_device_count(), alone)
    start_process_group(alone, device, timeout_minutes=10)
    options = TrainingOptions(
        train_iters=10**6, lr=1e-4, seed=SEED, compile=compiled is True, no_compile=compiled is False
    )
    trainer = Trainer(spec, layout, options, device)
    random = np.random.RandomState(SEED)
    shape = (layout.global_batch_size, spec.seq + 1)
    seconds = []
    for _ in range(WARM_UP + steps):
        batch = random.randint(0, spec.vocab, shape).astype(np.int64)
        started = time.perf_counter()
        result = trainer.train_step(batch[trainer.rows])
        loss = float(result.loss)
        seconds.append(time.perf_counter() - started)
    step_time = statistics.median(seconds[WARM_UP:])
    described = detect_device(1)
    flops = flops_per_sequence(spec) * layout.global_batch_size / step_time
    peak = described.peak_flops.get(layout.precision)
    return {
        "model": spec.name,
        "layers": spec.layers,
        "layout": layout.describe(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else described.name,
        "torch": torch.__version__,
        "step_time_s": step_time,
        "step_times_s": seconds[WARM_UP:],
        "tokens_per_s": layout.global_batch_size * spec.seq / step_time,
        "tflops": flops / 1e12,
        "mfu": flops / peak if peak else None,
        "peak_memory_gib": peak_memory_bytes(device) / GIB,
        "loss": loss,
    }


app = typer.Typer(add_completion=False)


@app.command()
def mfu(
    model: Annotated[str, typer.Option(help="Model of the catalogue.")] = "llama3-8b",
    num_layers: Annotated[int | None, typer.Option(help="Layers, where fewer are to be trained.")] = None,
    seq_length: Annotated[int | None, typer.Option(help="Tokens of one sample.")] = None,
    layout: Annotated[str, typer.Option(help="Layout of one rank, such as mbs=2,recompute=selective.")] = "",
    steps: Annotated[int, typer.Option(help="Steps to time.")] = 10,
    compiled: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Compile the blocks; on GPUs unless given.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train on one device and report its speed."""
    if steps < 1:
        raise InputError(f"--steps {steps}: must be at least 1")
    spec = ModelOptions(model=model, num_layers=num_layers, seq_length=seq_length).spec()
    one = parse_layout(f"precision=bf16,gbs=1,{layout}", spec)
    check_job(spec, one, 1)
    result = measure(spec, one, steps, compiled)
    if as_json:
        json.dump(result, sys.stdout, indent=2)
        print()
        return
    share = f"MFU {result['mfu']:.1%}" if result["mfu"] is not None else "no peak known"
    print(
        f"{result['model']}, {result['layers']} layers, {result['layout']} on {result['device']}: "
        f"{result['tokens_per_s']:,.0f} tokens/s, {result['tflops']:.1f} TFLOP/s, {share}, "
        f"peak {result['peak_memory_gib']:.1f} GiB"
    )


if __name__ == "__main__":
    run(app, "benchmarks.mfu")

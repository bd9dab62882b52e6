"""One row of `benchmarks.gpu` in a process of its own: `python -m benchmarks.gpu_case CASE CONTESTANT FORM`.

CONTESTANT is `runtime`, `transformers` or `warm`, FORM `compiled` or `eager`. Prints one JSON object: seconds
of a step, and the largest number of allocated bytes.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from benchmarks.gpu import CASES, TRANSFORMERS, WARM, WARM_LAYERS, WARM_VOCAB, Case, sized
from costmodels import Layout, ModelSpec
from runtime.huggingface.configs import config_for
from runtime.job.devices import local_device_count, torch_device
from runtime.job.metrics import peak_memory_bytes
from runtime.parallel.local_tensors import local_part
from runtime.parallel.ranks import Ranks, start_process_group
from runtime.settings.training_options import TrainingOptions
from runtime.train import stages
from runtime.train.trainer import Trainer

WARM_UP, STEPS = 3, 5
"""Number of untimed steps, and of timed steps after them; one of each without a GPU."""

Step = Callable[[np.ndarray], object]


def measure(case: Case, contestant: str, compiled: bool) -> dict[str, float]:
    """Seconds of a training step on random tokens, and peak bytes."""
    alone = Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1)
    device = torch_device(not local_device_count(), alone)
    start_process_group(alone, device, timeout_minutes=10)
    if device.type == "cpu":
        # Small shapes, which several threads make no faster.
        torch.set_num_threads(1)
    spec, layout = sized(case, device.type == "cuda")
    if contestant == WARM:
        spec = spec.model_copy(update={"layers": min(spec.layers, WARM_LAYERS), "vocab": WARM_VOCAB})
        layout = layout.model_copy(update={"layers_per_stage": (spec.layers,)})
    build = _transformers if contestant == TRANSFORMERS else _runtime
    step = build(spec, layout, device, compiled)
    random = np.random.RandomState(0)
    seconds = []
    warm_up, steps = (WARM_UP, STEPS) if device.type == "cuda" and contestant != WARM else (1, 1)
    for _ in range(warm_up + steps):
        batch = random.randint(0, spec.vocab, (layout.global_batch_size, spec.seq + 1)).astype(np.int64)
        _wait(device)
        started = time.perf_counter()
        step(batch)
        _wait(device)
        seconds.append(time.perf_counter() - started)
    return {
        "step_time_s": statistics.median(seconds[warm_up:]),
        "peak_memory_bytes": float(peak_memory_bytes(device)),
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _runtime(spec: ModelSpec, layout: Layout, device: torch.device, compiled: bool) -> Step:
    options = TrainingOptions(train_iters=10**6, lr=1e-4, compile=compiled, no_compile=not compiled)
    # On the device: drawing weights on the host takes most of a minute.
    with patch.object(stages, "initialise", _draw):
        trainer = Trainer(spec, layout, options, device)
    return lambda batch: trainer.train_step(batch[trainer.rows])


def _draw(model: nn.Module, *_: Any) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            part = local_part(parameter)
            if "norm" in name:
                part.fill_(1.0)
            else:
                part.normal_(0.0, 0.02)


def _transformers(spec: ModelSpec, layout: Layout, device: torch.device, compiled: bool) -> Step:
    """Plain PyTorch around the transformers library's model: compiled whole, bf16 autocast, fused AdamW."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = config_for(spec)
    config = AutoConfig.for_model(**{key: value for key, value in fields.items() if key != "architectures"})
    config.use_cache = False
    with torch.device(device):
        # Not typed in the library.
        make: Any = AutoModelForCausalLM.from_config
        model = make(config, attn_implementation="sdpa")
    model.train()
    if compiled:
        model.compile()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(batch: np.ndarray) -> None:
        micro_batches = torch.split(torch.from_numpy(batch).to(device), layout.micro_batch_size)
        for micro in micro_batches:
            with torch.autocast(device.type, torch.bfloat16):
                logits = model(input_ids=micro[:, :-1]).logits
                loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), micro[:, 1:].flatten())
            torch.autograd.backward(loss / len(micro_batches))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()

    return step


def main() -> None:
    """Measure what the command line names."""
    name, contestant, form = sys.argv[1:]
    (case,) = (one for one in CASES if one.name == name)
    print(json.dumps(measure(case, contestant, form == "compiled")))


if __name__ == "__main__":
    main()

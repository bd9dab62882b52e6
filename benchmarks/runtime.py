"""Tokens per second of layouts on two CPU ranks, beside DDP of the transformers library's model.

python -m benchmarks.runtime [--layout tp=2]... [--rounds N] [--json] [--against PATH [--pairs N]]

All contestants run in the same two processes and take turns, so that other work on the machine affects all
alike. With `--against`, the checkout of another commit at PATH and this one take turns as whole processes.
DDP is the same in both and shows changes of the machine's speed, so speeds are compared as multiples of
DDP's.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from costmodels import Layout, ModelSpec
from costmodels.errors import InputError
from planner.options.flags import run
from runtime.settings.checks import check_job
from tests.support.layouts import parse_layout
from tests.support.models import llama
from tests.support.ranks.parity import SEED
from tests.support.worker_pool import WorkerPool

MODEL = llama("llama-30m", layers=10, hidden=384, heads=6, ffn=1024, vocab=32000, seq=256).model_copy(
    update={"tied": True}
)
"""A Llama of 30 M parameters; its head weighs as much as seven of its layers."""

GLOBAL_BATCH_SIZE = 8

LAYOUTS = (
    "dp=2,mbs=4",
    "dp=2,zero=1,mbs=4",
    "tp=2,mbs=4",
    "pp=2,mbs=1,layers_per_stage=8;2",
)
"""Layouts that the planner would consider: in the pipeline, the second rank has two layers and the head."""

DDP = "transformers DDP"

Step = Callable[[np.ndarray], object]


def race(spec: ModelSpec, layouts: dict[str, Layout], rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds of one step of every contestant, by round; runs on both ranks of a process group."""
    import torch
    import torch.distributed as dist

    from runtime.settings.training_options import TrainingOptions
    from runtime.train.trainer import Trainer

    options = TrainingOptions(train_iters=10**6, lr=1e-3, seed=SEED)
    contestants: dict[str, Step] = {DDP: _ddp(spec)}
    for text, layout in layouts.items():
        trainer = Trainer(spec, layout, options, torch.device("cpu"))
        contestants[text] = lambda batch, trainer=trainer: trainer.train_step(batch[trainer.rows])  # type: ignore[misc]
    tokens = np.random.RandomState(SEED)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, step in contestants.items():
            batches = [tokens.randint(0, spec.vocab, (GLOBAL_BATCH_SIZE, spec.seq + 1)) for _ in range(steps)]
            dist.barrier()
            started = time.perf_counter()
            for batch in batches:
                step(batch)
            dist.barrier()
            if number:  # The first round warms up.
                seconds[name].append((time.perf_counter() - started) / steps)
    return seconds


def _ddp(spec: ModelSpec) -> Step:
    """A plain PyTorch loop: DDP, two microbatches, clipping and fused AdamW."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=spec.vocab,
        hidden_size=spec.hidden,
        intermediate_size=spec.ffn,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        max_position_embeddings=spec.seq,
        tie_word_embeddings=spec.tied,
        use_cache=False,
    )
    model = DistributedDataParallel(LlamaForCausalLM(config), gradient_as_bucket_view=True)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    share = GLOBAL_BATCH_SIZE // dist.get_world_size()

    def step(batch: np.ndarray) -> None:
        own = torch.from_numpy(batch[dist.get_rank() * share :][:share])
        micro_batches = torch.split(own, 4)
        for number, micro in enumerate(micro_batches, start=1):
            model.require_backward_grad_sync = number == len(micro_batches)
            logits = model(input_ids=micro[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), micro[:, 1:].flatten())
            torch.autograd.backward(loss / len(micro_batches))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()

    return step


def against(other: Path, words: list[str], pairs: int) -> dict[str, dict[str, float]]:
    """Speeds of both checkouts as multiples of DDP's in the same process, and the median of their ratios.

    Args:
        words: arguments of both commands.
    """
    here = Path(__file__).resolve().parents[1]
    found: list[dict[Path, dict[str, float]]] = []
    for number in range(pairs):
        pair = {}
        for tree in (here, other) if number % 2 else (other, here):
            command = [sys.executable, "-m", "benchmarks.runtime", "--json", *words]
            environment = os.environ | {"PYTHONPATH": str(tree)}
            done = subprocess.run(
                command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, check=True
            )
            rows = json.loads(done.stdout)["layouts"]
            pair[tree] = {name: row["speed_over_ddp"] for name, row in rows.items()}
        found.append(pair)
    return {
        name: {
            "speed_over_ddp": statistics.median(pair[here][name] for pair in found),
            "other_speed_over_ddp": statistics.median(pair[other][name] for pair in found),
            "speed_over_other": statistics.median(pair[here][name] / pair[other][name] for pair in found),
        }
        for name in found[0][here]
        if name != DDP
    }


app = typer.Typer(add_completion=False)


@app.command()
def runtime(
    layout: Annotated[list[str], typer.Option(help="Layout of 2 ranks (repeatable).")] = list(LAYOUTS),  # noqa: B006
    rounds: Annotated[int, typer.Option(help="Turns of each contestant.")] = 5,
    steps: Annotated[int, typer.Option(help="Training steps of a turn.")] = 1,
    other: Annotated[
        Path | None, typer.Option("--against", help="A checkout of another commit, to compare with.")
    ] = None,
    pairs: Annotated[int, typer.Option(help="Turns of both checkouts.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train each layout and DDP in turns and compare their speed."""
    if rounds < 1 or steps < 1 or pairs < 1:
        raise InputError(f"--rounds {rounds} --steps {steps} --pairs {pairs}: all must be at least 1")
    if find_spec("transformers") is None:
        raise InputError("the transformers library is not installed; run `pip install '.[benchmarks]'`")
    layouts = {text: parse_layout(f"gbs={GLOBAL_BATCH_SIZE},{text}", MODEL) for text in layout}
    for one in layouts.values():
        check_job(MODEL, one, 2)
    if other is not None:
        if not (other / "benchmarks" / "runtime.py").is_file():
            raise InputError(f"--against {other}: no checkout with benchmarks/runtime.py")
        words = [f"--layout={text}" for text in layout] + [f"--rounds={rounds}", f"--steps={steps}"]
        compared = against(other.resolve(), words, pairs)
        if as_json:
            json.dump({"model": MODEL.name, "layouts": compared}, sys.stdout, indent=2)
            print()
            return
        for name, row in compared.items():
            own, old = row["speed_over_ddp"], row["other_speed_over_ddp"]
            times = f"{own:.2f}x the speed of {DDP}, {old:.2f}x there"
            print(f"{name}: {row['speed_over_other']:.3f}x the speed of the other checkout ({times})")
        return
    seconds = WorkerPool(2).run(race, 2, MODEL, layouts, rounds, steps)[0]
    rows = {
        name: {
            "step_time_s": statistics.median(times),
            "tokens_per_s": GLOBAL_BATCH_SIZE * MODEL.seq / statistics.median(times),
            "speed_over_ddp": statistics.median(d / t for d, t in zip(seconds[DDP], times, strict=True)),
        }
        for name, times in seconds.items()
    }
    if as_json:
        result: dict[str, Any] = {"model": MODEL.name, "parameters": MODEL.parameters, "layouts": rows}
        json.dump(result, sys.stdout, indent=2)
        print()
        return
    print(f"{MODEL.name}: {MODEL.parameters / 1e6:.1f} M parameters, 2 ranks of one core, fp32")
    for name, row in rows.items():
        print(f"{name}: {row['tokens_per_s']:,.0f} tokens/s, {row['speed_over_ddp']:.2f}x the speed of {DDP}")


if __name__ == "__main__":
    run(app, "benchmarks.runtime")

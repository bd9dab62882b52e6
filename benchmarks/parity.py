"""Losses of layouts against those of one rank: `python -m benchmarks.parity --layout tp=2,pp=2`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated

import numpy as np
import typer

from benchmarks.worker_pool import WorkerPool
from costmodels import SHORT_NAMES, Layout, ModelSpec, even_split
from costmodels.errors import InputError
from planner.flags import run
from runtime.preflight import check_job

MODELS = {
    "gpt2": ModelSpec(
        name="parity-gpt2", layers=4, hidden=64, heads=4, vocab=250, seq=32, activation="gelu_tanh"
    ),
    "llama": ModelSpec(
        name="parity-llama",
        layers=4,
        hidden=64,
        heads=8,
        kv_heads=4,
        ffn=176,
        vocab=250,
        seq=32,
        gated=True,
        activation="silu",
        norm="rmsnorm",
        position="rope",
        tied=False,
        linear_bias=False,
    ),
}
"""Small models with every kind of layer; their vocabularies need padding."""

LISTS = ("layers_per_stage", "recompute_modules")
"""Fields whose values are separated by semicolons."""

NAMES = [*SHORT_NAMES, *(name for name in Layout.model_fields if name not in SHORT_NAMES.values())]
"""What a layout's text may name."""

GLOBAL_BATCH_SIZE = 8
SEED = 1234


def parse_layout(text: str, spec: ModelSpec) -> Layout:
    """A layout from `tp=2,pp=2`-style text; what is not said is 1, 0 or the even split.

    A schedule of several chunks means two pipeline ranks of two chunks unless other numbers are given.
    """
    fields: dict[str, object] = {"precision": "fp32", "global_batch_size": GLOBAL_BATCH_SIZE}
    for item in filter(None, text.split(",")):
        name, _, value = item.partition("=")
        name = SHORT_NAMES.get(name, name)
        if name not in Layout.model_fields or not value:
            raise InputError(f"--layout {text}: {item!r} is not name=value with a name of {', '.join(NAMES)}")
        fields[name] = value.split(";") if name in LISTS else int(value) if value.isdigit() else value
    if fields.get("schedule", "1f1b") != "1f1b":
        fields.setdefault(SHORT_NAMES["vpp"], 2)
    if fields.get(SHORT_NAMES["vpp"], 1) != 1:
        fields.setdefault(SHORT_NAMES["pp"], 2)
    pp, vpp = (fields.get(SHORT_NAMES[name], 1) for name in ("pp", "vpp"))
    if isinstance(pp, int) and isinstance(vpp, int) and pp * vpp > 0:
        fields.setdefault("schedule", "interleaved" if vpp > 1 else "1f1b")
        fields.setdefault("layers_per_stage", even_split(spec.layers, pp * vpp))
    return Layout.model_validate(fields)


def losses_of(spec: ModelSpec, layout: Layout, steps: int, compiled: bool = False) -> list[float]:
    """Losses of `steps` training steps on random tokens; runs on every rank of a process group."""
    import torch

    from runtime.options import TrainingOptions
    from runtime.trainer import Trainer

    options = TrainingOptions(train_iters=steps, lr=1e-3, seed=SEED, compile=compiled)
    trainer = Trainer(spec, layout, options, torch.device("cpu"))
    tokens = np.random.RandomState(SEED)
    losses = []
    for _ in range(steps):
        batch = tokens.randint(0, spec.vocab, (layout.global_batch_size, spec.seq + 1)).astype(np.int64)
        losses.append(float(trainer.train_step(batch[trainer.rows]).loss))
    return losses


def relative_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Largest relative difference of two loss curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))


app = typer.Typer(add_completion=False)


@app.command()
def parity(
    layout: Annotated[list[str], typer.Option(help="Layout such as tp=2,pp=2 (repeatable).")],
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")] = "gpt2",
    steps: Annotated[int, typer.Option(help="Training steps.")] = 20,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the layers of the layouts.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train each layout and one rank on the same tokens and compare the losses."""
    if model not in MODELS:
        raise InputError(f"--model {model}: choose one of {', '.join(MODELS)}")
    if steps < 1:
        raise InputError(f"--steps {steps}: must be at least 1")
    spec = MODELS[model]
    layouts = {text: parse_layout(text, spec) for text in layout}
    for one in layouts.values():
        check_job(spec, one, one.world_size)
    pool = WorkerPool(max(one.world_size for one in layouts.values()))
    reference = pool.run(losses_of, 1, spec, parse_layout("", spec), steps)[0]
    results = {}
    for text, one in layouts.items():
        losses = pool.run(losses_of, one.world_size, spec, one, steps, compiled)[0]
        difference = relative_difference(losses, reference)
        results[text] = {"max_relative_difference": difference, "losses": losses}
        if not as_json:
            print(f"{text}: largest relative difference {difference:.2e} over {steps} steps")
    if as_json:
        json.dump({"model": model, "reference": reference, "layouts": results}, sys.stdout)
        print()


if __name__ == "__main__":
    run(app, "benchmarks.parity")

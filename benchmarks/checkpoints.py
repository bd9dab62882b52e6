"""Checkpoints of layouts, loaded under each other: `python -m benchmarks.checkpoints`.

Each layout trains a small mixture of experts, saves, and goes on. Every layout then loads every checkpoint
and must report the same next losses. The seconds are those of a larger model on the ranks of this machine.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from benchmarks.runtime import MODEL
from costmodels import Layout, ModelSpec
from costmodels.errors import InputError
from planner.options.flags import run
from runtime.job.devices import local_device_count
from runtime.settings.checks import check_job
from tests.support.layouts import parse_layout
from tests.support.models import MODELS
from tests.support.ranks.parity import SEED
from tests.support.worker_pool import WorkerPool

SPEC = MODELS["deepseek"]
"""Latent attention, experts with biases, a shared expert, a dense layer."""

LAYOUTS = (
    "dp=1,mbs=8",
    "dp=2,zero=3,mbs=4",
    "tp=2,pp=2,ep=2,mbs=4",
    "dp=2,ep=2,zero=2,mbs=2",
    "tp=2,sp=1,mbs=4,recompute=full",
    "pp=2,dp=2,ep=2,zero=1,schedule=zbv",
    "cp=2,mbs=4",
    "pp=2,vpp=2,mbs=4",
)
"""Layouts of one, two and four ranks, with every kind of parallelism and every stage of ZeRO."""

SAVE_AT = 2
STEPS = 4
"""Two steps before the checkpoint, so that moments count; two after it, the second with updated weights."""

NEXT_LOSS = 1e-6
"""Largest allowed relative difference of the first loss, caused by the order of fp32 sums."""

LATER_LOSS = 1e-5
"""Largest allowed relative difference of a loss after an update."""


class Timing(NamedTuple):
    """Seconds of one save, of one load, and of the pause of training for a save."""

    save_s: float
    async_stall_s: float
    async_save_s: float
    """Seconds until the files of an asynchronous save are complete."""
    load_s: float
    first_stall_s: float
    checkpoint_bytes: int


def options_of() -> Any:
    """Training options of the small model."""
    from runtime.settings.training_options import TrainingOptions

    return TrainingOptions(
        train_iters=100, lr=1e-3, seed=SEED, moe_router_bias_update_rate=1e-2, moe_z_loss_coeff=1e-3
    )


def losses_between(spec: ModelSpec, layout: Layout, folder: str, steps: Sequence[int]) -> list[float]:
    """Losses of `steps`, from the checkpoint before the first to one after the last; runs on every rank."""
    import torch

    from runtime import checkpoint
    from runtime.train.trainer import Trainer

    trainer = Trainer(spec, layout, options_of(), torch.device("cpu"))
    if steps[0]:
        checkpoint.load(folder, trainer, spec, steps[0])
    losses = [_step(trainer, spec, step) for step in steps]
    checkpoint.save(folder, trainer, spec, {})
    return losses


def losses_after_loading(spec: ModelSpec, layout: Layout, folders: Sequence[str]) -> list[list[float]]:
    """Losses of the steps after loading each of `folders` in turn; runs on every rank."""
    import torch

    from runtime import checkpoint
    from runtime.train.trainer import Trainer

    trainer = Trainer(spec, layout, options_of(), torch.device("cpu"))
    losses = []
    for folder in folders:
        _spoil(trainer)
        checkpoint.load(folder, trainer, spec, SAVE_AT)
        losses.append([_step(trainer, spec, step) for step in range(SAVE_AT, STEPS)])
    return losses


def _step(trainer: Any, spec: ModelSpec, step: int) -> float:
    random = np.random.RandomState(step)
    batch = random.randint(0, spec.vocab, (trainer.layout.global_batch_size, spec.seq + 1))
    return float(trainer.train_step(batch.astype(np.int64)[trainer.rows]).loss)


def _spoil(trainer: Any) -> None:
    """Overwrite all state that a checkpoint stores, so that state that a load forgets is noticed."""
    import torch

    from runtime.parallel.local_tensors import local_part

    with torch.no_grad():
        for owned in trainer.optimizer.owned:
            owned.shard.fill_(torch.nan)
        for state in trainer.optimizer.rule.states().values():
            local_part(state).fill_(torch.nan)
        for bias in {} if trainer.balance is None else trainer.balance.biases().values():
            bias.fill_(torch.nan)
    trainer.iteration = trainer.updates = -1


def layouts_of(texts: Sequence[str], spec: ModelSpec) -> dict[str, Layout]:
    """The layouts that the texts describe, of the same global batch."""
    return {text: parse_layout(f"gbs=8,{text}", spec) for text in texts}


def differences(
    pool: WorkerPool,
    spec: ModelSpec,
    layouts: Mapping[str, Layout],
    folder: Path,
    on_pair: Callable[[str, str, float, float], None],
) -> None:
    """Load the checkpoint of each layout under each other one.

    Args:
        folder: folder for the checkpoints.
        on_pair: called with the layout that saved, the one that loads, and the largest relative differences
            of the next loss and of those after it.
    """
    places = {text: str(folder / str(number)) for number, text in enumerate(layouts)}
    expected = {}
    for text, one in layouts.items():
        pool.run(losses_between, one.world_size, spec, one, places[text], range(SAVE_AT))
        # In a folder of its own: what is loaded must not have been made by loading.
        own = places[text] + "-on"
        expected[text] = pool.run(losses_between, one.world_size, spec, one, own, range(STEPS))[0][SAVE_AT:]
    for after, one in layouts.items():
        sources = [text for text in layouts if text != after]
        runs = pool.run(losses_after_loading, one.world_size, spec, one, [places[text] for text in sources])
        for before, losses in zip(sources, runs[0], strict=True):
            off = np.abs(np.subtract(losses, expected[before]) / expected[before])
            on_pair(before, after, float(off[0]), float(np.max(off[1:])))


def timing(spec: ModelSpec, layout: Layout, folder: str, repetitions: int, on_gpu: bool) -> Timing:
    """Median seconds of saves and loads; runs on every rank."""
    import torch
    import torch.distributed as dist

    from runtime import checkpoint
    from runtime.parallel.ranks import wait_for_ranks
    from runtime.train.trainer import Trainer

    device = torch.device("cuda", dist.get_rank()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    trainer = Trainer(spec, layout, options_of(), device)
    trainer.optimizer.rule.states()

    def seconds(work: Callable[[], object]) -> float:
        wait_for_ranks(device)
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        wait_for_ranks(device)
        return time.perf_counter() - started

    savers = [checkpoint.Saver(folder, asynchronous=one, report=lambda line: None) for one in (False, True)]
    rows = []
    # The first asynchronous save makes room for its copies; the others use it again.
    for _ in range(repetitions + 1):
        save_s, stall_s = (seconds(lambda saver=saver: saver.save(trainer, spec, {})) for saver in savers)  # type: ignore[misc]
        rest_s = seconds(savers[1].wait)
        load_s = seconds(lambda: checkpoint.load(folder, trainer, spec, 0))
        rows.append((save_s, stall_s, stall_s + rest_s, load_s))
    files = checkpoint.verify(checkpoint.iteration_folder(folder, 0)).files
    save_s, stall_s, async_s, load_s = np.median(rows[1:], axis=0).tolist()
    size = sum(record.bytes for record in files.values())
    return Timing(save_s, stall_s, async_s, load_s, rows[0][1], size)


app = typer.Typer(add_completion=False)


@app.command()
def checkpoints(
    layout: Annotated[list[str], typer.Option(help="Layout such as tp=2,pp=2 (repeatable).")] = list(LAYOUTS),  # noqa: B006
    repetitions: Annotated[int, typer.Option(help="Saves that are timed; 0 for none.")] = 3,
    timed: Annotated[str, typer.Option(help="Layout of the timed saves.")] = "dp=2,zero=1,mbs=4",
    hidden: Annotated[int, typer.Option(help="Width of the model of the timed saves, in steps of 64.")] = 384,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Load each layout's checkpoint under all others, compare losses, and time saves and loads."""
    if repetitions < 0:
        raise InputError(f"--repetitions {repetitions}: must be at least 0")
    layouts = layouts_of(layout, SPEC)
    for one in layouts.values():
        check_job(SPEC, one, one.world_size)
    if hidden < 64 or hidden % 64:
        raise InputError(f"--hidden {hidden}: must be a multiple of 64")
    heads = hidden // 64
    larger = MODEL.model_copy(
        update={"hidden": hidden, "heads": heads, "kv_heads": heads, "ffn": 8 * hidden // 3}
    )
    wide = parse_layout(f"gbs=8,{timed}", larger)
    check_job(larger, wide, wide.world_size)
    pool = WorkerPool(max(one.world_size for one in (*layouts.values(), wide)))
    pairs: list[dict[str, Any]] = []

    def add(before: str, after: str, first: float, later: float) -> None:
        pairs.append({"saved": before, "loaded": after, "next": first, "later": later})
        if not as_json:
            print(f"{before:>38} -> {after:38} next loss {first:.1e}, later {later:.1e}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        differences(pool, SPEC, layouts, Path(folder), add)
    # Not max(), which may overlook a NaN.
    first, later = (float(np.max([pair[name] for pair in pairs])) for name in ("next", "later"))
    result: dict[str, Any] = {"pairs": pairs, "next": first, "later": later}
    passed = first <= NEXT_LOSS and later <= LATER_LOSS
    if not as_json:
        print(
            f"{len(pairs)} pairs: next loss within {first:.1e} (limit {NEXT_LOSS:.0e}), later ones within "
            f"{later:.1e} (limit {LATER_LOSS:.0e}): {'passed' if passed else 'FAILED'}"
        )
    if repetitions:
        with tempfile.TemporaryDirectory() as folder:
            gpus = local_device_count() >= wide.world_size
            workers = WorkerPool(wide.world_size, accelerated=True) if gpus else pool
            seconds = workers.run(timing, wide.world_size, larger, wide, folder, repetitions, gpus)[0]
        result["timing"] = seconds._asdict()
        if not as_json:
            where = "GPUs" if gpus else "the CPU"
            print(f"Llama of {larger.parameters / 1e6:.0f} M parameters as {timed} on {where}:")
            _print_timing(seconds)
    if as_json:
        json.dump(result, sys.stdout, indent=2)
        print()
    if not passed:
        raise typer.Exit(1)


def _print_timing(seconds: Timing) -> None:
    gigabytes = seconds.checkpoint_bytes / 1e9
    print(f"  checkpoint     {gigabytes:6.2f} GB")
    print(f"  save           {seconds.save_s:6.2f} s, {gigabytes / seconds.save_s:.2f} GB/s, training waits")
    print(
        f"  --async-save   {seconds.async_save_s:6.2f} s, training waits {seconds.async_stall_s:.2f} s, "
        f"{seconds.save_s / seconds.async_stall_s:.0f} times less ({seconds.first_stall_s:.2f} s at first)"
    )
    print(f"  verify, load   {seconds.load_s:6.2f} s, {gigabytes / seconds.load_s:.2f} GB/s")


if __name__ == "__main__":
    run(app, "benchmarks.checkpoints")

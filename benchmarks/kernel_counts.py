"""Kernels of a training step on a GPU, counted without one: `python -m benchmarks.kernel_counts`.

A dry run trains models of two depths with two numbers of microbatches. Compiled graphs are scheduled for an
H100, and each group of nodes that Inductor fuses counts as one kernel. In eager code, each operator counts as
one. The kernels of a layer and microbatch (forward, backward, accumulation of gradients) are the difference
that one more layer and one more microbatch make together. Kernels of a layer that do not depend on the number
of microbatches belong to the step: the optimizer, and weights that are copied or cast once.

Bytes are those of the tensors that a kernel reads and writes, once each. Kernels read some of them several
times (GEMMs, attention), which is not counted. `--save PATH` keeps the counts, `--against PATH` shows what
was saved beside them.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import torch
import typer
from torch import Tensor, fx
from torch._inductor import config as inductor_config
from torch.utils import _pytree as pytree

from costmodels import Layout, ModelSpec
from costmodels.catalogue import load_model
from costmodels.files import MIB
from planner.options.flags import run
from runtime.dryrun import compiled_layers
from runtime.dryrun import run as dry_run
from runtime.dryrun.course import BUILD
from runtime.dryrun.roles import roles
from runtime.dryrun.tracker import Tracker, is_compiling
from runtime.parallel import working_copies
from runtime.settings.training_options import TrainingOptions
from runtime.train.trainer import Trainer
from tests.support.gpu_lowering import Launch, launches_of, seen_graphs
from tests.support.layouts import parse_layout

CASES = {"llama3-8b": (1, 8192), "gpt2-medium": (8, 1024), "qwen3-30b-a3b": (2, 4096)}
"""Sequences of a microbatch, and tokens of a sequence, by the name of a model of the catalogue."""

PRECISIONS = {
    "bf16": "precision=bf16",
    "fp8": "precision=fp8",
    "fp8 rowwise": "precision=fp8,fp8_recipe=rowwise",
}
"""Layouts by the names of number formats."""

DEPTHS, MICRO_BATCHES = (3, 4), (2, 3)
"""Two numbers of layers and of microbatches. The last layer is the same in both, and so is the first."""

WARM_UP = 2
"""Number of steps before counting, in which layers are compiled and chained and the optimizer's state is
made."""

KINDS = (
    "GEMM",
    "grouped GEMM",
    "attention",
    "element-wise and sums",
    "casts to 8 bits",
    "additions of gradients",
    "other eager kernels",
)
"""Kinds of kernels, in the order of the table."""

ADDITIONS = "additions of gradients"

CAST = ("element-wise and sums", "casts to 8 bits")
"""Kinds of which casts make more than bf16 has: a kernel that casts often does element-wise work besides."""

BEYOND = "the two beyond bf16"
"""The row of additional kernels of `CAST` compared with bf16."""

FREE = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "detach", "resize", "set_"}
"""Operators, besides views, that start no kernel."""

Counts = dict[str, dict[str, list[int]]]
"""Launches and bytes by kind, of a layer and microbatch and of a layer and step."""


class KernelCounter(Tracker):  # type: ignore[no-untyped-call]
    """Counts kernels during a memory trace."""

    def __init__(self) -> None:
        super().__init__(on_gpu=True)
        self.counted: Counter[tuple[str, int]] = Counter()
        """Launches (0) and bytes (1) by kind."""
        self.within = 0
        """Above 0 while compiled functions run, whose kernels are known."""
        self.adding = 0
        """Above 0 while gradients are added up."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is not NotImplemented and not self.within and not is_compiling() and not self.pauses:
            self._count(func, (args, kwargs or {}), result)
        return result

    def _count(self, func: Any, given: Any, result: Any) -> None:
        name = func._schema.name.split("::")[-1]
        if func.is_view or name in FREE or func.namespace in ("prim", "c10d", "_c10d_functional"):
            return
        read = [one for one in pytree.tree_leaves(given) if isinstance(one, Tensor) and _on_device(one)]
        made = [one for one in pytree.tree_leaves(result) if isinstance(one, Tensor) and _on_device(one)]
        written = [
            part
            for argument, value in zip(func._schema.arguments, given[0], strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for part in pytree.tree_leaves(value)
            if isinstance(part, Tensor)
        ]
        if not read and not made:
            return
        fresh = [one for one in made if not any(one is other for other in read)]
        if name.startswith("_foreach_copy") or name == "copy_":
            # Tensors that are written over are not read.
            read = [one for one in read if not any(one is other for other in written)]
        size = sum(map(_bytes, (*read, *fresh, *written)))
        self.take(_kind(name, self.adding), _launches(name, given[0]), size)

    def take(self, kind: str, launches: int, size: int) -> None:
        """Count launches of a kind, and the bytes that they move."""
        self.counted[kind, 0] += launches
        self.counted[kind, 1] += size


def _on_device(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"


def _bytes(tensor: Tensor) -> int:
    shown = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        shown *= size if stride else 1
    return shown * tensor.element_size()


def _kind(name: str, adding: int) -> str:
    if name.startswith(("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")):
        return "GEMM"
    return ADDITIONS if adding else "other eager kernels"


def _launches(name: str, args: Any) -> int:
    """Number of kernels of an operator. An operator on lists is one kernel, unless number formats differ:
    PyTorch then handles each tensor separately."""
    if not name.startswith("_foreach"):
        return 1
    lists = [one for one in args if isinstance(one, (list, tuple)) and one and isinstance(one[0], Tensor)]
    formats = {tensor.dtype for one in lists for tensor in one}
    slow = len(formats) > 1 and not name.startswith("_foreach_copy")
    return len(lists[0]) if slow and lists else 1


@contextmanager
def counting() -> Iterator[Callable[[], KernelCounter]]:
    """Context in which dry runs count kernels; gives the counter of the latest one."""
    made: list[KernelCounter] = []
    plain, add = compiled_layers.memory_function, working_copies.GradientSums._add
    receive = working_copies.GradientSums.receive

    def tracker(**_: Any) -> KernelCounter:
        made.append(KernelCounter())
        return made[-1]

    def scheduled(graph: fx.GraphModule, current: Callable[[], Tracker]) -> Any:
        launches: list[Launch] = launches_of(copy.deepcopy(graph))
        function = plain(graph, current)

        def run_and_count(inputs: list[Any]) -> Any:
            counter = made[-1]
            for one in launches:
                counter.take(one.kind, 1, one.bytes)
            counter.within += 1
            try:
                return function(inputs)
            finally:
                counter.within -= 1

        run_and_count._boxed_call = True  # type: ignore[attr-defined]
        return run_and_count

    def adding(self: Any, *args: Any) -> None:
        made[-1].adding += 1
        try:
            add(self, *args)
        finally:
            made[-1].adding -= 1

    def receiving(self: Any, number: int) -> tuple[Tensor, bool]:
        """Count what the GEMM reads and writes of a sum that its graph does not know."""
        total, holds = receive(self, number)
        # Sums of experts are those of all of a layer.
        made[-1].take("grouped GEMM" if total.dim() == 3 else "GEMM", 0, _bytes(total) * (1 + holds))
        return total, holds

    with (
        seen_graphs(scheduled),
        patch.object(dry_run, "Tracker", tracker),
        patch.object(working_copies.GradientSums, "_add", adding),
        patch.object(working_copies.GradientSums, "receive", receiving),
    ):
        yield lambda: made[-1]


def steps_of(spec: ModelSpec, layout: Layout) -> list[Counter[tuple[str, int]]]:
    """Counts of a step for each number in `MICRO_BATCHES`, on the only rank."""
    options = TrainingOptions(compile=True)
    found: list[Counter[tuple[str, int]]] = []

    def run_steps(tracker: Any, model: ModelSpec, split: Layout, *_: Any) -> None:
        with roles(tracker), tracker:
            with tracker.scope(phase=BUILD):
                trainer = Trainer(model, split, options, torch.device("cuda"))
            samples = np.zeros((split.micro_batches * split.micro_batch_size, model.seq + 1), np.int64)
            for number in (split.micro_batches,) * WARM_UP + MICRO_BATCHES:
                tracker.counted.clear()
                tracker.mark()
                with dry_run._rows_of(trainer, number):
                    trainer.train_step(samples)
                found.append(Counter(tracker.counted))

    with (
        counting(),
        patch.object(dry_run, "_run_steps", run_steps),
        dry_run.dry_rank(spec, layout, 0, True, "cuda", options) as one_rank,
    ):
        one_rank(spec, layout)
    return found[WARM_UP:]


def counts(name: str, precision: str) -> Counts:
    """Kernels of a layer and microbatch, and of a layer and step, of a row."""
    size, seq = CASES[name]
    by_depth = []
    for layers in DEPTHS:
        spec = load_model(name).model_copy(update={"seq": seq, "layers": layers})
        layout = parse_layout(f"mbs={size},gbs={size * MICRO_BATCHES[-1]},{PRECISIONS[precision]}", spec)
        # Layouts choose how Inductor fuses, each for its own process.
        with inductor_config.patch(realize_opcount_threshold=inductor_config.realize_opcount_threshold):
            by_depth.append(steps_of(spec, layout))
    (few_few, few_more), (more_few, more_more) = by_depth
    result: Counts = {"microbatch": {}, "step": {}}
    for kind in KINDS:
        each, step = [], []
        for part in (0, 1):
            key = kind, part
            of_layer = more_few[key] - few_few[key]
            of_both = more_more[key] - few_more[key] - of_layer
            each.append(of_both)
            step.append(of_layer - MICRO_BATCHES[0] * of_both)
        for found, place in ((each, "microbatch"), (step, "step")):
            if any(found):
                result[place][kind] = found
    return result


def table(rows: dict[str, Counts], before: dict[str, Counts] | None) -> Iterator[str]:
    """Lines of a table of all rows, beside those of another commit if there are any."""
    beside = "" if before is None else f"{'before: launches':>18} {'MiB':>10}"
    yield f"{'model':<26} {'of a layer and':<15} {'kernels':<22} {'launches':>8} {'MiB':>9} {beside}".rstrip()
    for name, found in rows.items():
        for place, own in found.items():
            kinds = _with_beyond(rows, name, place, own)
            known = {} if before is None else before.get(name, {}).get(place, {})
            known = _with_beyond(before or {}, name, place, known)
            for kind in (*KINDS[:5], BEYOND, *KINDS[5:], "all"):
                now, then = _of(kinds, kind), _of(known, kind)
                if not any(now) and not any(then):
                    continue
                line = f"{name:<26} {place:<15} {kind:<22} {now[0]:>8} {now[1] / MIB:>9.1f}"
                yield line if before is None else f"{line} {then[0]:>18} {then[1] / MIB:>10.1f}"


def _with_beyond(
    rows: dict[str, Counts], name: str, place: str, kinds: dict[str, list[int]]
) -> dict[str, list[int]]:
    """The counts of a row in 8 bits with what it has beyond those of bf16, if these are known."""
    wide = rows.get(f"{name.split()[0]} bf16", {}).get(place)
    if wide is None or not kinds or name.endswith("bf16"):
        return kinds
    beyond = [sum(_of(kinds, kind)[part] - _of(wide, kind)[part] for kind in CAST) for part in (0, 1)]
    return {**kinds, BEYOND: beyond}


def _of(kinds: dict[str, list[int]], kind: str) -> list[int]:
    if kind != "all":
        return kinds.get(kind, [0, 0])
    return [sum(one[part] for name, one in kinds.items() if name != BEYOND) for part in (0, 1)]


app = typer.Typer(add_completion=False)


@app.command()
def kernel_counts(
    only: Annotated[str, typer.Option(help="Rows with this text in their name only.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    save: Annotated[Path | None, typer.Option(help="Keep the counts in this file.")] = None,
    against: Annotated[Path | None, typer.Option(help="Counts of another commit, to show beside.")] = None,
) -> None:
    """Kernels, launches and bytes of a layer, by kind."""
    rows = {
        f"{name} {precision}": counts(name, precision)
        for name in CASES
        for precision in PRECISIONS
        if only in f"{name} {precision}"
    }
    if save is not None:
        save.write_text(json.dumps(rows))
    before = None if against is None else json.loads(against.read_text())
    if as_json:
        print(json.dumps(rows))
    else:
        print(*table(rows, before), sep="\n")


if __name__ == "__main__":
    run(app, "benchmarks.kernel_counts")

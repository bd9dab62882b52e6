"""What logits that never exist save: `python -m benchmarks.logits`, for llama3-8b on 8 H100s.

The head's loss is made a chunk of tokens at a time. What the head did before, with all logits at once, was
recorded under PyTorch 2.11 (`whole_logits.json`); the peaks of both are played from tapes of that version.
"""

from __future__ import annotations

import typer

from benchmarks.memory_h100 import Row, remember_whole_logits
from costmodels import Layout
from costmodels.catalogue import load_model
from costmodels.spec.record import GIB
from costmodels.tapes import player
from planner.options.flags import run

VERSION = "2.11"

STAGES = (1, 2, 3)
"""ZeRO's."""


def peak_gib(row: Row) -> float:
    """The most that tensors of a rank of the row take at once."""
    return max(moment.total for moment in player.rank_moments(row.model, row.layout, 0, True, VERSION)) / GIB


def rows() -> list[Row]:
    """The layouts that are compared."""
    model = load_model("llama3-8b").model_copy(update={"seq": 8192})
    fields = {"layers_per_stage": (model.layers,), "data_parallel": 8, "global_batch_size": 8}
    layouts = [Layout.model_validate({**fields, "zero_stage": stage}) for stage in STAGES]
    return [Row(model, layout, "h100", VERSION, 0.0) for layout in layouts]


def logits() -> None:
    """Compare the peaks of chunks of logits with those of whole ones."""
    every = rows()
    now = [peak_gib(row) for row in every]
    for row in every:
        remember_whole_logits(row)
    for row, chunks in zip(every, now, strict=True):
        whole = peak_gib(row)
        print(
            f"{row.model.name}, seq {row.model.seq}, {row.layout.describe()}: {chunks:.2f} GiB, "
            f"with whole logits {whole:.2f}: {whole - chunks:.2f} GiB less"
        )


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(logits)

if __name__ == "__main__":
    run(app, "benchmarks.logits")

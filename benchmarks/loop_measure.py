"""The questions of `benchmarks.loop`, and measured times and memory of their layouts on this machine."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from costmodels import Layout, ModelSpec
from planner.api import search
from planner.ranking.result import SearchResult
from runtime.calibrate.local import step_on_rank
from runtime.launch.rank_pool import RankPool
from runtime.launch.warm_ranks import threads_of
from tests.support.models import llama

DENSE = llama("dense", layers=4, hidden=192, heads=2, ffn=512, vocab=1024, seq=128)

MODELS = {
    "dense": DENSE,
    "experts": DENSE.model_copy(
        update={"name": "experts", "layers": 2, "experts": 4, "top_k": 2, "expert_ffn": 256}
    ),
    "long": DENSE.model_copy(
        update={
            "name": "long",
            "layers": 2,
            "hidden": 128,
            "heads": 2,
            "ffn": 384,
            "vocab": 512,
            "seq": 512,
            "max_positions": 512,
        }
    ),
}
"""Models so small that all of their layouts can be run."""


DISTURBED = 0.1
"""Largest share of the cores that other processes may use during a measurement, if an undisturbed one
exists."""

TIMES, STEPS_S = 3, 1.0
"""Number of measurements of each layout, and seconds of steps in each. Steps differ by a tenth, and runs of a
layout by some per cent."""


class Question(NamedTuple):
    """A model on some ranks of the CPU."""

    model: str
    world_size: int
    batch: int
    pin: str = ""

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        return MODELS[self.model]

    def search(self) -> SearchResult:
        """All layouts that fit, with the present constants of the device."""
        size = self.world_size
        return search(
            self.spec,
            world_size=size,
            local_world_size=size,
            device="cpu",
            global_batch_size=self.batch,
            pin=[self.pin] if self.pin else None,
        )

    def layouts(self, sample: int | None) -> list[Layout]:
        """All layouts that fit, or a random selection of this many."""
        table = self.search().table
        every = [table.layout(row) for row in range(len(table))]
        if sample is None or sample >= len(every):
            return every
        return random.Random(self.model).sample(every, sample)


class Measured(NamedTuple):
    """A layout that was run."""

    question: Question
    layout: Layout
    step_time_s: float
    peak_memory_bytes: int
    others: float
    """Share of the cores that other processes used."""
    times: int = 1
    """The number of measurements."""


def measure_all(wanted: Mapping[Question, Sequence[Layout]], kept: Path, limit_s: float) -> bool:
    """Measure the layouts that `kept` lacks, for at most `limit_s` seconds; returns True if all were
    measured.

    Each layout has ranks of its own, as each run has, so that it does not affect the next one. Each is
    measured `TIMES` times, in rounds.
    """
    started, pool = time.monotonic(), RankPool(max(question.world_size for question in wanted))
    every = [(question, layout) for question, layouts in wanted.items() for layout in layouts]
    # A change of the machine meanwhile must not look like a property of layouts.
    random.Random(0).shuffle(every)
    times = {(row.question, row.layout): row.times for row in read_kept(kept)}
    with kept.open("a", encoding="utf-8") as file:
        for turn in range(TIMES):
            for question, layout in every:
                if times.get((question, layout), 0) > turn:
                    continue
                if time.monotonic() - started > limit_s:
                    return False
                size = question.world_size
                words = question.spec, layout, "cpu", int(threads_of(size)), STEPS_S
                found = pool.run(step_on_rank, size, *words)[0]
                fields = layout.model_dump(mode="json")
                file.write(json.dumps([*question, fields, *found]) + "\n")
                file.flush()
    return True


def read_kept(kept: Path) -> list[Measured]:
    """The layouts that were measured before.

    The median of the undisturbed measurements of a layout counts, or the least disturbed one if there are
    none.
    """
    if not kept.exists():
        return []
    found: dict[tuple[Question, Layout], list[Measured]] = {}
    for line in kept.read_text(encoding="utf-8").splitlines():
        model, size, batch, pin, fields, seconds, peak, others = json.loads(line)
        row = Measured(
            Question(model, size, batch, pin), Layout.model_validate(fields), seconds, peak, others
        )
        found.setdefault((row.question, row.layout), []).append(row)
    result = []
    for rows in found.values():
        quiet = [row for row in rows if row.others <= DISTURBED] or [min(rows, key=lambda row: row.others)]
        seconds = statistics.median(row.step_time_s for row in quiet)
        result.append(quiet[0]._replace(step_time_s=seconds, times=len(rows)))
    return result

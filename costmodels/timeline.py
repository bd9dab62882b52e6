"""`Timeline`: start and end of each pass and message of a simulated pipeline, for viewing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.files import write_whole
from costmodels.pipeline_times import stage_seconds
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Cluster
from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from costmodels.spec.schedules import BACKWARD, FORWARD, INPUTS, WEIGHTS
from costmodels.spec.table import Floats, LayoutTable
from costmodels.time.simulation import Simulation, simulate

LETTERS = {FORWARD: "F", BACKWARD: "B", INPUTS: "I", WEIGHTS: "W"}
"""Kinds of passes: forward, whole backward, gradients of inputs, gradients of weights."""

COLOURS = {
    "F": "thread_state_runnable",
    "B": "thread_state_running",
    "I": "thread_state_running",
    "W": "thread_state_iowait",
}
"""Colour names of trace viewers."""

MOST_PASSES = 500_000
"""Most passes of a timeline; its file has some 200 bytes for each pass."""

MICROSECONDS = 1e6


@dataclass(frozen=True)
class Event:
    """A pass of a pipeline rank, or a message that it sends."""

    kind: str
    """`F`, `B`, `I` or `W` (`LETTERS`)."""
    rank: int
    stage: int
    chunk: int
    """Place of the stage among those of its rank."""
    micro_batch: int
    start_s: float
    end_s: float

    @property
    def name(self) -> str:
        """The kind of the pass and its microbatch, such as `F3`."""
        return f"{self.kind}{self.micro_batch}"


@dataclass(frozen=True, eq=False)
class Timeline:
    """One step of a pipeline up to its last pass, without the optimizer."""

    passes: list[Event]
    """Passes, sorted by rank, then by time."""
    messages: list[Event]
    """Messages with activations (F) and gradients (B, I) to a neighbouring rank; a rank sends one at a
    time."""
    seconds: float
    """Seconds from the first to the last pass."""
    busy_s: list[float]
    """Seconds that each pipeline rank computes."""
    chunks: int
    """Model chunks on each rank."""

    @property
    def ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.busy_s)

    @property
    def idle_s(self) -> list[float]:
        """Seconds that each pipeline rank waits."""
        return [self.seconds - busy for busy in self.busy_s]

    @classmethod
    def of(cls, simulation: Simulation, send: Floats) -> Timeline:
        """The timeline of a simulated pipeline.

        Args:
            send: [stages - 1], seconds of a message across each boundary between stages.
        """
        graph, ranks = simulation.graph, simulation.ranks
        order = np.lexsort((simulation.start, graph.rank))
        columns = [
            graph.kind[order],
            graph.rank[order],
            graph.stage[order],
            graph.stage[order] // ranks,
            graph.micro_batch[order],
            simulation.start[order],
            simulation.end[order],
            graph.sent[order],
            simulation.arrive[order],
        ]
        passes, messages = [], []
        for kind, rank, stage, chunk, number, start, end, boundary, arrival in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            letter = LETTERS[kind]
            passes.append(Event(letter, rank, stage, chunk, number, start, end))
            if boundary:
                leaves = arrival - float(send[boundary - 1])
                messages.append(Event(letter, rank, stage, chunk, number, leaves, arrival))
        return cls(
            passes=passes,
            messages=messages,
            seconds=simulation.seconds,
            busy_s=simulation.busy.tolist(),
            chunks=int(graph.stage.max()) // ranks + 1,
        )

    def chrome_trace(self) -> dict[str, Any]:
        """The timeline in the Trace Event Format that chrome://tracing and ui.perfetto.dev open.

        Each rank has one row for its passes, named `F3`, or `F3.1` if ranks hold several chunks, and one row
        each for the activations and the gradients that it sends. Times are in microseconds.
        """
        rows = (
            (0, "compute", self.passes),
            (1, "activations sent", [event for event in self.messages if event.kind == "F"]),
            (2, "gradients sent", [event for event in self.messages if event.kind != "F"]),
        )
        events: list[dict[str, Any]] = []
        for process, title, found in rows:
            if not found:
                continue
            events += _titles(process, title, sorted({event.rank for event in found}))
            events += [self._trace_event(process, event) for event in found]
        return {"displayTimeUnit": "ms", "traceEvents": events}

    def _trace_event(self, process: int, event: Event) -> dict[str, Any]:
        return {
            "name": f"{event.name}.{event.chunk}" if self.chunks > 1 else event.name,
            "cat": event.kind,
            "ph": "X",
            "ts": event.start_s * MICROSECONDS,
            "dur": (event.end_s - event.start_s) * MICROSECONDS,
            "pid": process,
            "tid": event.rank,
            "cname": COLOURS[event.kind],
            "args": {"micro_batch": event.micro_batch, "stage": event.stage, "chunk": event.chunk},
        }

    def save(self, path: str | Path) -> None:
        """Write `chrome_trace` as JSON; raises `InputError` when the file cannot be written."""
        write_whole("timeline", path, json.dumps(self.chrome_trace()) + "\n")


def timeline(model: ModelSpec, cluster: Cluster, engine: Engine, layout: Layout) -> Timeline:
    """The timeline of one step of a layout; without pipeline parallelism, the microbatches on one rank.

    Args:
        engine: its constants; `Engine.for_device` is applied here.

    Raises:
        InputError: the schedule does not run the layout's number of microbatches, there are more than
            `MOST_PASSES` passes, or the device or the engine does not know the precision.
    """
    passes, micro_batches = 2 * len(layout.layers_per_stage), layout.micro_batches
    if passes * micro_batches > MOST_PASSES:
        raise InputError(
            f"timeline of {layout.describe()}: {micro_batches} microbatches are too many to draw; "
            f"use a batch of at most {MOST_PASSES // passes} microbatches"
        )
    [seconds] = stage_seconds(model, cluster, engine, LayoutTable.of([layout]))
    pipeline, chunks = layout.pipeline_parallel, layout.virtual_pipeline_parallel
    played = simulate(layout.schedule, pipeline, chunks, micro_batches, seconds)
    return Timeline.of(played, seconds.send)


def _titles(process: int, title: str, ranks: list[int]) -> Iterator[dict[str, Any]]:
    """Names of a group of rows and of its rows, in the order of the ranks."""
    yield {"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": {"name": title}}
    for rank in ranks:
        named = {"ph": "M", "pid": process, "tid": rank}
        yield {"name": "thread_name", **named, "args": {"name": f"rank {rank}"}}
        yield {"name": "thread_sort_index", **named, "args": {"sort_index": rank}}

"""A rank with several stages as one sequence of changes (`_PipelineScheduleRuntime._step_microbatches`).

What a rank computes, and when its messages come and go, follows from its schedule alone: a program, which all
plans with the schedule share. What each change does to memory follows from the stages of a plan: its sequence
is an array, and its peaks are those of running sums.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from costmodels.spec.layout import Schedule
from costmodels.spec.schedules import BACKWARD, INPUTS, WEIGHTS
from costmodels.spec.table import Bools, Ints
from costmodels.tapes.player.heap import CATEGORIES, NOTHING, Effect, Heap, Storage
from costmodels.tapes.player.sends import GRADIENTS, RESULTS
from costmodels.tapes.player.stage import Stage
from costmodels.tapes.player.stage_actions import (
    AWAIT,
    NAMES,
    REDUCE,
    UNSHARD,
    Actions,
    Stages,
    rank_actions,
    send_waits,
)

INPUT, OUTPUT, OUTPUT_GRADIENT, INPUT_GRADIENT = range(4)
"""Messages of a stage: received, or made by its passes."""

MESSAGES = 4

NEXT_PASS = -1
"""In the place of a message's number: the next one of the passes."""

NEVER = -1

WAIT, PASS, BEGIN, END, ADD = range(5)
"""Within an action: parameters are there, then it computes, then messages begin or end, then gradients of
weights are added up."""

TIMES = 5
"""Of an action."""

WAITS, ADDS = len(NAMES), len(NAMES) + 1
DOES = {**NAMES, WAITS: "wait", ADDS: "add_up"}
"""What stages do, by its number: actions, what they await before them, and what they add up after them."""


class Program(NamedTuple):
    """What a rank does."""

    chunks: Ints
    """Of what stages do to parameters and gradients, in order."""
    does: Ints
    """What they do, in numbers of `DOES`."""
    changes: Ints
    """All changes in order: `NEXT_PASS`, or twice the number of a message (`MESSAGES` of each chunk), with 1
    more where it ends."""


@lru_cache(maxsize=256)
def program_of(
    schedule: Schedule, stages: Stages, rank: int, micro_batches: int, awaits: bool, adds: bool
) -> Program:
    """The program of one of the ranks that have these stages.

    Args:
        awaits: sends and reductions, as PyTorch from 2.15 on.
        adds: gradients of weights that are made apart are added up then, as without FSDP2.
    """
    actions = rank_actions(schedule, stages, rank, micro_batches, awaits)
    waits = send_waits(schedule, stages, micro_batches) if awaits else None
    own, last = stages[rank], max(map(max, stages))
    chunks, does, places = _passes(actions, own, adds)
    times, codes = [places], [np.full(len(places), NEXT_PASS)]
    for starts, ends, message in _lifetimes(actions, own, last, micro_batches, waits):
        for when, code in ((starts, 2 * message), (ends, 2 * message + 1)):
            there = when[when != NEVER]
            times.append(there)
            codes.append(np.full(len(there), code))
    order = np.argsort(np.concatenate(times), kind="stable")
    return Program(chunks, does, np.concatenate(codes)[order])


def _passes(actions: Actions, stages: Sequence[int], adds: bool) -> tuple[Ints, Ints, Ints]:
    """Chunks, what their stages do, and the times of it."""
    name, stage = actions.name, actions.stage
    computes = name <= WEIGHTS
    waits = np.zeros_like(computes)
    for each in stages:
        own = np.flatnonzero(computes & (stage == each))
        gathered = np.flatnonzero((name == UNSHARD) & (stage == each))
        waits[own] = np.diff(np.searchsorted(gathered, own), prepend=0) > 0
    # Stage 0 has no gradients of inputs; those of weights are its whole backward.
    is_first = stage == 0
    does = np.where(is_first & (name == WEIGHTS), BACKWARD, name)
    waiting = np.flatnonzero(waits)
    doing = np.flatnonzero((computes | ((name >= REDUCE) & (name != AWAIT))) & ~(is_first & (name == INPUTS)))
    adding = np.flatnonzero(does == WEIGHTS) if adds else doing[:0]
    times = np.concatenate([waiting * TIMES + WAIT, doing * TIMES + PASS, adding * TIMES + ADD])
    order = np.argsort(times)
    does = np.concatenate([np.full(len(waiting), WAITS), does[doing], np.full(len(adding), ADDS)])[order]
    chunks = _chunk_of(stages)[stage[np.concatenate([waiting, doing, adding])[order]]]
    return chunks, does, times[order]


def _chunk_of(stages: Sequence[int]) -> Ints:
    """The chunk of each stage up to the last of these."""
    chunks = np.zeros(max(stages) + 1, dtype=np.int64)
    chunks[list(stages)] = np.arange(len(stages))
    return chunks


def _lifetimes(
    actions: Actions,
    stages: Sequence[int],
    last: int,
    micro_batches: int,
    waits: Ints | None,
) -> list[tuple[Ints, Ints, int]]:
    """When messages begin, `NEVER` where a pass makes them, and end; and their numbers. Of micro batches.

    Args:
        waits: before which other one sends are awaited (`awaited_sends`); the others are at the end of a
            step, or once results have come back as gradients. None where nobody keeps messages for that.
    """
    chunk_of = {stage: chunk for chunk, stage in enumerate(stages)}
    of_one = np.flatnonzero(actions.micro_batch >= 0)
    chunks_of_stages = _chunk_of(stages)
    chunks = chunks_of_stages[actions.stage[of_one]]
    when = np.full((len(NAMES), len(stages), micro_batches), NEVER)
    when[actions.name[of_one], chunks, actions.micro_batch[of_one]] = of_one * TIMES
    places: dict[str, Ints] = dict(zip(NAMES.values(), when, strict=True))
    done = np.where(places["weights"] == NEVER, places["backward"], places["weights"]) + END
    nothing: Ints = np.full(micro_batches, NEVER)
    found: list[tuple[Ints, Ints, int]] = []
    for chunk, stage in enumerate(stages):
        before, after = chunk_of.get(stage - 1), chunk_of.get(stage + 1)
        own, first = done[chunk], MESSAGES * chunk
        if stage > 0:
            if before is None:
                found.append((places["receive_forward"][chunk] + BEGIN, own, first + INPUT))
            taken = places["send_backward"][chunk] + END if before is None else done[before]
            if before is None and waits is not None:
                taken = np.full(micro_batches, len(actions.name) * TIMES)
                _wait_earlier(taken, waits, GRADIENTS, stage, places, chunks_of_stages)
            # The stage's input has it as its gradient.
            found.append((nothing, np.maximum(taken, own), first + INPUT_GRADIENT))
        if stage == last:
            # Losses are there to the end.
            found.append((nothing, np.full(micro_batches, len(actions.name) * TIMES), first + OUTPUT))
            continue
        kept = own.copy() if after is None else np.maximum(own, done[after])
        if after is None and waits is not None:
            _wait_earlier(kept, waits, RESULTS, stage, places, chunks_of_stages)
        found.append((nothing, kept, first + OUTPUT))
        if after is None:
            found.append((places["receive_backward"][chunk] + BEGIN, own, first + OUTPUT_GRADIENT))
    return found


def _wait_earlier(
    ends: Ints, waits: Ints, kind: int, stage: int, places: Mapping[str, Ints], chunk_of: Ints
) -> None:
    """Let messages of a kind and stage end where they are awaited, if that is before another send."""
    there = np.flatnonzero(waits[kind, stage] != NEVER)
    other, stages, numbers = np.unravel_index(waits[kind, stage, there], waits.shape)
    results, gradients = places["send_forward"], places["send_backward"]
    chunks = chunk_of[stages]
    ends[there] = np.where(other == RESULTS, results[chunks, numbers], gradients[chunks, numbers])


def play(program: Program, stages: Sequence[Stage], states: Sequence[int], heap: Heap) -> list[int]:
    """All changes of a program, by the stages of each chunk and their states; the states after it."""
    rows = _Rows()
    messages = [rows.message(storage) for stage in stages for storage in _messages(stage)]
    # Stages that are alike are one.
    alike = [stages.index(stage) for stage in stages]
    known: dict[tuple[int, int, int], tuple[int, int]] = {}
    states, numbers = list(states), []
    for chunk, does in zip(program.chunks.tolist(), program.does.tolist(), strict=True):
        key = alike[chunk], does, states[chunk]
        if key not in known:
            effect, state = stages[chunk].effect_of(DOES[does], states[chunk])
            known[key] = rows.append(effect), state
        number, states[chunk] = known[key]
        numbers.append(number)
    is_pass: Bools = program.changes == NEXT_PASS
    sequence = np.array([number for both in messages for number in both])[program.changes]
    sequence[is_pass] = numbers
    rows.play(sequence, heap)
    return states


def _messages(stage: Stage) -> tuple[Storage | None, ...]:
    """In the order of their numbers."""
    return stage.input, stage.output, stage.output_gradient, stage.input_gradient


class _Rows:
    """Effects as arrays."""

    def __init__(self) -> None:
        self.nets: list[tuple[int, ...]] = []
        self.peaks: list[Mapping[str, tuple[int, tuple[int, ...]]]] = []
        self.messages: dict[Storage | None, tuple[int, int]] = {}

    def append(self, effect: Effect) -> int:
        """The number of one."""
        self.nets.append(effect.net)
        self.peaks.append({label: (high, composition) for label, high, composition in effect.peaks})
        return len(self.nets) - 1

    def message(self, storage: Storage | None) -> tuple[int, int]:
        """The numbers of the beginning and the end of one."""
        if storage not in self.messages:
            category, size = storage or (0, 0)
            net = tuple(size * (number == category) for number in range(len(CATEGORIES)))
            begins = Effect((("schedule", size, net),), net, is_new=False)
            ends = Effect((("schedule", 0, NOTHING),), tuple(-each for each in net), is_new=False)
            self.messages[storage] = self.append(begins), self.append(ends)
        return self.messages[storage]

    def play(self, sequence: Ints, heap: Heap) -> None:
        """Do all of a sequence of numbers to the heap."""
        nets = np.array(self.nets)
        totals = nets.sum(axis=1)[sequence]
        before = heap.total + np.cumsum(totals) - totals
        labels = dict.fromkeys(label for peaks in self.peaks for label in peaks)
        for label in labels:
            there = np.array([label in peaks for peaks in self.peaks])
            high = np.array([peaks[label][0] if label in peaks else 0 for peaks in self.peaks])
            reached = np.where(there[sequence], before + high[sequence], -1)
            place = int(reached.argmax())
            if reached[place] > heap.peaks.get(label, (-1, ()))[0]:
                held = np.array(heap.bytes) + nets[sequence[:place]].sum(axis=0)
                held += np.array(self.peaks[sequence[place]][label][1])
                heap.peaks[label] = int(reached[place]), tuple(held.tolist())
        heap.bytes = (np.array(heap.bytes) + nets[sequence].sum(axis=0)).tolist()
        heap.total += int(totals.sum())
        heap.is_new = False

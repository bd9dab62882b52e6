"""Records the tape of a structure: what its unit does with several sets of sizes, in symbols."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

from costmodels.tapes.store import write_tapes
from costmodels.tapes.structure import LAYERS, Structure
from costmodels.tapes.tape import (
    Addend,
    Allocation,
    Event,
    Gradient,
    Mark,
    Parameter,
    Release,
    Size,
    SplitBackward,
    Tape,
)
from runtime.dryrun.loops import collapsed, rolled_together, steps_dimension
from runtime.dryrun.prime_sizes import SAMPLES
from runtime.dryrun.recording import Change, Recording, UnitRecordings, UnlikeError
from runtime.dryrun.sample_sizes import Sample, sample
from runtime.dryrun.symbols import UnknownSizeError, symbolic
from runtime.dryrun.unit_recorder import record_unit
from runtime.model import capped_attention
from runtime.parallel import loss

MOST_BYTES = 2**63
"""That PyTorch can count of one tensor."""

PROOF = 2
"""Recordings with other sizes that agree; sums of more terms take more of them, and so do loops of as many
turns as a dimension is yet to tell."""

STEPS = "steps"
"""The dimension that is the number of turns of linear attention."""


def recorded_tape(structure: Structure, splits: bool = True) -> Tape:
    """The tape of a structure, under the PyTorch that runs.

    Args:
        splits: with backward in two passes too, where the unit has them.

    Raises:
        ValueError: no model or layout has the structure.
        UnlikeError: the unit does other things with other sizes, or in other micro batches.
        UnknownSizeError: a size is no small sum of products of dimensions.
    """
    samples: list[Sample] = []
    recordings: list[UnitRecordings] = []
    splits &= not structure.compiled and structure.unit != "embedding" and not structure.further
    sends = structure.offloads_activations == "sent"
    has_scores = structure.unfused or not {"attention_softcap", "attention=linear"}.isdisjoint(structure.form)
    failure: Exception | None = None
    for number in range(SAMPLES):
        # Where one of them is not there or too large, the others may do.
        try:
            one = sample(structure, number)
        except ValueError as error:
            failure = error
            continue
        if has_scores and score_bytes(one) >= MOST_BYTES:
            continue
        samples.append(one)
        model, layout, _, query_block = one
        with _in_parts(structure.chunks, query_block):
            recordings.append(record_unit(model, layout, structure.unit, structure.compiled, splits, sends))
        if len(samples) < PROOF:
            continue
        try:
            return _tape(samples, recordings, structure)
        except (UnknownSizeError, UnlikeError) as error:
            failure = error
    raise failure or ValueError(f"{structure.name}: samples have too many scores to count")


def score_bytes(one: Sample) -> int:
    """Bytes of the scores of one rank's heads that are there at a time, in 4 bytes each; of linear attention
    those of the tokens of all steps."""
    model, layout = one.model, one.layout
    linear = model.linear_attention
    if linear is not None:
        tokens = -(-model.seq // linear.chunk) * linear.chunk
        heads = linear.value_heads // (layout.tensor_parallel * layout.context_parallel)
        return 4 * layout.micro_batch_size * heads * tokens * linear.chunk
    heads, queries = model.heads // layout.tensor_parallel, model.seq
    if layout.context_parallel_form == "all_to_all":
        heads //= layout.context_parallel
    else:
        queries //= layout.context_parallel
    return 4 * layout.micro_batch_size * heads * min(one.query_block, queries) * model.seq


@contextmanager
def _in_parts(chunks: int, query_block: int) -> Iterator[None]:
    """Let the loss be in so many chunks, whose number follows from sizes, when samples' sizes are others, and
    capped scores be there for so many queries at a time, which tell how many these are."""
    with (
        patch.object(loss, "loss_chunks", lambda *_: chunks),
        patch.object(capped_attention, "BLOCK", query_block),
    ):
        yield


def record_tapes(
    structures: Iterable[Structure],
    path: Path,
    at_once: int,
    tell: Callable[[int, Structure], None] = lambda *_: None,
    splits: bool = True,
) -> list[str]:
    """Record tapes into a file; what ends it loses no more than the last `at_once`.

    Args:
        tell: called with the number of each structure, from 1 on, before it is recorded.
        splits: with backward in two passes too.

    Returns:
        Why some could not be.

    Raises:
        OSError: the file cannot be written.
    """
    tapes: dict[Structure, Tape] = {}
    refused: list[str] = []
    try:
        for number, structure in enumerate(structures, start=1):
            tell(number, structure)
            try:
                tapes[structure] = recorded_tape(structure, splits)
            except (UnknownSizeError, UnlikeError, ValueError) as error:
                refused.append(f"{structure.name}: {error}")
            if len(tapes) == at_once:
                write_tapes(tapes, path)
                tapes.clear()
    finally:
        if tapes:
            write_tapes(tapes, path)
    return refused


def _tape(samples: Sequence[Sample], every: Sequence[UnitRecordings], structure: Structure) -> Tape:
    foreign = foreign_dimensions(structure)
    own = [{name: n for name, n in one.dimensions.items() if name not in foreign} for one in samples]
    repeats = None
    if not _are_alike(every):
        # Blocks of queries leave nothing behind, of which the last one may be smaller.
        keeps_last = structure.partial_step and "attention_softcap" in structure.form
        shorter = partial(collapsed, keeps_last=keeps_last)
        every = [
            UnitRecordings(shorter(one.whole), *(each and shorter(each) for each in one[1:])) for one in every
        ]
        if not _are_alike(every):
            dimension = STEPS
            if STEPS not in own[0]:
                # Any dimension grows with two of them.
                if len(every) <= PROOF:
                    raise UnlikeError(f"{samples[0].model.name}: other sizes, other operations")
                dimension = steps_dimension([len(one.whole.changes) for one in every], own)
            every, repeats = rolled_together(every, dimension, [one[dimension] for one in own])
            if not _are_alike(every):
                raise UnlikeError(f"{samples[0].model.name}: other sizes, other operations")
    recordings = [one.whole for one in every]
    first = recordings[0]
    primes = [{name: n for name, n in one.primes.items() if name not in foreign} for one in samples]
    known: dict[tuple[int, ...], Size] = {}

    def size_of(values: tuple[int, ...]) -> Size:
        if values not in known:
            known[values] = symbolic(values, own, primes)
        return known[values]

    parameters = tuple(
        Parameter(
            name,
            tuple(
                size_of(tuple(one.parameters[place].shape[side] for one in recordings))
                for side in range(len(shape))
            ),
            group,
            partial,
            distributed,
            split,
        )
        for place, (name, shape, group, partial, distributed, split) in enumerate(first.parameters)
    )
    return Tape(
        parameters,
        _events([one.forward for one in recordings], size_of),
        _events([one.backward for one in recordings], size_of),
        first.input_gradient,
        first.input_category,
        _split([(one.split_first, one.split) for one in every], size_of),
        _split([(one.end_first, one.end) for one in every], size_of),
        repeats,
    )


def foreign_dimensions(structure: Structure) -> set[str]:
    """Dimensions that no size of a unit has, which sums would have by chance."""
    found = {"vocab", "tokens", "positions"} if structure.unit in LAYERS else set[str]()
    return found | ({"head", "group"} if structure.latent else set())


def _are_alike(every: Sequence[UnitRecordings]) -> bool:
    """Whether recordings differ in their sizes alone."""
    return all(
        _without_sizes(one) == _without_sizes(same)
        for other in every[1:]
        for one, same in zip(every[0], other, strict=True)
        if one is not None and same is not None
    )


def _split(
    every: Sequence[tuple[Recording | None, Recording | None]], size_of: Callable[[tuple[int, ...]], Size]
) -> SplitBackward | None:
    firsts = [first for first, _ in every if first is not None]
    laters = [later for _, later in every if later is not None]
    if not laters:
        return None
    return SplitBackward(
        inputs=_events([one.backward for one in laters], size_of),
        first_weights=_events([one.weights for one in firsts], size_of),
        weights=_events([one.weights for one in laters], size_of),
        forgotten=_events([one.forgotten for one in laters], size_of),
        rest=_events([one.rest for one in laters], size_of),
        input_gradient=laters[0].input_gradient,
    )


def _without_sizes(recording: Recording) -> tuple[object, ...]:
    passes = [
        [(kind, number, 0 if kind == "allocation" else size, text) for kind, number, size, text in changes]
        for changes in (
            recording.forward,
            recording.backward,
            recording.weights,
            recording.forgotten,
            recording.rest,
        )
    ]
    parameters = [one._replace(shape=(0,) * len(one.shape)) for one in recording.parameters]
    return (*passes, parameters, recording.input_gradient, recording.input_category)


def _events(
    passes: Sequence[Sequence[Change]], size_of: Callable[[tuple[int, ...]], Size]
) -> tuple[Event, ...]:
    events: list[Event] = []
    for same in zip(*passes, strict=True):
        kind, number, what, text = same[0]
        if kind == "allocation":
            events.append(Allocation(number, size_of(tuple(change[2] for change in same)), text))
        elif kind == "release":
            events.append(Release(number))
        elif kind == "gradient":
            events.append(Gradient(what, number))
        elif kind == "addend":
            events.append(Addend(what, number))
        else:
            events.append(Mark(text))
    return tuple(events)

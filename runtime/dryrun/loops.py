"""Finds what a unit does once for each step through a sequence, so that one tape tells of any number of them.

Two kinds of loops are known. Turns that leave nothing behind differ in their sizes alone: the highest of them
stands for all (`collapsed`). Turns that keep something for backward are the same each time, but for numbers
of storages, which grow or fall by the same from turn to turn (`rolled`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count, groupby, zip_longest
from typing import NamedTuple

import numpy as np

from costmodels.tapes.tape import OUTPUT_GRADIENT, Loop, Repeats
from runtime.dryrun.recording import Change, Recording, UnitRecordings, UnlikeError

LONGEST_TURN = 96
"""Changes of one turn at most."""

FEWEST_TURNS = 6
"""Of a loop; fewer may be alike by chance."""

MOST_OTHERS = 4
"""First and last steps that do other things than a turn of a loop."""

MOST_BY_CHANCE = 64
"""Loops of a pass that only seem to be; where there are more, recordings are unlike."""

PASSES = ("forward", "backward", "weights", "forgotten", "rest")
"""Of a recording, in the order of time."""

PLAYED = (
    ("whole", "forward"),
    ("whole", "backward"),
    ("split", "backward"),
    ("split_first", "weights"),
    ("split", "weights"),
    ("split", "forgotten"),
    ("split", "rest"),
    ("end", "backward"),
    ("end_first", "weights"),
    ("end", "weights"),
    ("end", "forgotten"),
    ("end", "rest"),
)
"""The passes of a tape, of which recording they are."""


class Rolled(NamedTuple):
    """One pass, with one turn of each loop."""

    changes: list[Change]
    by_turn: list[int]
    """What is added to the number of each change's storage from turn to turn."""
    loops: list[Loop]


def collapsed(recording: Recording, keeps_last: bool = False) -> Recording:
    """The same recording without turns of loops that leave nothing behind, but for the highest of each.

    Args:
        keeps_last: the last turn of each is of another size, and stays besides the highest of the others.
    """
    passes = {
        name: _without_lower_turns(_youngest_first(getattr(recording, name)), keeps_last) for name in PASSES
    }
    names = {number: number for number in range(OUTPUT_GRADIENT + 1)} | {-1: -1}
    for changes in passes.values():
        for _, number, *_ in changes:
            names.setdefault(number, len(names) - 1)
    given = recording.input_gradient
    return Recording(
        parameters=recording.parameters,
        input_gradient=None if given is None else names[given],
        input_category=recording.input_category,
        **{
            name: [(kind, names[number], size, text) for kind, number, size, text in changes]
            for name, changes in passes.items()
        },
    )


def _youngest_first(changes: Iterable[Change]) -> list[Change]:
    """The same with ends that come one after the other in another order, so that a turn ends with its own."""
    found: list[Change] = []
    for is_end, some in groupby(changes, lambda change: change[0] == "release"):
        alike = list(some)
        found += sorted(alike, reverse=True) if is_end else alike
    return found


def _without_lower_turns(changes: Sequence[Change], keeps_last: bool) -> list[Change]:
    found: list[Change] = []
    place = 0
    while place < len(changes):
        turns = _turns_at(changes, place)
        if len(turns) < FEWEST_TURNS:
            found.append(changes[place])
            place += 1
            continue
        alike = turns[:-1] if keeps_last else turns
        found.extend(max(alike, key=_height))
        for turn in turns[len(alike) :]:
            found.extend(turn)
        place += sum(map(len, turns))
    return found


def _turns_at(changes: Sequence[Change], start: int) -> list[Sequence[Change]]:
    """Alike parts of a pass from a place on, in each of which all ends that begins in it."""
    found: list[Sequence[Change]] = []
    while (end := _closed_end(changes, start)) is not None:
        turn = changes[start:end]
        if found and _shape(turn) != _shape(found[0]):
            break
        found.append(turn)
        start = end
    return found


def _closed_end(changes: Sequence[Change], start: int) -> int | None:
    """Where all that begins at `start` has ended; None where anything else ends or is noted before."""
    alive: set[int] = set()
    for place in range(start, min(start + LONGEST_TURN, len(changes))):
        kind, number, *_ = changes[place]
        if kind == "allocation":
            alive.add(number)
        elif kind == "release" and number in alive:
            alive.remove(number)
            if not alive:
                return place + 1
        else:
            return None
    return None


def _shape(turn: Sequence[Change]) -> list[tuple[str, int, str]]:
    """What a turn does, whatever the sizes."""
    return [(kind, number - turn[0][1], text) for kind, number, _, text in turn]


def _height(turn: Iterable[Change]) -> int:
    sizes: dict[int, int] = {}
    total = highest = 0
    for kind, number, size, _ in turn:
        sizes.setdefault(number, size)
        total += sizes[number] if kind == "allocation" else -sizes[number]
        highest = max(highest, total)
    return highest


def rolled(changes: Sequence[Change], steps: int, others: Collection[int] = ()) -> Rolled:
    """One pass with one turn of each loop that goes through about so many steps.

    Args:
        others: places in what is returned where no loop begins, whatever it looks like.
    """
    found = Rolled([], [], [])
    tokens: dict[tuple[str, int, str], int] = {}
    alike = np.array([tokens.setdefault((k, s, t), len(tokens)) for k, _, s, t in changes], dtype=np.int64)
    numbers = np.array([number for _, number, *_ in changes], dtype=np.int64)
    place = 0
    while place < len(changes):
        is_other = len(found.changes) in others
        length, turns = (0, 0) if is_other else _loop_at(alike, numbers, place, steps)
        if turns:
            found.loops.append(Loop(len(found.changes), length, steps - turns))
            by_turn = numbers[place + length : place + 2 * length] - numbers[place : place + length]
        else:
            length, turns, by_turn = 1, 1, np.zeros(1, dtype=np.int64)
        found.changes.extend(changes[place : place + length])
        found.by_turn.extend(by_turn.tolist())
        place += length * turns
    return found


def _loop_at(alike: np.ndarray, numbers: np.ndarray, start: int, steps: int) -> tuple[int, int]:
    """The changes of a turn of the loop that begins at a place, and the number of turns; 0 without one."""
    fewest = max(FEWEST_TURNS, steps - MOST_OTHERS)
    for length in range(1, min(LONGEST_TURN, (len(alike) - start) // fewest) + 1):
        later = slice(start + length, None)
        same = alike[start:-length] == alike[later]
        if not same[:length].all():
            continue
        by_turn = numbers[later] - numbers[start:-length]
        same[length:] &= by_turn[length:] == by_turn[:-length]
        turns = 1 + int(np.argmin(np.append(same, False))) // length
        if fewest <= turns <= steps:
            return length, turns
    return 0, 0


def rolled_together(
    every: Sequence[UnitRecordings], dimension: str, steps: Sequence[int]
) -> tuple[list[UnitRecordings], Repeats]:
    """Recordings of several numbers of steps with one turn of each loop, and what repeats in all of them.

    Raises:
        UnlikeError: they differ in more than the turns of loops.
    """
    found = list(every)
    loops: dict[tuple[str, str], tuple[Loop, ...]] = {}
    shifts: dict[tuple[str, str], tuple[tuple[int, int], ...]] = {}
    given: dict[str, int] = {}
    for kind in UnitRecordings._fields:
        recordings = [getattr(one, kind) for one in every]
        if recordings[0] is None:
            continue
        firsts, given[kind] = _by_steps([one.input_gradient for one in recordings], steps)
        parts: dict[str, list[list[Change]]] = {}
        for name in PASSES:
            passes = _rolled_alike([getattr(one, name) for one in recordings], steps)
            parts[name], by_step = _numbered_alike(passes, steps)
            loops[kind, name] = tuple(passes[0].loops)
            shifts[kind, name] = tuple(zip(by_step, passes[0].by_turn, strict=True))
        for place, recording in enumerate(recordings):
            own = {name: changes[place] for name, changes in parts.items()}
            again = replace(recording, input_gradient=firsts, **own)
            found[place] = found[place]._replace(**{kind: again})
    played = [one for one in PLAYED if one in loops]
    repeats = Repeats(
        dimension,
        tuple(loops[one] for one in played),
        tuple(shifts[one] for one in played),
        (given["whole"], given.get("split", 0)),
    )
    return found, repeats


def _rolled_alike(every: Sequence[Sequence[Change]], steps: Sequence[int]) -> list[Rolled]:
    """One pass of several recordings with one turn of each loop that all of them have: about as many changes
    as there are steps may be alike in one of them by chance."""
    others: set[int] = set()
    for tries in count():
        passes = [rolled(changes, n, others) for changes, n in zip(every, steps, strict=True)]
        loops = zip_longest(*(one.loops for one in passes))
        unlike = next((same for same in loops if len(set(same)) > 1), None)
        if unlike is None or tries == MOST_BY_CHANCE:
            break
        # All of its turns, of which fewer would do for another one.
        first, length, turns = min(
            (loop.first, loop.length, n - loop.less)
            for loop, n in zip(unlike, steps, strict=True)
            if loop is not None
        )
        others |= {*range(first, first + length * turns)}
    return passes


def _numbered_alike(passes: Sequence[Rolled], steps: Sequence[int]) -> tuple[list[list[Change]], list[int]]:
    """Changes whose storages have the numbers that they have without steps, and what each step adds."""
    first = passes[0]
    shape = [(kind, text) for kind, _, _, text in first.changes]
    for other in passes[1:]:
        if (other.loops, other.by_turn) != (first.loops, first.by_turn):
            raise UnlikeError("other sizes, other loops")
        if [(kind, text) for kind, _, _, text in other.changes] != shape:
            raise UnlikeError("other sizes, other operations")
    found: list[list[Change]] = [[] for _ in passes]
    shifts: list[int] = []
    for same in zip(*(one.changes for one in passes), strict=True):
        number, shift = _by_steps([change[1] for change in same], steps)
        assert number is not None
        shifts.append(shift)
        for changes, (kind, _, size, text) in zip(found, same, strict=True):
            changes.append((kind, number, size, text))
    return found, shifts


def _by_steps(numbers: Sequence[int | None], steps: Sequence[int]) -> tuple[int | None, int]:
    """A number without steps, and what each step adds to it."""
    first, other, *_ = numbers
    if first is None or other is None:
        return None, 0
    shift = (other - first) // (steps[1] - steps[0])
    without = first - shift * steps[0]
    if any(number != without + shift * n for number, n in zip(numbers, steps, strict=True)):
        raise UnlikeError("numbers of storages do not grow with steps")
    return without, shift


def steps_dimension(lengths: Sequence[int], dimensions: Sequence[Mapping[str, int]]) -> str:
    """The dimension with which recordings of these lengths grow.

    Raises:
        UnlikeError: there is none.
    """
    first = dimensions[0]
    for name in first:
        steps = [own[name] for own in dimensions]
        grown = steps[1] - steps[0]
        more = [(length - lengths[0]) * grown for length in lengths]
        if grown and more == [(lengths[1] - lengths[0]) * (n - steps[0]) for n in steps]:
            return name
    raise UnlikeError("other sizes, other operations")

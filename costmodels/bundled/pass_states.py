"""What a pipeline rank with several stages holds before each pass of its schedule.

Passes come in the order of `costmodels.spec.schedules`. PyTorch posts the receive of a message where its
sender computes, as it finds out by walking through the passes of all ranks in turns (`_add_send_recv` in
`torch.distributed.pipelining.schedules`), and gathers the parameters of the next `GATHERED_STAGES` stages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from costmodels.bundled.pytorch import is_before
from costmodels.bundled.sent_messages import sent_messages
from costmodels.spec.layout import V_SCHEDULES, Schedule
from costmodels.spec.schedules import BACKWARD, FORWARD, INPUTS, WEIGHTS, schedule_exists
from costmodels.spec.table import Bools, Ints, combined_key, distinct_rows
from costmodels.tapes.player.message_times import Timed, message_times, resident

REDUCE = WEIGHTS + 1
"""After the last gradients of a stage: they are reduced."""

GATHER = REDUCE + 1
"""Before a stage's first pass, or one after its parameters were freed: they are there, and are copied."""

ROUNDS = 5
"""Rounds of micro batches after which every state of an interleaved schedule has been there."""

V_ROUNDS, MORE = 2, 2
"""Rounds of micro batches and how many more, after which every state of a schedule has been there whose
stages lie in a V."""

ALL = ("held", "waiting", "arrived", "returned")
"""Of all stages of a rank: micro batches between forward and backward, and between the gradients of inputs
and those of weights; inputs that wait for forward, and gradients of results that wait for backward."""

OTHERS = ("summed", "either", "fresh", "gathered", "freed", "coming", "reduced")
"""Of the other stages than the pass's: those in which FSDP2 has added up gradients; that have gradients at
all, but not reduced ones; ones that FSDP2 has not seen yet; whose parameters are gathered; of these, whose
latest pass was a forward one, in which layers may free theirs; whose parameters are on their way; whose
gradients are reduced."""

OWN = ("own_summed", "own_fresh", "own_freed", "local", "sent")
"""Of the pass's own stage; gradients that one stage of the rank has given to another one there; and messages
that the rank has given or keeps for gradients of weights."""

Columns = dict[str, Ints]


@dataclass(frozen=True, eq=False)
class States:
    """Of all ranks of a schedule; arrays of shape [states], and [states, classes] of alike stages."""

    rank: Ints
    kind: Ints
    own: Ints
    """The class of the pass's stage."""
    columns: Columns
    """`ALL`, `OTHERS` and `OWN`."""


def stages_of(schedule: Schedule, pipeline: int, chunks: int) -> Ints:
    """The stage of each rank and chunk, [pipeline, chunks]."""
    place = np.arange(chunks * pipeline).reshape(chunks, pipeline)
    if schedule in V_SCHEDULES:
        place[1] = place[1, ::-1].copy()
    result: Ints = place.T
    return result


Classes = tuple[tuple[int, ...], ...]
"""Of each rank, the class of each chunk."""


@lru_cache(maxsize=512)
def states_of(schedule: Schedule, pipeline: int, chunks: int, micro_batches: int, classes: Classes) -> States:
    """Every state that can be the fullest of its rank.

    Raises:
        InputError: the schedule does not run this number of micro batches.
    """
    found = []
    count = 1 + max(map(max, classes))
    for rank, states in enumerate(_all_states(schedule, pipeline, chunks, micro_batches)):
        member = np.array(classes[rank])[:, None] == np.arange(count)
        found.append(replace(_by_class(states, member), rank=np.full(len(states.kind), rank)))
    names = (*ALL, *OTHERS, *OWN)
    return _fullest(
        States(
            rank=np.concatenate([one.rank for one in found]),
            kind=np.concatenate([one.kind for one in found]),
            own=np.concatenate([one.own for one in found]),
            columns={name: np.concatenate([one.columns[name] for one in found]) for name in names},
        )
    )


@lru_cache(maxsize=128)
def _all_states(schedule: Schedule, pipeline: int, chunks: int, micro_batches: int) -> tuple[States, ...]:
    """The states of each rank before each of its passes, with a class for each chunk."""
    some = fewer(schedule, pipeline, chunks, micro_batches)
    stages = stages_of(schedule, pipeline, chunks)
    timed = message_times(schedule, stages, some, not is_before(2, 15))
    sent = sent_messages(timed, stages)
    return tuple(_states_of_rank(one, stages[rank], some, sent[rank]) for rank, one in enumerate(timed))


def fewer(schedule: Schedule, pipeline: int, chunks: int, micro_batches: int) -> int:
    """A number of micro batches with the same states."""
    if schedule in V_SCHEDULES:
        return min(V_ROUNDS * pipeline + MORE, micro_batches)
    rest = micro_batches % pipeline
    if rest:
        return micro_batches
    some = ROUNDS * pipeline
    return (
        some if some < micro_batches and schedule_exists(schedule, pipeline, chunks, some) else micro_batches
    )


def _states_of_rank(timed: Timed, stages: Ints, micro_batches: int, sent: Ints) -> States:
    kind = timed.kind
    is_own: Bools = timed.stage[:, None] == stages
    first = stages == 0
    # [passes + 1, chunks]: how many of each kind there have been before each pass, and after the last one.
    done = {each: _before(is_own & (kind == each)[:, None]) for each in (FORWARD, BACKWARD, INPUTS, WEIGHTS)}
    backward = done[BACKWARD] + done[INPUTS]
    end = np.iinfo(np.int64).max

    def waiting(times: dict[int, Ints], used: Ints, moments: Ints) -> Ints:
        """Messages that have come and have not been used, where any come from another rank."""
        come = np.stack([np.searchsorted(times[stage], moments) for stage in stages.tolist()], axis=1)
        any_come = np.array([len(times[stage]) > 0 for stage in stages.tolist()])
        result: Ints = (come - used) * any_come
        return result

    columns: Columns = {
        "held": done[FORWARD] - backward,
        "waiting": done[INPUTS] - done[WEIGHTS],
        "arrived": waiting(timed.inputs, done[FORWARD], np.append(timed.time, end)),
        "returned": waiting(timed.gradients, backward, np.append(timed.time, end)),
    }
    # Gradients are reduced in the turn after a pass.
    turns = timed.time + timed.turn
    then = {
        "arrived": waiting(timed.inputs, done[FORWARD][1:], turns),
        "returned": waiting(timed.gradients, backward[1:], turns),
    }
    by_hand = done[WEIGHTS] * ~first
    seen = done[BACKWARD] + done[WEIGHTS] * first
    either = (by_hand + seen) > 0
    latest = {
        name: np.maximum.accumulate(np.where(_after(which), np.arange(len(kind) + 1)[:, None], 0), axis=0)
        for name, which in (
            ("hand", is_own & (kind == WEIGHTS)[:, None] & ~first),
            ("seen", is_own & np.isin(kind, (BACKWARD, INPUTS))[:, None]),
        )
    }
    fresh = latest["hand"] > latest["seen"]
    columns["summed"] = ((seen > 0) | (np.maximum.accumulate(either & ~fresh, axis=0))).astype(np.int64)
    columns["either"], columns["fresh"] = either.astype(np.int64), fresh.astype(np.int64)
    columns["reduced"] = (done[BACKWARD] + done[WEIGHTS] == micro_batches).astype(np.int64)
    there = resident(is_own)
    # The next pass has not changed yet what is gathered where gradients are reduced.
    for held, used, reduced in zip(
        (columns, then), _used(there, is_own), (slice(-1), slice(1, None)), strict=True
    ):
        free = 1 - columns["reduced"][reduced]
        held["gathered"], held["coming"] = there * used * free, there * (1 - used) * free
    moved = _latest(is_own & (kind == FORWARD)[:, None]) == _latest(is_own)
    columns["freed"], then["freed"] = (
        held["gathered"] * some for held, some in ((columns, moved[:-1]), (then, moved[1:]))
    )
    for name in ("gathered", "freed", "coming"):
        columns[name] = np.concatenate([columns[name], np.zeros((1, len(stages)), dtype=np.int64)])
    return _listed(timed, is_own, columns, np.stack([_local(timed, stages, micro_batches), sent]), then)


def _before(which: Bools) -> Ints:
    """How many there have been before each row, and before the end: [rows + 1, columns]."""
    return np.concatenate([np.zeros((1, which.shape[1]), dtype=np.int64), which.cumsum(axis=0)])


def _after(which: Bools) -> Bools:
    """What has just been, before each row and at the end."""
    return np.concatenate([np.zeros((1, which.shape[1]), dtype=np.bool_), which])


def _used(there: Ints, is_own: Bools) -> tuple[Ints, Ints]:
    """1 for stages with a pass since their parameters were asked for last, before each pass and after it.

    Args:
        there: stages whose parameters are there or on their way, [passes, chunks].
    """
    numbers = np.arange(len(there))[:, None]
    absent = np.maximum.accumulate(np.where(there, -1, numbers), axis=0)
    latest = _latest(is_own)
    return (latest[:-1] > absent).astype(np.int64), (latest[1:] > absent).astype(np.int64)


def _latest(which: Bools) -> Ints:
    """The latest pass that is one of some, before each pass and after the last one; -2 for none."""
    result: Ints = np.maximum.accumulate(_after(which) * np.arange(1, len(which) + 2)[:, None], axis=0) - 2
    return result


def _local(timed: Timed, stages: Ints, micro_batches: int) -> Ints:
    """Gradients between stages of the rank that are alive at each pass, and after the last one."""
    kind, number = timed.kind, timed.micro_batch
    change = np.zeros(len(kind) + 2, dtype=np.int64)
    for upper in stages[np.isin(stages - 1, stages)].tolist():
        born, ends = (np.zeros(micro_batches, dtype=np.int64) for _ in range(2))
        for place in np.flatnonzero(np.isin(timed.stage, (upper, upper - 1))).tolist():
            if timed.stage[place] == upper and kind[place] in (BACKWARD, INPUTS):
                born[number[place]] = place + 1
            if kind[place] in (BACKWARD, WEIGHTS):
                ends[number[place]] = place + 1
        np.add.at(change, born, 1)
        np.add.at(change, ends, -1)
    result: Ints = change.cumsum()[:-1]
    return result


def _listed(timed: Timed, is_own: Bools, columns: Columns, given: Ints, then: Columns) -> States:
    """The states before passes, where parameters are copied, and where gradients are reduced.

    Args:
        given: `local` and `sent` at each pass, and after the last one.
        then: columns that are others after each pass than before the next one.
    """
    kind = timed.kind
    passes = np.arange(len(kind))
    # The first stage has no gradients of inputs: those of weights take a whole backward pass.
    whole = np.where((kind == WEIGHTS) & (timed.stage == 0), BACKWARD, kind)
    real = (kind != INPUTS) | (timed.stage > 0)
    chunk = is_own.argmax(axis=1)
    own = {name: held[:-1].copy() for name, held in columns.items()}
    # Without the pass's own micro batch.
    backward = np.isin(kind, (BACKWARD, INPUTS))
    for name, which in (
        ("arrived", kind == FORWARD),
        ("returned", backward),
        ("held", backward),
        ("waiting", kind == WEIGHTS),
    ):
        has = which & (own[name][passes, chunk] > 0)
        own[name][passes[has], chunk[has]] -= 1
    absent = _before(columns["gathered"][:-1] == 0)
    previous = np.maximum.accumulate(_after(is_own) * np.arange(len(kind) + 1)[:, None], axis=0)[:-1]
    since = absent[passes + 1, chunk] - absent[previous[passes, chunk], chunk]
    first_use = passes[(since > 0) | (previous[passes, chunk] == 0)]
    last_use = passes[columns["reduced"][1:][passes, chunk] > columns["reduced"][:-1][passes, chunk]]
    parts = [
        (whole[real], chunk[real], {name: held[real] for name, held in own.items()}, given[:, :-1][:, real]),
        (
            np.full(len(first_use), GATHER),
            chunk[first_use],
            {name: held[first_use] for name, held in columns.items()},
            given[:, first_use],
        ),
        (
            np.full(len(last_use), REDUCE),
            chunk[last_use],
            {name: held[last_use + 1] for name, held in columns.items()}
            | {name: held[last_use] for name, held in then.items()},
            given[:, last_use + 1],
        ),
    ]
    joined = {name: np.concatenate([held[name] for *_, held, _ in parts]) for name in columns}
    every = np.concatenate([chunk for _, chunk, *_ in parts])
    rows = np.arange(len(every))
    for name in ("summed", "fresh", "freed"):
        joined[f"own_{name}"] = joined[name][rows, every]
    joined["local"], joined["sent"] = np.concatenate([some for *_, some in parts], axis=1)
    # Nothing of a stage whose gradients are reduced but these.
    for name in ("summed", "either", "fresh"):
        joined[name] = joined[name] * (1 - joined["reduced"])
    for name in OTHERS:
        joined[name][rows, every] = 0
    return States(
        rank=np.zeros_like(every),
        kind=np.concatenate([kinds for kinds, *_ in parts]),
        own=every,
        columns=joined,
    )


def _by_class(states: States, member: Bools) -> States:
    """With stages of one class added up; `member` is [chunks, classes]."""
    columns = {
        name: held @ member.astype(np.int64) if name not in OWN else held
        for name, held in states.columns.items()
    }
    return States(states.rank, states.kind, member.argmax(axis=1)[states.own], columns)


def _fullest(states: States) -> States:
    """Of each rank, those in which nothing is less than in another one with the same kind of pass on a stage
    whose parameters are there alike."""
    columns = states.columns
    vectors = np.concatenate(
        [
            *(columns[name] for name in (*ALL, "summed", "either", "fresh", "gathered", "coming")),
            -columns["freed"],
            # What is reduced is less where ranks share it, and more where they do not and it is wider.
            columns["reduced"],
            -columns["reduced"],
            *(columns[name][:, None] for name in OWN),
        ],
        axis=1,
    )
    first, _ = distinct_rows([states.rank, states.kind, states.own, *(vectors - vectors.min(axis=0)).T])
    group = combined_key([states.rank, states.kind, states.own, columns["own_freed"]])[first]
    # Only one with a larger sum can have no less of anything.
    order = np.lexsort((-np.arange(len(first)), -vectors[first].sum(axis=1), group))
    rows = first[order][_undominated(vectors[first[order]], group[order])]
    return States(
        states.rank[rows],
        states.kind[rows],
        states.own[rows],
        {name: held[rows] for name, held in columns.items()},
    )


def _undominated(vectors: Ints, group: Ints) -> Bools:
    """Rows without one before them in their group that has no less of anything.

    Args:
        vectors: [rows, numbers].
        group: of each row, ascending.
    """
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    sizes = np.diff(starts, append=len(group))
    narrow = vectors.astype(np.int32)
    found = np.ones(len(group), dtype=np.bool_)
    width = 2
    while width < 2 * sizes.max(initial=1):
        # Groups of about the same size are compared together.
        some = np.flatnonzero((sizes > width // 2) & (sizes <= width))
        rows = np.minimum(starts[some, None] + np.arange(width), len(group) - 1)
        over: Bools = np.tri(width, k=-1, dtype=np.bool_) & (np.arange(width) < sizes[some, None, None])
        for number in narrow.T:
            own = number[rows]
            over &= own[:, None, :] >= own[:, :, None]
        there = np.arange(width) < sizes[some, None]
        dominated: Bools = np.logical_or.reduce(over, axis=2)
        found[rows[there]] = ~dominated[there]
        width *= 2
    return found

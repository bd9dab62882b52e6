"""What the ranks of a table with several stages each are made of, for every state of their schedules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from costmodels.bundled.pass_states import Classes, States, stages_of, states_of
from costmodels.bundled.stage_sums import Stage
from costmodels.bundled.states import converts_gradients
from costmodels.ranks.rank_layers import stage_ranks
from costmodels.spec.layout import SPLIT_BACKWARD
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import SCHEDULES, Bools, Floats, Ints, LayoutTable, distinct_rows


@dataclass(frozen=True)
class Rows:
    """States of the rows of a table: arrays of shape [states], and [states, classes] of alike stages."""

    row: Ints
    """Of the table."""
    rank: Ints
    kind: Ints
    own: Ints
    """The class of the pass's stage."""
    columns: dict[str, Floats]
    """Those of `States`."""

    def take(self, some: Ints) -> Rows:
        """Some of the states."""
        columns = {name: held[some] for name, held in self.columns.items()}
        return Rows(self.row[some], self.rank[some], self.kind[some], self.own[some], columns)


class Alike(NamedTuple):
    """What stages of a rank that are counted together have in common."""

    layers: tuple[float, ...]
    """Of each kind."""
    first: bool
    last: bool
    local_before: bool
    local_after: bool
    """A neighbour is on the same rank."""


NOTHING = Alike((), False, False, False, False)


def alike_stages(
    model: ModelSpec, table: LayoutTable, row: int, names: list[str]
) -> tuple[Classes, list[list[Alike]]]:
    """The class of each chunk of each rank, and what the classes of each rank are.

    Args:
        names: the fields of `Ranks` that count layers.
    """
    pipeline, chunks = int(table.pipeline_parallel[row]), int(table.virtual_pipeline_parallel[row])
    every = stage_ranks(model, table, row)
    layers = list(zip(*(getattr(every, name).tolist() for name in names), strict=True))
    classes, found = [], []
    for stages in stages_of(SCHEDULES[int(table.schedule[row])], pipeline, chunks).tolist():
        numbers: dict[Alike, int] = {}
        for stage in stages:
            last = pipeline * chunks - 1
            one = Alike(layers[stage], stage == 0, stage == last, stage - 1 in stages, stage + 1 in stages)
            numbers.setdefault(one, len(numbers))
            classes.append(numbers[one])
        found.append(list(numbers))
    return tuple(tuple(classes[at : at + chunks]) for at in range(0, len(classes), chunks)), found


@dataclass(frozen=True)
class Setting:
    """The stages of all states: what `costmodels.bundled.stage_sums.Stage` has, by class."""

    rows: Rows
    shape: tuple[int, int]
    """Rows of the table, and pipeline ranks."""
    layers: list[Floats]
    """Layers of each kind, [states, classes]."""
    stage: Stage
    """Whose counts are not used."""
    first: Bools
    last: Bools
    """Stages with the embedding, and with head and loss, [states, classes]."""
    local_before: Bools
    local_after: Bools
    """Stages whose neighbour is on the same rank."""
    wraps: Bools
    converts: Bools
    frees: Bools
    """Rows whose parameters FSDP2 manages; of these, whose gradients change their number format, and whose
    layers free their parameters in forward. [states, 1]."""

    def take(self, some: Ints) -> Setting:
        """Of some states."""
        arrays = ("first", "last", "local_before", "local_after", "wraps", "converts", "frees")
        return replace(
            self.of_rows(some),
            rows=self.rows.take(some),
            layers=[held[some] for held in self.layers],
            **{name: getattr(self, name)[some] for name in arrays},
        )

    def of_rows(self, rows: Ints) -> Setting:
        """With the bytes of some rows."""
        stage = self.stage
        kinds = [
            replace(
                kind,
                unit=kind.unit.take(rows),
                group=kind.group.take(rows),
                experts=None if kind.experts is None else kind.experts.take(rows),
            )
            for kind in stage.kinds
        ]
        held = {name: getattr(stage, name).take(rows) for name in ("residual", "message", "saved", "logits")}
        ends = [(count, group.take(rows)) for count, group in stage.ends]
        first, last = stage.first.take(rows), stage.last.take(rows)
        return replace(self, stage=replace(stage, kinds=kinds, first=first, last=last, ends=ends, **held))

    def passes(self) -> tuple[Ints, Ints]:
        """Passes that are alike, whatever else there is: a state of each, and which one each state has."""
        rows, own = self.rows, (np.arange(len(self.rows.row)), self.rows.own)
        of_stage = (self.first, self.last, self.local_before, self.local_after, *self.layers)
        columns = [rows.row, rows.kind, *(held[own].astype(np.int64) for held in of_stage)]
        names = ("own_summed", "own_fresh", "own_freed")
        return distinct_rows([*columns, *(rows.columns[name].astype(np.int64) for name in names)])

    def tops(self) -> list[Floats]:
        """1 for the kind that a stage's last layer is of, else 0: by kind, [states, classes]."""
        missing, found = np.ones_like(self.layers[0]), []
        for count in reversed(self.layers):
            found.append(missing * (count > 0))
            missing = missing - found[-1]
        return found[::-1]


def setting_of(
    model: ModelSpec,
    table: LayoutTable,
    stage: Stage,
    names: list[str],
    wraps: Bools,
    pipeline: int,
) -> Setting:
    """The states of the rows of a table.

    Args:
        stage: of the rows, whose counts are of whole ranks.
        names: the fields of `Ranks` that count layers of the stage's kinds.
        wraps: rows whose parameters FSDP2 manages.
    """
    rows, alike = _rows_of(model, table, names)
    empty = (0.0,) * len(names)
    # Of each rank of each row, and from there of each state.
    rank = rows.row * pipeline + rows.rank
    layers = np.array([[one.layers or empty for one in some] for some in alike])[rank].transpose(2, 0, 1)
    first, last, before, after = (
        np.array([[getattr(one, name) for one in some] for some in alike])[rank]
        for name in ("first", "last", "local_before", "local_after")
    )
    converts = wraps & converts_gradients(table)
    frees = wraps & (table.zero_stage == 3) & ~table.runs(*SPLIT_BACKWARD)
    whole = Setting(
        rows=rows,
        shape=(len(table), pipeline),
        layers=list(layers),
        stage=stage,
        first=first,
        last=last,
        local_before=before,
        local_after=after,
        wraps=wraps[rows.row][:, None],
        converts=converts[rows.row][:, None],
        frees=frees[rows.row][:, None],
    )
    return whole.of_rows(rows.row)


def _rows_of(model: ModelSpec, table: LayoutTable, names: list[str]) -> tuple[Rows, list[list[Alike]]]:
    """The states of all rows, and the classes of each rank of each row."""
    found: list[tuple[int, States]] = []
    alike: list[list[Alike]] = []
    for row in range(len(table)):
        classes, own = alike_stages(model, table, row, names)
        columns = (table.pipeline_parallel, table.virtual_pipeline_parallel, table.micro_batches)
        numbers = [int(column[row]) for column in columns]
        states = states_of(SCHEDULES[int(table.schedule[row])], *numbers, classes)
        found.append((row, states))
        alike += own
    most = max(map(len, alike))

    def joined(arrays: list[Ints]) -> Floats:
        wide = [
            np.pad(each, [(0, 0), (0, most - each.shape[1])]) if each.ndim == 2 else each for each in arrays
        ]
        return np.concatenate(wide).astype(np.float64)

    rows = Rows(
        row=np.concatenate([np.full(len(states.rank), row) for row, states in found]),
        rank=np.concatenate([states.rank for _, states in found]),
        kind=np.concatenate([states.kind for _, states in found]),
        own=np.concatenate([states.own for _, states in found]),
        columns={name: joined([states.columns[name] for _, states in found]) for name in found[0][1].columns},
    )
    return rows, [[*own, *[NOTHING] * (most - len(own))] for own in alike]

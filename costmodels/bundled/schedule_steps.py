"""The moments of a step of pipeline ranks with several stages, and of schedules that split backward.

Each state of `costmodels.bundled.pass_states` is a row of its own here: what other micro batches and stages
hold is known before its pass begins, and the pass adds its moments to that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from costmodels.bundled.moments import Bytes, Moment, Peak
from costmodels.bundled.pass_states import GATHER, REDUCE, Classes, States, stages_of, states_of
from costmodels.bundled.replay import KINDS
from costmodels.bundled.stage_sums import Kind, Place, Stage, Sums, Terms, value
from costmodels.bundled.states import GroupBytes, converts_gradients
from costmodels.model_spec import ModelSpec
from costmodels.pipeline import stages_as_ranks
from costmodels.schedules import BACKWARD, FORWARD, INPUTS, WEIGHTS
from costmodels.table import SCHEDULES, Bools, Floats, Ints, LayoutTable


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
    every = stages_as_ranks(model, table, row)
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
    fixed: Bytes
    first: Bools
    last: Bools
    """Stages with the embedding, and with head and loss, [states, classes]."""
    local_before: Bools
    local_after: Bools
    """Stages whose neighbour is on the same rank."""
    wraps: Bools
    converts: Bools
    """Rows whose parameters FSDP2 manages; and of these, whose gradients change their number format. [states,
    1]."""

    def take(self, some: Ints) -> Setting:
        """Of some states."""
        arrays = ("first", "last", "local_before", "local_after", "wraps", "converts")
        return replace(
            self.of_rows(some),
            rows=self.rows.take(some),
            layers=[held[some] for held in self.layers],
            fixed=self.fixed.take(some),
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
    fixed: Terms,
    wraps: Bools,
    pipeline: int,
) -> Setting:
    """The states of the rows of a table.

    Args:
        stage: of the rows, whose counts are of whole ranks.
        names: the fields of `Ranks` that count layers of the stage's kinds.
        fixed: what each rank holds from the start of the step to its end, [n, pipeline].
        wraps: rows whose parameters FSDP2 manages.
    """
    rows, alike = _rows_of(model, table, names)
    empty = (0.0,) * len(names)
    layers = np.array([[one.layers or empty for one in some] for some in alike]).transpose(2, 0, 1)
    first, last, before, after = (
        np.array([[getattr(one, name) for one in some] for some in alike])
        for name in ("first", "last", "local_before", "local_after")
    )
    composition = Moment("forward", fixed).composition(rows.row, rows.rank)
    converts = wraps & converts_gradients(table)
    whole = Setting(
        rows=rows,
        shape=(len(table), pipeline),
        layers=list(layers),
        stage=stage,
        fixed=Bytes.of_shapes(composition, np.arange(len(rows.row))),
        first=first,
        last=last,
        local_before=before,
        local_after=after,
        wraps=wraps[rows.row][:, None],
        converts=converts[rows.row][:, None],
    )
    return whole.of_rows(rows.row)


def _rows_of(model: ModelSpec, table: LayoutTable, names: list[str]) -> tuple[Rows, list[list[Alike]]]:
    """The states of all rows, and the classes of each state's rank."""
    found: list[tuple[int, States]] = []
    alike: list[list[Alike]] = []
    for row in range(len(table)):
        classes, own = alike_stages(model, table, row, names)
        columns = (table.pipeline_parallel, table.virtual_pipeline_parallel, table.micro_batches)
        numbers = [int(column[row]) for column in columns]
        states = states_of(SCHEDULES[int(table.schedule[row])], *numbers, classes)
        found.append((row, states))
        alike += [own[rank] for rank in states.rank.tolist()]
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


NEAR = 0.01
"""Moments this much lower than the highest one may take its place where bytes are rounded."""


def scheduled_peak(setting: Setting, only_highest: bool = False) -> Peak:
    """Moments near the peak of each pipeline rank of a table, [n, k].

    Args:
        only_highest: of each rank the highest one alone.
    """
    places = setting.rows.row * setting.shape[1] + setting.rows.rank
    found = [(places[some], one) for some, peak in passes(setting) for one in peak.moments if one.can_happen]
    totals = [moment.total((len(where), 1))[:, 0] for where, moment in found]
    highest = np.zeros(setting.shape[0] * setting.shape[1])
    for (where, _), total in zip(found, totals, strict=True):
        np.maximum.at(highest, where, total)
    result = Peak(setting.shape)
    held: dict[str, list[Floats]] = {}
    for (where, moment), total in zip(found, totals, strict=True):
        some = np.flatnonzero(total >= highest[where] * (1.0 if only_highest else 1.0 - NEAR))
        if len(some):
            composition = moment.composition(some, np.zeros_like(some))
            _spread(held.setdefault(moment.label, []), where[some], composition, len(highest))
    for label, several in held.items():
        for one in several:
            result.moments.append(_moment(label, one.reshape(len(KINDS), *setting.shape)))
    return result


def _spread(several: list[Floats], where: Ints, composition: Floats, places: int) -> None:
    """Put compositions [kinds, entries] of places into arrays [kinds, places] that have nothing there yet."""
    order = np.argsort(where, kind="stable")
    where, composition = where[order], composition[:, order]
    number = np.arange(len(where)) - np.searchsorted(where, where)
    for layer in range(int(number.max()) + 1):
        own = number == layer
        free = next((one for one in several if not one[:, where[own]].any()), None)
        if free is None:
            free = np.zeros((len(KINDS), places))
            several.append(free)
        free[:, where[own]] = composition[:, own]


def _moment(label: str, composition: Floats) -> Moment:
    """One moment of ranks with these bytes, [kinds, n, k]."""
    ranks = composition.shape[2]
    rows = np.arange(composition.shape[1])
    terms: Terms = [
        ((np.arange(ranks) == rank)[None] * 1.0, Bytes.of_shapes(composition[:, :, rank], rows))
        for rank in range(ranks)
    ]
    return Moment(label, terms, composition.sum(axis=0) > 0)


def passes(setting: Setting) -> Iterator[tuple[Ints, Peak]]:
    """The moments of the states of each kind of pass, [some states, 1], and which states these are."""
    makers = {
        FORWARD: _forward,
        BACKWARD: _backward,
        INPUTS: _inputs,
        WEIGHTS: _weights,
        REDUCE: _reduce,
        GATHER: _gather,
    }
    for kind, maker in makers.items():
        some = np.flatnonzero(setting.rows.kind == kind)
        if len(some):
            own = _Pass(setting.take(some))
            maker(own)
            yield some, own.peak


class _Pass:
    """The own stage of each state's pass, and what is there besides."""

    def __init__(self, setting: Setting) -> None:
        rows = setting.rows
        self.rows, self.setting = rows, setting
        self.peak = Peak((len(rows.row), 1))
        place = np.arange(len(rows.row)), rows.own

        def own(held: Floats | Bools) -> Floats:
            result: Floats = held[place][:, None].astype(np.float64)
            return result

        self.first, self.last = own(setting.first), own(setting.last)
        self.takes, self.gives = own(setting.local_before), own(setting.local_after)
        """1 where the input is a result of this rank, and where the result is an input here."""
        kinds = [
            replace(kind, count=own(layers))
            for kind, layers in zip(setting.stage.kinds, setting.layers, strict=True)
        ]
        (_, embedding), (_, head) = setting.stage.ends
        self.stage = replace(setting.stage, kinds=kinds, ends=[(self.first, embedding), (self.last, head)])
        self.sums = Sums(self.stage)
        converts = setting.converts * 1.0
        summed, fresh = (rows.columns[name][:, None] for name in ("own_summed", "own_fresh"))
        either = np.maximum(summed, fresh)
        self.summed = np.where(converts > 0, summed, either)
        """1 where gradients are there as they are reduced."""
        self.fresh = fresh * converts
        """1 where there are gradients as backward has made them, which FSDP2 has not seen."""
        self.grown = np.where(converts > 0, fresh, either)
        """1 where backward adds to a gradient."""
        self.start: Terms = [(1.0, self._background())]

    def _background(self) -> Bytes:
        """What is there besides the own micro batch, and the parameters and gradients of the own stage."""
        rows, setting, stage = self.rows, self.setting, self.stage
        counts = rows.columns
        held, waiting = counts["held"], counts["waiting"]
        under_way = held + waiting
        converts, wraps = setting.converts, setting.wraps
        # Without FSDP2, what is reduced stays as it is.
        summed = np.where(converts, counts["summed"], counts["either"]) + counts["reduced"] * ~wraps
        others = (
            (summed, "accumulated"),
            (counts["fresh"] * converts, "fresh"),
            (counts["gathered"] * wraps, "gathered"),
            (counts["reduced"] * wraps, "gradients"),
        )
        inner = ~setting.first * waiting

        def total(each: Floats) -> Floats:
            result: Floats = each.sum(axis=1, keepdims=True)
            return result

        terms: Terms = []
        for kind, layers, top in zip(stage.kinds, setting.layers, setting.tops(), strict=True):
            terms.append((total(under_way * layers), kind.unit.kept))
            if "waits" in kind.unit.held:
                above = top * ~setting.last
                terms.append((total(inner * (layers - above)), kind.unit.waits_net))
                terms.append((total(inner * above), kind.unit.top_waits_net))
            for count, what in others:
                terms.append((total(count * layers), value(kind, what)))
        for where, (_, group), unit in zip(
            (setting.first, setting.last), stage.ends, (stage.first, stage.last), strict=True
        ):
            terms.append((total(under_way * where), unit.kept))
            for count, what in others:
                terms.append((total(count * where), getattr(group, what)))
        if "waits" in stage.last.held:
            terms.append((total(inner * setting.last), stage.last.waits_net))
        terms.append((total(held * setting.last), stage.logits))
        gives = ~setting.last & ~setting.local_after
        messages = under_way * gives + counts["returned"] + waiting * gives
        messages += waiting * (~setting.first & ~setting.local_before)
        terms.append((total(messages) + counts["local"][:, None], stage.message))
        inputs = counts["arrived"] + under_way * setting.local_after - under_way * setting.local_before
        terms.append((total(inputs), stage.saved))
        composition = np.zeros((len(KINDS), len(rows.row)))
        for factor, one in [(1.0, setting.fixed), *terms]:
            if not one.is_empty:
                composition += np.ravel(factor) * one.composition[:, one.shape]
        return Bytes.of_shapes(composition, np.arange(len(rows.row)))

    def own_gradients(self) -> Terms:
        """Of the own stage, before the pass."""
        return [
            *self.sums.all("accumulated", self.summed),
            *self.sums.all("fresh", self.fresh),
            *self.root_gradients(),
        ]

    def root_gradients(self) -> Terms:
        """The same of embedding and head."""
        return [*self.stage.roots("accumulated", self.summed), *self.stage.roots("fresh", self.fresh)]

    def gathered(self) -> Terms:
        """The own stage's parameters."""
        wraps = self.setting.wraps * 1.0
        return [*self.sums.all("gathered", wraps), *self.stage.roots("gathered", wraps)]

    def exchanged(self) -> Terms:
        """The result of the own micro batch and its gradient."""
        stage = self.stage
        sent = (1 - self.last) * (1 - self.gives)
        return [
            (2 * sent, stage.message),
            ((1 - self.last) * self.gives, stage.saved),
            (-self.takes, stage.saved),
        ]

    def tops(self, place: Place) -> Floats:
        """1 for the last layer of a stage without head, else 0."""
        kinds = self.stage.kinds
        above = sum((later.count for later in kinds[place.index + 1 :]), np.zeros(self.peak.shape))
        result: Floats = (above + kinds[place.index].count - place.below == 1) * (1 - self.last)
        return result

    def of_place(self, place: Place, name: str) -> Terms:
        """A pass of a layer as it is named where the layer is the first or last one of its stage."""
        unit, top = self.stage.kinds[place.index].unit, self.tops(place)
        bottom = self.sums.is_lowest(place) * np.ones_like(top)
        return [
            ((1 - bottom) * (1 - top), unit.held[name]),
            ((1 - bottom) * top, unit.held[f"top_{name}"]),
            (bottom * (1 - top), unit.held[f"bottom_{name}"]),
            (bottom * top, unit.held[f"top_bottom_{name}"]),
        ]


def _either(condition: Floats, yes: Bytes, no: Bytes) -> Terms:
    return [(condition, yes), (1 - condition, no)]


def _gather(own: _Pass) -> None:
    """Parameters arrive, and are copied to where they are used layer by layer."""
    happens = own.setting.wraps
    state: Terms = [*own.start, *own.own_gradients(), *own.gathered()]
    for place in own.sums.places():
        group = own.stage.kinds[place.index].group
        own.peak.add("forward", [*state, (1.0, group.buffer)], place.happens & happens)
    own.peak.add("forward", [*state, *own.stage.roots("buffer")], happens)


def _forward(own: _Pass) -> None:
    stage, sums = own.stage, own.sums
    state: Terms = [*own.start, *own.own_gradients(), *own.gathered(), (-own.takes, stage.saved)]
    own.peak.add("forward", [*state, (1.0, stage.first.forward)], own.first > 0)
    state.append((own.first, stage.first.kept))
    for place in sums.places():
        unit = stage.kinds[place.index].unit
        handed = own.tops(place) * (1 - own.gives)
        running = _either(handed, unit.handed_forward, unit.forward)
        own.peak.add("forward", [*state, *sums.below(place, "kept"), *running], place.happens)
    state += sums.all("kept")
    for part in (stage.last.scores, stage.last.forward):
        own.peak.add("forward", [*state, (1.0, part)], own.last > 0)


def _backward(own: _Pass) -> None:
    stage, sums = own.stage, own.sums
    grown = own.grown > 0
    state: Terms = [*own.start, *own.gathered(), *own.exchanged(), (own.last, stage.logits)]
    state += [(own.first, stage.first.kept), *own.root_gradients()]
    before: Terms = [*state, *own.sums.all("accumulated", own.summed), *own.sums.all("fresh", own.fresh)]
    loss: Terms = [*before, *sums.all("kept"), (1.0, stage.last.kept)]
    for part in ([(1.0, stage.last.scoring)], _either(own.grown, stage.last.matrix, stage.last.first_matrix)):
        own.peak.add("backward", [*loss, *part], own.last > 0)
    head: Terms = [(own.last * own.grown, stage.last.added), (own.last * (1 - own.grown), stage.last.left)]
    state += head
    for place in sums.places():
        kind = stage.kinds[place.index]
        handed = own.tops(place)
        done: Terms = [*state, *sums.above(place, "accumulated")]
        kept: Terms = [*done, *sums.below(place, "kept", own=1.0)]
        kept += [
            *sums.below(place, "accumulated", own.summed, own=1.0),
            *sums.below(place, "fresh", own.fresh, own=1.0),
        ]
        for phase, more in _phases(own, kind):
            for unit, condition in (("first_backward", ~grown), ("backward", grown)):
                top = {"first_backward": "handed_first", "backward": "handed_backward"}[unit]
                running = _either(handed, value(kind, top + phase), value(kind, unit + phase))
                own.peak.add("backward", [*kept, *running, *more], place.happens & condition)
        terms: Terms = [*done, *sums.below(place, "kept"), (1.0, stage.residual)]
        terms += [
            *sums.below(place, "fresh", own.fresh),
            (1.0, kind.group.accumulated),
            (1.0, kind.group.converted),
        ]
        own.peak.add("reduce", terms, place.happens & own.setting.converts & (own.summed == 0))
    ends: Terms = [*state, *sums.all("accumulated")]
    for unit, condition in (("first_backward", ~grown), ("backward", grown)):
        own.peak.add("backward", [*ends, (1.0, getattr(stage.first, unit))], (own.first > 0) & condition)


def _phases(own: _Pass, kind: Kind) -> list[tuple[str, Terms]]:
    """Parts of the backward of a layer, and what has become of its experts' gradients then."""
    if kind.experts is None:
        return [("", [])]
    experts, converts = kind.experts, own.setting.converts * 1.0
    first = (1 - own.summed) * (1 - own.fresh)
    after: Terms = [(first * converts, experts.accumulated), (first * (1 - converts), experts.fresh)]
    after += [(own.fresh * (1 - own.summed), experts.accumulated), (-own.fresh, experts.fresh)]
    return [("_before", []), ("_after", after)]


def _inputs(own: _Pass) -> None:
    """Gradients of inputs: what was saved stays, and gradients of results for those of weights."""
    stage, sums = own.stage, own.sums
    state: Terms = [*own.start, *own.gathered(), *own.exchanged(), (own.last, stage.logits)]
    state += [*own.root_gradients(), *sums.all("kept"), (own.last, stage.last.kept)]
    before: Terms = [*state, *sums.all("accumulated", own.summed), *sums.all("fresh", own.fresh)]
    own.peak.add("backward", [*before, (1.0, stage.last.inputs)], own.last > 0)
    state.append((own.last, stage.last.inputs_net))
    either = np.maximum(own.summed, own.fresh)
    for place in sums.places():
        kind = stage.kinds[place.index]
        handed = own.tops(place)
        done: Terms = [*state, *sums.above(place, "inputs_net"), *sums.above(place, "accumulated", either)]
        done += _top_of_stage(own, place)
        rest: Terms = [*done, *sums.below(place, "accumulated", own.summed, own=1.0)]
        rest += sums.below(place, "fresh", own.fresh, own=1.0)
        for phase, more in _input_phases(own, kind):
            running = own.of_place(place, f"inputs{phase}")
            own.peak.add("backward", [*rest, *running, *more], place.happens)
        terms: Terms = [*done, *_either(handed, kind.unit.top_inputs_net, kind.unit.inputs_net)]
        terms += [*sums.below(place, "fresh", own.fresh), (1.0, stage.residual)]
        terms += [(1.0, kind.group.accumulated), (1.0, kind.group.converted)]
        own.peak.add("reduce", terms, place.happens & (own.fresh > 0) & (own.summed == 0))


def _input_phases(own: _Pass, kind: Kind) -> list[tuple[str, Terms]]:
    if kind.experts is None:
        return [("", [])]
    experts = kind.experts
    after: Terms = [(own.fresh * (1 - own.summed), experts.accumulated), (-own.fresh, experts.fresh)]
    return [("_before", []), ("_after", after)]


def _top_of_stage(own: _Pass, place: Place) -> Terms:
    """What the last layer of a stage without head differs in from others, where it is after a layer."""
    terms: Terms = []
    missing: Floats = 1 - own.last
    for index, kind in reversed(list(enumerate(own.stage.kinds))):
        here = missing * (kind.count > 0)
        missing = missing - here
        if index < place.index:
            break
        if index == place.index:
            here = here * (kind.count - place.below > 1)
        terms += [(here, kind.unit.top_inputs_net), (-here, kind.unit.inputs_net)]
    return terms


def _weights(own: _Pass) -> None:
    """Gradients of weights, from the first layer to the last one."""
    stage, sums = own.stage, own.sums
    state: Terms = [*own.start, *own.gathered(), *own.exchanged(), *own.own_gradients()]
    state += [((1 - own.first) * (1 - own.takes), stage.message)]
    state += [*sums.all("kept"), (own.last, stage.last.kept), (own.last, stage.last.waits_net)]
    for kind, top in zip(stage.kinds, _tops(own), strict=True):
        state += [(kind.count - top, kind.unit.waits_net), (top, kind.unit.top_waits_net)]
    grown = own.grown > 0
    for first, condition in (("first_", ~grown), ("", grown)):
        name = f"{first}weights"
        for place in sums.places():
            terms: Terms = [*state, *_below_weights(own, place, name), *own.of_place(place, name)]
            own.peak.add("backward", terms, place.happens & condition)
        last = Place(len(stage.kinds) - 1, stage.kinds[-1].count, own.last > 0)
        terms = [*state, *_below_weights(own, last, name), (1.0, stage.last.held[name])]
        own.peak.add("backward", terms, (own.last > 0) & condition)


def _tops(own: _Pass) -> list[Floats]:
    """1 for the kind of the last layer of a stage without head."""
    missing: Floats = 1 - own.last
    found = []
    for kind in reversed(own.stage.kinds):
        found.append(missing * (kind.count > 0))
        missing = missing - found[-1]
    return found[::-1]


def _below_weights(own: _Pass, place: Place, name: str) -> Terms:
    """What the layers before one have left, of which the stage's first one keeps its input."""
    terms = own.sums.below(place, f"{name}_net")
    missing: Floats = np.ones_like(own.last)
    for index, kind in enumerate(own.stage.kinds[: place.index + 1]):
        here = missing * (kind.count > 0)
        missing = missing - here
        if index == place.index:
            here = here * (np.asarray(place.below) > 0)
        terms += [(here, kind.unit.held[f"bottom_{name}_net"]), (-here, kind.unit.held[f"{name}_net"])]
    return terms


def _reduce(own: _Pass) -> None:
    """Embedding and head, then the layers in their order."""
    stage, sums = own.stage, own.sums
    wraps = own.setting.wraps
    accumulated: Terms = sums.all("accumulated")
    layers: Terms = [*own.start, *accumulated, *sums.all("fresh", own.fresh), *sums.all("gathered")]
    reading = stage.roots("reducing")
    own.peak.add("reduce", [*layers, *stage.roots("accumulated"), *reading], wraps)
    written: Terms = [*stage.roots("written"), *stage.roots("quotient")]
    cast: Terms = [*stage.roots("reduced"), *stage.roots("gradients")]
    for result in (written, cast):
        own.peak.add("reduce", [*layers, *reading, *result, *stage.roots("last_accumulated")], wraps)
    done: Terms = [*own.start, *stage.roots("gradients"), *stage.roots("held")]
    for place in sums.places():
        kind = stage.kinds[place.index]
        group, happens = kind.group, place.happens & wraps
        state: Terms = [*done, *sums.below(place, "gradients"), *sums.below(place, "held")]
        rest: Terms = [*sums.above(place, "accumulated"), *sums.above(place, "gathered")]
        rest += sums.above(place, "fresh", own.fresh)
        if kind.experts is not None:
            # They follow the rest of their layer.
            rest += [
                (1.0, kind.experts.accumulated),
                (1.0, kind.experts.gathered),
                (own.fresh, kind.experts.fresh),
            ]
        state += [(1.0, group.reducing), *rest]
        own.peak.add("reduce", [*state, (1.0, group.accumulated)], happens)
        state.append((1.0, group.last_accumulated))
        own.peak.add("reduce", [*state, (1.0, group.written), (1.0, group.quotient)], happens)
        own.peak.add("reduce", [*state, (1.0, group.reduced), (1.0, group.gradients)], happens)
        if kind.experts is not None:
            _reduce_experts(own, place, kind.experts, [*done, *sums.below(place, "gradients"), *rest])
    parts: Terms = [*own.start, *sums.all("gradients"), *stage.roots("gradients")]
    whole: Terms = [*own.start, *accumulated, *stage.roots("accumulated")]
    for label in ("reduce", "optimizer"):
        own.peak.add(label, parts, wraps)
        own.peak.add(label, whole, ~wraps)


def _reduce_experts(own: _Pass, place: Place, experts: GroupBytes, state: Terms) -> None:
    group, happens = own.stage.kinds[place.index].group, place.happens & own.setting.wraps
    state = [*state, (-1.0, experts.accumulated), (-1.0, experts.gathered), (-own.fresh, experts.fresh)]
    state += [
        (1.0, group.gradients),
        (1.0, group.held),
        *own.sums.below(place, "held"),
        (1.0, experts.reducing),
    ]
    shuffled: Terms = [(1.0, experts.accumulated), (1.0, experts.shuffled_accumulated)]
    own.peak.add("reduce", [*state, *shuffled], happens)
    state.append((1.0, experts.last_accumulated))
    own.peak.add("reduce", [*state, (1.0, experts.written), (1.0, experts.quotient)], happens)
    own.peak.add("reduce", [*state, (1.0, experts.reduced), (1.0, experts.gradients)], happens)

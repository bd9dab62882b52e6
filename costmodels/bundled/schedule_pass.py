"""One pass of a stage among others on its rank: its own stage, and terms of several kinds of passes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from costmodels.bundled.moments import Bytes, Count, Peak
from costmodels.bundled.schedule_setting import Setting
from costmodels.bundled.stage_sums import Place, Sums, Terms, backward_pass
from costmodels.spec.table import Bools, Floats


class Pass:
    """The own stage of each state's pass."""

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
        self.frees = setting.frees * 1.0
        self.freed = self.frees * rows.columns["own_freed"][:, None]
        """1 where the layers have freed their parameters."""

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

    def gathered(self, without: Count = 0.0) -> Terms:
        """The own stage's parameters.

        Args:
            without: 1 where those of layers are not there, else 0.
        """
        wraps = self.setting.wraps * 1.0
        return [*self.sums.all("gathered", wraps - without), *self.stage.roots("gathered", wraps)]

    def exchanged(self, gradient: float = 1.0) -> Terms:
        """The gradient of the own micro batch's result, if it is there, and what the stage shares with others
        of the rank."""
        stage = self.stage
        return [
            (gradient * (1 - self.last) * (1 - self.gives), stage.message),
            ((1 - self.last) * self.gives, stage.saved),
            (-self.takes, stage.saved),
        ]

    def tops(self, place: Place) -> Floats:
        """1 for the last layer of a stage without head, else 0."""
        kinds = self.stage.kinds
        above = sum((later.count for later in kinds[place.index + 1 :]), np.zeros(self.peak.shape))
        result: Floats = (above + kinds[place.index].count - place.below == 1) * (1 - self.last)
        return result

    def whole_backward(self, place: Place, unit: str, phase: str) -> Terms:
        """A part of the backward of a layer for all its gradients, first_backward or backward."""
        kind, handed = self.stage.kinds[place.index], self.tops(place)
        top = {"first_backward": "handed_first", "backward": "handed_backward"}[unit]
        lowest = self.sums.is_lowest(place) * (1 - self.first)
        return [
            *backward_pass(kind, f"{unit}{phase}", 1 - handed, lowest),
            *backward_pass(kind, f"{top}{phase}", handed, lowest),
        ]

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


def one_of(condition: Floats, yes: Bytes, no: Bytes) -> Terms:
    """One of two, by a condition that is 1 or 0."""
    return [(condition, yes), (1 - condition, no)]

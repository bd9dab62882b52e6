"""What the ranks of one layout share while they are played: sizes, policies, and bundles of parameters."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from costmodels.tapes.dimensions import dimensions
from costmodels.tapes.player.bundle import Bundle, casts_of, policy_of, wraps_parameters
from costmodels.tapes.player.casts import Casts
from costmodels.tapes.player.heap import OPTIMIZER, Heap, Storage
from costmodels.tapes.player.optimizer import Updated, state_of
from costmodels.tapes.player.units import Parameter, Played, Sizes, parameters_of
from costmodels.tapes.player.ways import Ways
from costmodels.tapes.tape import Tape


class Part(NamedTuple):
    """A parameter of a group."""

    parameter: Parameter
    whole: tuple[int, ...]
    """Its sides where nobody splits it."""
    made: Storage
    """Its gradient as autograd makes it."""
    is_layer: bool
    """It belongs to a layer, not to embedding or head."""


KnownSizes = dict[Hashable, tuple[Sizes, Sizes]]
"""Sizes under a layout, and under one that splits no matrices, by what decides the units of a model."""


class Setting:
    """What the ranks of one layout share while they are played."""

    def __init__(self, model: ModelSpec, layout: Layout, ways: Ways, known: KnownSizes | None = None) -> None:
        """`known`: of other layouts of the model; more are added."""
        self.model, self.layout, self.ways, self.heap = model, layout, ways, Heap()
        self.wraps = wraps_parameters(layout)
        self.policies = {experts: policy_of(layout, experts) for experts in (False, True)}
        alone = {"tensor_parallel": 1, "sequence_parallel": False, "expert_tensor_parallel": 1}
        known = {} if known is None else known
        own = dimensions(model, layout)
        casts = [(one.converts, one.widens, one.reduced) for one in self.policies.values()]
        # What units do depends on these, and on their tapes.
        key = *own.items(), *casts, self.wraps, layout.expert_tensor_parallel
        if key not in known:
            whole = Sizes(dimensions(model, layout.model_copy(update=alone)))
            known[key] = Sizes(own, self.casts), whole
        self.sizes, self.whole = known[key]
        """The latter those of a layout that splits no matrices."""
        self.bundles: dict[tuple[int, str], Bundle] = {}
        """Of layers, by the identity of their tapes and the group."""
        # By the identity of tapes.
        self.known_casts: dict[int, Casts] = {}
        self.known_parameters: dict[int, tuple[list[Parameter], list[Parameter]]] = {}

    def bundle(self, tape: Tape, one: Played, group: str) -> Bundle:
        """The parameters of a layer, or of a group of a unit."""
        key = id(tape), group
        if key not in self.bundles:
            parts = self.parts(tape, one, group, is_layer=True)
            self.bundles[key] = self.bundle_of(parts, parts[0].parameter.is_expert)
        return self.bundles[key]

    def parts(self, tape: Tape, one: Played, group: str, is_layer: bool) -> list[Part]:
        """The parameters of a group of a unit."""
        own, whole = self._parameters(tape)
        made = [
            storage._replace(size=cast.size) if cast is not None and cast.always and storage.size else storage
            for storage, cast in zip(one.gradients, map(self.casts(tape).get, range(len(own))), strict=True)
        ]
        every = zip(own, whole, made, tape.parameters, strict=True)
        return [
            Part(parameter, other.sides, storage, is_layer)
            for parameter, other, storage, known in every
            if known.group == group
        ]

    def casts(self, tape: Tape) -> Casts:
        """The gradients of a unit that autograd casts."""
        if not (self.wraps and self.ways.casts_gradients):
            return {}
        if id(tape) not in self.known_casts:
            own, whole = self._parameters(tape)
            self.known_casts[id(tape)] = casts_of(tape, own, whole, self.policies, self.layout)
        return self.known_casts[id(tape)]

    def _parameters(self, tape: Tape) -> tuple[list[Parameter], list[Parameter]]:
        """The parameters of a unit, and the same where no matrix is split."""
        if id(tape) in self.known_parameters:
            return self.known_parameters[id(tape)]
        own, whole = (parameters_of(tape, sizes) for sizes in (self.sizes, self.whole))
        ranks = self.layout.tensor_parallel, self.layout.expert_tensor_parallel
        for number, known in enumerate(tape.parameters):
            # Symbols do not tell one head from the part of a rank that has one.
            if known.split is not None:
                sides = list(own[number].sides)
                for side in known.split:
                    sides[side] *= ranks[own[number].is_expert]
                whole[number] = own[number]._replace(sides=tuple(sides))
        self.known_parameters[id(tape)] = own, whole
        return own, whole

    def bundle_of(self, parts: Sequence[Part], experts: bool) -> Bundle:
        """Parameters that are wrapped together."""
        policy = self.policies[experts]
        bundle = Bundle([one.parameter for one in parts], [one.made for one in parts], policy, self.ways)
        seen = [
            Updated(one.parameter.name, one.sides, part.whole, part.is_layer)
            for one, part in zip(bundle.parts, parts, strict=True)
        ]
        bundle.updated = seen
        bundle.optimizer = Storage(OPTIMIZER, sum(one.size for one in state_of(self.layout, seen)))
        return bundle

"""The units of a stage between each other: who lets go last of what goes from one to the next."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from costmodels.tapes.player.heap import COMMUNICATION, Storage
from costmodels.tapes.player.units import (
    Border,
    Played,
    Sizes,
    category_of,
    end_of,
    output_of,
    played,
)
from costmodels.tapes.structure import LAYERS
from costmodels.tapes.structure import Unit as Kind
from costmodels.tapes.tape import INPUT, OUTPUT, OUTPUT_GRADIENT, Tape, shared_parameter


class Unit(NamedTuple):
    """One unit of a stage and its tape."""

    kind: Kind
    tape: Tape
    plain: Tape | None = None
    """Of a layer that is computed again together with the one after it: its tape without recomputation."""

    @property
    def backward(self) -> Tape:
        """The tape whose backward it plays."""
        return self.plain or self.tape


class Chain:
    """A stage's units, ready to be played, and its messages."""

    def __init__(
        self,
        units: Sequence[Unit],
        sizes: Sizes,
        is_tied: bool,
        is_piped: bool,
        splits: bool,
        kept_as: str = "",
    ) -> None:
        """A stage of these units.

        Args:
            is_piped: stages hold their inputs, outputs and the gradients of these to the end of backward.
            splits: backward is two passes, but in the first stage.
            kept_as: what the output is to the next stage, where that is on the same rank.
        """
        *others, last = units
        if splits and last.tape.split_end is not None:
            last = last._replace(tape=_at_end(last.tape))
        self.units = [*others, last]
        self.sizes, self.is_tied, self.is_piped = sizes, is_tied, is_piped
        self.kept_as = kept_as
        self.is_last = units[-1].kind == "head"
        is_first = units[0].kind == "embedding"
        self.splits = splits and not is_first
        self.outputs = [output_of(one.tape, sizes, self._border(n)) for n, one in enumerate(units)]
        """Of each unit, in forward."""
        self.output = self.outputs[-1]
        # What a layer returns goes from stage to stage.
        layers = [n for n, one in enumerate(units) if one.kind in LAYERS]
        message = Storage(COMMUNICATION, self.outputs[layers[0] if layers else 0].size)
        self.input: Storage | None = None
        """None in the first stage, as the gradient of it."""
        if not is_first:
            saved = units[0].tape.input_category
            self.input = message._replace(category=category_of(saved) if saved else COMMUNICATION)
        self.output_gradient = message
        self.played: list[Played] = []
        self.again: list[Played | None] = []
        """Layers that are computed again together with the one after them, as they are then."""
        gradient = self._play()
        self.input_gradient = None if is_first else gradient

    def _border(self, number: int) -> Border:
        """The border of a unit in forward."""
        unit, is_end = self.units[number], number + 1 == len(self.units)
        category = self.kept_as if is_end else ""
        if not is_end and unit.plain is None:
            category = self.units[number + 1].tape.input_category
        return Border(
            output_category=category,
            sends_output=is_end and self.is_piped and not self.is_last,
            tied=self._tied(number),
        )

    def _tied(self, number: int) -> int | None:
        if not self.is_tied:
            return None
        unit = self.units[number]
        if unit.kind == "head":
            return shared_parameter(unit.tape)
        return 0 if unit.kind == "embedding" else None

    def _is_held(self, number: int) -> bool:
        """Whether a stage holds the output of a unit: what it gives."""
        return self.is_piped and number + 1 == len(self.units)

    def _end(self, number: int, storage: int) -> tuple[int, int]:
        return end_of(self.units[number].backward, number, storage, self.splits)

    def _play(self) -> Storage | None:
        """Play all units, and return the gradient of the input."""
        gradient: Storage | None = None
        for number in range(len(self.units) - 1, -1, -1):
            unit = self.units[number]
            is_end = number + 1 == len(self.units)
            # Of a unit and the one after it, the one that lets go last.
            ends_input = (
                number > 0
                and not self._is_held(number - 1)
                and self._end(number, INPUT) > self._end(number - 1, OUTPUT)
            )
            ends_output = not self._is_held(number) and (
                is_end or self._end(number, OUTPUT) > self._end(number + 1, INPUT)
            )
            border = self._border(number)._replace(
                input=self._computed_last(number - 1) if ends_input else None,
                output=self._computed_last(number),
                output_ends=ends_output,
                output_gradient=gradient,
                sends_input_gradient=number == 0 and self.is_piped,
            )
            one = played(unit.backward, self.sizes, border, self.splits)
            self.again.insert(0, None if unit.plain is None else one)
            if unit.plain is None:
                self.played.insert(0, one)
            else:
                forward = border._replace(output=self.outputs[number], output_ends=False, input=None)
                self.played.insert(0, played(unit.tape, self.sizes, forward, self.splits))
            split = unit.tape.split if self.splits else None
            given = unit.backward.input_gradient if split is None else split.input_gradient
            if given != OUTPUT_GRADIENT:
                gradient = one.input_gradient
        return gradient

    def _computed_last(self, number: int) -> Storage:
        """The output of a unit, in backward where it is computed again there."""
        unit = self.units[number]
        if unit.plain is None:
            return self.outputs[number]
        category = self.units[number + 1].backward.input_category
        return output_of(unit.plain, self.sizes, Border(output_category=category))


@lru_cache(maxsize=256)
def _at_end(tape: Tape) -> Tape:
    """The tape of a unit as the last of its stage."""
    return tape._replace(split=tape.split_end)

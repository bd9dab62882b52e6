"""The units of a stage as spans of memory: tapes under the dimensions of one model and layout."""

from collections.abc import Callable, Mapping, Set
from functools import cached_property, reduce
from operator import mul
from typing import NamedTuple

from costmodels.tapes.player.casts import (
    Casting,
    Casts,
    Manner,
    Steps,
    Sum,
    always_cast,
    cast_backward,
    cast_weights,
)
from costmodels.tapes.player.heap import (
    CATEGORIES,
    COMMUNICATION,
    GRADIENTS,
    NOTHING,
    TEMPORARIES,
    Span,
    Storage,
    block_bytes,
)
from costmodels.tapes.player.held_gradients import operations_of, with_held
from costmodels.tapes.tape import (
    EXPERTS,
    INPUT,
    OUTPUT,
    OUTPUT_GRADIENT,
    Allocation,
    Event,
    Gradient,
    Mark,
    Release,
    Size,
    Tape,
    elements_of,
    made_by_experts,
    seen_gradients,
)

STRENGTH = {"temporaries": 0, "communication": 1, "activations": 2, "logits": 3}
"""Of what a storage at a border is for, the strongest names it; what is communication there is a message."""

Step = Span | str
"""Memory that changes, or a mark at which others act."""


def _no_casts(_: Tape) -> Casts:
    return {}


class Sizes:
    """Values of symbolic sizes under one set of dimensions."""

    def __init__(self, dimensions: Mapping[str, int], casts_of: Callable[[Tape], Casts] = _no_casts) -> None:
        self.dimensions, self.casts_of = dimensions, casts_of
        self.known: dict[Size, int] = {}
        self.played: dict[tuple[int, Border, bool], Played] = {}
        """Units by the identity of their tapes and what is around them."""

    def elements(self, size: Size) -> int:
        """The value itself."""
        found = self.known.get(size)
        if found is None:
            found = self.known[size] = elements_of(size, self.dimensions)
        return found

    def bytes(self, size: Size) -> int:
        """What the allocator hands out for so many bytes."""
        return block_bytes(self.elements(size))


class Parameter(NamedTuple):
    """A parameter of a unit as one rank has it before data parallelism splits it."""

    name: str
    sides: tuple[int, ...]
    is_expert: bool
    """It belongs to the routed experts, which have a group of their own."""
    partial: bool
    """Tensor-parallel ranks have parts of the sum that is its gradient."""

    @property
    def elements(self) -> int:
        """All of it."""
        return reduce(mul, self.sides, 1)


def parameters_of(tape: Tape, sizes: Sizes) -> list[Parameter]:
    """The parameters of a unit, in the order of its module."""
    return [
        Parameter(one.name, tuple(map(sizes.elements, one.shape)), one.group.endswith(EXPERTS), one.partial)
        for one in tape.parameters
    ]


NUMBERS = {name: number for number, name in enumerate(CATEGORIES)}


def category_of(name: str) -> int:
    """The number of a category."""
    return NUMBERS[name]


class Border(NamedTuple):
    """Who else has what comes into a unit, and what goes out of it."""

    input: Storage | None = None
    """What ends when this unit lets its input go; None where others still have it, or it never ends."""
    output_category: str = ""
    """What the unit after it uses its output as; "" for nothing that forward keeps."""
    output: Storage = Storage(TEMPORARIES, 0)
    output_ends: bool = True
    """Nobody else has the output once this unit lets it go."""
    output_gradient: Storage | None = None
    """What ends when this unit has used the gradient of its output; None where others still have it."""
    sends_input_gradient: bool = False
    """The gradient of the input becomes a message."""
    sends_output: bool = False
    """The output becomes a message."""
    tied: int | None = None
    """The parameter whose gradient waits for that of another unit, to be added to it."""


class PlayedSplit:
    """Backward of a unit in two passes, each worked out when it is first played."""

    def __init__(self, tape: Tape, storages: "_Storages", casts: Casts) -> None:
        split = tape.split
        assert split is not None
        self._tape, self._split, self._storages, self._casts = tape, split, storages, casts
        self._experts = {number for number, one in enumerate(tape.parameters) if one.group == EXPERTS}
        gradients = {one.storage for one in split.first_weights if isinstance(one, Gradient)}
        self._operations = operations_of(split.weights, gradients)
        self._mixed: dict[frozenset[int], tuple[Step, ...]] = {}
        self._brief: dict[frozenset[int], tuple[Step, ...]] = {}

    @cached_property
    def inputs(self) -> tuple[Step, ...]:
        """Gradients of inputs."""
        return self._storages.steps(self._split.inputs)

    def first_weights(self, brief: Set[int] = frozenset()) -> tuple[Step, ...]:
        """Leaves gradients of all parameters, new ones.

        Args:
            brief: parameters whose gradients FSDP2 converts before the pass of the stage is over.
        """
        key = frozenset(brief)
        if key not in self._brief:
            events = self._with_casts(self._split.first_weights, self._casts)
            self._brief[key] = self._storages.steps(events, passing=key)
        return self._brief[key]

    @cached_property
    def weights(self) -> tuple[Step, ...]:
        """The same where they are added to gradients that are there."""
        return self._cast(self._split.weights, always_cast(self._casts))

    def weights_of(self, parameters: frozenset[int]) -> tuple[Step, ...]:
        """Leaves new gradients of some parameters, and adds to those of the others."""
        if parameters not in self._mixed:
            new = {
                one.storage
                for one in self._split.first_weights
                if isinstance(one, Gradient) and one.parameter in parameters
            }
            events = tuple(
                one for one in self._split.weights if not (isinstance(one, Release) and one.storage in new)
            )
            self._mixed[parameters] = self._cast(events, always_cast(self._casts))
        return self._mixed[parameters]

    @cached_property
    def cast_weights(self) -> tuple[Step, ...]:
        """The same where each is cast before, but for what the experts' backward gives itself: to those that
        are there, FSDP2 lets autograd add as it makes them."""
        split, always = self._split, always_cast(self._casts)
        own = made_by_experts(split.first_weights) & self._experts
        casts = {
            number: cast for number, cast in self._casts.items() if number in always or number not in own
        }
        return self._cast(split.weights, casts)

    @cached_property
    def seen(self) -> list[list[int]]:
        """The parameters that have gradients by each time that FSDP2 comes to them."""
        return seen_gradients(self._split.first_weights)

    @cached_property
    def forgotten(self) -> tuple[Step, ...]:
        """What was computed again and not used."""
        return self._storages.steps(self._split.forgotten)

    @cached_property
    def rest(self) -> tuple[Step, ...]:
        """What the graph still held."""
        return self._storages.steps(self._split.rest)

    def _cast(self, events: tuple[Event, ...], casts: Casts) -> tuple[Step, ...]:
        return self._storages.steps(self._with_casts(events, casts))

    def _with_casts(self, events: tuple[Event, ...], casts: Casts) -> Steps:
        own = cast_weights(self._tape, events, casts, self._operations.together)
        return with_held(own, self._operations)


class Played:
    """One unit of a stage between its neighbours, its passes worked out when they are first played."""

    def __init__(self, tape: Tape, sizes: Sizes, border: Border, splits: bool) -> None:
        self._tape, self._casts = tape, sizes.casts_of(tape)
        self._whole = _Storages(tape.forward, tape.backward, tape.input_gradient, sizes, border)
        self._backward: dict[tuple[Manner, ...], tuple[Step, ...]] = {}
        self.gradients = self._whole.gradients(tape)
        """Of each parameter."""
        self.input_gradient = self._whole.given
        """None where the unit has none, or hands the gradient of its output on."""
        self.split: PlayedSplit | None = None
        if splits and tape.split is not None:
            own = tape.split
            backward = (*own.inputs, *own.first_weights, *own.weights)
            storages = _Storages(tape.forward, backward, own.input_gradient, sizes, border)
            self.split = PlayedSplit(tape, storages, self._casts)
            self.input_gradient = storages.given

    @cached_property
    def forward(self) -> tuple[Step, ...]:
        """What forward does."""
        return self._whole.steps(self._tape.forward)

    def backward(
        self, manner: Manner, inner: Mapping[str, Manner] | None = None, late: Set[int] = frozenset()
    ) -> tuple[Step, ...]:
        """What backward does that gives gradients to all parameters.

        Args:
            manner: how autograd gives them.
            inner: the same of other groups of parameters in the unit, by name.
            late: parameters that have new ones, and get more added to them.
        """
        of_group = inner or {}
        manners = tuple(
            "adds" if number in late else of_group.get(one.group, manner)
            for number, one in enumerate(self._tape.parameters)
        )
        if manners not in self._backward:
            kept = always_cast(self._casts)
            casts = {
                number: cast
                for number, cast in self._casts.items()
                if manners[number] == "casts" or number in kept
            }
            adding = {number for number, own in enumerate(manners) if own == "adds"}
            self._backward[manners] = self._whole.steps(cast_backward(self._tape, casts), adding)
        return self._backward[manners]


def output_of(tape: Tape, sizes: Sizes, border: Border) -> Storage:
    """The storage of the output of a unit."""
    for event in tape.forward:
        if isinstance(event, Allocation) and event.storage == OUTPUT:
            names = [(STRENGTH[event.category], event.category)]
            if border.output_category:
                names.append((STRENGTH[border.output_category], border.output_category))
            if border.sends_output:
                names.append((STRENGTH["communication"], "communication"))
            return Storage(category_of(max(names)[1]), sizes.bytes(event.size))
    raise ValueError("a unit without output is none")


FORWARD, BACKWARD, WEIGHTS, FORGOTTEN, REST = range(5)


def end_of(tape: Tape, number: int, storage: int, splits: bool) -> tuple[int, int]:
    """When a unit lets a storage at its border go: the pass, and the place in it; to be compared with others.

    Args:
        number: of the unit in its stage.
    """
    passes: list[tuple[int, tuple[Event, ...]]] = [(FORWARD, tape.forward)]
    if splits and tape.split is not None:
        split = tape.split
        passes += [(BACKWARD, split.inputs), (WEIGHTS, split.weights)]
        passes += [(FORGOTTEN, split.forgotten), (REST, split.rest)]
    else:
        passes.append((BACKWARD, tape.backward))
    for kind, events in passes:
        if Release(storage) in events:
            return kind, -number if kind == BACKWARD else number
    return -1, number


def played(tape: Tape, sizes: Sizes, border: Border, splits: bool) -> Played:
    """A unit under dimensions and between neighbours."""
    key = id(tape), border, splits
    if key not in sizes.played:
        sizes.played[key] = Played(tape, sizes, border, splits)
    return sizes.played[key]


class _Storages:
    """What each storage of a tape is, and what its beginning and its end change."""

    def __init__(
        self,
        forward: tuple[Event, ...],
        backward: tuple[Event, ...],
        input_gradient: int | None,
        sizes: Sizes,
        border: Border,
    ) -> None:
        self.known: dict[int, Storage] = {}
        for event in (*forward, *backward):
            if isinstance(event, Allocation):
                number, size, name = event
                category = category_of(name)
                if border.sends_input_gradient and number == input_gradient and category == TEMPORARIES:
                    category = COMMUNICATION
                self.known[number] = Storage(category, sizes.bytes(size))
                if number == OUTPUT:
                    self.known[number] = border.output
        self.early = {one.storage for one in forward if isinstance(one, Allocation)}
        """What forward makes: of a head, the gradient of its matrix too."""
        for one in backward:
            if isinstance(one, Gradient):
                waits = one.parameter == border.tied and one.storage not in self.early
                category = TEMPORARIES if waits else GRADIENTS
                self.known[one.storage] = self.known[one.storage]._replace(category=category)
        self.tied = border.tied
        nothing = Storage(TEMPORARIES, 0)
        self.ends = self.known | {
            INPUT: border.input or nothing,
            OUTPUT: border.output if border.output_ends else nothing,
            OUTPUT_GRADIENT: border.output_gradient or nothing,
        }
        self.given: Storage | None = None
        """The gradient of the input, unless it is that of the output."""
        if input_gradient is not None and input_gradient != OUTPUT_GRADIENT:
            self.given = self.known[input_gradient]

    def gradients(self, tape: Tape) -> tuple[Storage, ...]:
        """Gradients in the order of parameters."""
        found = {one.parameter: one.storage for one in tape.backward if isinstance(one, Gradient)}
        if len(set(found.values())) < len(found):
            raise ValueError("two parameters share the storage of their gradients")
        nothing = Storage(GRADIENTS, 0)
        return tuple(
            self.known[found[number]] if number in found else nothing
            for number in range(len(tape.parameters))
        )

    def steps(
        self, events: Steps, adding: Set[int] = frozenset(), passing: Set[int] = frozenset()
    ) -> tuple[Step, ...]:
        """Spans between marks.

        Args:
            adding: parameters to whose gradients autograd adds, so that new ones end at once.
            passing: parameters whose gradients others end before the pass does.
        """
        found: list[Step] = []
        changes: list[tuple[int, int]] = []
        given = [one for one in events if isinstance(one, Gradient) and one.parameter != self.tied]
        kept = {one.storage for one in given if one.parameter not in passing}
        ending = {one.storage for one in given if one.parameter in adding}
        # What others follow in the same place, and what is added to gradients of weights made apart.
        brief = ending | {one.storage for one in given if one.parameter in passing}
        brief |= {one.storage for one in events if isinstance(one, Casting)}
        brief |= {one.storage for one in events if isinstance(one, Release)} - kept - self.early
        last: dict[int, Storage] = {}
        for event in events:
            match event:
                case Allocation(storage, _, _):
                    category, size = self.known[storage]
                    if storage in brief and category == GRADIENTS:
                        category, last[storage] = TEMPORARIES, Storage(TEMPORARIES, size)
                    changes.append((category, size))
                case Release(storage):
                    changes.append(_end(last.get(storage, self.ends[storage])))
                case Casting(storage, size):
                    category = GRADIENTS if storage in kept - ending else TEMPORARIES
                    last[storage] = Storage(category, size)
                    changes += [(category, size), _end(self._made(storage))]
                case Sum(storage, size):
                    category = GRADIENTS if storage in kept - ending else TEMPORARIES
                    last[storage] = Storage(category, size)
                    changes.append((category, size))
                case Gradient(_, storage):
                    if storage in ending:
                        changes.append(_end(last.get(storage, self._made(storage))))
                case Mark(name):
                    found += [span_of(changes), name]
                    changes = []
        return (*found, span_of(changes))

    def _made(self, storage: int) -> Storage:
        """A gradient as backward makes it for a short while, or forward."""
        known = self.known[storage]
        return known if storage in self.early else known._replace(category=TEMPORARIES)


def _end(storage: Storage) -> tuple[int, int]:
    return storage.category, -storage.size


def span_of(changes: list[tuple[int, int]]) -> Span:
    """The span of changes, each a category and bytes."""
    total = high = at = 0
    for place, (_, size) in enumerate(changes, start=1):
        total += size
        if total > high:
            high, at = total, place
    return Span(high, _sums(changes[:at]), _sums(changes))


def _sums(changes: list[tuple[int, int]]) -> tuple[int, ...]:
    sums = list(NOTHING)
    for category, size in changes:
        sums[category] += size
    return tuple(sums)

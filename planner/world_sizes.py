"""World sizes: the best plan of each of several, and the front of time against cost."""

from __future__ import annotations

import reprlib
import time
from collections.abc import Iterable
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, SupportsIndex

from costmodels.dataclass import dataclass
from costmodels.errors import InputError, NoLayoutFits
from costmodels.spec.hardware import Device
from costmodels.spec.model import ModelSpec
from planner.advice import no_layout_fits
from planner.api import search
from planner.budget.goodput import Failures
from planner.budget.run import UNIT_TOKENS, Run, check_price, parse_tokens
from planner.inputs.cluster import MOST_DEVICES, resolve_cluster
from planner.inputs.keywords import keywords
from planner.inputs.model import resolve_model
from planner.inputs.node_kinds import is_of_kinds
from planner.objective import DEFAULT_OBJECTIVE, Objective, equal_peak, parse_objective
from planner.plan import Plan
from planner.problem import Problem, SearchKeywords, cluster_of
from planner.ranking.ranking import rank
from planner.ranking.result import SearchResult
from planner.space.rule import divisors

if TYPE_CHECKING:
    from typing_extensions import Unpack

WorldSizes = str | SupportsIndex | Iterable[SupportsIndex]
"""A world size, several, or text such as `64..512`, `64,96,128` or `8,64..512`."""

MOST_SIZES = 64
"""World sizes of one question."""


@dataclass(frozen=True)
class Size:
    """The best plan of one world size."""

    world_size: int
    plan: Plan | None
    """None where no layout is legal, or none fits."""
    run: Run | None
    """What `plan` takes for the tokens asked for, or for `UNIT_TOKENS`; None without a plan."""
    problem: str | None
    """Why there is no plan."""
    result: SearchResult | None = field(compare=False, repr=False)
    """None where no layout is legal."""
    on_front: bool = False
    """No other size is as fast for less, or faster for as much."""


@dataclass(frozen=True, repr=False)
class Sizes:
    """The best plans of several world sizes, ascending, and their front of time against cost."""

    sizes: tuple[Size, ...]
    objective: Objective
    tokens: int | None
    """None where none were asked for, so that runs are of `UNIT_TOKENS`."""

    def __repr__(self) -> str:
        best = "none" if self.chosen is None else self.chosen.world_size
        sizes = ", ".join(str(size.world_size) for size in self.sizes)
        return f"<Sizes of {self.problem.model.name}: {sizes} devices; best by {self.objective}: {best}>"

    @property
    def problem(self) -> Problem:
        """The question of the largest size that has legal layouts; the others differ in their cluster."""
        return [size.result.problem for size in self.sizes if size.result is not None][-1]

    @property
    def front(self) -> tuple[Size, ...]:
        """The sizes on the Pareto front of days against device-hours, and so against money, ascending."""
        return tuple(size for size in self.sizes if size.on_front)

    @property
    def chosen(self) -> Size | None:
        """The size that is best by the objective, of equal ones the smallest; None where nothing fits."""
        found = [size for size in self.sizes if size.run is not None]
        return min(found, key=self._figure, default=None)

    def _figure(self, size: Size) -> tuple[float, ...]:
        """What the objective wants to be least; the first decides, the next one where it is equal."""
        assert size.run is not None and size.plan is not None
        figures: dict[Objective, tuple[float, ...]] = {
            "throughput": (size.run.days,),
            "step-time": (size.plan.estimate.step_time_s, size.run.days),
            "cost": (size.run.device_hours,),
            "memory": (equal_peak(size.plan.estimate.peak_memory_bytes), size.run.days),
        }
        return figures[self.objective]


def parse_world_sizes(text: WorldSizes, per_node: int) -> tuple[int, ...]:
    """The world sizes that a text names, ascending, each once.

    Of a range those are taken that are whole nodes of `per_node` devices, a power of two of them or three
    times one, so that each is a third or a half more than the last and divides into many degrees; below a
    node its divisors; and both ends, as far as they are whole nodes or divisors of one.

    Raises:
        InputError: the text is no number, list or range, a number is too small or too large, or a range
            holds no such size.
    """
    if not isinstance(text, Iterable):
        if not isinstance(text, SupportsIndex):
            raise InputError(f"world_size {reprlib.repr(text)}: expected 64, 64,128,256 or 64..512")
        text = [text]
    items = text.split(",") if isinstance(text, str) else map(str, text)
    found: set[int] = set()
    for item in items:
        first, dots, last = item.partition("..")
        ends = [_count(text, word) for word in ((first, last) if dots else (first,))]
        if not dots:
            found.update(ends)
            continue
        low, high = ends
        if low > high:
            raise InputError(f"world_size {item.strip()}: expected the smaller end first, {high}..{low}")
        sizes = [size for size in _usual(high, per_node) if low <= size]
        sizes += [end for end in ends if end % per_node == 0 or per_node % end == 0]
        if not sizes:
            raise InputError(
                f"world_size {item.strip()}: no whole nodes of {per_node} devices, or divisors of one, in it"
            )
        found.update(sizes)
    if not 0 < len(found) <= MOST_SIZES:
        raise InputError(f"world_size: {len(found)} sizes; expected 1 to {MOST_SIZES}")
    return tuple(sorted(found))


def _usual(most: int, per_node: int) -> list[int]:
    """Divisors of a node, and whole nodes that are a power of two or three times one, up to `most`."""
    nodes = [factor << exponent for factor in (1, 3) for exponent in range(most.bit_length())]
    sizes = [*divisors(per_node), *(count * per_node for count in nodes)]
    return [size for size in sizes if size <= most]


def _count(given: object, word: str) -> int:
    word = word.strip()
    digits = len(str(MOST_DEVICES))
    if word.isascii() and word.isdigit() and len(word.lstrip("0")) <= digits:
        number = int(word)
        if 1 <= number <= MOST_DEVICES:
            return number
    raise InputError(
        f"world_size {given}: {word!r} is not a number of devices; expected 64, 64,128,256 or 64..512, "
        f"at most {MOST_DEVICES}"
    )


@keywords(SearchKeywords)
def sizes(
    model: ModelSpec | str | Path,
    *,
    world_size: WorldSizes,
    tokens: str | float | None = None,
    price_per_hour: float | None = None,
    failures: Failures | None = None,
    **job: Unpack[SearchKeywords],
) -> Sizes:
    """The best plan of each world size (`parse_world_sizes`), and the front of time against cost.

    The other keywords are those of `search`. `tokens`, `price_per_hour` and `failures` are as in `Plan.run`;
    days and device-hours are of `tokens`, or of `UNIT_TOKENS`. Tokens per second and their cost are compared
    at the same maximum, or exact, batch.

    Raises `InputError` for wrong input, and when no size has a legal layout; a size without one is listed
    with the reason where others have.

    >>> import planner
    >>> job = dict(device="h100", global_batch_size=64, tokens="1T")
    >>> found = planner.sizes("llama3-8b", world_size="8,16", **job)
    >>> [size.world_size for size in found.sizes]
    [8, 16]
    >>> found.sizes[0].run.days > found.sizes[1].run.days
    True
    """
    device = job.get("device")
    if is_of_kinds(device):
        raise InputError(
            f"world_size {world_size}: device {device} tells how many nodes there are of each kind; plan for "
            "one size, or for one kind"
        )
    objective = parse_objective(job.get("objective") or DEFAULT_OBJECTIVE)
    spec = resolve_model(model)
    count = None if tokens is None else parse_tokens(tokens)
    check_price(price_per_hour)
    found, errors = [], []
    known: Problem | None = None
    for size in parse_world_sizes(world_size, _per_node(device, job.get("local_world_size"))):
        result = plan = spent = problem = None
        try:
            result = search(spec, world_size=size, **job) if known is None else _resized(known, size, job)
            known = result.problem
            plan = result.best
            if plan is None:
                problem = result.closest()[0].reason
            else:
                spent = plan.run(UNIT_TOKENS if count is None else count, price_per_hour, failures)
        except InputError as error:
            errors.append(error)
            plan, problem = None, str(error)
        found.append(Size(size, plan, spent, problem, result))
    if len(errors) == len(found):
        raise errors[0]
    return Sizes(tuple(_with_front(found)), objective, count)


def _resized(known: Problem, world_size: int, job: SearchKeywords) -> SearchResult:
    """The search of `known` on another number of devices.

    Raises `InputError` when no layout is legal, without the sizes nearby that are: they take seconds to find.
    """
    cluster = cluster_of(world_size, job)
    problem = replace(known, cluster=cluster)
    started = time.perf_counter()
    space = problem.space()
    if not len(space.table):
        raise InputError(
            f"no layout is legal on {cluster.world_size} devices with {problem.batch}: {problem.obstacle()}"
        )
    return rank(problem, space, started, offload=True)


def no_size_fits(found: Sizes) -> NoLayoutFits:
    """The error of sizes of which none has a plan: that of the largest one that lacks memory."""
    results = [size.result for size in found.sizes if size.result is not None and not size.result.feasible]
    return no_layout_fits(results[-1])


def _per_node(device: Device | str | None, local_world_size: int | None) -> int:
    """Devices of a node, as far as one world size does not decide it."""
    resolved = resolve_cluster(device, 1, local_world_size).device
    return int(local_world_size or (1 if resolved.kind == "cpu" else resolved.devices_per_node))


def _with_front(found: list[Size]) -> list[Size]:
    runs = [size.run for size in found if size.run is not None]

    def on_front(run: Run | None) -> bool:
        return run is not None and not any(
            other.days <= run.days
            and other.device_hours <= run.device_hours
            and (other.days, other.device_hours) != (run.days, run.device_hours)
            for other in runs
        )

    return [replace(size, on_front=on_front(size.run)) for size in found]

"""World sizes: the best plan of each of several world sizes, and the Pareto front of time against cost."""

from __future__ import annotations

import reprlib
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

from costmodels.dataclass import dataclass
from costmodels.errors import InputError, NoLayoutFits
from costmodels.spec.hardware import Device
from costmodels.spec.model import ModelSpec
from planner.advice import no_layout_fits
from planner.api import search
from planner.budget.goal import Goal, parse_goal
from planner.budget.goodput import Failures
from planner.budget.money import Money
from planner.budget.question import RunQuestion, SizeRun, run_question
from planner.budget.recommendation import Recommendation, front, recommend
from planner.budget.run import UNIT_TOKENS, Run, parse_price, parse_tokens
from planner.inputs.cluster import MOST_DEVICES, resolve_cluster
from planner.inputs.keywords import keywords
from planner.inputs.model import resolve_model
from planner.inputs.node_kinds import is_of_kinds
from planner.objective import DEFAULT_OBJECTIVE, MEANINGS, Objective, equal_peak, parse_objective
from planner.plan import Plan
from planner.plan_rows import COLUMNS, data_frame, html_table, record, shown
from planner.problem import Problem, SearchKeywords, cluster_of
from planner.processes import Calls, helpers_for
from planner.ranking.ranking import rank
from planner.ranking.result import SearchResult
from planner.space.rule import divisors

if TYPE_CHECKING:
    import pandas
    from typing_extensions import Unpack

WorldSizes = str | SupportsIndex | Iterable[SupportsIndex]
"""A world size, several, or text such as `64..512`, `64,96,128` or `8,64..512`."""

MOST_SIZES = 64
"""Most world sizes of one question."""


@dataclass(frozen=True)
class Size:
    """The best plan of one world size."""

    world_size: int
    plan: Plan | None
    """The best plan; None where no layout is legal, or none fits."""
    run: Run | None
    """The run of `plan` over the tokens asked for, or over `UNIT_TOKENS`; None without a plan."""
    problem: str | None
    """The reason why there is no plan."""
    result: SearchResult | None = field(compare=False, repr=False)
    """The result of the search; None where no layout is legal."""
    on_front: bool = False
    """Pareto-optimal: no other size is both faster and cheaper."""


@dataclass(frozen=True, repr=False)
class Sizes:
    """The best plans of several world sizes, ascending, and their front of time against cost."""

    sizes: tuple[Size, ...]
    objective: Objective
    tokens: int | None
    """Tokens of the runs; None where none were asked for, so that runs are over `UNIT_TOKENS`."""
    price: Money | None = None
    """The price of one device for an hour."""
    goal: Goal = Goal()
    """The deadline and the budget."""
    failures: Failures | None = None

    def __repr__(self) -> str:
        best = "none" if self.chosen is None else self.chosen.world_size
        sizes = ", ".join(str(size.world_size) for size in self.sizes)
        return f"<Sizes of {self.problem.model.name}: {sizes} devices; recommended: {best}>"

    def _repr_html_(self) -> str:
        """The table that notebooks show: the best plan of each size, and the size to take."""
        found = self.recommendation
        title = repr(self).strip("<>") + ("" if found is None else f", as {found.why}")
        columns = ("devices", "front", *COLUMNS, "days", "device-hours")
        return html_table(title, columns, map(_cells, self.sizes))

    def to_pandas(self) -> pandas.DataFrame:
        """A row for each size: its plan, seconds, bytes, days, device-hours and money.

        Raises `InputError` where pandas is not installed.
        """
        return data_frame([_record(size) for size in self.sizes])

    @property
    def problem(self) -> Problem:
        """The question of the largest size that has legal layouts; the others differ in their cluster."""
        return [size.result.problem for size in self.sizes if size.result is not None][-1]

    @property
    def front(self) -> tuple[Size, ...]:
        """The sizes on the Pareto front of days against device-hours, and so against money, ascending."""
        return tuple(size for size in self.sizes if size.on_front)

    @property
    def runs(self) -> dict[int, Run]:
        """The runs by the number of devices, ascending, of the sizes that have a plan."""
        return {size.world_size: size.run for size in self.sizes if size.run is not None}

    @cached_property
    def recommendation(self) -> Recommendation | None:
        """The recommended size, with the reason; None if nothing fits.

        With a deadline it is the cheapest size in time; with a budget the fastest affordable size; without
        either the knee of days against cost; an objective other than throughput decides in their place.
        """
        if self.objective == DEFAULT_OBJECTIVE:
            return recommend(self.runs, self.goal)
        words = f"{self.objective} ({MEANINGS[self.objective]})"
        return recommend(self.runs, self.goal, (words, self._best))

    @property
    def chosen(self) -> Size | None:
        """The size that is recommended; None where nothing fits."""
        found = self.recommendation
        sizes = {size.world_size: size for size in self.sizes}
        return None if found is None else sizes[found.world_size]

    @property
    def plan(self) -> Plan | None:
        """The plan of the recommended size, with the question noted in it; None where nothing fits."""
        chosen = self.chosen
        if chosen is None or chosen.plan is None:
            return None
        return chosen.plan.model_copy(update={"asked": self._question()})

    def _question(self) -> RunQuestion | None:
        found = self.recommendation
        size, why = (None, "") if found is None else (found.world_size, found.why)
        rows = tuple(size_run(one) for one in self.sizes)
        return run_question(self.tokens, self.price, self.goal, self.failures, rows, size, why)

    def _best(self, world_sizes: Collection[int]) -> int:
        """The best of some sizes by the objective; the smallest among equals."""
        some = [size for size in self.sizes if size.world_size in world_sizes]
        return min(some, key=self._figure).world_size

    def _figure(self, size: Size) -> tuple[float, ...]:
        """Figures of a size that the objective minimises; the first one decides, the next one breaks ties."""
        assert size.run is not None and size.plan is not None
        figures: dict[Objective, tuple[float, ...]] = {
            "throughput": (size.run.days,),
            "step-time": (size.plan.estimate.step_time_s, size.run.days),
            "cost": (size.run.device_hours,),
            "memory": (equal_peak(size.plan.estimate.peak_memory_bytes), size.run.days),
        }
        return figures[self.objective]


def _cells(size: Size) -> tuple[str, ...]:
    """The cells of a size's row."""
    if size.plan is None or size.run is None:
        return (str(size.world_size), "", size.problem or "", *[""] * (len(COLUMNS) + 1))
    days, hours = f"{size.run.days:.3g}", f"{size.run.device_hours:,.0f}"
    front = "*" if size.on_front else ""
    return (str(size.world_size), front, *shown(size.plan.layout, size.plan.estimate), days, hours)


def _record(size: Size) -> dict[str, Any]:
    """A size's row for programs."""
    found: dict[str, Any] = {
        "world_size": size.world_size,
        "on_front": size.on_front,
        "problem": size.problem,
    }
    if size.plan is None or size.run is None:
        return found
    run = size.run
    spent = {name: getattr(run, name) for name in ("days", "days_low", "days_high", "device_hours", "money")}
    return found | spent | record(size.plan.layout, size.plan.estimate)


def parse_world_sizes(text: WorldSizes, per_node: int) -> tuple[int, ...]:
    """The world sizes that a text names, ascending, each once.

    A range gives these sizes:

    - whole nodes of `per_node` devices, in a number that is a power of two or three times one. Each is a
      third or a half more than the last and divides into many degrees;
    - below a node, the divisors of a node;
    - both ends, if they are whole nodes or divisors of one.

    Raises:
        InputError: the text is no number, list or range; a number is too small or too large; or a range holds
            no such size.
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
    world_size: WorldSizes,
    *,
    tokens: str | float | None = None,
    price_per_hour: str | float | Money | None = None,
    deadline_days: float | None = None,
    budget: str | float | None = None,
    failures: Failures | None = None,
    **job: Unpack[SearchKeywords],
) -> Sizes:
    """The best plan of each world size (`parse_world_sizes`), and the front of time against cost.

    The other keywords are those of `search`. `tokens`, `price_per_hour` and `failures` are as in `Plan.run`;
    days and device-hours are of `tokens`, or of `UNIT_TOKENS`. Tokens per second and their cost are compared
    at the same maximum, or exact, batch. `Sizes.recommendation` names one size and says why: the cheapest
    that takes at most `deadline_days`, the fastest that costs at most `budget` (`200000`, `"$200k"`), or
    without both the knee of days against cost (`planner.budget.recommendation.knee`); `Sizes.plan` is the
    plan of that size.

    Raises `InputError` for wrong input, and when no size has a legal layout; a size without one is listed
    with the reason where others have.

    Examples:
        >>> import planner
        >>> job = dict(device="h100", global_batch_size=64, tokens="1T")
        >>> found = planner.sizes("llama3-8b", world_size="8,16", **job)
        >>> [size.world_size for size in found.sizes]
        [8, 16]
        >>> found.sizes[0].run.days > found.sizes[1].run.days
        True
        >>> found = planner.sizes("llama3-8b", world_size="8,16", price_per_hour="$2", budget="$60k", **job)
        >>> found.recommendation.world_size, found.recommendation.rule
        (16, 'budget')
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
    price = parse_price(price_per_hour)
    goal = parse_goal(deadline_days, budget, count, price)
    wanted = parse_world_sizes(world_size, _per_node(device, job.get("local_world_size")))
    of_run = UNIT_TOKENS if count is None else count, price, failures
    found: list[_Planned] = []
    known: Problem | None = None
    seconds = 0.0
    # Until a size has legal layouts, errors name sizes nearby; what the first one resolves holds for all.
    for size in wanted:
        found.append(_first_planned(spec, size, job, *of_run))
        result = found[-1].size.result
        if result is not None:
            known, seconds = result.problem, result.elapsed_s
            break
    rest = wanted[len(found) :]
    if known is not None:
        calls = [partial(_planned, _resized(known, size, job), size, *of_run) for size in rest]
        with Calls(calls, helpers_for(len(calls), seconds)) as made:
            found += made.results()
    errors = [one.error for one in found if one.error is not None]
    if len(errors) == len(found):
        raise errors[0]
    return Sizes(tuple(marked_front([one.size for one in found])), objective, count, price, goal, failures)


class _Planned(NamedTuple):
    """A size, and the error that ended its search, if any."""

    size: Size
    error: InputError | None


def _first_planned(
    spec: ModelSpec,
    world_size: int,
    job: SearchKeywords,
    tokens: int,
    price: Money | None,
    failures: Failures | None,
) -> _Planned:
    """The best plan of a size, and its run, for a question that was not resolved before."""
    try:
        result = search(spec, world_size=world_size, **job)
    except InputError as error:
        return _without_plan(world_size, error)
    return _with_run(result, tokens, price, failures)


def _resized(known: Problem, world_size: int, job: SearchKeywords) -> Problem | str:
    """The problem `known` on another number of devices, or the error of that number."""
    try:
        return replace(known, cluster=cluster_of(world_size, job))
    except InputError as error:
        return str(error)


def _planned(
    problem: Problem | str,
    world_size: int,
    tokens: int,
    price: Money | None,
    failures: Failures | None,
) -> _Planned:
    """The best plan of a size, and its run.

    Where no layout is legal, the error does not name sizes nearby that have some: they take seconds to find.
    """
    if isinstance(problem, str):
        return _without_plan(world_size, InputError(problem))
    started = time.perf_counter()
    try:
        space = problem.space()
    except InputError as error:
        return _without_plan(world_size, error)
    if not len(space.table):
        line = f"no layout is legal on {world_size} devices with {problem.batch}: {problem.obstacle()}"
        return _without_plan(world_size, InputError(line))
    return _with_run(rank(problem, space, started, offload=True), tokens, price, failures)


def planned_size(problem: Problem, asked: RunQuestion) -> Size:
    """The best plan of a problem, and its run, or why there is none."""
    run = asked.run_tokens, asked.price, asked.failures
    return _planned(problem, problem.cluster.world_size, *run).size


def _without_plan(world_size: int, error: InputError) -> _Planned:
    return _Planned(Size(world_size, None, None, str(error), None), error)


def _with_run(result: SearchResult, tokens: int, price: Money | None, failures: Failures | None) -> _Planned:
    plan, world_size = result.best, result.problem.cluster.world_size
    if plan is None:
        return _Planned(Size(world_size, None, None, result.closest()[0].reason, result), None)
    try:
        return _Planned(Size(world_size, plan, plan.run(tokens, price, failures), None, result), None)
    except InputError as error:
        return _Planned(Size(world_size, None, None, str(error), result), error)


def no_size_fits(found: Sizes) -> NoLayoutFits:
    """The error of sizes without any plan: the error of the largest size that lacks memory."""
    results = [size.result for size in found.sizes if size.result is not None and not size.result.feasible]
    return no_layout_fits(results[-1])


def _per_node(device: Device | str | None, local_world_size: int | None) -> int:
    """Devices of a node where the world size does not decide it."""
    resolved = resolve_cluster(device, 1, local_world_size).device
    return int(local_world_size or (1 if resolved.kind == "cpu" else resolved.devices_per_node))


def marked_front(found: Sequence[Size]) -> list[Size]:
    """The sizes, ascending, each marked if it is Pareto-optimal among them."""
    best = front({size.world_size: size.run for size in found if size.run is not None})
    marked = [replace(size, on_front=size.world_size in best) for size in found]
    return sorted(marked, key=lambda size: size.world_size)


def own_run(plan: Plan, asked: RunQuestion) -> Run:
    """The run that a question asks about, for a plan."""
    return plan.run(asked.run_tokens, asked.price, asked.failures)


def size_run(size: Size) -> SizeRun:
    """The record of a size in a plan file."""
    if size.run is None or size.plan is None:
        return SizeRun(world_size=size.world_size, problem=size.problem)
    run = size.run
    return SizeRun(
        world_size=size.world_size,
        layout=size.plan.layout.describe(),
        days=run.days,
        days_low=run.days_low,
        days_high=run.days_high,
        device_hours=run.device_hours,
        money=run.money,
        on_front=size.on_front,
    )

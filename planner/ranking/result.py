"""`SearchResult`: the answer of a search; its plans are made from rows on demand."""

from __future__ import annotations

from dataclasses import field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from costmodels.dataclass import dataclass
from costmodels.pricing import Prices, estimate, peak_memory
from costmodels.spec.estimate import Estimate
from costmodels.spec.layout import Layout
from costmodels.spec.table import Floats, Ints, LayoutTable
from planner.objective import EQUAL, gain, logarithms, metric
from planner.plan import Plan
from planner.plan_rows import COLUMNS, data_frame, html_table, record, shown
from planner.problem import Problem
from planner.ranking import reasons
from planner.ranking.first_plans import MOST, SHOWN, Ranking, order
from planner.ranking.twins import other_form
from planner.solve.concatenation import concatenate_tables
from planner.solve.offload import OFFLOAD_REASON
from planner.space.rules import DEVICE_MEMORY

if TYPE_CHECKING:
    import pandas

    from planner.space.grid import Space


@dataclass(frozen=True, repr=False)
class Listed:
    """The enumerated layouts of a search and their peaks of memory, for other searches of the same
    layouts."""

    space: Space
    peaks: Floats
    """Bytes of the fullest device, as in `planner.solve.fit.Fit.peaks`, [n]."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # Other processes are told what was found, and list layouts themselves: that takes no longer.
        return type(None), ()


@dataclass(frozen=True, repr=False)
class SearchResult:
    """All legal layouts of a problem, priced; plans are made from its rows on demand.

    Examples:
        >>> import planner
        >>> result = planner.search("gpt2-small", world_size=4, device="h100", global_batch_size=16)
        >>> best, second = result.plans(2)
        >>> best == result.best and best.estimate.step_time_s <= second.estimate.step_time_s
        True
        >>> result.to_pandas(3)[["data_parallel", "step_time_s"]].shape
        (3, 2)
    """

    problem: Problem
    considered: int
    """Number of all layouts: `legal` plus those that a rule removed."""
    legal: int
    """Number of layouts that break no rule."""
    illegal: dict[str, int]
    """Numbers of layouts by the rule that removed them before pricing."""
    elapsed_s: float
    """Seconds of the search itself, without imports and input."""
    tables: tuple[LayoutTable, ...]
    """The legal layouts: the enumerated ones, then those with solved degrees."""
    ranking: Ranking
    """The layouts that fit, best first.

    The first ones are ordered by their simulated pipelines, the others by closed forms. In a large space the
    others are ordered only when they are asked for.
    """
    rows: Ints
    """The row of `table` for each row of `ranking.prices`, and then for each row of its tail."""
    solutions: int = 0
    """Number of layouts with solved degrees; the counts and the table include them."""
    offloads: bool = False
    """True if nothing fits without offloading."""
    listed: Listed | None = field(default=None, compare=False)
    """Facts about the enumerated layouts, for other searches."""
    notes: tuple[str, ...] = ()
    """Notes for nodes of two kinds: the ranks of each kind, and the speed of one kind alone."""

    def __repr__(self) -> str:
        problem, cluster = self.problem, self.problem.cluster
        best = self.plan(0).layout.describe() if self.feasible else "none"
        return (
            f"<SearchResult of {problem.model.name} on {cluster.world_size} x {cluster.device.name}: "
            f"{self.considered:,} layouts, {self.legal:,} legal, {self.feasible:,} fit; best {best}>"
        )

    def _repr_html_(self) -> str:
        """The table of the first plans that notebooks show."""
        rows = [shown(plan.layout, plan.estimate) for plan in self.plans()]
        return html_table(repr(self).strip("<>"), COLUMNS, rows)

    def to_pandas(self, top: int = 100) -> pandas.DataFrame:
        """One row for each of the first `top` plans, best first: all fields of the layout, seconds, bytes and
        rates.

        Raises `InputError` where pandas is not installed.
        """
        return data_frame([record(plan.layout, plan.estimate) for plan in self.plans(top)])

    @cached_property
    def _whole(self) -> Ranking:
        return self.ranking.reaching(self.feasible)

    @property
    def prices(self) -> Prices:
        """The prices of the layouts that fit; those at the top of the ranking with simulated pipelines."""
        return self._whole.prices

    @property
    def places(self) -> Ints:
        """Rows of `prices`, best first."""
        return self._whole.places

    def first(self, count: int) -> Prices:
        """The prices of the first `count` places, best first, or of all places if there are fewer."""
        ranking = self.ranking.reaching(count)
        return ranking.prices.take(ranking.places[:count])

    @cached_property
    def fitting(self) -> Ints:
        """Rows of `table` that fit, best first."""
        return self.rows[self.places]

    @property
    def feasible(self) -> int:
        """The number of legal layouts that fit, which is the number of places in the ranking."""
        return len(self.ranking)

    @property
    def rejected(self) -> dict[str, int]:
        """Numbers of layouts by the rule that removed them, including `device_memory`."""
        too_big = self.legal - self.feasible
        return self.illegal | ({DEVICE_MEMORY: too_big} if too_big else {})

    @cached_property
    def table(self) -> LayoutTable:
        """The legal layouts."""
        return concatenate_tables(self.tables)

    @cached_property
    def order(self) -> Ints:
        """Rows of `table`, best first: those that fit by the objective, then the others by memory."""
        problem = self.problem
        other = np.setdiff1d(np.arange(self.legal), self.fitting)
        # Seldom asked for: what does not fit is not shown beside what does.
        memory = peak_memory(problem.model, problem.cluster, problem.engine, self.table, other)
        return np.concatenate([self.fitting, other[order(self.table, other, np.log(memory))]])

    @property
    def best(self) -> Plan | None:
        """The first plan that fits; None when none does."""
        return self.plan(0) if self.feasible else None

    def plans(self, top: int = SHOWN) -> list[Plan]:
        """The best `top` plans that fit, best first."""
        return [self.plan(rank) for rank in range(min(top, self.feasible))]

    def closest(self, top: int = 1) -> list[Plan]:
        """The `top` plans that do not fit and lack least memory, nearest first."""
        return [self.plan(rank) for rank in range(self.feasible, min(self.feasible + top, self.legal))]

    def plan(self, rank: int) -> Plan:
        """The plan at a place of the ranking, 0 being the first."""
        layout, estimate = self._candidate(rank)
        return Plan(
            model=self.problem.model,
            cluster=self.problem.cluster,
            engine=self.problem.engine,
            layout=layout,
            estimate=estimate,
            fits=rank < self.feasible,
            reason=self._reason(rank),
            objective=self.problem.objective,
            preference=self.problem.preference,
            considered=self.considered,
            legal=self.legal,
            feasible=self.feasible,
            rejected=self.rejected,
        )

    @cached_property
    def _candidates(self) -> dict[int, tuple[Layout, Estimate]]:
        """Cached plans, as making a plan takes time and comparisons use plans repeatedly."""
        return {}

    def _candidate(self, rank: int) -> tuple[Layout, Estimate]:
        if rank not in self._candidates:
            where = self.problem.model, self.problem.cluster, self.problem.engine
            if rank < self.feasible:
                ranking = self.ranking if rank < len(self.ranking.places) else self._whole
                place = int(ranking.places[rank])
                layout, cost = ranking.prices.table.layout(place), ranking.prices.estimate(place)
            else:
                layout = self.table.layout(int(self.order[rank]))
                cost = estimate(*where, layout)
            self._candidates[rank] = layout, cost
        return self._candidates[rank]

    def _reason(self, rank: int) -> str:
        if rank >= self.feasible:
            return reasons.memory_reason(self._candidate(rank)[1], self.problem.cluster)
        if self.feasible == 1:
            return self._resort + "the only legal layout that fits into memory"
        best = self._candidate(0)
        if rank:
            return self._resort + self.reason_behind(self._candidate(rank))
        if self.first_faster:
            fastest = self._candidate(self.first_faster)
            return self._resort + reasons.preferred_reason(self.problem.objective, best, fastest, self.room)
        others = (self._candidate(place) for place in range(1, min(self.feasible, MOST)))
        rival = next((one for one in others if other_form(best, one) is None), self._candidate(1))
        return self._resort + reasons.lead_reason(self.problem.objective, best, rival)

    def reason_behind(self, candidate: tuple[Layout, Estimate]) -> str:
        """The reason why a plan that fits ranks behind the first one."""
        objective, best = self.problem.objective, self._candidate(0)
        if objective != "memory":
            mine, first = (metric(objective, each[1]) for each in (candidate, best))
            if gain(objective, mine, first) > 1 + EQUAL:
                return reasons.ahead_reason(objective, candidate, best, self.room)
        return reasons.lag_reason(objective, candidate, best)

    @property
    def room(self) -> reasons.Room:
        """The memory that plans should leave free."""
        memory = self.problem.cluster.memory_bytes
        return reasons.Room(memory, self.problem.preference.headroom_bytes(memory))

    @property
    def first_faster(self) -> int:
        """The place, from 0, of the fastest of the plans that are faster than the first by the estimate.

        0 where the first is the fastest; else the first is simpler, or leaves more memory
        (`planner.ranking.preferred`).
        """
        objective = self.problem.objective
        if objective == "memory" or not self.feasible:
            return 0
        scores = logarithms(objective, self.first(MOST))[0]
        place = int(scores.argmin())
        return place if scores[place] < scores[0] - EQUAL else 0

    @property
    def fastest(self) -> Plan | None:
        """The plan that is best by the objective alone; None where none fits."""
        return self.plan(self.first_faster) if self.feasible else None

    @property
    def _resort(self) -> str:
        return OFFLOAD_REASON if self.offloads else ""

"""Reasons for the best plan and against others, the bottleneck, and the gain of changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from costmodels.dataclass import dataclass
from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import FORMATS, code_of
from planner import advice
from planner.api import search, search_problem
from planner.explanation.changes import Binding, Change, binding, changes
from planner.explanation.comparison import Comparison, compare
from planner.explanation.mixed_neighbours import neighbour_searches
from planner.explanation.neighbours import Neighbour, neighbours
from planner.explanation.outcome import Verdict, outcome_of
from planner.explanation.text import (
    HEADS,
    MOST_NEIGHBOURS,
    aligned_rows,
    change_line,
    comparison_rows,
    cost_line,
    lead_line,
    neighbour_line,
    verdict_lines,
)
from planner.inputs.batch import Batch
from planner.inputs.keywords import keywords
from planner.inputs.pins import PinInput, Pins, degrees_of
from planner.objective import EQUAL
from planner.plan import Plan
from planner.plan_rows import data_frame
from planner.problem import Problem, SearchKeywords
from planner.processes import Calls
from planner.proposals.proposal import Proposal, proposal_lines
from planner.ranking.result import SearchResult
from planner.ranking.ties import MOST, indistinguishable
from planner.solve.offload import OFFLOAD_REASON
from planner.solve.recompute import MODULE_SETS
from planner.space.grid import SINGLE_VALUES

if TYPE_CHECKING:
    import pandas
    from typing_extensions import Unpack


@dataclass(frozen=True, repr=False)
class Explanation:
    """The answer of `planner explain`; `print` writes all of it."""

    result: SearchResult
    """The search that is explained."""
    indistinguishable: tuple[int, ...]
    """Places, from 1, of the plans within the estimate's error of the best; itself included."""
    comparisons: tuple[Comparison, ...]
    """The best plan against the next one with another cost, and against the named ones."""
    verdicts: tuple[Verdict, ...]
    """Verdicts on the named layouts, except those that the best plan is compared with."""
    binding: Binding | None
    """The bottleneck of the best plan; None where nothing fits, or changes were not asked for."""
    changes: tuple[Change, ...]
    """The gain of each change; none where nothing fits, or changes were not asked for."""
    neighbours: tuple[Neighbour, ...]
    """The layouts one step from the best."""
    advice: str | None
    """The closest plan if nothing fits, the bytes that it lacks, and the changes that help."""
    proposals: tuple[Proposal, ...] = ()
    """The smallest change of each kind with which a layout fits, if nothing fits."""

    def __repr__(self) -> str:
        problem, cluster = self.result.problem, self.result.problem.cluster
        best = "nothing fits" if self.result.best is None else f"best {self.result.best.layout.describe()}"
        held = "" if self.binding is None else f", bottleneck {self.binding.constraint}"
        return (
            f"<Explanation of {problem.model.name} on {cluster.world_size} x {cluster.device.name}: "
            f"{best}{held}>"
        )

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def _repr_html_(self) -> str:
        """The answer in words for notebooks, with the best plan term by term against the others."""
        import html  # Notebooks alone ask for one, and it loads a table of all entities.

        return f"<pre>{html.escape(str(self))}</pre>"

    def to_pandas(self) -> pandas.DataFrame:
        """A row for each term of each comparison, the best plan against another; seconds and bytes.

        Raises `InputError` where pandas is not installed.
        """
        return data_frame(
            [
                {
                    "against": comparison.second.layout.describe(),
                    "term": term.name,
                    "unit": unit,
                    "best": term.first,
                    "other": term.second,
                    "difference": term.difference,
                }
                for comparison in self.comparisons
                for unit, terms in (("seconds", comparison.time), ("bytes", comparison.memory))
                for term in terms
            ]
        )


def _lines(found: Explanation) -> Iterator[str]:
    result, best = found.result, found.result.best
    objective = result.problem.objective
    shown = best or result.closest()[0]
    yield f"{'best' if best else 'closest'}: {shown.layout.describe()}"
    yield f"why: {shown.reason}"
    if best is not None:
        yield cost_line(best)
    for comparison in found.comparisons:
        yield ""
        yield f"against {comparison.second.layout.describe()}"
        yield lead_line(comparison)
        yield from aligned_rows([HEADS, *comparison_rows(comparison)])
    for verdict in found.verdicts:
        yield ""
        yield from verdict_lines(verdict)
    if found.neighbours:
        yield ""
        yield "change one setting, re-optimise the rest"
        yield from (neighbour_line(one, objective) for one in found.neighbours[:MOST_NEIGHBOURS])
    if found.binding is not None:
        yield ""
        yield f"bottleneck: {found.binding.constraint}. {found.binding.reason}"
    yield from (change_line(change, objective) for change in found.changes)
    if found.advice is not None:
        yield ""
        yield found.advice
        yield from proposal_lines(found.proposals)


@keywords(SearchKeywords)
def explain(
    model: ModelSpec | str | Path,
    world_size: int,
    *,
    layout: PinInput | Sequence[PinInput] = None,
    against: PinInput | Sequence[PinInput] = None,
    what_if: bool = True,
    **job: Unpack[SearchKeywords],
) -> Explanation:
    """Search as `planner.search` does, with the same keywords, and explain the answer.

    Args:
        layout: a layout to judge: degrees such as `"tp=16,pp=2"`, as `Layout.describe` spells them, or a
            mapping; or a list of such. Degrees that are not given get their best values.
        against: a layout that is also compared with the best plan, term by term.
        what_if: whether to search again with twice the memory, links, batch and devices and without each pin,
            which takes as long as that many searches.

    Raises:
        InputError: as `search`, and for a wrong `layout`.

    Examples:
        >>> import planner
        >>> job = dict(world_size=8, device="h100", global_batch_size=64)
        >>> found = planner.explain("llama3-8b", layout="tp=3", what_if=False, **job)
        >>> found.verdicts[0].outcome, found.verdicts[0].legal
        ('illegal', 0)
    """
    result = search(model, world_size=world_size, **job)
    return explain_result(result, layouts=_several(layout), against=_several(against), what_if=what_if)


def explain_plan(
    plan: Plan,
    *,
    layout: PinInput | Sequence[PinInput] = None,
    against: PinInput | Sequence[PinInput] = None,
    what_if: bool = True,
) -> Explanation:
    """The explanation of a saved plan: its model, cluster, engine and batch are searched, and the plan is
    judged.

    The original pins are not known. Degrees that the search neither varies nor solves stay as in the plan.
    """
    result = search_problem(problem_of(plan))
    return explain_result(
        result,
        layouts=[degrees_of(plan.layout), *_several(layout)],
        against=_several(against),
        what_if=what_if,
    )


def explain_result(
    result: SearchResult,
    *,
    layouts: Sequence[PinInput] = (),
    against: Sequence[PinInput] = (),
    what_if: bool = True,
) -> Explanation:
    """The explanation of a finished search."""
    best = result.best
    rivals = [outcome_of(result, one) for one in against]
    comparisons = [compare(best, _runner_up(result))] if best is not None and result.feasible > 1 else []
    comparisons += [rival.comparison for rival in rivals if rival.comparison is not None]
    with changes(result) if what_if else Calls[Change]([], 0) as searched:
        near = neighbours(result)
        if result.problem.cluster.parts:
            near = neighbour_searches(result, near)
        found = searched.results()
    error = None if result.feasible else advice.no_layout_fits(result)
    return Explanation(
        result=result,
        indistinguishable=indistinguishable(result),
        comparisons=tuple(comparisons),
        verdicts=tuple(
            [outcome_of(result, one) for one in layouts]
            + [rival for rival in rivals if rival.comparison is None]
        ),
        binding=binding(result, found, near) if what_if else None,
        changes=tuple(found),
        neighbours=tuple(near),
        advice=None if error is None else str(error),
        proposals=() if error is None else error.proposals,
    )


def _runner_up(result: SearchResult) -> Plan:
    """The next plan that differs in speed or memory, among the first ones of the ranking."""
    prices = result.first(MOST)
    costs = np.log([prices.tokens_per_s, prices.peak_memory_bytes])
    differ = (np.abs(costs - costs[:, :1]) > EQUAL).any(axis=0)
    return result.plan(int(differ.argmax()) if differ.any() else 1)


def problem_of(plan: Plan) -> Problem:
    """The question that a saved plan answers, as far as the plan tells.

    The original pins are not known. Degrees that the search neither varies nor solves stay as in the plan.
    """
    layout = plan.layout
    usual_formats = {name: Layout.model_fields[name].default for name in FORMATS[1:]}
    fixed = {**SINGLE_VALUES, **usual_formats}
    for name in _found_by_search(plan):
        fixed.pop(name, None)
    pins: Pins = {
        name: getattr(layout, name) for name, usual in fixed.items() if getattr(layout, name) != usual
    }
    if "recompute_modules" not in _found_by_search(plan):
        names = ["recompute", "recompute_method", "recompute_num_layers"]
        names += ["recompute_modules"] * (layout.recompute == "selective")
        pins |= {name: getattr(layout, name) for name in names}
    return Problem(
        model=plan.model,
        cluster=plan.cluster,
        engine=plan.engine,
        batch=Batch(layout.global_batch_size),
        precision=layout.precision,
        pins=pins,
        objective=plan.objective,
        preference=plan.preference,
    )


def _found_by_search(plan: Plan) -> set[str]:
    """Degrees that a search does not enumerate, but may have solved for `plan`."""
    layout, names = plan.layout, set[str]()
    usual = layout.recompute_method, layout.recompute_num_layers, layout.recompute_modules
    enumerated = usual[:2] == ("uniform", 1) and usual[2] in ((), ("core_attention",))
    solves = plan.objective != "memory"
    modules = code_of("recompute_modules", layout.recompute_modules)
    sets = layout.recompute == "full" or modules in MODULE_SETS
    layers = layout.recompute_method == "block" or layout.recompute_num_layers == 1
    if enumerated or (solves and sets and layers):
        names |= {"recompute_modules", "recompute_method", "recompute_num_layers"}
    if solves:
        names.add("zero_replicas")
    if plan.reason.startswith(OFFLOAD_REASON):
        names |= {"offload_activations", "offload_optimizer"}
    return names


def _several(given: PinInput | Sequence[PinInput]) -> list[PinInput]:
    """One layout, or several: a string, a mapping, or a list of these."""
    if given is None:
        return []
    if isinstance(given, (str, dict)):
        return [given]
    return list(given)

"""The rank of published layouts of experts among all that their software could have run.

python -m benchmarks.experts [--json] [--rows TEXT]

Every layout that fits is ranked by the model's own estimate. Degrees that the experts could not choose are
pinned (`experts.yaml` lists them with reasons). The published layout should be near the top, with the best
values of its unpublished degrees.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cli.tables import console, table
from costmodels.catalogue.yaml_files import parse
from costmodels.pricing import Prices
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import code_of
from planner import search
from planner.explanation.outcome import outcome_of, parse_layout
from planner.inputs.engine import resolve_engine
from planner.inputs.model import resolve_model
from planner.preference import usual_complexity
from planner.ranking.complexity import points_of
from planner.ranking.result import SearchResult
from planner.ranking.ties import chance_to_be_faster

DATA = Path(__file__).with_name("experts.yaml")

NEAR_THE_TOP = 0.05
"""Share of the ranking that counts as its top."""

WIDTH = 170
"""Width of the printed table in characters if the output is no terminal."""


@dataclass(frozen=True)
class Ranked:
    """A published layout in the ranking of its space."""

    group: str
    model: str
    devices: int
    published: str
    """The degrees that were published."""
    layout: str
    """The best layout with the published degrees; empty if none is legal."""
    not_searched: str | None
    """The reason why the search does not rank a legal layout; `place` is then its place if it were ranked."""
    why_not: str | None
    """The reason why the layout does not fit or is illegal; None if it has a place."""
    best: str
    """The fastest of the ranking."""
    ours: str
    """The plan that a user gets: the simplest of the plans that tie with the fastest."""
    ours_s: float
    """Estimated step time of ours, in seconds."""
    fastest_s: float
    """Estimated step time of the fastest, in seconds."""
    chance: float
    """Probability that the fastest plan is really faster than ours."""
    points: tuple[float, float]
    """Points of complexity of our plan, and of the fastest."""
    place: int | None
    """Place of the published layout, from 1; None where the layout is not ranked."""
    feasible: int
    """Number of layouts in the ranking, which are those that fit."""
    legal: int
    """Number of legal layouts, including those that do not fit."""
    percentile: float | None
    """Place over layouts, in percent."""
    slower: float | None
    """Estimated step time of the published layout over that of the fastest."""
    estimated_s: float | None
    """Estimated step time of the published layout, in seconds."""
    measured_s: float | None
    """Published step time, in seconds."""

    @property
    def near_the_top(self) -> bool:
        """True if the place is within the first 5 % of the ranking, rounded up."""
        return self.place is not None and self.place <= math.ceil(NEAR_THE_TOP * self.feasible)


def rows(only: str = "") -> Iterator[Ranked]:
    """Every published layout whose group or model has `only` in its name, ranked."""
    for group in parse(DATA.read_text(encoding="utf-8"), DATA.name)["groups"]:
        for row in group["rows"]:
            if only.lower() in f"{group['name']} {row['model']}".lower():
                yield ranked(group, row)


def ranked(group: dict[str, Any], row: dict[str, Any]) -> Ranked:
    """One published layout among those of its space."""
    result, preferred = (_searched(group, row, prefer) for prefer in ("fastest", "simple"))
    model, legal = result.problem.model, result.legal
    if group.get("equal_stages"):
        (result, legal), (preferred, _) = (_with_equal_stages(each) for each in (result, preferred))
    ours, fastest = preferred.first(1), result.first(1)
    place, best = _place(result, row["layout"]), result.plan(0)
    plan = None if place is None else result.plan(place - 1)
    not_searched, reason = None, ""
    if place is None:
        verdict = outcome_of(result, row["layout"])
        place, plan, reason = verdict.place, verdict.plan, verdict.reason
        not_searched = verdict.not_searched
    return Ranked(
        group=group["name"],
        model=model.name,
        devices=row["devices"],
        published=row["layout"],
        layout="" if plan is None else plan.layout.describe(),
        not_searched=not_searched,
        why_not=None if place else reason,
        best=best.layout.describe(),
        ours=preferred.plan(0).layout.describe(),
        ours_s=float(ours.step_time_s[0]),
        fastest_s=float(fastest.step_time_s[0]),
        chance=float(chance_to_be_faster(ours, fastest)[0]),
        points=(_points(ours), _points(fastest)),
        place=place,
        feasible=result.feasible,
        legal=legal,
        percentile=None if place is None else 100 * place / result.feasible,
        slower=plan.estimate.step_time_s / best.estimate.step_time_s if plan and place else None,
        estimated_s=plan.estimate.step_time_s if plan and place else None,
        measured_s=row.get("seconds"),
    )


def _searched(group: dict[str, Any], row: dict[str, Any], prefer: str) -> SearchResult:
    """The search of a job, with the preferred plan first."""
    named = row["model"]
    model = ModelSpec.model_validate(named) if isinstance(named, dict) else named
    return search(
        resolve_model(model, seq=row.get("seq")),
        world_size=row["devices"],
        device=group["device"],
        device_memory_gib=group.get("memory_gib"),
        global_batch_size=row["batch"],
        precision=group["precision"],
        engine=resolve_engine(group["engine"]).with_constants(group.get("switches", {})),
        pin=group["pins"],
        forbid=group.get("forbid"),
        prefer=prefer,
        **group.get("network", {}),
    )


def _points(prices: Prices) -> float:
    return float(points_of(usual_complexity(), prices.table, prices.cluster, prices.engine)[0])


def _place(result: SearchResult, layout: str) -> int | None:
    """Place, from 1, of the first layout in the ranking with the degrees of `layout`; None if there is
    none."""
    table = result.table.take(result.fitting)
    same = np.ones(len(table), dtype=bool)
    for name, value in parse_layout(layout).items():
        same &= getattr(table, name) == code_of(name, value)
    return 1 + int(same.argmax()) if same.any() else None


def _with_equal_stages(result: SearchResult) -> tuple[SearchResult, int]:
    """The ranking of the layouts with equal stages, and the number of legal ones among them."""
    equal = np.array([len(set(split)) == 1 for split in result.table.splits])[result.table.split]
    whole = result.ranking.reaching(result.feasible)
    ranking = replace(whole, places=whole.places[equal[result.fitting]])
    return replace(result, ranking=ranking), int(equal.sum())


def main() -> None:
    """Print where each layout ranks."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.experts", description="Rank the layouts that experts published among all others."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a layout, as a list")
    parser.add_argument("--rows", default="", metavar="TEXT", help="only those with TEXT in source or model")
    given = parser.parse_args()
    found = list(rows(given.rows))
    if given.json:
        print(json.dumps([asdict(one) for one in found], indent=2))
        return
    out = console()
    if not out.is_terminal:
        out.width = WIDTH
    columns = ["source", "model", "devices", "published", "place", "of", "top %", "top % of legal"]
    columns += ["step / fastest", "step s", "published s", "ours s", "fastest s", "points"]
    lines = [
        [
            one.group,
            one.model,
            str(one.devices),
            one.published,
            *_shown((one.place, "d"), (one.feasible, ",d"), (one.percentile, ".1f")),
            *_shown((one.place and 100 * one.place / one.legal, ".1f"), (one.slower, ".3f")),
            *_shown((one.estimated_s, ".4g"), (one.measured_s, ".4g")),
            *_shown((one.ours_s, ".4g"), (one.fastest_s, ".4g")),
            _points_text(one),
        ]
        for one in found
    ]
    out.print(table(columns, lines, left=("source", "model", "published")))
    out.print()
    for one in found:
        job = f"{one.model} on {one.devices}"
        out.print(f"{job}: theirs {one.layout or one.published}", markup=False)
        same = " (the same)" if one.ours == one.layout else ""
        out.print(f"    ours {one.ours}{same}", markup=False)
        if one.best != one.ours:
            gain = f"{100 * (one.ours_s / one.fastest_s - 1):.1f} % faster"
            likely = f"{100 * one.chance:.0f} % likely to be"
            out.print(f"    fastest {one.best}: {gain}, {likely}", markup=False)
        if one.why_not or one.not_searched:
            out.print(f"{job}: {one.why_not or one.not_searched}", markup=False)
    out.print()
    for share, what in ((1.0, "first, or faster than what the search finds"), (1.1, "at most 10 % slower")):
        count = sum(one.slower is not None and one.slower <= share for one in found)
        out.print(f"{count} of {len(found)} are {what}")
    near = sum(one.ours_s <= 1.01 * one.fastest_s for one in found)
    simpler = sum(one.ours_s > 1.01 * one.fastest_s and one.points[0] < one.points[1] for one in found)
    split = sum("schedule=" in one.ours for one in found)
    out.print(
        f"ours: {near} of {len(found)} are at most 1 % slower than the fastest, {simpler} more are simpler, "
        f"{split} split backward"
    )
    top = sum(one.near_the_top for one in found)
    out.print(f"{top} of {len(found)} are in the top {100 * NEAR_THE_TOP:.0f} % of the layouts that fit")


def _points_text(one: Ranked) -> str:
    """Points of our plan, and of the fastest if it is another plan."""
    ours, fastest = (f"{each:.3g}" for each in one.points)
    return ours if one.ours == one.best else f"{ours}, {fastest}"


def _shown(*values: tuple[float | None, str]) -> list[str]:
    return ["-" if value is None else format(value, digits) for value, digits in values]


if __name__ == "__main__":
    main()

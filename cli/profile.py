"""`planner profile`: run one rank of a plan on one real device, and compare its seconds with the plan's."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, ClassVar

from cli.status import Status
from cli.tables import console, table
from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.spec.record import in_seconds
from planner.history.step_parts import TERMS
from planner.options.flags import flag, flag_groups
from planner.plan import Plan
from runtime.dryrun.requirements import check_torch, ranks_to_trace
from runtime.processes.interrupts import exit_on_ctrl_c
from runtime.settings.checks import check_plan

if TYPE_CHECKING:
    from runtime.dryrun.rank_profile import RankProfile


@dataclass(frozen=True)
class ProfileOptions:
    """The rank to run and the format of the result."""

    SECTIONS: ClassVar[dict[str, str]] = {"plan": "Profile"}

    plan: str | None = flag(None, "Plan file of `planner suggest --save`.", metavar="FILE")
    rank: int = flag(0, "Rank to run.")
    json: bool = flag(False, "Print one JSON object instead of a table.")


@flag_groups(options=ProfileOptions)
def profile(options: ProfileOptions) -> None:
    """Run one rank of a plan on one real device, and show its seconds by part, beside the prediction.

    The computation of the rank is exact, with fewer microbatches. No other rank exists, so seconds of
    communication and of the bubble are predictions. A device of the same maker stands in for that of the
    plan, such as an h200 for an h100. Predictions are then for the device that runs. Their ratio scales the
    step to the plan's device.
    """
    if options.plan is None:
        raise InputError("--plan FILE is missing: the plan whose rank to run, of planner suggest --save")
    plan = Plan.load(options.plan)
    ranks_to_trace(plan.layout, None, options.rank)
    check_plan(plan, plan.layout.world_size)
    check_torch("planner profile trains for a few steps", plan.layout.precision, plan.layout.optimizer)
    with Status() as status:
        status.tell("loading PyTorch")
        # Only here: it takes seconds, and bad input should not wait for it.
        with exit_on_ctrl_c():
            from runtime.dryrun.rank_profile import profile_rank
        status.tell(f"running rank {options.rank} of {plan.layout.world_size}")
        found = profile_rank(plan, options.rank)
    if options.json:
        print(json.dumps(found.as_json(), indent=2), flush=True)
    else:
        _print(plan, found)


def _print(plan: Plan, found: RankProfile) -> None:
    screen = console()
    layers = "compiled" if found.compiled else "eager"
    screen.print(f"[bold]{plan.model.name}[/bold]: {plan.layout.describe()}")
    counts = " and ".join(map(str, found.micro_batches))
    screen.print(
        f"rank {found.rank} of {plan.layout.world_size} (pipeline rank {found.pipeline_rank}) on "
        f"{found.device}, {layers} layers: steps of {counts} of {plan.layout.micro_batches} microbatches"
    )
    if found.device != found.plan_device:
        screen.print(
            f"{found.device} stands in for {found.plan_device}: both columns are of {found.device}. Scaled "
            f"by the predictions' ratio, a step of {found.plan_device} takes {in_seconds(found.plan_step_s)}"
        )
    rows = [
        _row(TERMS[name].split(",")[0], found.predicted[name], found.measured[name])
        for name in found.measured
    ]
    rows.append(_row("the rank by itself", sum(found.predicted.values()), sum(found.measured.values())))
    rows += [
        [name.replace("_", " "), in_seconds(seconds), "of the plan", ""]
        for name, seconds in found.network.items()
        if seconds
    ]
    whole = sum(found.predicted.values()) + sum(found.network.values())
    rows.append(_row("step", whole, found.step_s))
    columns = ["seconds of a step", "predicted", "measured", "predicted / measured"]
    screen.print(table(columns, rows, left=columns[:1]))


def _row(name: str, predicted: float, measured: float) -> list[str]:
    ratio = f"{predicted / measured:.2f}" if measured else ""
    return [name, in_seconds(predicted), in_seconds(measured), ratio]

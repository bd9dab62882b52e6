"""Quality of the order in which `planner launch --try` measures plans, on layouts that `planner sweep` has
measured.

python -m benchmarks.trial_order SWEEP.jsonl... [--json]

Each file is a pool of plans of one model and number of ranks. The program prints a row for each number of
tries: the plans that would have been measured, the loss of time of the kept plan against the best of the
pool, and the stated regret.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from costmodels.errors import InputError
from planner import Plan
from planner.options.flags import run
from runtime.job.measurement import Measurement
from runtime.launch.trial_order import try_plans
from runtime.launch.trials import Trial


def played(plans: list[Plan], seconds: dict[str, float]) -> list[dict[str, Any]]:
    """A row for each number of tries: the needed tries, and the real and the stated regret in per cent.

    Args:
        plans: by predicted time.
        seconds: measured, by the description of the layout.
    """

    def measured(plan: Plan) -> Trial:
        return Trial(plan, Measurement(seconds[plan.layout.describe()], 1))

    rows = []
    for most in range(1, len(plans) + 1):
        tries = try_plans(plans, most, measured)
        kept = seconds[tries.best.plan.layout.describe()]
        rows.append(
            {
                "tries": most,
                "measured": len(tries.trials),
                "kept": tries.best.plan.layout.describe(),
                "regret_percent": 100 * (kept / min(seconds.values()) - 1),
                "said_percent": 100 * (tries.regret or 0.0),
            }
        )
    return rows


def tries(
    files: Annotated[list[Path], typer.Argument(help="sweep.jsonl of planner sweep.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Simulate --try with the measurements of sweeps."""
    found = {}
    for file in files:
        try:
            cases = [json.loads(line) for line in file.read_text().splitlines()]
        except (OSError, ValueError) as error:
            raise InputError(f"{file}: no file of planner sweep ({error})") from None
        ran = [case for case in cases if case.get("measured_s")]
        plans = [Plan.model_validate(case["plan"]) for case in ran]
        plans.sort(key=lambda plan: plan.estimate.step_time_s)
        found[str(file)] = played(plans, {case["layout"]: case["measured_s"] for case in ran})
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for name, rows in found.items():
        print(name)
        for row in rows:
            print(
                f"  --try {row['tries']}: measured {row['measured']}, regret {row['regret_percent']:.1f} %, "
                f"said at most {row['said_percent']:.1f} %; kept {row['kept']}"
            )


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(tries)
    run(app, "benchmarks.trial_order")

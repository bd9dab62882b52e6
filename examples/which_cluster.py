"""Which cluster to rent for a job: days and money of each offer, cheapest first.

    python examples/which_cluster.py [MODEL] [TOKENS]

Prices are made up to show the form: put in what you are offered.
"""

from __future__ import annotations

import sys

import planner

OFFERS = (
    ("a100-80g", 64, 1.6),
    ("a100-80g", 256, 1.6),
    ("h100", 64, 2.5),
    ("h100", 128, 2.5),
    ("b200", 64, 5.0),
    ("mi300x", 64, 2.3),
)
"""Device, number of devices, and money for one device and hour."""

MOST_DAYS = 30.0
"""Days until the model must be there."""


def main(model: str = "llama3-8b", tokens: str = "300B") -> None:
    """Plan the job on each offer; what takes too long, or does not fit, is said."""
    rows = []
    for device, count, price in OFFERS:
        try:
            plan = planner.suggest(model, world_size=count, device=device, max_global_batch_size=512)
        except planner.InputError as error:
            print(f"{count} x {device}: {error}")
            continue
        rows.append((plan.run(tokens, price_per_hour=price), device, count, plan))
    print(f"{'money':>10} {'range':>21} {'days':>6} {'in time':>8}  cluster")
    for run, device, count, plan in sorted(rows, key=lambda row: row[0].money or 0.0):
        cluster = f"{count} x {device}: {plan.layout.describe()}"
        print(
            f"{run.money:10,.0f} {run.money_low:10,.0f} {run.money_high:10,.0f} {run.days:6.1f} "
            # A promise holds where the end of the range does.
            f"{'yes' if run.days_high <= MOST_DAYS else 'no':>8}  {cluster}"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])

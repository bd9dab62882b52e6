"""Software that plans can be written for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from costmodels.errors import InputError
from costmodels.spelling import nearest
from planner.formats.deepspeed_export import export_deepspeed
from planner.formats.export import Export
from planner.formats.megatron_export import export_megatron
from planner.plan import Plan

TARGETS: dict[str, Callable[[Plan], Export]] = {
    "megatron": lambda plan: export_megatron(plan.model, plan.layout),
    "mindspeed": lambda plan: export_megatron(plan.model, plan.layout, "mindspeed"),
    "deepspeed": lambda plan: export_deepspeed(plan.layout),
}
"""What writes a plan, by the name of the software."""


def export(plan: Plan | str | Path, *, to: str) -> Export:
    """A plan, or the file of one, in the words of another software.

    `Export.text` is what it takes; `Export.inexpressible` names each part of the plan that it has no words
    for. Raises `InputError` for a software that is not in `TARGETS`, and for a file that is no plan.
    """
    if to not in TARGETS:
        raise InputError(f"export to {to!r}: {nearest(to, TARGETS) or 'expected ' + ', '.join(TARGETS)}")
    return TARGETS[to](plan if isinstance(plan, Plan) else Plan.load(plan))

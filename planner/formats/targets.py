"""Software that plans can be written for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from costmodels.errors import InputError
from costmodels.spelling import nearest
from planner.formats.accelerate_export import export_accelerate
from planner.formats.bridge_export import export_bridge
from planner.formats.deepspeed_export import export_deepspeed
from planner.formats.export import Export
from planner.formats.megatron_export import export_megatron
from planner.formats.mindformers_export import export_mindformers
from planner.formats.nanotron_export import export_nanotron
from planner.formats.torchtitan_export import export_torchtitan
from planner.plan import Plan

TARGETS: dict[str, Callable[[Plan], Export]] = {
    "megatron": lambda plan: export_megatron(plan.model, plan.layout),
    "megatron-bridge": lambda plan: export_bridge(plan.model, plan.layout),
    "torchtitan": lambda plan: export_torchtitan(plan.model, plan.layout),
    "deepspeed": lambda plan: export_deepspeed(plan.model, plan.layout),
    "nanotron": lambda plan: export_nanotron(plan.model, plan.layout),
    "mindspeed": lambda plan: export_megatron(plan.model, plan.layout, "mindspeed"),
    "mindformers": lambda plan: export_mindformers(plan.model, plan.layout),
    "accelerate": lambda plan: export_accelerate(plan.model, plan.layout, plan.cluster.nodes),
}
"""What writes a plan, by the name of the software."""

MTP_WORDS = ("--mtp-num-layers", "mtp_num_layers")
"""The number of modules that predict further tokens, as a flag and as a field."""


def export(plan: Plan | str | Path, *, to: str) -> Export:
    """A plan, or the file of one, in the words of another software.

    `Export.text` is what it takes; `Export.inexpressible` names each part of the plan that it has no words
    for. Raises `InputError` for a software that is not in `TARGETS`, and for a file that is no plan.
    """
    if to not in TARGETS:
        raise InputError(f"export to {to!r}: {nearest(to, TARGETS) or 'expected ' + ', '.join(TARGETS)}")
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    found = TARGETS[to](plan)
    if plan.model.mtp is not None and not any(word in found.text for word in MTP_WORDS):
        what = f"mtp={plan.model.mtp.depths}: multi-token prediction is set up in the software's own words"
        found = replace(found, inexpressible=(*found.inexpressible, what))
    if plan.model.lora is None:
        return found
    base = plan.model.lora.quantize_base
    named = f"lora={plan.model.lora.rank}" + ("" if base is None else f" on a base in {base}")
    what = f"{named}: adapters are set up by the training script there, not written here"
    return replace(found, inexpressible=(*found.inexpressible, what))

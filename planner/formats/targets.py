"""Software for which plans can be written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from costmodels.errors import InputError
from costmodels.spelling import nearest
from planner.formats.hugging_face.accelerate_export import export_accelerate
from planner.formats.hugging_face.deepspeed_export import export_deepspeed
from planner.formats.megatron.dispatch import dispatch_flags
from planner.formats.megatron.export import export_megatron
from planner.formats.mindformers.export import export_mindformers
from planner.formats.nanotron.export import export_nanotron
from planner.formats.nemo.bridge_export import export_bridge
from planner.formats.torchtitan.export import export_torchtitan
from planner.formats.writing.export import Export
from planner.plan import Plan


def _overlaps(plan: Plan) -> bool:
    """Return whether the price of a plan assumes overlap of data-parallel communication."""
    return plan.engine.overlap.data_parallel > 0


def _exchange(plan: Plan) -> dict[str, str]:
    """Flags of Megatron-Core for dispatch that the price of a plan assumes."""
    return dispatch_flags(plan.model, plan.layout, plan.engine.for_device(plan.cluster.device))


def _sums_in_fp32(plan: Plan) -> bool:
    """Return whether the price of a plan assumes gradients that are summed in fp32."""
    policy = plan.engine.memory_policy(plan.layout.precision)
    return policy.gradients >= 4 and plan.layout.gradient_reduction == "fp32"


TARGETS: dict[str, Callable[[Plan], Export]] = {
    "megatron": lambda plan: export_megatron(
        plan.model, plan.layout, overlaps=_overlaps(plan), exchange=_exchange(plan)
    ),
    "megatron-bridge": lambda plan: export_bridge(
        plan.model, plan.layout, _overlaps(plan), _exchange(plan), wide_gradients=_sums_in_fp32(plan)
    ),
    "torchtitan": lambda plan: export_torchtitan(plan.model, plan.layout),
    "deepspeed": lambda plan: export_deepspeed(plan.model, plan.layout),
    "nanotron": lambda plan: export_nanotron(plan.model, plan.layout),
    "mindspeed": lambda plan: export_megatron(plan.model, plan.layout, "mindspeed", _overlaps(plan)),
    "mindformers": lambda plan: export_mindformers(plan.model, plan.layout),
    "accelerate": lambda plan: export_accelerate(plan.model, plan.layout, plan.cluster.nodes),
}
"""Writers of a plan, by the name of the software."""

WORDS_OF = {
    "nemo": "megatron-bridge",
    "megatron-deepspeed": "megatron",
    "megatron-deepspeed-flash": "megatron",
    "bloom": "megatron",
    "aleph-scaling": "megatron",
    "fsdp": "torchtitan",
    "mindformers-dynamic": "mindformers",
    "mindformers-flash": "mindformers",
}
"""The export target of an engine, if it differs from the engine's name."""


def target_of(engine: str) -> str | None:
    """The export target for plans of an engine; None for an unknown engine."""
    target = WORDS_OF.get(engine, engine)
    return target if target in TARGETS else None


MTP_WORDS = ("--mtp-num-layers", "mtp_num_layers")
"""Names of the number of MTP modules: a flag and a field."""


def export(plan: Plan | str | Path, *, to: str) -> Export:
    """A plan, or a plan file, as flags or a file of other software.

    `Export.text` has the flags or the file. `Export.inexpressible` names each part of the plan that the
    software does not support. `Export.in_script` names parts that its training script decides. Raises
    `InputError` for a software that is not in `TARGETS`, and for a file that is not a plan.
    """
    if to not in TARGETS:
        raise InputError(f"export to {to!r}: {nearest(to, TARGETS) or 'expected ' + ', '.join(TARGETS)}")
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    found = TARGETS[to](plan)
    missing: list[str] = []
    if found.inexpressible_fields & {"tensor_parallel", "pipeline_parallel", "context_parallel"}:
        missing.append(f"data_parallel={plan.layout.data_parallel}: devices that other degrees leave join it")
    if plan.model.mtp is not None and not any(word in found.text for word in MTP_WORDS):
        missing.append(
            f"mtp={plan.model.mtp.depths}: multi-token prediction is set up in the software's own words"
        )
    if plan.model.lora is not None:
        base = plan.model.lora.quantize_base
        named = f"lora={plan.model.lora.rank}" + ("" if base is None else f" on a base in {base}")
        missing.append(f"{named}: adapters are set up by the training script there, not written here")
    if any(text.startswith("model ") for text in found.in_script):
        fields = tuple(text for text in missing if text.startswith("data_parallel="))
        others = tuple(text for text in missing if text not in fields)
        return replace(
            found, inexpressible=(*found.inexpressible, *fields), in_script=(*found.in_script, *others)
        )
    return replace(found, inexpressible=(*found.inexpressible, *missing))

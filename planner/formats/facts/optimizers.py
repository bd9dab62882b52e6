"""Optimizers with priced states, by their names in other software."""

from __future__ import annotations

from costmodels.spec.layout import Optimizer
from planner.formats.facts.reading import Problems

_NAMES: dict[Optimizer, str] = {
    "adam": "adam adamw adamw_torch adamw_torch_fused adamw_torch_xla adamw_torch_npu_fused adamw_hf "
    "adamw_apex_fused adamw_32bit fusedadam fused_adam distributed_fused_adam megatron_fused_adam "
    "mcore_distributed_optim adamweightdecay fp32stateadamweightdecay fusedadamweightdecay "
    "fusedcastadamweightdecay fusedadamw pmaadamw speedadamw deepspeedcpuadam",
    "adam8bit": "adamw_8bit adamw_bnb_8bit adamw_torch_8bit ao_adamw_8bit",
    "adafactor": "adafactor distributed_adafactor",
    "sgd": "sgd momentum",
    "muon": "muon dist_muon",
    "came": "came camezero2 came_pytorch",
}

OPTIMIZERS: dict[str, Optimizer] = {
    name: optimizer for optimizer, names in _NAMES.items() for name in names.split()
}
"""Optimizers by name in lower case; states in paged host memory (`paged_`) count as on the device."""


def optimizer_named(
    name: str | None, problems: Problems, flag: str, line: int | None, file: str = ""
) -> Optimizer:
    """The optimizer that a file names; Adam where it names none.

    An unknown optimizer makes memory and time unknown.
    """
    word = (name or "adam").strip().lower().removeprefix("paged_")
    if word in OPTIMIZERS:
        return OPTIMIZERS[word]
    remedy = f"give --define {flag.lstrip('-')}=NAME of a priced one for its price"
    text = f"{name}: the states of this optimizer are not priced"
    problems.add("unknown", text, flag, line, remedy, file, of_price=True)
    return "adam"

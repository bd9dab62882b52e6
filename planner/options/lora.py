"""The flags of low-rank adapters."""

from __future__ import annotations

from typing import ClassVar, cast, get_args

from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.layers.adapters import adapter_parameters
from costmodels.layers.quantised import quantised_parameters
from costmodels.spec.model import ModelSpec
from costmodels.spec.model_parts import LORA_TARGETS, BaseFormat, Lora, LoraTarget
from planner.inputs.model import with_lora
from planner.options.flags import flag
from planner.options.limits import AT_LEAST_1, POSITIVE

GROUPS: dict[str, tuple[LoraTarget, ...]] = {
    "all": LORA_TARGETS,
    "attention": ("query", "key", "value", "output"),
    "mlp": ("up", "gate", "down"),
}
"""Words that name several targets at once."""

THEIR_NAMES: dict[str, LoraTarget] = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "output",
    "up_proj": "up",
    "gate_proj": "gate",
    "down_proj": "down",
}
"""Targets as `target_modules` of Hugging Face's peft names them."""

FORMATS: tuple[BaseFormat, ...] = get_args(BaseFormat)


@dataclass(frozen=True)
class LoraFlags:
    """Flags of adapters that are trained instead of the model."""

    SECTIONS: ClassVar[dict[str, str]] = {"lora_rank": "Fine-tuning"}

    lora_rank: int | None = flag(
        None, "Train low-rank adapters of this rank; the model itself is frozen.", within=AT_LEAST_1
    )
    lora_alpha: float | None = flag(
        None,
        "Numerator of the scale of adapters, alpha / rank; twice the rank unless given.",
        within=POSITIVE,
    )
    lora_targets: str | None = flag(
        None,
        f"Layers with adapters, with commas: {', '.join((*GROUPS, *LORA_TARGETS))}; all unless given.",
        metavar="NAMES",
    )

    quantize_base: str | None = flag(
        None,
        f"Keep the frozen matrices of layers in 4 bits (QLoRA): {', '.join(FORMATS)}.",
        metavar="FORMAT",
        values=lambda: list(FORMATS),
    )

    def with_lora(self, spec: ModelSpec) -> ModelSpec:
        """`spec` with the adapters that the flags ask for; raises `InputError` where they contradict it."""
        given = {
            "lora-alpha": self.lora_alpha,
            "lora-targets": self.lora_targets,
            "quantize-base": self.quantize_base,
        }
        if self.quantize_base not in (None, *FORMATS):
            raise InputError(f"--quantize-base {self.quantize_base}: expected {', '.join(FORMATS)}")
        if self.lora_rank is None:
            for name, value in given.items():
                if value is not None:
                    raise InputError(f"--{name} {value} needs --lora-rank, the rank of the adapters")
            return spec
        lora = Lora(
            rank=self.lora_rank,
            alpha=2.0 * self.lora_rank if self.lora_alpha is None else self.lora_alpha,
            targets=LORA_TARGETS if self.lora_targets is None else parse_targets(self.lora_targets),
            quantize_base=self.quantize_base,
        )
        return with_lora(spec, lora)


def lora_note(spec: ModelSpec) -> str:
    """The parameters of a model that train and that are frozen, in words."""
    assert spec.lora is not None
    told = (
        f"LoRA of rank {spec.lora.rank} (alpha {spec.lora.alpha:g}): {adapter_parameters(spec) / 1e6:,.1f} M "
        f"parameters train, {spec.parameters / 1e6:,.1f} M are frozen"
    )
    if spec.lora.quantize_base is None:
        return told
    return f"{told}, {quantised_parameters(spec) / 1e6:,.1f} M of them in {spec.lora.quantize_base}"


def parse_targets(text: str) -> tuple[LoraTarget, ...]:
    """The targets that a list with commas names, in their usual order; raises `InputError` for others."""
    found: set[LoraTarget] = set()
    for word in text.replace(" ", ",").split(","):
        if word in GROUPS:
            found.update(GROUPS[word])
        elif word in get_args(LoraTarget):
            found.add(cast(LoraTarget, word))
        elif word in THEIR_NAMES:
            found.add(THEIR_NAMES[word])
        elif word:
            raise InputError(f"--lora-targets {word}: expected {', '.join((*GROUPS, *LORA_TARGETS))}")
    if not found:
        raise InputError("--lora-targets is empty: name a layer such as query, or leave it out for all")
    return tuple(target for target in LORA_TARGETS if target in found)

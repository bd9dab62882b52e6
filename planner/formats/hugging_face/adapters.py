"""Adapters (LoRA, QLoRA) from the flags and keys of trainers."""

from __future__ import annotations

from costmodels.dataclass import dataclass
from costmodels.errors import InputError, on_one_line
from costmodels.spec.model import ModelSpec
from costmodels.spec.model_parts import LORA_TARGETS, BaseFormat, Lora, LoraTarget
from planner.formats.facts.keyed import Keyed
from planner.inputs.model import with_lora
from planner.options.lora import THEIR_NAMES

SWITCHES = ("--use_peft", "--use_lora", "--lora", "--lora_enable", "--qlora", "--q_lora")
METHODS = ("--finetuning_type", "--train_type", "--tuner_type", "--sft_type", "--adapter")
RANKS = ("--lora_r", "--lora_rank", "--lora_dim")
TARGETS = ("--lora_target_modules", "--lora_target", "--target_modules")
FOUR_BITS = ("--load_in_4bit", "--qlora", "--q_lora")
BITS = ("--quantization_bit", "--quant_bits", "--bits")

WHOLE_MODULES = ("--modules_to_save", "--lora_modules_to_save", "--additional_target")
"""Flags that name modules without adapters that train beside them: peft keeps a copy of each."""

_WHOLE = ("full", "none", "null", "false", "")
_ALL = ("all", "all-linear", "all_linear")


@dataclass(frozen=True)
class AdapterDefaults:
    """The defaults of a trainer for adapters."""

    method: str = "full"
    rank: int | None = None
    """The default rank; None for a trainer without one."""
    targets: tuple[LoraTarget, ...] = ("query", "value")
    """Target modules by peft's defaults (peft/utils/constants.py, for models of Llama's kind)."""


DEFAULTS = {
    "trl": AdapterDefaults(rank=16),
    "llama-factory": AdapterDefaults(method="lora", rank=8, targets=LORA_TARGETS),
    "ms-swift": AdapterDefaults(method="lora", rank=8, targets=LORA_TARGETS),
    "axolotl": AdapterDefaults(),
}
"""Sources: trl/trainer/model_config.py, llamafactory/hparams/finetuning_args.py, swift/arguments."""


def with_adapters(model: ModelSpec, keys: Keyed, software: str) -> ModelSpec:
    """`model` with the adapters of the trainer's flags; unknown values add problems."""
    usual = DEFAULTS.get(software, AdapterDefaults(rank=16 if "--use_peft" in keys else None))
    method = _method(keys, usual)
    if method in _WHOLE:
        for name in (*FOUR_BITS, "--load_in_8bit"):
            if name in keys and keys.switch(name):
                text = "the weights of a model without adapters do not train in few bits"
                keys.add("unknown", text, name, "give --define lora_r=N where adapters train")
        return model
    if method not in ("lora", "qlora"):
        name = next(one for one in METHODS if one in keys)
        keys.add(
            "unknown",
            f"{method}: this kind of fine-tuning is not priced",
            name,
            "see planner suggest --lora-rank",
        )
        return model
    whole = keys.first(*WHOLE_MODULES)
    if whole is not None and whole.text.strip().lower() not in ("", "[]", "false", "none", "null"):
        text = f"{whole.text}: layers that train as a whole beside adapters are not priced"
        keys.problems.add("unknown", text, whole.path, whole.line, "", keys.file, of_price=True)
    rank = keys.count(*RANKS) or usual.rank
    quantised = _quantised(keys, method)
    targets = _targets(keys, usual)
    if rank is None:
        name = next((one for one in (*SWITCHES, *METHODS) if one in keys), RANKS[0])
        keys.add("unknown", "the rank of the adapters is not known", name, "give --define lora_r=N")
        return model
    try:
        lora = Lora(
            rank=rank,
            alpha=keys.number("--lora_alpha") or 2.0 * rank,
            targets=targets,
            quantize_base=quantised,
        )
        return with_lora(model, lora)
    except (InputError, ValueError) as error:
        keys.add("unknown", f"these adapters are not priced: {on_one_line(error)}", RANKS[0])
        return model


def _method(keys: Keyed, usual: AdapterDefaults) -> str:
    named = keys.text(*METHODS)
    if named is not None:
        return named.lower()
    given = [name for name in SWITCHES if name in keys]
    if any(keys.switch(name) for name in given):
        return "lora"
    if any(name not in FOUR_BITS for name in given):
        return "full"
    return "lora" if any(name in keys for name in RANKS) else usual.method


def _quantised(keys: Keyed, method: str) -> BaseFormat | None:
    bits = keys.count(*BITS)
    eight = "--load_in_8bit" in keys and keys.switch("--load_in_8bit")
    if eight or bits not in (None, 4):
        name = "--load_in_8bit" if eight else next(one for one in BITS if one in keys)
        keys.add("unknown", "a base in these bits is not priced", name, "4 bits are")
        return None
    method_name = keys.text("--quantization_method", "--quant_method") or "bnb"
    if bits is not None and method_name.lower() not in ("bnb", "bitsandbytes"):
        name = next(one for one in ("--quantization_method", "--quant_method") if one in keys)
        keys.add("unknown", f"{method_name}: a base quantised by it is not priced", name, "bnb is")
        return None
    four = any(name in keys and keys.switch(name) for name in FOUR_BITS)
    return "nf4" if four or bits == 4 or method == "qlora" else None


def _targets(keys: Keyed, usual: AdapterDefaults) -> tuple[LoraTarget, ...]:
    if "--lora_target_linear" in keys and keys.switch("--lora_target_linear"):
        return LORA_TARGETS
    entry = keys.first(*TARGETS)
    if entry is None:
        return usual.targets
    words = (entry.text if entry.items is None else " ".join(entry.items)).replace(",", " ").split()
    if any(word in _ALL for word in words):
        return LORA_TARGETS
    other = [word for word in words if word not in THEIR_NAMES]
    if other or not words:
        keys.add(
            "unknown",
            f"{' '.join(other) or 'nothing'}: these layers are not known",
            entry.path,
            "name q_proj and the like",
        )
        return usual.targets
    found = {THEIR_NAMES[word] for word in words}
    return tuple(target for target in LORA_TARGETS if target in found)

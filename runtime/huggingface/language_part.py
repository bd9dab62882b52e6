"""The language model in files with further parts: image encoders, or MTP modules."""

from __future__ import annotations

import re
from collections.abc import Mapping

from planner.inputs.huggingface.keys import Config
from planner.inputs.huggingface.readers import READERS, text_part
from runtime.huggingface.configs import CLASSES
from runtime.huggingface.files import TensorPlace

PLACES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
}
"""Prefixes of tensors' names in a model with several parts, and in the separate language model."""

SHARED_KEYS = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id", "quantization_config")
"""Keys of a config.json that apply to the language model if its own part lacks them."""

ONLY_PARTS = ("qwen3_vl_text", "qwen3_vl_moe_text")
"""Model types that only exist as parts of others in transformers."""

FURTHER = re.compile(r"^(model\.)?mtp[._]")
"""Names of MTP modules, which transformers also skips (Qwen3-Next, Qwen 3.5)."""


def language_config(config: Config) -> Config:
    """The config.json of the separate language model in a `config.json`."""
    if config.get("model_type") in READERS:
        return config
    part = text_part(config)
    shared = {key: config[key] for key in SHARED_KEYS if key in config}
    name = CLASSES.get(str(part["model_type"]))
    return shared | part | ({"architectures": [name]} if name else {})


def language_tensors(tensors: Mapping[str, TensorPlace]) -> tuple[dict[str, TensorPlace], list[str]]:
    """The tensors of the language model among others, under the names of the separate model, and the names of
    the other tensors."""
    found, others = {}, []
    for name, place in tensors.items():
        here = next((one for one in PLACES if name.startswith(one)), None)
        if here is None:
            others.append(name)
        else:
            found[PLACES[here] + name.removeprefix(here)] = place
    return found, others

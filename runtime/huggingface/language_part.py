"""The language model in files that hold more: encoders of images, or MTP modules."""

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
"""Beginnings of tensors' names in a model with several parts, and in the language model by itself."""

SHARED_KEYS = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id", "quantization_config")
"""Keys of a config.json that count for the language model where its own part leaves them out."""

ONLY_PARTS = ("qwen3_vl_text", "qwen3_vl_moe_text")
"""Model types that transformers does not have by themselves."""

FURTHER = re.compile(r"^(model\.)?mtp[._]")
"""Names of MTP modules, which transformers leaves out too (Qwen3-Next, Qwen 3.5)."""


def language_config(config: Config) -> Config:
    """The config.json that the language model of a `config.json` has by itself."""
    if config.get("model_type") in READERS:
        return config
    part = text_part(config)
    shared = {key: config[key] for key in SHARED_KEYS if key in config}
    name = CLASSES.get(str(part["model_type"]))
    return shared | part | ({"architectures": [name]} if name else {})


def language_tensors(tensors: Mapping[str, TensorPlace]) -> tuple[dict[str, TensorPlace], list[str]]:
    """The tensors of a language model that lie beside others, under the names that they have by themselves,
    and the names of the others."""
    found, others = {}, []
    for name, place in tensors.items():
        here = next((one for one in PLACES if name.startswith(one)), None)
        if here is None:
            others.append(name)
        else:
            found[PLACES[here] + name.removeprefix(here)] = place
    return found, others

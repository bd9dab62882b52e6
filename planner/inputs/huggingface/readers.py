"""The fields of `ModelSpec` from the keys of a Hugging Face `config.json`, by model type."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any

from costmodels.spec.model import MOST_LAYERS
from planner.inputs.huggingface import dense, hybrid, routed
from planner.inputs.huggingface.deepseek_v4 import deepseek_v4
from planner.inputs.huggingface.gemma4 import gemma4
from planner.inputs.huggingface.keys import Config

READERS: dict[str, Callable[[Config], Config]] = {
    "arcee": dense.arcee,
    "deepseek_v2": routed.deepseek_v2,
    "deepseek_v3": routed.deepseek_v3,
    "deepseek_v32": routed.deepseek_v32,
    "deepseek_v4": deepseek_v4,
    "ernie4_5": dense.ernie4_5,
    "ernie4_5_moe": routed.ernie4_5_moe,
    "exaone4": dense.exaone4,
    "gemma": dense.gemma,
    "gemma2": dense.gemma2,
    "gemma3_text": dense.gemma3,
    "gemma4_text": gemma4,
    "glm": dense.glm,
    "glm4": dense.glm4,
    "glm4_moe": routed.glm4_moe,
    "glm4_moe_lite": routed.glm4_moe_lite,
    "glm_moe_dsa": routed.glm_moe_dsa,
    "gpt2": dense.gpt2,
    "gpt_oss": routed.gpt_oss,
    "granite": dense.granite,
    "granitemoe": routed.granitemoe,
    "kimi_k2": routed.deepseek_v3,
    "llama": dense.llama,
    "llama4_text": routed.llama4,
    "minimax_m2": routed.minimax_m2,
    "mistral": dense.mistral,
    "mixtral": routed.mixtral,
    "nemotron_h": hybrid.nemotron_h,
    "olmo2": dense.olmo2,
    "olmo3": dense.olmo3,
    "phi3": dense.phi3,
    "qwen2": dense.qwen2,
    "qwen2_moe": routed.qwen2_moe,
    "qwen3": dense.qwen3,
    "qwen3_5_moe_text": routed.qwen3_5_moe,
    "qwen3_5_text": routed.qwen3_5,
    "qwen3_moe": routed.qwen3_moe,
    "qwen3_next": routed.qwen3_next,
    "qwen3_vl_moe_text": routed.qwen3_moe,
    "qwen3_vl_text": dense.qwen3,
    "seed_oss": dense.seed_oss,
    "smollm3": dense.smollm3,
    "starcoder2": dense.starcoder2,
}
"""Reader by `model_type`: from the keys of a config.json, with defaults, to the fields of `ModelSpec`."""

DEFAULTS_OF = {"kimi_k2": "deepseek_v3"}
"""The model type whose defaults a type has, for types with another name in transformers."""


class UnknownType(ValueError):
    """Error: there is no reader for the `model_type`."""


@cache
def _defaults() -> dict[str, dict[str, Any]]:
    """Tables by model type: `defaults` (values of missing keys) and `names` (other names of keys)."""
    text = files("planner.inputs.huggingface").joinpath("defaults.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = json.loads(text)["types"]
    return found


def text_part(config: Config) -> Config:
    """The keys of the language model of a `config.json`: those in it, or those of its `text_config`.

    Raises `UnknownType` where there is no reader for its `model_type`.
    """
    model_type = config.get("model_type")
    inner = config.get("text_config")
    if isinstance(model_type, str) and model_type in READERS:
        return config
    named = str(inner.get("model_type", model_type)) if isinstance(inner, dict) else ""
    named = named if named in READERS else f"{named}_text"
    if named not in READERS or not isinstance(inner, dict):
        raise UnknownType(f"model_type {model_type!r} is not one of {', '.join(READERS)}")
    tied = {"tie_word_embeddings": config["tie_word_embeddings"]} if "tie_word_embeddings" in config else {}
    return tied | inner | {"model_type": named}


def model_fields(config: Config) -> Config:
    """The fields of `ModelSpec` that a `config.json` describes, except name and sequence length.

    A missing key has transformers' default. Raises `UnknownType`, `KeyError` for a key without a default, and
    `ValueError` for a feature that `ModelSpec` cannot express.
    """
    config = text_part(config)
    model_type = str(config["model_type"])
    known = _defaults().get(DEFAULTS_OF.get(model_type, model_type), {"defaults": {}, "names": {}})
    names = known["names"]
    keys = {names.get(key, key): value for key, value in config.items() if names.get(key) not in config}
    # Transformers 5 keeps keys in one mapping that stood alone before.
    if "rope_theta" in keys or "rope_scaling" in keys:
        keys.setdefault("rope_parameters", None)
    layers = keys.get("num_hidden_layers")
    if isinstance(layers, int) and layers > MOST_LAYERS:
        # Readers go through them one by one.
        raise ValueError(f"num_hidden_layers is {layers}, more than {MOST_LAYERS}")
    return READERS[model_type](known["defaults"] | keys)

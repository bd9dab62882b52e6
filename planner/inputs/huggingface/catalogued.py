"""Models of the catalogue by their names on Hugging Face's Hub."""

from __future__ import annotations

import re

from costmodels.catalogue import load_model, model_names
from costmodels.spec.model import ModelSpec

_OTHER = {
    "gpt2": "gpt2-small",
    "openai-gpt2": "gpt2-small",
    "llama-7b": "llama2-7b",
    "llama-13b": "llama2-13b",
    "vicuna-7b": "llama2-7b",
    "vicuna-13b": "llama2-13b",
    "deepseek-v3-base": "deepseek-v3",
    "deepseek-r1": "deepseek-v3",
    "llama3.1-405b": "llama3-405b",
    "mixtral-8x7b-v0.1": "mixtral-8x7b",
    "mixtral-8x22b-v0.1": "mixtral-8x22b",
    "llama-30b": "llama-33b",
    "olmo-2-1124-7b": "olmo2-7b",
    "olmo-2-1124-13b": "olmo2-13b",
    "olmo-2-0325-32b": "olmo2-32b",
}

_ENDINGS = (
    r"-(hf|chat|instruct|base|it|v0\.\d|v1\.\d|2507|thinking|checkpoints"
    r"|(bnb-)?(nf4|4bit)(-bf16)?|bnb|[bf]p?16)$"
)
"""Endings of names for further training or storage formats, which leave the shape of the model as it is."""

_FAMILIES = (
    (r"^meta-", ""),
    (r"^deepseek-r1-distill-llama-(8b|70b)$", r"llama3.1-\1"),
    (r"^deepseek-r1-distill-qwen-", "qwen2.5-"),
    (r"^(qwen2\.5|qwen3)-(coder|math)-", r"\1-"),
    (r"^llama-(?=[23])", "llama"),
)
"""Models with the shape of another family, by the beginning of their names."""


def catalogued(name: str) -> ModelSpec | None:
    """The model of the catalogue that has the shape of a name, or of a path that ends with it, if any."""
    # ModelScope writes three low lines for a point in the names of folders.
    word = name.rstrip("/").rpartition("/")[2].lower().replace("___", ".").replace("_", "-")
    for _ in range(4):
        word = re.sub(_ENDINGS, "", word)
    for begin, family in _FAMILIES:
        word = re.sub(begin, family, word)
    known = model_names()
    found = next((one for one in (word, _OTHER.get(word, "")) if one in known), None)
    return None if found is None else load_model(found)

"""Models of the catalogue by the names that they have on Hugging Face's hub."""

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
}

_ENDINGS = r"-(hf|chat|instruct|base|v0\.1|v0\.2|v0\.3|chat-hf)$"


def model_of(name: str) -> ModelSpec | None:
    """The model of a name, or of a path that ends with it: `meta-llama/Llama-2-7b-hf`. None where unknown."""
    word = name.rstrip("/").rpartition("/")[2].lower().replace("_", "-")
    for _ in range(3):
        word = re.sub(_ENDINGS, "", word)
    word = re.sub(r"^meta-", "", word)
    word = re.sub(r"^llama-(?=[23])", "llama", word)
    known = model_names()
    found = next((one for one in (word, _OTHER.get(word, "")) if one in known), None)
    return None if found is None else load_model(found)

"""Models by their names in scripts, which are the names on Hugging Face's Hub."""

from __future__ import annotations

from costmodels.spec.model import ModelSpec
from planner.inputs.huggingface.catalogued import catalogued
from planner.inputs.huggingface.config_file import model_from_hf_config
from planner.inputs.huggingface.hub import cached_file, hub_model


def model_of(name: str) -> ModelSpec | None:
    """The model of a name, or of a path that ends with it: `meta-llama/Llama-2-7b-hf`. None where unknown.

    A model outside the catalogue is found if its config.json is in the Hub's cache on this machine.
    """
    known = catalogued(name)
    if known is not None:
        return known
    model = hub_model(name)
    file = None if model is None else cached_file(model)
    return None if file is None else model_from_hf_config(file)

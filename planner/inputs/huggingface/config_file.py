"""Models from Hugging Face `config.json` files."""

from __future__ import annotations

import json
from pathlib import Path

from costmodels.catalogue.yaml_files import build
from costmodels.errors import InputError
from costmodels.files import MIB, read_text
from costmodels.paths import expanded, is_folder, resolved
from costmodels.spec.model import ModelSpec
from planner.inputs.huggingface.hub import CONFIG_FILE, hub_origin
from planner.inputs.huggingface.keys import Config, period
from planner.inputs.huggingface.readers import model_fields

LONGEST_DEFAULT_SEQ = 4096
"""Tokens of a training sample when the user does not say: models with rotary positions are pre-trained at
about this length, even if they later accept longer sequences."""

LARGEST_CONFIG = 16 * MIB
"""Most bytes of a config.json; a larger file is refused."""


def model_from_hf_config(path: str | Path, seq: int | None = None) -> ModelSpec:
    """The model that a Hugging Face config.json describes.

    `path` is the file or its folder. `seq`, in tokens, is by default `n_positions` of a GPT-2 and the
    lesser of `max_position_embeddings` and 4096 of the others; a longer one extends the positions.
    `InputError` for a missing or broken file, a model type that is not supported, a missing key, an
    option that `ModelSpec` cannot express.
    """
    file = expanded(path)
    if is_folder(file):
        file = file / CONFIG_FILE
    return model_of_config(read_config(file), file, seq)


def model_of_config(config: Config, file: Path, seq: int | None = None) -> ModelSpec:
    """The model that the keys of a config.json describe; `file` is their file, and gives the model's name."""
    origin = f"model config {str(file)!r}"
    model_type = config.get("model_type")
    try:
        fields = model_fields(config)
    except KeyError as missing:
        raise InputError(f"{origin}: a {model_type} needs the key {missing.args[0]!r}") from None
    except ValueError as unsupported:
        raise InputError(f"{origin}: {unsupported}") from None
    except (TypeError, AttributeError, ArithmeticError) as wrong:
        raise InputError(f"{origin}: a key has a value of another kind than expected ({wrong})") from None
    positions = fields["max_positions"]
    if seq is None:
        seq = positions if fields["position"] == "learned" else min(positions, LONGEST_DEFAULT_SEQ)
    fields = without_idle_windows(fields, seq)
    fields |= {"seq": seq, "max_positions": max(seq, positions)}
    name, place = _named(file)
    fields |= {"name": name, "source": f"{place}, Hugging Face type {model_type}"}
    return build(ModelSpec, fields, origin)


def without_idle_windows(fields: Config, seq: int) -> Config:
    """The fields of a model without windows that no sequence of `seq` tokens reaches beyond.

    Windows stay if their layers differ from the others in more than the window.
    """
    differs = fields.get("window_rope_theta") or not fields.get("rotates_full", True)
    window = fields.get("window")
    if differs or not window or window < seq:
        return fields
    pattern = tuple("full" if kind in ("window", "chunk") else kind for kind in fields["attention_pattern"])
    return {**fields, "window": 0, "attention_pattern": period(pattern)}


def read_config(file: Path) -> Config:
    """The keys of a config.json; raises `InputError` where it cannot be read or holds something else."""
    try:
        text = read_text(file, LARGEST_CONFIG)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InputError(f"cannot read model config {str(file)!r}: {reason}") from None
    return parse_config(text, file)


def parse_config(text: str, file: Path) -> Config:
    """The keys in the text of a config.json; raises `InputError` where it holds something else."""
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(
            f"model config {str(file)!r} is not valid JSON at line {error.lineno}, column {error.colno}: "
            f"{error.msg}"
        ) from None
    except ValueError:
        raise InputError(f"model config {str(file)!r} holds a number of thousands of digits") from None
    except RecursionError:
        raise InputError(f"model config {str(file)!r} is nested too deeply to be one") from None
    if not isinstance(config, dict):
        raise InputError(f"model config {str(file)!r} must hold one JSON object of keys and values")
    return config


def _named(file: Path) -> tuple[str, str]:
    """The name of a config.json's model and its origin; for a file in the Hub's cache, the Hub id."""
    folder = resolved(file.parent)
    model = hub_origin(folder / file.name)
    if model is not None:
        return model.name, f"{file.name} of {model}"
    return folder.name if file.name == CONFIG_FILE and folder.name else file.stem, file.name

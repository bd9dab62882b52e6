"""Files beside weights: config.json, tokenizer and licence, which are copied from one format to the other.

A folder of checkpoints keeps them in its subfolder `huggingface`, for all its iterations.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from costmodels import ModelSpec
from costmodels.errors import InputError
from costmodels.files import read_at_most
from costmodels.paths import entries, exists, file_bytes, is_file
from planner.inputs.huggingface.config_file import model_from_hf_config, read_config
from planner.inputs.huggingface.keys import Config
from runtime.huggingface.folder_kind import CONFIG_FILE, INDEX_FILE
from runtime.huggingface.mapping import GPT2_PREFIX

NAMES_FILE = "tensor_names.json"
LARGEST_NAMES = 4096

_KINDS = (".json", ".txt", ".model", ".jinja", ".md", ".tiktoken")
_WITHOUT_ENDING = ("LICENSE", "LICENCE", "NOTICE")
LARGEST_BYTES = 200 * 10**6
"""Most bytes of a tokenizer file; larger files are weights."""


class Names(BaseModel):
    """Differences between the names in a model's files and those that transformers writes today."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prefix: str = GPT2_PREFIX
    """The beginning of the tensors' names of a GPT-2."""
    stores_tied_head: bool = False


class Companions(NamedTuple):
    """Configuration and names stored with a checkpoint."""

    config: Config
    spec: ModelSpec
    """The model that `config` describes."""
    names: Names


def copy_companions(source: Path, target: Path) -> None:
    """Copy the files in `source` except weights and config.json; existing files in `target` stay."""
    target.mkdir(parents=True, exist_ok=True)
    for file in entries(source):
        wanted = file.suffix in _KINDS or file.stem in _WITHOUT_ENDING
        left = file.name in (INDEX_FILE, CONFIG_FILE, NAMES_FILE) or file.name.endswith(".index.json")
        if is_file(file) and wanted and not left and file_bytes(file) <= LARGEST_BYTES:
            place = target / file.name
            if not exists(place):
                shutil.copyfile(file, place)


def write_companions(folder: Path, config: Config, names: Names) -> None:
    """Keep the config.json of a model and the names of its tensors in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, config)
    (folder / NAMES_FILE).write_text(names.model_dump_json(indent=2) + "\n")


def write_config(folder: Path, config: Config) -> None:
    """Write a config.json as transformers does."""
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")


def read_companions(folder: Path) -> Companions | None:
    """The files that `write_companions` left in `folder`; None where there is no config.json.

    Raises `InputError` for broken files.
    """
    if not exists(folder / CONFIG_FILE):
        return None
    spec = model_from_hf_config(folder)
    names = folder / NAMES_FILE
    try:
        found = Names.model_validate_json(read_at_most(names, LARGEST_NAMES)) if exists(names) else Names()
    except (OSError, ValidationError):
        raise InputError(f"{names}: broken; delete {folder} to have its files written anew") from None
    return Companions(read_config(folder / CONFIG_FILE), spec, found)

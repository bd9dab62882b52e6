"""Files of other software: what kind each is, and the job that they describe together."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from costmodels.errors import InputError
from costmodels.files import MIB, read_text
from planner.formats.megatron import read_megatron
from planner.formats.reading import Reading

LARGEST = MIB // 4
"""Bytes of a configuration."""

_NAME = re.compile(r"[A-Za-z_]\w*|[0-9]+")

EXPECTED = "expected a script or arguments of Megatron-LM, MindSpeed or PAI's llmacc"


def read_files(
    files: Sequence[str | Path],
    *,
    world_size: int | None = None,
    local_world_size: int | None = None,
    define: Mapping[str, str] | Iterable[str] | None = None,
) -> Reading:
    """The job that `files` describe together: one that starts it, and files that describe its model.

    Nothing is run. `define` gives variables that a script gets from outside, as a mapping or as
    `NAME=VALUE`. Raises `InputError` for files that cannot be read, and where none or several start a job.
    """
    defined = parse_definitions(define)
    texts = {str(file): _text(file) for file in files}
    if not texts:
        raise InputError(f"no file to read: {EXPECTED}")
    models = [file for file, text in texts.items() if _describes_model(file, text)]
    if len(models) > 1:
        raise InputError(f"{' and '.join(models)} both describe a model; give one")
    described = models[0] if models else None
    readings = []
    for file, text in texts.items():
        if file == described:
            continue
        reading = read_megatron(text, file, defined, world_size, local_world_size, described)
        if reading is None:
            raise InputError(f"file {file}: nothing in it starts a training job that is known; {EXPECTED}")
        readings.append(reading)
    if len(readings) != 1:
        names = ", ".join(reading.file for reading in readings)
        raise InputError(
            f"{names} each start a job; give one" if readings else f"file {described}: {EXPECTED} beside it"
        )
    return dataclasses.replace(
        readings[0],
        world_size=world_size or readings[0].world_size,
        local_world_size=local_world_size or readings[0].local_world_size,
    )


def parse_definitions(define: Mapping[str, str] | Iterable[str] | None) -> dict[str, str]:
    """Variables by name; raises `InputError` for what is no `NAME=VALUE`."""
    if define is None:
        return {}
    if isinstance(define, Mapping):
        pairs = [(str(name), "=", str(value)) for name, value in define.items()]
    else:
        pairs = [text.partition("=") for text in ([define] if isinstance(define, str) else define)]
    for name, equals, _ in pairs:
        if not equals or not _NAME.fullmatch(name):
            raise InputError(f"define {name!r}: expected NAME=VALUE, such as NNODES=4")
    return {name: value for name, _, value in pairs}


def _text(file: str | Path) -> str:
    try:
        return read_text(file, LARGEST, encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"cannot read file {file}: it is not UTF-8 text") from None
    except OSError as error:
        raise InputError(f"cannot read file {file}: {error.strerror or error}") from None


def _describes_model(file: str, text: str) -> bool:
    """Whether a file is a Hugging Face config.json, or a model of the planner's own YAML."""
    if file.endswith((".yaml", ".yml")):
        return bool(
            re.search(r"^layers\s*:", text, re.MULTILINE) and re.search(r"^hidden\s*:", text, re.MULTILINE)
        )
    if not file.endswith(".json"):
        return False
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and ("model_type" in content or "architectures" in content)

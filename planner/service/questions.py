"""Questions from programs and pages: a mapping of names to values, and its answer as a JSON record."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from costmodels.catalogue import load_model
from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.spec.model import ModelSpec
from costmodels.spelling import nearest
from planner.inputs.huggingface.config_file import (
    LARGEST_CONFIG,
    model_from_hf_config,
    model_of_config,
    parse_config,
)
from planner.inputs.huggingface.hub import HubModel, HubUse, cached_file, catalogue_hint, hub_file, parsed_id
from planner.inputs.model import resolve_model, with_seq
from planner.options.flags import arguments, one_line
from planner.options.limits import check_bounds
from planner.options.messages import message_spelling, spelling
from planner.options.model import ModelOptions
from planner.service.answers import PLANS, Answer, Question, SizesAnswer, ask
from planner.service.fields import CONFIG, PRECISION, PRECISIONS, Field, fields, spelled

TRUE, FALSE = ("true", "1", "on", "yes"), ("false", "0", "off", "no")

LONGEST = 10_000
"""Most characters of a value that is not a pasted config.json."""

FILES = ("model", "device", "engine", "prefer")
"""Fields whose value may name a file on the answering machine instead of a known name."""

SUFFIXES = (".yaml", ".yml", ".json", ".jsonl", ".csv")
"""Suffixes of the names of such files."""


@dataclass(frozen=True)
class NamedModel(ModelOptions):
    """A model with a pasted config.json, or a model name from a caller who may not read files here."""

    config: str = ""
    files: bool = True
    hub: HubUse = "cached"

    def named_model(self, name: str, seq: int | None) -> ModelSpec:
        """The model of the pasted config.json, or of the name; raises `InputError` for a file."""
        if self.config:
            file = Path(name)
            return model_of_config(parse_config(self.config, file), file, seq)
        if self.files:
            return resolve_model(name, seq)
        model = parsed_id(name)
        if model is None and "/" in name:
            raise InputError(
                f"model {name}: neither in the catalogue nor an id such as Qwen/Qwen3-8B; paste the text of "
                "its config.json as config"
            )
        if model is None:
            return with_seq(load_model(name), seq)
        return model_from_hf_config(known_file(model, self.hub), seq=seq)

    def is_described(self, name: str) -> bool:
        """Return whether a model comes from a description, without looking for files on this machine."""
        if self.files:
            return super().is_described(name)
        return bool(self.config) or parsed_id(name) is not None


def known_file(model: HubModel, hub: HubUse = "cached") -> Path:
    """The path of a model's config.json after its links are resolved; raises `InputError` for any other
    file."""
    found = hub_file(model) if hub == "fetched" else cached_file(model) if hub == "cached" else None
    if found is not None:
        return found
    why = "not in the Hugging Face cache of this machine" if hub == "cached" else "not in the catalogue"
    raise InputError(
        f"model {model}: {why}; paste the text of its config.json as config, which stands at "
        f"{model.page}/blob/{model.revision}/config.json{catalogue_hint(model)}"
    )


@dataclass(frozen=True)
class Asked:
    """A parsed question."""

    question: Question
    words: tuple[str, ...]
    """The flags of `planner suggest` that ask the same question."""
    config_file: str | None = None
    """The file name under which these flags expect the pasted config.json."""


def answer(
    question: Mapping[str, Any], *, files: bool = True, top: int = PLANS, hub: HubUse = "cached"
) -> dict[str, Any]:
    """The answer of `planner suggest --json` to a question.

    Args:
        question: values by the names of flags without dashes (`{"model": "llama3-8b", "world_size": 8,
            "device": "h100", "global_batch_size": 64}`), as numbers or as text. Further names are
            `precision`, and `config` with the text or the object of a Hugging Face config.json. `fields`
            lists all names.
        files: True if values may name files of this machine, and models of the Hub.
        top: number of plans that are listed.
        hub: reach of the look-up of Hub ids if `files` is false.

    Raises `InputError`, in the words of the command line, for a wrong question, and where no layout is legal.
    Where nothing fits, the answer's `error` has the reason, and `proposals` has changes that would fit.

    Examples:
        >>> from planner.service.questions import answer
        >>> job = {"model": "llama3-8b", "world_size": 8, "device": "h100", "global_batch_size": 64}
        >>> answer(job)["plans"][0]["fits"]
        True
    """
    return answered(question, files=files, top=top, hub=hub)[1].as_json()


def answered(
    question: Mapping[str, Any], *, files: bool = True, top: int = PLANS, hub: HubUse = "cached"
) -> tuple[Asked, Answer | SizesAnswer]:
    """A parsed question, and its answer as a record; raises as `answer` does."""
    given = _by_name(question)
    words = list(_words(question))
    names = [(field.name, field.spellings, field.degree) for field in fields().values() if field.spellings]
    with message_spelling(spelling(names, words)):
        try:
            asked = _read(given, files, hub)
            return asked, ask(asked.question, top=top)
        except (InputError, ValidationError) as error:
            kind = type(error) if isinstance(error, InputError) else InputError
            raise kind(one_line(error)) from None


def _words(question: Mapping[str, Any]) -> Iterator[str]:
    """The flags and values of a question; they decide the spelling of names in messages."""
    for name, value in question.items():
        field = fields().get(spelled().get(str(name), ""))
        if field is not None and field.spellings:
            flags = {flag.lstrip("-").replace("-", "_"): flag for flag in field.spellings}
            flag = flags.get(str(name), field.spellings[0])
            for one in _list(value) if field.kind == "array" and isinstance(value, str) else [value]:
                yield from (flag, str(one))


def read_question(question: Mapping[str, Any], *, files: bool = True) -> Asked:
    """A question from its values by name; raises `InputError` for unknown names and wrong values."""
    return _read(_by_name(question), files, "cached")


def _read(named: Mapping[str, Any], files: bool, hub: HubUse) -> Asked:
    given = {
        name: value if name == CONFIG else _value(fields()[name], value) for name, value in named.items()
    }
    config = _config_text(given.pop(CONFIG, None))
    precision = given.pop(PRECISION, None)
    if precision is not None:
        if precision not in PRECISIONS:
            raise InputError(f"precision {precision!r}: expected one of {', '.join(PRECISIONS)}")
        given[precision] = True
    file = None
    if config is not None:
        file = given["model"] = f"{_stem(given.get('model'), config)}.json"
    if not files:
        _check_no_files({name: value for name, value in given.items() if config is None or name != "model"})
    groups: dict[str, Any] = {}
    usual = Question()
    for part in _names_of(Question):
        own = {name: value for name, value in given.items() if fields()[name].group == part}
        groups[part] = type(getattr(usual, part))(**own)
        check_bounds(groups[part])
    words = tuple(word for group in groups.values() for word in arguments(group))
    if config is not None or not files:
        own = {name: getattr(groups["model"], name) for name in _names_of(ModelOptions)}
        groups["model"] = NamedModel(**own, config=config or "", files=files, hub=hub)
    return Asked(Question(**groups), words, file)


def _by_name(question: Mapping[str, Any]) -> dict[str, Any]:
    """Values by the names of fields, without empty values."""
    found: dict[str, Any] = {}
    for name, value in question.items():
        if value is None or (isinstance(value, str) and not value.strip()):
            continue
        proper = spelled().get(str(name))
        if proper is None:
            hint = nearest(str(name), spelled()) or "`planner suggest --help` lists all, without the dashes"
            raise InputError(f"unknown field {str(name)[:LONGEST]!r}: {hint}")
        if proper in found:
            raise InputError(f"{name} and {proper} are the same field; give one")
        found[proper] = value
    return found


def _value(field: Field, value: Any) -> Any:
    """A value in the type that its group of flags needs."""
    name = field.spellings[0] if field.spellings else field.name
    if field.kind == "array":
        items = _list(value) if isinstance(value, str) else value
        if not isinstance(items, Sequence) or not all(isinstance(item, str) for item in items):
            raise InputError(f"{name} {value!r}: expected a list of texts")
        return [_text(name, item) for item in items]
    if isinstance(value, (Mapping, Sequence)) and not isinstance(value, str):
        raise InputError(f"{name}: expected one value, not a {type(value).__name__}")
    text = _text(name, str(value)).strip()
    if field.kind == "string":
        return text
    if field.kind == "boolean":
        if text.lower() not in (*TRUE, *FALSE):
            raise InputError(f"{name} {text!r}: expected true or false")
        return text.lower() in TRUE
    if isinstance(value, bool):
        raise InputError(f"{name} {text!r} is not a number")
    try:
        number = float(text)
        whole = int(text) if field.kind == "integer" and isinstance(value, str) else number
    except (ValueError, OverflowError):
        number = whole = math.nan
    if not math.isfinite(number) or (field.kind == "integer" and whole != int(number)):
        raise InputError(f"{name} {text!r} is not a {'whole ' * (field.kind == 'integer')}number")
    return int(whole) if field.kind == "integer" else number


def _text(name: str, text: str) -> str:
    if len(text) > LONGEST:
        raise InputError(f"{name}: {len(text):,} characters; expected at most {LONGEST:,}")
    return text


def _list(text: str) -> list[str]:
    return text.replace(";", " ").split()


def _config_text(config: Any) -> str | None:
    if config is None:
        return None
    try:
        text = config if isinstance(config, str) else json.dumps(config)
    except (TypeError, ValueError, RecursionError):
        raise InputError("config: expected the text or the object of a config.json") from None
    if len(text) > LARGEST_CONFIG:
        raise InputError(f"config: {len(text):,} characters; expected at most {LARGEST_CONFIG:,}")
    return text


_OWN_NAME = re.compile(r'"_name_or_path"\s*:\s*"([^"]{1,200})"')


def _stem(model: str | None, config: str) -> str:
    """A file name for a pasted config.json: the last part of the model's name, without path characters."""
    own = _OWN_NAME.search(config)
    name = model or (own.group(1) if own else "")
    last = name.rstrip("/").rpartition("/")[2].removesuffix(".json")
    words = re.sub(r"[^A-Za-z0-9._-]+", "-", last)[:64].strip(".-")
    return "pasted" if words in ("", "config") else words


def _check_no_files(given: Mapping[str, Any]) -> None:
    """Raise `InputError` for a value that names a file."""
    for name in FILES:
        text = str(given.get(name, ""))
        if text.lower().endswith(SUFFIXES):
            raise InputError(
                f"--{name} {text}: no files are read here; give a name of the catalogue"
                + (", or paste the text of a config.json" if name == "model" else "")
            )
    table, load = given.get("network_table"), given.get("moe_load_imbalance")
    if table is not None:
        raise InputError(f"--network-table {table}: no files are read here; ask at the command line")
    if load is not None and not _is_number(load):
        raise InputError(f"--moe-load-imbalance {load}: no files are read here; give a number such as 1.2")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _names_of(group: type) -> list[str]:
    return [field.name for field in dataclasses.fields(group)]

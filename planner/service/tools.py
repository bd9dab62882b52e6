"""Tools for agents, as data: a name, a description, a JSON schema, and the function that answers.

Seconds, bytes and rates of answers have their unit in the name of their field (`_s`, `_bytes`, `_per_s`). No
tool writes files on the answering machine, runs given programs, or uses the network. The only file that tools
read is the config.json of a model that is named by its Hugging Face Hub id and is in the Hub's cache.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from costmodels.dataclass import dataclass
from costmodels.errors import InputError, NoLayoutFits
from costmodels.spelling import nearest
from planner.catalogues import devices, models
from planner.explanation.explanation import explain
from planner.explanation.records import as_json as explanation_json
from planner.formats.check import as_json as check_json
from planner.formats.check import check
from planner.formats.targets import TARGETS, export
from planner.inputs.huggingface.hub import parsed_id
from planner.options.flags import one_line
from planner.service.answers import Answer, Question
from planner.service.fields import question_schema
from planner.service.questions import answered, known_file, read_question

Values = Mapping[str, Any]

LARGEST = 1 << 20
"""Most characters of the arguments of one call, as JSON."""

MOST_FILES = 8

MOST_SIZES = 8
"""Most world sizes of one question; each needs a separate search."""

MOST_DEVICES = 1 << 17

TOP, MOST_TOP = 3, 20
"""Default and largest number of plans in an answer."""


@dataclass(frozen=True)
class Tool:
    """A tool that an agent may call."""

    name: str
    description: str
    """The contents of the answer, with units."""
    schema: dict[str, Any]
    """The JSON schema of the tool's arguments."""
    example: dict[str, Any]
    """Example arguments, which a test uses."""
    answer: Callable[[Values], dict[str, Any]]
    """The function that answers; it raises `InputError` with one line for wrong arguments."""


def call(name: str, arguments: Values | None) -> dict[str, Any]:
    """The answer of a tool; raises `InputError` with one line for wrong arguments, and where nothing fits."""
    tool = TOOLS.get(name)
    if tool is None:
        raise InputError(f"tool {name!r}: {nearest(name, TOOLS) or 'expected ' + ', '.join(TOOLS)}")
    given = {} if arguments is None else dict(arguments)
    try:
        size = len(json.dumps(given))
    except (TypeError, ValueError, RecursionError):
        raise InputError(f"tool {name}: its arguments are no JSON") from None
    if size > LARGEST:
        raise InputError(f"tool {name}: arguments of {size:,} characters; expected at most {LARGEST:,}")
    try:
        return tool.answer(given)
    except NoLayoutFits as error:
        raise InputError(one_line(error)) from None


def _suggest(given: Values) -> dict[str, Any]:
    question, top = _without(given, "top")
    found = _answered(question, _top(top.get("top")))
    return found.as_json()


def _explain(given: Values) -> dict[str, Any]:
    question, own = _without(given, "layout", "against", "what_if")
    asked = _bounded(read_question(question, files=False).question)
    if isinstance(asked.world_size, str):
        raise InputError(f"world_size {asked.world_size}: explain takes one size")
    found = explain(
        asked.model.spec(),
        world_size=asked.world_size,
        layout=_texts("layout", own.get("layout")),
        against=_texts("against", own.get("against")),
        what_if=own.get("what_if") is True,
        **asked.keywords(()),
    )
    return {"text": str(found)} | explanation_json(found, asked.assumed())


def _check(given: Values) -> dict[str, Any]:
    files, own = given.get("files"), {name: value for name, value in given.items() if name != "files"}
    known = set(TOOLS["check"].schema["properties"])
    if unknown := sorted({*given} - known):
        raise InputError(f"unknown field {unknown[0]!r}: expected {', '.join(sorted(known))}")
    if not isinstance(files, Mapping) or not 1 <= len(files) <= MOST_FILES:
        raise InputError(f"files: expected 1 to {MOST_FILES} texts by their file names")
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for name, text in files.items():
            if not isinstance(text, str) or Path(str(name)).name != name or name in ("", ".", ".."):
                raise InputError(
                    f"files: {str(name)[:80]!r}: expected a file name without a folder, and its text"
                )
            paths.append(Path(folder, name))
            paths[-1].write_text(text, encoding="utf-8")
        named = own.get("model")
        model = parsed_id(named) if isinstance(named, str) else None
        if model is not None:
            own["model"] = str(known_file(model))
        for name in ("device", "engine", *(() if model else ("model",))):
            _check_name(name, own.get(name))
        try:
            return check_json(check(paths, **own))
        except InputError as error:
            raise InputError(one_line(error).replace(f"{folder}/", "")) from None


def _export(given: Values) -> dict[str, Any]:
    question, own = _without(given, "to")
    target = own.get("to")
    if target not in TARGETS:
        raise InputError(f"to {target!r}: expected one of {', '.join(TARGETS)}")
    found = _answered(question, 1)
    if found.best is None:
        raise InputError(found.error_line or "no layout fits")
    written = export(found.best, to=target)
    return {
        "text": written.text,
        "inexpressible": list(written.inexpressible),
        "in_script": list(written.in_script),
        "environment": dict(written.environment),
        "layout": found.best.layout.describe(),
        "step_time_s": found.best.estimate.step_time_s,
        "peak_memory_bytes": found.best.estimate.peak_memory_bytes,
    }


def _models(given: Values) -> dict[str, Any]:
    found = _filtered(given, {spec.name: spec for spec in models()})
    return {
        "models": [
            spec.model_dump(mode="json") | {"parameters": spec.parameters}
            if len(found) == 1
            else {"name": name, "parameters": spec.parameters, "seq": spec.seq, "experts": spec.experts}
            for name, spec in found.items()
        ]
    }


def _devices(given: Values) -> dict[str, Any]:
    found = _filtered(given, {device.name: device for device in devices()})
    names = {"name", "vendor", "memory_bytes", "memory_bandwidth", "peak_flops", "devices_per_node"}
    return {
        "devices": [
            one.model_dump(mode="json", include=None if len(found) == 1 else names) for one in found.values()
        ]
    }


def _filtered(given: Values, records: dict[str, Any]) -> dict[str, Any]:
    """The records whose names contain a text; all records without a text."""
    if unknown := sorted({*given} - {"name"}):
        raise InputError(f"unknown field {unknown[0]!r}: expected name")
    text = given.get("name", "")
    if not isinstance(text, str):
        raise InputError(f"name {str(text)[:80]}: expected a text")
    exact = {name: one for name, one in records.items() if name == text}
    found = exact or {name: one for name, one in records.items() if text.lower() in name.lower()}
    if not found:
        raise InputError(f"name {text[:80]!r}: {nearest(text, records) or 'no name holds it'}")
    return found


def _answered(question: Values, top: int) -> Answer | Any:
    _bounded(read_question(question, files=False).question)
    return answered(question, files=False, top=top)[1]


def _bounded(question: Question) -> Question:
    """A question with few world sizes and possible numbers of devices; raises `InputError` for others."""
    size = question.world_size
    if isinstance(size, str):
        from planner.world_sizes import parse_world_sizes

        sizes = parse_world_sizes(size, question.cluster.local_world_size or 8)
        if len(sizes) > MOST_SIZES:
            raise InputError(f"world_size {size}: {len(sizes)} sizes; expected at most {MOST_SIZES}")
        size = max(sizes)
    if size > MOST_DEVICES:
        raise InputError(f"world_size {size}: expected at most {MOST_DEVICES}")
    return question


def _without(given: Values, *names: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of a question, separated from those of a tool's own fields."""
    own = {name: value for name, value in given.items() if name in names}
    return {name: value for name, value in given.items() if name not in names}, own


def _top(value: Any) -> int:
    if value is None:
        return TOP
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_TOP:
        raise InputError(f"top {str(value)[:40]}: expected a whole number from 1 to {MOST_TOP}")
    return value


def _texts(name: str, value: Any) -> list[str]:
    several = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(several, list) or not all(isinstance(one, str) for one in several) or len(several) > 8:
        raise InputError(f"{name}: expected a layout such as tp=4,pp=2, or a list of at most 8")
    return several


def _check_name(name: str, value: Any) -> None:
    if value is not None and (not isinstance(value, str) or "/" in value or Path(value).suffix):
        raise InputError(
            f"{name} {str(value)[:80]!r}: expected a name of the catalogue; no files are read here"
        )


def _with(own: dict[str, Any], *required: str) -> dict[str, Any]:
    """The schema of a question with further fields before its own."""
    base = question_schema()
    properties = own | {name: each for name, each in base["properties"].items() if name not in own}
    return base | {"properties": properties, "required": [*base["required"], *required]}


_LAYOUTS = {
    "type": "array",
    "items": {"type": "string"},
    "description": "Layouts such as tp=4,pp=2; degrees that are left out are filled in as is best.",
}

_NAME = {
    "type": "object",
    "properties": {"name": {"type": "string", "description": "A name, or a part of one; all unless given."}},
    "additionalProperties": False,
}

_JOB = {"model": "llama3-8b", "world_size": 16, "device": "h100", "global_batch_size": 256}

_SCRIPT = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --num-layers 32 "
    "--hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 "
    "--micro-batch-size 1 --global-batch-size 64 --vocab-size 32000 --bf16"
)

TOOLS = {
    tool.name: tool
    for tool in (
        Tool(
            "suggest",
            "Rank the parallel layouts (tensor, pipeline, context, expert and data parallelism, ZeRO, "
            "microbatch, recomputation) of a training job. Answers with the first plans: seconds of a step "
            "(`step_time_s`, with its 80 % prediction interval), bytes on a device "
            "(`peak_memory_bytes`), tokens per second, MFU; with `tokens` the days of the run, and with "
            "`price_per_hour` its cost. Where nothing fits, `error` says why and `proposals` what would.",
            _with(
                {
                    "top": {
                        "type": "integer",
                        "minimum": 1,
                        "maximum": MOST_TOP,
                        "description": f"Plans to list; {TOP} unless given.",
                    }
                }
            ),
            _JOB,
            _suggest,
        ),
        Tool(
            "explain",
            "Say why the best layout of a job is the best: what other layouts cost (seconds of a step by "
            "part, bytes on a device by part), which rule forbids one, the bottleneck of the best one. "
            "`text` is the answer in words.",
            _with(
                {
                    "layout": _LAYOUTS
                    | {"description": f"Layouts whose place to explain. {_LAYOUTS['description']}"},
                    "against": _LAYOUTS
                    | {"description": f"Compare the best with these, by term. {_LAYOUTS['description']}"},
                    "what_if": {
                        "type": "boolean",
                        "description": "Also search with twice the memory, links, batch and devices, and "
                        "without each pin; takes several times as long. False unless given.",
                    },
                }
            ),
            _JOB | {"layout": ["tp=8,pp=2"]},
            _explain,
        ),
        Tool(
            "check",
            "Judge a training script or configuration of other software (Megatron-LM, NeMo, torchtitan, "
            "DeepSpeed, accelerate, MindFormers and others): is it legal, does it fit into memory, how many "
            "seconds does a step take, and which flags to change for the best plan. Nothing in it is run.",
            {
                "type": "object",
                "properties": {
                    "files": {
                        "type": "object",
                        "additionalProperties": {"type": "string"},
                        "description": "Texts by their file names, such as train.sh; a config.json of the "
                        f"model may be one of them. At most {MOST_FILES}.",
                    },
                    "world_size": {
                        "type": "integer",
                        "description": "Devices of the job, if no file says.",
                    },
                    "local_world_size": {"type": "integer", "description": "Devices of one node."},
                    "device": {"type": "string", "description": "Name of a device, such as h100."},
                    "model": {"type": "string", "description": "Name of a model, if no file says it."},
                    "engine": {"type": "string", "description": "Price another software than the files'."},
                    "define": {
                        "type": "object",
                        "additionalProperties": {"type": "string"},
                        "description": "Variables that a script gets from outside, such as NNODES.",
                    },
                },
                "required": ["files"],
                "additionalProperties": False,
            },
            {"files": {"train.sh": _SCRIPT}, "device": "h100"},
            _check,
        ),
        Tool(
            "export",
            "Write the best plan of a job as flags or configuration of other software. `text` is the file; "
            "`inexpressible` names the parts that this software does not support. Choose `engine` to "
            "match, such as megatron.",
            _with(
                {
                    "to": {
                        "type": "string",
                        "enum": list(TARGETS),
                        "description": "The software that is to read the file.",
                    }
                },
                "to",
            ),
            _JOB | {"engine": "megatron", "to": "megatron"},
            _export,
        ),
        Tool(
            "models",
            "The models of the catalogue: names and parameters; all sizes where one name matches. For "
            "another model give its config.json as `config` to suggest, or its id on the Hugging Face Hub as "
            "`model` where this machine has it in its cache.",
            _NAME,
            {"name": "llama3"},
            _models,
        ),
        Tool(
            "devices",
            "The accelerators of the catalogue: memory in bytes, bandwidth in bytes per second, peak FLOP/s "
            "by number format, devices of a node.",
            _NAME,
            {"name": "h100"},
            _devices,
        ),
    )
}
"""The tools by name."""

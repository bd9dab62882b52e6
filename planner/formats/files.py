"""Files of other software: the kind of each, and the job that they describe together."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.files import MIB, read_text
from planner.formats.facts.definitions import check_definitions, parse_definitions
from planner.formats.facts.entries import PARSERS, Entries
from planner.formats.facts.flag_catalogue import known_flags
from planner.formats.facts.inherited import named_files, variables
from planner.formats.facts.keyed import known_keys
from planner.formats.facts.launcher import commands, find_launch, known_count
from planner.formats.facts.objective import DEFINED, with_objective
from planner.formats.facts.open_words import deciding_names, loose_words, name_open_words
from planner.formats.facts.pages import block_entries, running_entries
from planner.formats.facts.reading import ConfigProblem, Problems, Reading
from planner.formats.facts.source import Source, Surroundings
from planner.formats.hugging_face import deepspeed_config, fsdp_files, trainer_files
from planner.formats.hugging_face import reader as hugging_face
from planner.formats.megatron import functional_tests
from planner.formats.megatron.reader import read_megatron
from planner.formats.mindformers import dynamic as mindformers_dynamic
from planner.formats.mindformers import reader as mindformers
from planner.formats.nanotron import reader as nanotron
from planner.formats.nemo import reader as nemo
from planner.formats.nemo import rl
from planner.formats.nemo.overrides import override_entries
from planner.formats.on_megatron import gpt_neox, slime, swift, verl
from planner.formats.primus import reader as primus
from planner.formats.python.recipes import recipes
from planner.formats.recognised import refuse_recognised
from planner.formats.torchtitan import flags as torchtitan_flags
from planner.formats.torchtitan import reader as torchtitan
from planner.formats.torchtitan import registry
from planner.inputs.model import resolve_model

LARGEST = MIB // 4
"""Most bytes of a configuration."""

EXPECTED = (
    "expected a script or arguments of Megatron-LM, MindSpeed or PAI's llmacc, "
    "or a configuration of MindFormers, torchtitan, nanotron, NeMo, Megatron-Bridge, Primus, accelerate "
    "or DeepSpeed"
)

Reader = Callable[[Source, Surroundings], Reading]


@dataclass(frozen=True)
class Kind:
    """Software whose configurations are files of keys."""

    framework: str
    recognises: Callable[[Entries], bool]
    read: Reader


TRAINERS = tuple(
    Kind(name, recognises, hugging_face.trainer_reader(name))
    for name, recognises in trainer_files.SOFTWARE.items()
)
"""Trainers that are built on Hugging Face's."""

KINDS = (
    Kind("primus", primus.recognises, primus.read_primus),
    Kind("nemo-rl", rl.recognises, rl.read_nemo_rl),
    Kind("functional-test", functional_tests.recognises, functional_tests.read_functional_test),
    *TRAINERS,
    Kind("gpt-neox", gpt_neox.is_neox, gpt_neox.read_neox),
    Kind("verl", verl.is_verl, verl.read_verl),
    Kind("verl-sft", verl.is_verl_sft, verl.read_verl_sft),
    Kind("mindformers-dynamic", mindformers_dynamic.recognises, mindformers_dynamic.read_dynamic),
    Kind("mindformers", mindformers.recognises, mindformers.read_static),
    Kind("nanotron", nanotron.recognises, nanotron.read_nanotron),
    Kind("torchtitan", torchtitan.recognises, torchtitan.read_torchtitan),
    Kind("nemo", nemo.recognises, nemo.read_nemo),
    Kind(
        "accelerate",
        fsdp_files.is_accelerate,
        lambda source, around: hugging_face.read_hugging_face(None, source, None, around),
    ),
    Kind(
        "deepspeed",
        deepspeed_config.recognises,
        lambda source, around: hugging_face.read_hugging_face(None, None, source, around),
    ),
)
"""Kinds of files; the first kind that recognises a file's keys reads the file."""

RECIPES = Kind("recipes", lambda entries: False, nemo.read_recipe)
"""The kind of Python files of Megatron-Bridge and NeMo."""

REGISTRY = Kind("registry", lambda entries: False, registry.read_registry)
"""The kind of Python files of torchtitan."""

TORCHTITAN_COMMAND = Kind("torchtitan", lambda entries: False, torchtitan.read_torchtitan)
"""The kind of scripts and lists of arguments that start torchtitan."""

OVERRIDES = Kind("overrides", lambda entries: False, nemo.read_overrides)
"""The kind of scripts that pass keys of NeMo or Megatron-Bridge to a program."""

SWIFT = Kind("ms-swift", lambda entries: False, swift.read_swift)
"""The kind of scripts with ms-swift's commands for Megatron-LM."""

WITH_VARIABLES = ("primus", "functional-test")
"""Kinds of files of keys that use environment variables, and whose keys are read as flags."""

SLIME = Kind("slime", lambda entries: False, slime.read_slime)
"""The kind of scripts that start slime."""

BESIDE_SCRIPTS = ("accelerate", "deepspeed", *trainer_files.SOFTWARE)
"""Kinds of files that a script's trainer reads."""


def read_files(
    files: Sequence[str | Path],
    *,
    world_size: int | None = None,
    local_world_size: int | None = None,
    define: Mapping[str, str] | Iterable[str] | None = None,
    model: str | Path | None = None,
) -> Reading:
    """The job that `files` describe together: one that starts it, and files that describe its model.

    Nothing is run. `define` gives environment variables of a script, or keys that replace those of a file, as
    a mapping or as `NAME=VALUE`; `model` names the model where no file describes it. Raises `InputError` for
    files that cannot be read, and where none or several start a job.
    """
    defined = parse_definitions(define)
    texts = {str(file): _text(file) for file in files}
    if not texts:
        raise InputError(f"no file to read: {EXPECTED}")
    models = [file for file, text in texts.items() if _describes_model(file, text)]
    if len(models) > 1:
        raise InputError(f"{' and '.join(models)} both describe a model; give one")
    if models and model is not None:
        raise InputError(f"{models[0]} describes a model, and model {model} is given too; give one")
    described = models[0] if models else (None if model is None else str(model))
    beside = _beside(texts)
    around = Surroundings(
        world_size=world_size,
        local_world_size=local_world_size,
        described=described,
        model=None if described is None else resolve_model(described),
        define=defined,
        beside=beside,
    )
    own = [file for file in texts if file != described and Path(file).name not in beside]
    around = dataclasses.replace(around, files=tuple(own))
    together = _of_gpt_neox(own, texts)
    parts = [together] if together else _joined([_part(file, texts[file], around) for file in own])
    reading = with_objective(_together(parts, around, described), defined)
    scripts = [
        part
        for part in parts
        if not part.source.page and Path(part.source.file).suffix.lower() not in PARSERS
    ]
    if defined:
        texts_of_scripts = [part.source.text for part in scripts]
        check_definitions(
            defined, [*texts_of_scripts, *beside.values()], _known_names(parts, reading), " and ".join(own)
        )
    found = [problem for part in scripts for problem in _open_words(part, around)]
    reading = dataclasses.replace(reading, problems=(*reading.problems, *found))
    return dataclasses.replace(
        reading,
        world_size=world_size or reading.world_size,
        local_world_size=local_world_size or reading.local_world_size,
    )


_SOURCE = re.compile(r"^[ \t]*(?:source|\.)[ \t]+[\"']?([^\s;&|\"']+)", re.MULTILINE)
_STARTED = re.compile(
    r"^(?![ \t]*#)[^\n]*?(?:\b(?:bash|sh|zsh|sbatch)[ \t][^\n;&|#]*?|(?<=[\s\"'=:/.-]))"
    r"([\w.-]+\.(?:sh|bash|slurm|sbatch))(?![\w.])",
    re.MULTILINE,
)
"""Scripts that a line may start, by name without folders."""


def _beside(texts: Mapping[str, str]) -> dict[str, str]:
    """Texts of the files that other files read, by name without folders.

    Scripts source commands (`source env.sh`) and start scripts (`bash train.sh`), and files of keys inherit
    (`extends: base.yaml`).
    """
    found: dict[str, str] = {}
    for file, text in texts.items():
        keys = Path(file).suffix in PARSERS
        names = {*named_files(text)} if keys else _sourced(text) | _started(text)
        found |= {
            Path(other).name: content
            for other, content in texts.items()
            if other != file
            and Path(other).name in names
            and (Path(other).suffix in PARSERS) == keys
            and (keys or Path(other).name in _sourced(text) or Path(file).name not in _started(content))
        }
    return found


def _sourced(text: str) -> set[str]:
    """Names without folders of the scripts that a script sources."""
    return {name.rpartition("/")[2] for name in _SOURCE.findall(text)}


def _started(text: str) -> set[str]:
    """Names without folders of the scripts that a script may start."""
    return {*_STARTED.findall(text)}


@dataclass(frozen=True)
class _Part:
    """One file and its kind."""

    source: Source
    kind: Kind | None
    """The kind of the file; None for a script."""
    other_values: tuple[ConfigProblem, ...] = ()


def _is_program(part: _Part) -> bool:
    return part.kind is None or part.kind in (RECIPES, REGISTRY, OVERRIDES, SWIFT, SLIME)


def _open_words(part: _Part, around: Surroundings) -> list[ConfigProblem]:
    """Problems of words that may hold keys or flags of the largest command of a script.

    Readers of slime's, Megatron-LM's and trainers' commands name such words themselves.
    """
    if part.kind in (None, RECIPES, REGISTRY, SLIME):
        return []
    found = commands(part.source.text, dict(around.define), around.beside)
    launch = max(found, key=lambda one: len(one.arguments), default=None)
    problems = Problems(part.source.file)
    if launch is not None:
        names = deciding_names(part.source.text, launch, lambda flag: True)
        name_open_words(loose_words(launch.arguments), names, problems)
    return problems.found


def _known_names(parts: Sequence[_Part], reading: Reading) -> set[str]:
    """All flags and keys that exist in files of these kinds."""
    found = {path for part in parts for path in part.source.entries} | {flag.name for flag in reading.flags}
    found.add(DEFINED)
    for part in parts:
        if part.kind is SLIME:
            found |= {*known_keys("slime")}
        if part.kind is RECIPES:
            found |= {"recipe", *nemo.OTHERS}
        if part.kind is REGISTRY:
            found |= {"recipe", *known_keys("torchtitan")}
        if part.kind is None or _is_program(part) or part.kind.framework == "nemo":
            found |= {*known_flags(), *(name[2:].replace("-", "_") for name in known_flags())}
        if part.kind is not None and part.kind not in TRAINERS and not _is_program(part):
            found |= {*known_keys(part.kind.framework)}
        if part.kind is not None and part.kind.framework in WITH_VARIABLES:
            found |= {*variables(part.source.text), *known_flags(), *known_keys("torchtitan")}
            found |= {functional_tests.RUN, functional_tests.NODES, functional_tests.DEVICES}
        if part.kind is not None and part.kind.framework == "gpt-neox":
            found |= {*gpt_neox.NEOX}
        if part.kind is None or part.kind.framework in BESIDE_SCRIPTS:
            found |= {*known_keys("transformers")}
    return found


def _joined(parts: list[_Part]) -> list[_Part]:
    """Program files joined into one part, as a recipe may use recipes of another file."""
    programs = [part for part in parts if part.kind in (RECIPES, REGISTRY)]
    if len({id(part.kind) for part in programs}) != 1 or len(programs) < 2:
        return parts
    first, *others = programs
    source = dataclasses.replace(
        first.source, others=tuple((other.source.file, other.source.text) for other in others)
    )
    return [dataclasses.replace(first, source=source), *(part for part in parts if part not in programs)]


def _of_gpt_neox(own: Sequence[str], texts: Mapping[str, str]) -> _Part | None:
    """Several YAML files of one GPT-NeoX job joined into one part; None for other files."""
    if len(own) < 2 or not all(file.lower().endswith((".yml", ".yaml")) for file in own):
        return None
    found = {file: PARSERS[Path(file).suffix.lower()](texts[file], f"file {file}") for file in own}
    first = next((file for file, entries in found.items() if gpt_neox.is_neox(entries)), None)
    if first is None or any(primus.recognises(entries) for entries in found.values()):
        return None
    others = tuple((file, texts[file]) for file in own if file != first)
    kind = next(one for one in KINDS if one.framework == "gpt-neox")
    return _Part(Source(first, texts[first], found[first], others=others), kind)


def _part(file: str, text: str, around: Surroundings) -> _Part:
    """A file and its kind; raises `InputError` where nothing in the file is known."""
    if Path(file).suffix.lower() == ".py":
        if registry.has_configurations(file, text):
            return _Part(Source(file, text), REGISTRY)
        if not recipes(((file, text),)):
            refuse_recognised(file, (), text)
        return _Part(Source(file, text), RECIPES)
    parser = PARSERS.get(Path(file).suffix.lower())
    if parser is not None:
        entries = functional_tests.of_other_software(parser(text, f"file {file}"))
        refuse_recognised(file, entries)
        kind = _kind_of(entries)
        if kind is not None:
            return _Part(Source(file, text, entries), kind)
    elif command := torchtitan_flags.find_command(text, around.define, around.beside):
        entries, world, local = command
        return _Part(
            Source(file, text, entries, world_size=world, local_world_size=local), TORCHTITAN_COMMAND
        )
    elif swift.swift_command(text, around) is not None:
        return _Part(Source(file, text), SWIFT)
    elif slime.find_slime(text, around.define, around.beside) is not None:
        return _Part(Source(file, text), SLIME)
    elif entries := override_entries(text, around.define, around.beside):
        kind = _kind_of(entries)
        own = kind is not None and kind.framework in ("verl", "verl-sft")
        return _Part(Source(file, text, entries), kind if own else OVERRIDES)
    elif _starts_job(text, around):
        return _Part(Source(file, text), None)
    else:
        refuse_recognised(file, (), text)
        part = _page(file, text)
        if part is not None:
            return part
    raise InputError(f"file {file}: nothing in it starts a training job that is known; {EXPECTED}")


def _starts_job(text: str, around: Surroundings) -> bool:
    define = dict(around.define)
    if find_launch(text, define, around.beside) is not None:
        return True
    configurations = [file for file in around.files if Path(file).suffix in PARSERS]
    return hugging_face.find_command(text, define, around.beside, configurations) is not None


def _together(parts: Sequence[_Part], around: Surroundings, described: str | None) -> Reading:
    """The job that several files describe: a script with the files that its trainer reads."""
    by_name = {part.kind.framework if part.kind else "": part.source for part in parts}
    if len(parts) == 2 and set(by_name) == {OVERRIDES.framework, "nemo"}:
        # A script, and the file whose keys it changes.
        changes, whole = by_name[OVERRIDES.framework], by_name["nemo"]
        both = dataclasses.replace(whole, entries={**whole.entries, **changes.entries})
        return nemo.read_nemo(both, around)
    command = next((part.source for part in parts if part.kind is TORCHTITAN_COMMAND), None)
    named = next((part for part in parts if part.source is not command), None)
    if command is not None and named is not None and len(parts) == 2:
        reading = _named_by(command, named, around)
        if reading is not None:
            return reading
    if (
        len(by_name) < len(parts)
        or not parts
        or len(set(by_name) - {"", *BESIDE_SCRIPTS}) > (len(parts) == 1)
    ):
        names = ", ".join(part.source.file for part in parts)
        raise InputError(
            f"{names} each start a job; give one" if parts else f"file {described}: {EXPECTED} beside it"
        )
    script, deepspeed = by_name.get(""), by_name.get("deepspeed")
    if script is not None and _is_megatron(script, around):
        sizes = around.world_size, around.local_world_size
        define = dict(around.define)
        reading = read_megatron(script.text, script.file, define, *sizes, described, deepspeed, around.beside)
        if reading is not None:
            return reading
    (first, *_) = parts
    if first.kind is not None and first.kind.framework not in BESIDE_SCRIPTS:
        reading = first.kind.read(first.source, around)
        return dataclasses.replace(reading, problems=(*reading.problems, *first.other_values))
    software = next((name for name in trainer_files.SOFTWARE if name in by_name), "")
    accelerate, trainer = by_name.get("accelerate"), by_name.get(software) if software else None
    return hugging_face.read_hugging_face(script, accelerate, deepspeed, around, trainer, software)


def _named_by(command: Source, named: _Part, around: Surroundings) -> Reading | None:
    """The job of a torchtitan command with its named configuration; None for another file."""
    world = around.world_size or command.world_size
    local = around.local_world_size or command.local_world_size
    around = dataclasses.replace(around, world_size=world, local_world_size=local)
    if named.kind is REGISTRY:
        reading = registry.read_registry(named.source, around, command.entries)
    elif named.kind not in (None, TORCHTITAN_COMMAND) and named.kind.framework == "torchtitan":
        changes = torchtitan_flags.without_names(command.entries)
        whole = dataclasses.replace(named.source, entries={**named.source.entries, **changes})
        reading = torchtitan.read_torchtitan(whole, around)
    else:
        return None
    placed = (
        dataclasses.replace(one, file=command.file) if one.flag in command.entries else one
        for one in reading.problems
    )
    return dataclasses.replace(reading, problems=tuple(placed))


def _is_megatron(script: Source, around: Surroundings) -> bool:
    """Return whether a script is Megatron-LM's rather than one of Hugging Face's trainer."""
    define = dict(around.define)
    other = hugging_face.find_command(script.text, define, around.beside)
    launch = find_launch(script.text, define, around.beside)
    if launch is None or other is None:
        return launch is not None
    return known_count(launch) >= sum(path in known_keys("transformers") for path in other[1])


def _kind_of(entries: Entries) -> Kind | None:
    return next((kind for kind in KINDS if kind.recognises(entries)), None)


def _page(file: str, text: str) -> _Part | None:
    """The first configuration on a page: in a code block, or in text without its line breaks."""
    for entries in block_entries(text, file):
        kind = _kind_of(entries)
        if kind is not None:
            return _Part(Source(file, text, entries, page=True), kind)
    best: tuple[int, Kind, Entries, dict[str, list[int]]] | None = None
    for kind in KINDS[KINDS.index(TRAINERS[-1]) + 1 :]:
        entries, again = running_entries(text, known_keys(kind.framework))
        enough = len(entries) >= (FEWEST_KEYS if best is None else best[0] + 1)
        if enough and kind.recognises(entries):
            others = {path: [entry.line for entry in found] for path, found in again.items()}
            best = len(entries), kind, entries, others
    if best is None:
        return None
    _, kind, entries, others = best
    source = Source(file, text, entries, page=True)
    return _Part(source, kind, tuple(_other_values(file, entries, others)))


FEWEST_KEYS = 5
"""Least number of known keys of a page with a configuration."""


def _other_values(file: str, entries: Entries, others: Mapping[str, list[int]]) -> Iterator[ConfigProblem]:
    problems = Problems(file)
    for path, lines in others.items():
        text = f"has other values on lines {', '.join(map(str, lines))} of the page; the first one counts"
        name = path.rpartition(".")[2]
        problems.add("note", text, path, entries[path].line, f"for another give --define {name}=VALUE")
    yield from problems.found


def _text(file: str | Path) -> str:
    try:
        return read_text(file, LARGEST, encoding="utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError:
        raise InputError(f"cannot read file {file}: it is not UTF-8 text") from None
    except OSError as error:
        raise InputError(f"cannot read file {file}: {error.strerror or error}") from None


def _describes_model(file: str, text: str) -> bool:
    """Return whether a file is a Hugging Face config.json, or a model of the planner's own YAML."""
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

"""Experiments of Primus (AMD):

`modules.*.overrides`, with the named presets. A module names its framework, the file of its defaults
(`config`), the preset of a model, and its overrides. Presets that are not given are Primus's own of these
names.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

from costmodels.errors import InputError
from costmodels.spec.model import ModelSpec
from planner.formats.facts.definitions import with_definitions
from planner.formats.facts.entries import PARSERS, Entries, Entry
from planner.formats.facts.flag_catalogue import known_flags
from planner.formats.facts.inherited import Inherited, inherit, with_variables
from planner.formats.facts.keyed import Keyed
from planner.formats.facts.launcher import Launch
from planner.formats.facts.reading import Problems, Reading
from planner.formats.facts.roles import name_others
from planner.formats.facts.source import Source, Surroundings
from planner.formats.megatron.reader import read_command
from planner.formats.on_megatron.flags import as_flags, renamed
from planner.formats.primus.names import (
    EIGHT_RANKS,
    FLAGS,
    MODULES,
    OF_EXPERTS,
    OF_LATENT,
    OFF,
    SAME_MODEL,
    TITAN_MODULE,
)
from planner.formats.shell.text import Word
from planner.formats.torchtitan.reader import read_torchtitan
from planner.inputs.huggingface.script_names import model_of

_MODULE = re.compile(r"(modules\.\w+)\.framework")


def recognises(entries: Entries) -> bool:
    """Return whether keys are those of an experiment of Primus."""
    return any(_MODULE.fullmatch(path) for path in entries)


def read_primus(source: Source, around: Surroundings) -> Reading:
    """The job of an experiment of Primus; raises `InputError` where the experiment trains with other
    software."""
    entries = {
        path: dataclasses.replace(
            entry,
            text=with_variables(entry.text, around.define),
            items=entry.items and tuple(with_variables(item, around.define) for item in entry.items),
        )
        for path, entry in source.entries.items()
    }
    modules = [match[1] for path in entries if (match := _MODULE.fullmatch(path))]
    (module, *others) = modules
    if others:
        raise InputError(f"file {source.file}: {' and '.join(modules)} are several jobs; give one")
    framework = entries[f"{module}.framework"].text
    if framework == "megatron":
        return _Megatron(source, around, entries, module).read()
    if framework == "torchtitan":
        return _read_titan(source, around, entries, module)
    raise InputError(f"file {source.file} trains with {framework}, whose jobs of Primus are not read")


def _below(entries: Entries, section: str) -> Entries:
    """The keys of a section by their paths in the section."""
    start = f"{section}."
    return {
        path.removeprefix(start): dataclasses.replace(entry, path=path.removeprefix(start))
        for path, entry in entries.items()
        if path.startswith(start)
    }


def _preset(
    entries: Entries, key: str, around: Surroundings, file: str
) -> tuple[Inherited | None, Entry | None, str]:
    """The keys of a given preset, the key that names it, and its name without suffix."""
    entry = entries.get(key)
    if entry is None or entry.null:
        return None, None, ""
    name = Path(entry.text).name
    text = around.beside.get(name)
    if text is None or Path(name).suffix not in PARSERS:
        return None, entry, Path(name).stem
    own = PARSERS[Path(name).suffix](text, f"file {name}")
    whole = inherit(own, name, "extends", around.beside)
    files = {path: whole.files.get(path, name) for path in whole.entries}
    return dataclasses.replace(whole, files=files), entry, Path(name).stem


@dataclasses.dataclass
class _Megatron:
    """A job of Primus that trains with Megatron-LM."""

    source: Source
    around: Surroundings
    entries: Entries
    module: str

    def __post_init__(self) -> None:
        self.problems = Problems(self.source.file)
        self.files: dict[str, str] = {}
        self.assumed: list[str] = []

    def read(self) -> Reading:
        """The job, with Primus's names of keys."""
        around, problems = self.around, self.problems
        own = _below(self.entries, f"{self.module}.overrides")
        own = with_definitions(own, around.define, {*FLAGS, *OFF, *_flag_keys()})
        preset, said, name = _preset(self.entries, f"{self.module}.model", around, self.source.file)
        keys = self._defaults() | ({} if preset is None else preset.entries) | own
        keys = _that_count(keys)
        if preset is not None:
            self.files = {path: file for path, file in preset.files.items() if path not in own}
            for file, entry in preset.missing:
                text = f"{entry.text} is not given, from which it starts"
                problems.add("unknown", text, entry.path, entry.line, "give that file too", file)
        model = around.model
        if model is None and preset is None:
            model = self._model(name, said, own)
            ranks = "expert_model_parallel_size"
            if model is not None and model.name in EIGHT_RANKS and ranks not in keys:
                keys[ranks] = Entry(ranks, "8", 0)
        degree = keys.get("tensor_model_parallel_size")
        if degree is None or degree.text == "1":
            keys.pop("sequence_parallel", None)  # Presets say it for every degree.
        pairs, names = _pairs(keys)
        flags = {flag for flag, _ in pairs}
        if model is not None and not model.tied and UNTIED not in flags:
            pairs.append((UNTIED, Entry("", "true", 0)))  # Its preset says so.
        names = {flag: flag[2:].replace("-", "_") for flag in known_flags()} | names
        reading = read_command(
            as_flags(pairs),
            [],
            Launch("", (), None, None, None, None if flags & FSDP else Word("1", 0)),
            self.source.file,
            world_size=around.world_size,
            local_world_size=around.local_world_size,
            model=model,
            framework="megatron",
        )
        keyed = Keyed(
            {path: entry for path, entry in keys.items() if path not in names.values() and not entry.null},
            "primus",
            self.source.file,
            problems,
        )
        others = [flag for flag in keyed.flags() if flag.line and not _is_flag(flag.name)]
        name_others(others, problems, "is no key of Primus or Megatron-LM that is known here")
        unknown_model = model is None and preset is None
        reading = dataclasses.replace(
            reading,
            # Without a preset nothing says the model: its other facts are not asked for.
            problems=(*problems.found, *(() if unknown_model else reading.problems)),
            layout=None if unknown_model else reading.layout,
            flags=(*(flag for flag in reading.flags if flag.line), *others),
            assumed=(*self.assumed, *reading.assumed),
        )
        reading = renamed(reading, names, "primus", "megatron")
        placed = [
            dataclasses.replace(problem, file=self.files.get(problem.flag, problem.file))
            for problem in reading.problems
            # Presets spell out what is usual.
            if problem.severity != "note" or problem.flag not in self.files
        ]
        return dataclasses.replace(reading, files=self.files, problems=tuple(placed))

    def _defaults(self) -> Entries:
        """Values of the module's own file; a problem is added if that file is neither Primus's nor given."""
        preset, entry, _ = _preset(self.entries, f"{self.module}.config", self.around, self.source.file)
        file = "" if entry is None else Path(entry.text).name
        known = MODULES.get(file, {})
        if not known and preset is None:
            line = None if entry is None else entry.line
            text = f"{file or 'the file of the defaults'} is not given, whose keys count"
            self.problems.add("unknown", text, f"{self.module}.config", line, "give that file too")
        found = {name: Entry(name, value, 0) for name, value in known.items()}
        return found | ({} if preset is None else preset.entries)

    def _model(self, name: str, said: Entry | None, own: Entries) -> ModelSpec | None:
        """The catalogue's model with the name of a preset; None where the job changes its sizes."""
        path, line = f"{self.module}.model", None if said is None else said.line
        remedy = "give that file and those that it extends, or --model"
        model = model_of(name) if name else None
        if model is None:
            file = f"{name}.yaml is not given, and no model of the catalogue" if name else "no model is named"
            self.problems.add("unknown", file, path, line, remedy)
            return None
        for key, entry in own.items():
            flag = _flag(key)
            role = known_flags()[flag].role if flag in known_flags() else ""
            same = flag in SAME_MODEL or (
                flag == "--multi-latent-attention"
                and (entry.text.lower() == "true") == (model.latent_attention is not None)
            )
            if role == "model" and not same and not entry.null:
                text = f"changes the model of {name}.yaml, which is not given"
                self.problems.add("unknown", text, key, entry.line, remedy)
                return None
        self.assumed.append(f"the model is {model.name} of the catalogue")
        return model


def _flag_keys() -> set[str]:
    return {name[2:].replace("-", "_") for name in known_flags()}


def _flag(key: str) -> str:
    """The flag for a key of this name; it may be an unknown flag."""
    return FLAGS.get(key, f"--{key.replace('_', '-')}")


def _is_flag(key: str) -> bool:
    """Return whether a key is a flag of Megatron-LM, or a switch that is on by default."""
    return _flag(key) in known_flags() or key in OFF or f"--no-{_flag(key)[2:]}" in known_flags()


UNTIED = "--untie-embeddings-and-output-weights"
FSDP = {"--use-torch-fsdp2", "--use-megatron-fsdp", "--use-custom-fsdp"}
"""Flags with which Primus's launcher must not set `CUDA_DEVICE_MAX_CONNECTIONS`."""


def _that_count(keys: Entries) -> Entries:
    """The keys that apply to this model, without those that presets give for all models."""
    experts = keys.get("num_experts")
    latent = keys.get("multi_latent_attention")
    found = dict(keys)
    if experts is None or experts.null:
        found = {path: entry for path, entry in found.items() if not path.startswith(OF_EXPERTS)}
    if latent is None or latent.text.lower() != "true":
        found = {path: entry for path, entry in found.items() if path not in OF_LATENT}
    layers = keys.get("recompute_num_layers")
    if layers is not None and layers.text == "0":
        found = {path: entry for path, entry in found.items() if path not in _RECOMPUTATION}
    return found


_RECOMPUTATION = ("recompute_granularity", "recompute_method", "recompute_num_layers")


def _pairs(keys: Mapping[str, Entry]) -> tuple[list[tuple[str, Entry]], dict[str, str]]:
    """The keys as flags with their values, and the key of each flag."""
    known = known_flags()
    pairs, names = [], {}
    for key, entry in keys.items():
        text = entry.text.lower()
        name = _flag(key)
        off = OFF.get(key, f"--no-{name[2:]}")
        if entry.null:
            continue
        if name not in known and off in known and text in ("true", "false"):
            if text == "false":
                pairs.append((off, dataclasses.replace(entry, text="true")))
                names[off] = key
        elif name in known and not (known[name].words and text in ("true", "false")):
            pairs.append((name, entry))
            names[name] = key
    return pairs, names


_TITAN_MODEL = re.compile(r"(llama3|llama4|deepseek_v3|qwen3)(?:\.\d)?_([\w.]+?)(-fp8)?")


def _read_titan(source: Source, around: Surroundings, entries: Entries, module: str) -> Reading:
    """A job of Primus that trains with torchtitan: its overrides are torchtitan's own keys."""
    config = entries.get(f"{module}.config")
    preset, said, name = _preset(entries, f"{module}.model", around, source.file)
    defaults = TITAN_MODULE if config is not None and Path(config.text).name == "pre_trainer.yaml" else {}
    keys = {path: Entry(path, text, 0) for path, text in defaults.items()}
    named = _TITAN_MODEL.fullmatch(name)
    if preset is not None:
        keys |= preset.entries
    elif named is not None and said is not None:
        family, flavor, narrow = named.groups()
        flavor = flavor.upper() if family in ("llama3", "deepseek_v3") else flavor.upper().replace("_", "-")
        keys |= {
            "model.name": Entry("model.name", family, said.line),
            "model.flavor": Entry("model.flavor", flavor, said.line),
        }
        if narrow:
            keys["model.converters"] = Entry("model.converters", "quantize.linear.float8", said.line)
    own = {
        path: entry
        for path, entry in _below(entries, f"{module}.overrides").items()
        if "." in path and not path.startswith("primus_turbo.")
    }
    reading = read_torchtitan(dataclasses.replace(source, entries=keys | own), around)
    problems = Problems(source.file)
    if preset is None and named is None and around.model is None:
        text = f"{name or 'the preset of the model'} is not given"
        line = None if said is None else said.line
        problems.add("unknown", text, f"{module}.model", line, "give that file, or --model")
    return dataclasses.replace(reading, framework="primus", problems=(*problems.found, *reading.problems))

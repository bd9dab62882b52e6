"""Configurations of NeMo (YAML, and recipes of NeMo 2) and recipes of Megatron-Bridge.

Their keys are Megatron-LM's flags with underscores, so they are read as these flags, with the same rules.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from costmodels.catalogue import load_engine
from costmodels.spec.model import ModelSpec
from planner.formats.facts.definitions import with_definitions
from planner.formats.facts.entries import Entries, Entry
from planner.formats.facts.flag_catalogue import GivenFlag, known_flags
from planner.formats.facts.keyed import Keyed, resolved_value, word_of
from planner.formats.facts.launcher import Launch
from planner.formats.facts.optimizers import optimizer_named
from planner.formats.facts.reading import ConfigProblem, Problems, Reading
from planner.formats.facts.roles import decides, name_others
from planner.formats.facts.source import Source, Surroundings
from planner.formats.facts.tokenizers import TYPES
from planner.formats.megatron.names import DEGREE_FLAGS
from planner.formats.megatron.reader import read_command
from planner.formats.nemo.bridge_names import FP8_RECIPES, PERFORMANCE, RECIPES
from planner.formats.nemo.names import FLAGS, NOT_MEGATRONS, OFF
from planner.formats.python.recipes import PARALLEL, Recipe, chosen
from planner.formats.shell.text import Word
from planner.inputs.huggingface.script_names import model_of


def recognises(entries: Entries) -> bool:
    """Return whether keys are those of NeMo or Megatron-Bridge."""
    leaves = {path.rpartition(".")[2] for path in entries}
    return PARALLEL[0] in leaves and not any(path.startswith("parallel_config.") for path in entries)


def read_nemo(source: Source, around: Surroundings) -> Reading:
    """The job that a YAML file of NeMo, or of overrides of Megatron-Bridge, describes."""
    bridge = any(path.startswith(("train.", "ddp.")) for path in source.entries)
    return _read(source, around, source.entries, "megatron-bridge" if bridge else "nemo", (), [])


def read_overrides(source: Source, around: Surroundings) -> Reading:
    """The job of a script that passes keys to a program, without the file that these keys override."""
    reading = read_nemo(source, around)
    problems = Problems(source.file)
    named = re.search(r"--config-name[= ]+([^\s\\]+)", source.text)
    line = source.text.count("\n", 0, named.start()) + 1 if named else None
    text = f"{named.group(1) if named else 'the file'} whose keys the command changes is not given"
    problems.add("unknown", text, "--config-name" if named else "", line, "give that file too")
    return dataclasses.replace(reading, problems=(*reading.problems, *problems.found))


def read_recipe(source: Source, around: Surroundings) -> Reading:
    """The job that a recipe in Python describes; raises `InputError` where the file has none."""
    recipe, others = chosen(((source.file, source.text), *source.others), around.define)
    assumed = []
    if recipe.name != "<file>":
        more = f" of {len(others) + 1}; give --define recipe=NAME for another" if others else ""
        assumed.append(f"recipe {recipe.name}{more}")
    bridge = any(path.startswith(("model.", "train.", "ddp.")) for path in recipe.entries)
    framework = "megatron-bridge" if bridge else "nemo"
    reading = _read(source, around, recipe.entries, framework, (recipe.name, *recipe.models), assumed)
    problems = Problems(source.file)
    _name_inherited(recipe, reading, around.define, problems)
    placed = [
        dataclasses.replace(
            _open_to_base(problem, recipe, bridge), file=recipe.files.get(problem.flag, recipe.file)
        )
        for problem in reading.problems
    ]
    return dataclasses.replace(
        reading,
        program=" ".join((recipe.name, *recipe.models)),
        files=recipe.files,
        problems=(*problems.found, *placed),
    )


_COMMON = re.compile(r"_?(?:pretrain|sft|peft)_common\w*")
"""Base functions of Megatron-Bridge's recipes that set nothing of a model (recipes/common.py)."""


def _open_to_base(problem: ConfigProblem, recipe: Recipe, bridge: bool) -> ConfigProblem:
    """A problem of a recipe; one that fields of a base which is not given may solve is not known."""
    names = [(base, base.rpartition(".")[2]) for base in recipe.bases]
    others = [base for base, name in names if name not in RECIPES and not _COMMON.fullmatch(name)]
    if problem.severity != "illegal" or not others or (bridge and "model" in recipe.replaced):
        return problem
    text = f"{problem.text}, unless {others[0]}(), which is in no file that is given, says otherwise"
    return dataclasses.replace(
        problem, severity="unknown", text=text, remedy=f"give the file of {others[0]} too", certain=False
    )


_OWN_BASES = re.compile(r"_?(?:pretrain|sft|peft)_common|\w+_(?:pretrain|sft|finetune)_\w*config")
"""Base functions of Megatron-Bridge's recipes (recipes/common.py), which train in bf16."""

_BATCH = {"global_batch_size": "train", "micro_batch_size": "train"}
_DEGREES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


def _name_inherited(recipe: Recipe, reading: Reading, define: Mapping[str, str], problems: Problems) -> None:
    """Add problems for values that a recipe inherits from a function that is not in the files."""
    leaves = {flag.name.rpartition(".")[2] for flag in reading.flags}
    leaves |= {name.rpartition(".")[2] for name in define}
    bridge = reading.framework == "megatron-bridge"
    for base in recipe.bases:
        if base.rpartition(".")[2] in RECIPES:
            continue  # A number format, not a whole configuration.
        wanted = {leaf: part for leaf, part in _BATCH.items() if part not in recipe.replaced or not bridge}
        if not bridge or "model" not in recipe.replaced:
            wanted |= dict.fromkeys((*_DEGREES, "seq_length"), "model" if bridge else "strategy")
        if bridge and not _OWN_BASES.fullmatch(base.rpartition(".")[2]) and not _is_own(base.module):
            wanted |= {"mixed_precision": ""}
        for leaf, part in wanted.items():
            if leaf in leaves:
                continue
            path = f"{part}.{leaf}" if part else leaf
            remedy = f"give the file of {base} too, or --define {leaf}=VALUE"
            text = f"comes from {base}(), which is in no file that is given"
            problems.add("unknown", text, path, base.line, remedy, recipe.file)
    for function in recipe.changed_by:
        text = f"{function}() changes the configuration, and is in no file that is given"
        foreign = function.module and not _is_own(function.module)
        problems.add(
            "unknown" if foreign else "note",
            text,
            "",
            function.line,
            f"give the file of {function} too",
            recipe.file,
        )


def _is_own(module: str) -> bool:
    return module.startswith(("megatron.", "nemo.", "nemo_run.", "."))


def _read(
    source: Source,
    around: Surroundings,
    entries: Entries,
    framework: str,
    models: tuple[str, ...],
    assumed: list[str],
) -> Reading:
    problems = Problems(source.file)
    define = {name: value for name, value in around.define.items() if name != "recipe"}
    keys = Keyed(_defined(entries, define), "nemo", source.file, problems)
    given, paths = _as_flags(keys, framework)
    wide = _sums_in_fp32(keys, framework)
    if wide:
        given = [flag for flag in given if flag.name != OFF[_REDUCED]]
    model = around.model or _named_model(models)
    if around.model is None and model is not None:
        assumed.append(f"the model is {model.name} of the catalogue")
    if model is None:
        _name_defaults_of_class(keys)
    world, local, device = _devices(keys, models)
    # Its launchers set one connection where Megatron-LM wants one, which it does not with its FSDP.
    fsdp = any(
        flag.name in ("--use-megatron-fsdp", "--use-custom-fsdp", "--use-torch-fsdp2") for flag in given
    )
    launch = Launch("", (), None, None, None, None if fsdp else Word("1", 0))
    reading = read_command(
        given,
        [],
        launch,
        source.file,
        world_size=around.world_size or world,
        local_world_size=around.local_world_size or local,
        model=model,
        framework="megatron",
    )
    found = [_renamed(problem, paths, reading.framework) for problem in reading.problems]
    shown = tuple(
        dataclasses.replace(flag, name=paths.get(flag.name, flag.name)) for flag in reading.flags if flag.line
    )
    others = _others(keys, set(keys.entries) - set(paths.values()))
    _name_adapters(keys)
    for path in ("model.optim.name", "optim.name"):
        optimizer_named(keys.text(path), problems, path, keys.line(path))
    _name_other_models(keys)
    name_others(others, problems, "is no key of NeMo that is known here")
    return dataclasses.replace(
        reading,
        framework=framework,
        engine="nemo",
        engine_constants=dict(reading.engine_constants) | (_with_fp32_gradients() if wide else {}),
        device=device,
        flags=(*shown, *others),
        names={name: paths.get(flag, flag) for name, flag in DEGREE_FLAGS.items()},
        assumed=(*assumed, *reading.assumed),
        problems=(*problems.found, *found),
    )


_REDUCED = "grad_reduce_in_fp32"
_PRECISIONS = ("mixed_precision", "plugins", "MixedPrecision", "MegatronMixedPrecision")


def _sums_in_fp32(keys: Keyed, framework: str) -> bool:
    """Return whether a file says that gradients are summed and reduced in fp32.

    The recipe of the number format replaces the field of the data-parallel configuration
    (training/mixed_precision.py, `setup`); its usual value is true with bf16 weights.
    """
    said = [path for path in keys.entries if path.rpartition(".")[2] == _REDUCED]
    of_formats = [path for path in said if path == _REDUCED or any(word in path for word in _PRECISIONS)]
    formats = {entry.text for path, entry in keys.entries.items() if path.endswith("mixed_precision")}
    if framework == "megatron-bridge" and said and not of_formats and formats & {*RECIPES} - {"fp16_mixed"}:
        return True
    last = (of_formats or said)[-1:]
    return any(keys.entries[path].text.lower() == "true" for path in last)


def _with_fp32_gradients() -> dict[str, Any]:
    """Constants of the engine for gradients that are summed and reduced in fp32; recipes of performance, to
    which the engine is fitted, use bf16."""
    changes = {"gradients": 4.0, "reduced": 4.0, "stepping_cast": 0.0}
    memory = load_engine("nemo").memory
    return {"memory": {name: policy.model_copy(update=changes) for name, policy in memory.items()}}


OTHERS = {"precision", "mixed_precision"}
"""Keys that are equivalent to several flags of Megatron-LM."""


def _defined(entries: Entries, define: Mapping[str, str]) -> Entries:
    """The keys with the caller's keys replaced or added; any key with a flag of Megatron-LM is allowed."""
    known = {name[2:].replace("-", "_") for name in known_flags()} | set(FLAGS) | set(OFF)
    known |= OTHERS
    return with_definitions(entries, define, known)


_LAYOUT, _BUILDER = "pipeline_model_parallel_layout", "_pipeline_model_parallel_layout_builder"


def _others(keys: Keyed, rest: set[str]) -> tuple[GivenFlag, ...]:
    """Keys without a flag of Megatron-LM; most are about logs, data and internals of the framework."""
    laid_out = any(path.rpartition(".")[2] == _LAYOUT for path in keys.entries)
    found = []
    for flag in keys.flags():
        path, leaf = flag.name, flag.name.rpartition(".")[2]
        if path not in rest or not flag.line:
            continue
        role = flag.known.role
        if role == "unknown":
            own = known_flags().get(FLAGS.get(leaf, f"--{leaf.replace('_', '-')}"))
            is_own = own is not None or leaf in OFF or leaf in NOT_MEGATRONS
            role = "unknown" if not is_own and decides(leaf, flag.text) else "harmless"
            if own is not None and own.role == "unsupported":
                role = "unsupported"
        if (leaf == _BUILDER and laid_out) or flag.text.lower() in _USUAL:
            role = "harmless"
        found.append(dataclasses.replace(flag, known=dataclasses.replace(flag.known, role=role)))
    return tuple(found)


_USUAL = ("", "false", "none", "null", "0", "0.0", "1")
"""Values by which recipes state that a feature is off."""


def _name_adapters(keys: Keyed) -> None:
    """Add a problem for adapters that train instead of the weights: a scheme of NeMo's own, or a part of a
    recipe."""
    for path, entry in keys.entries.items():
        if path.rpartition(".")[2] in ("peft", "peft_scheme") and entry.text.lower() not in _USUAL:
            what = entry.text if entry.text.isidentifier() else "fine-tuning"
            keys.add(
                "unknown", f"{what}: adapters of NeMo are not priced", path, "see planner suggest --lora-rank"
            )


def _name_other_models(keys: Keyed) -> None:
    """Add problems for models that are not only a decoder: further parts, images, masked words."""
    for path, entry in keys.entries.items():
        words = path.split(".")
        part = words[1] if words[0] == "model" and len(words) > 2 else ""
        inner = part not in ("", "config") and words[-1] in ("num_layers", "hidden_size", "ffn_hidden_size")
        masked = path == "model.bert_binary_head" and not entry.null
        if (inner and not entry.null) or masked or path == "model.mm_cfg.vision_encoder.from_pretrained":
            what = "a model that predicts masked words" if masked else f"a model with a part {part}"
            keys.add("unknown", f"{what} is not priced as a decoder alone", path, "")
            return


def _as_flags(keys: Keyed, framework: str) -> tuple[list[GivenFlag], dict[str, str]]:
    """Keys as flags of Megatron-LM, and the path of each."""
    known = known_flags()
    flags: dict[str, GivenFlag] = {}
    paths: dict[str, str] = {}

    def give(name: str, entry: Entry, words: tuple[str, ...]) -> None:
        if name in flags and "model" in paths[name] and "model" not in entry.path:
            return  # The model's own key counts before that of its data.
        flags[name] = GivenFlag(
            name, tuple(word_of(text, entry.line) for text in words), entry.line, known[name]
        )
        paths[name] = entry.path

    for path, entry in keys.entries.items():
        leaf = path.rpartition(".")[2]
        if entry.null or leaf in NOT_MEGATRONS:
            continue
        text = _computed(entry, keys.entries)
        if leaf in OFF:
            if text.lower() == "false":
                give(OFF[leaf], entry, ())
            continue
        name = FLAGS.get(leaf, f"--{leaf.replace('_', '-')}")
        method = path.removesuffix("num_layers") + "method"
        if name == "--recompute-num-layers" and text == "0" and keys.text(method) != "block":
            continue  # As null: all layers, or none.
        if name not in known or known[name].role not in ("model", "batch", "layout", "special", "unpriced"):
            continue
        if path.startswith("tokenizer.") and not text.isdigit():
            continue
        if leaf.startswith("fp8_"):
            switch = path.rpartition(".")[0] + ".fp8"
            off = (keys.text(switch) or "").lower() == "false"
            if off or (framework == "nemo" and path.startswith("model.") and switch not in keys):
                continue  # Details of a format that is off.
        if known[name].role == "unpriced" and text.lower() != "true":
            continue  # Formats and numbers that recipes spell out though they are the usual ones.
        if text.lower() in ("true", "false"):
            if text.lower() == "true" and not known[name].words:
                give(name, entry, ())
            elif paths.get(name, "").rpartition(".")[2] == leaf and "model" not in paths[name]:
                del flags[name], paths[name]  # Of the same field, which was made with another value.
        elif known[name].words:
            give(name, entry, tuple(entry.items) if entry.items is not None else (text,))
    if "--num-query-groups" in flags:
        # Megatron-LM's parser has a switch besides, which the field needs not.
        entry = keys.entries[paths["--num-query-groups"]]
        give("--group-query-attention", entry, ())
    for name, entry in _said_otherwise(keys, framework):
        give(name, entry, _value_named(name, entry.text))
    if "--sequence-parallel" not in flags and "Overlap" in paths.get("--tp-comm-overlap", ""):
        del flags["--tp-comm-overlap"]  # The callback turns it off by itself (comm_overlap.py).
    granularity = flags.get("--recompute-granularity")
    if granularity is None or granularity.text == "selective":
        flags.pop("--recompute-method", None)  # It is about whole layers.
    if granularity is None or (granularity.text == "selective" and framework == "nemo"):
        flags.pop("--recompute-num-layers", None)
    return list(flags.values()), paths


def keys_of_flags(flags: Mapping[str, str]) -> dict[str, str]:
    """Keys of NeMo's YAML for flags of Megatron-LM and their values."""
    leaves = {flag: leaf for leaf, flag in FLAGS.items() if leaf not in _OTHER_LEAVES}
    return {
        f"model.{leaves.get(flag, flag[2:].replace('-', '_'))}": text or "true"
        for flag, text in flags.items()
        if flag not in ("--bf16", "--fp16")
    }


_OTHER_LEAVES = ("sequence_length", "override_vocab_size")


_PRODUCT = re.compile(r"\$\{multiply:\s*([\w.${}]+)\s*,\s*([\w.${}]+)\s*\}")


def _computed(entry: Entry, entries: Entries) -> str:
    """The value of a key, taken from another one or multiplied (`${multiply:4, ${.hidden_size}}`)."""
    text = resolved_value(entry, entries)
    product = _PRODUCT.fullmatch(text)
    if product is None:
        return text
    factors = [resolved_value(dataclasses.replace(entry, text=part), entries) for part in product.groups()]
    if all(re.fullmatch(r"[0-9]{1,9}", factor) for factor in factors):
        return str(int(factors[0]) * int(factors[1]))
    return text


def _value_named(flag: str, text: str) -> tuple[str, ...]:
    """The value of a flag for the name of a recipe."""
    if flag == "--fp8-recipe":
        return tuple(recipe for word, recipe in FP8_RECIPES.items() if word in text.lower())[:1]
    if flag in ("--optimizer", "--muon-tp-mode", "--tokenizer-type", "--tokenizer-name-or-path"):
        return (text,)
    return ("e2m1",) if flag == "--fp4-format" else ()


def _said_otherwise(keys: Keyed, framework: str) -> list[tuple[str, Entry]]:
    """Switches that are turned on by other keys than Megatron-LM's."""
    found: list[tuple[str, Entry]] = []
    made = Entry("", "", 0)
    of_muon: Entry | None = None
    for path, entry in keys.entries.items():
        leaf, text = path.rpartition(".")[2], entry.text.lower()
        if leaf == "mixed_precision":
            text = PERFORMANCE.get(text.strip("${}"), text)
            if "${" in text and "16" not in text and framework == "megatron-bridge":
                keys.add("unknown", f"{entry.text.strip('${}')} makes it, which is not known", path, _FORMATS)
        if leaf in ("precision", "mixed_precision", "plugins"):
            if "nvfp4" in text:
                found.append(("--fp4-format", entry))
            if "fp8" in text:
                found.append(("--fp8-hybrid", entry))
            if "fp8" in text and any(word in text for word in FP8_RECIPES):
                found.append(("--fp8-recipe", entry))
            if "bf16" in text:
                found.append(("--bf16", entry))
            elif "16" in text and "fp8" not in text:
                found.append(("--fp16", entry))
        elif leaf == "fp8" and text == "true":
            found.append(("--fp8-hybrid", entry))
        elif leaf == "name" and text in ("distributed_fused_adam", "mcore_distributed_optim"):
            found.append(("--use-distributed-optimizer", entry))
        elif path.startswith(_MUON):
            of_muon = entry
        elif path.endswith("optimizer.optimizer") and text not in _USUAL:
            found.append(("--optimizer", entry))
        elif path.endswith("tokenizer.type") and not entry.null:
            found.append(("--tokenizer-type" if entry.text in TYPES else "--tokenizer-name-or-path", entry))
        elif path.endswith("tokenizer.library") and text not in ("megatron", "null"):
            found.append(("--tokenizer-type", entry))
        elif leaf == "activation" and text.removeprefix("fast-") in ("swiglu", "geglu"):
            found.append((f"--{text.removeprefix('fast-')}", entry))
    given = {path.rpartition(".")[2]: entry.text.lower() for path, entry in keys.entries.items()}
    if of_muon is not None and all(name != "--optimizer" for name, _ in found):
        found += [
            ("--optimizer", dataclasses.replace(of_muon, text="dist_muon")),
            ("--muon-tp-mode", dataclasses.replace(of_muon, text=given.get("muon_tp_mode", "blockwise"))),
        ]
    named = {name for name, _ in found}
    if framework == "megatron-bridge" or any("MegatronStrategy" in path for path in keys.entries):
        # Recipes start from bf16 and the distributed optimizer (recipes/common.py, recipes/optim).
        # A trainer of NeMo 2 that is made here without a precision trains in fp32, as Lightning's does.
        own = any(path.startswith("Trainer.") for path in keys.entries) and "plugins" not in given
        if not named & {"--bf16", "--fp16"} and not own:
            found.append(("--bf16", made))
        if given.get(_DISTRIBUTED) != "false" or (framework == "megatron-bridge" and _distributes(keys)):
            found.append(("--use-distributed-optimizer", made))
    return found


_FORMATS = "give the file of that function too, or --define mixed_precision=bf16_mixed"

_DISTRIBUTED = "use_distributed_optimizer"


def _distributes(keys: Keyed) -> bool:
    """Return whether Megatron-Bridge shards the optimizer: it does where one of both fields is true
    (training/config.py). Of an optimizer that a file does not make, the field is true (recipes/common.py)."""
    said = {"ddp": True, "optimizer": not any(path.startswith(_MUON) for path in keys.entries)}
    for path, entry in keys.entries.items():
        part, _, leaf = path.rpartition(".")
        if leaf == _DISTRIBUTED:
            said["ddp" if "ddp" in part or "DistributedData" in part else "optimizer"] = entry.text == "true"
    return any(said.values())


_MUON = "distributed_muon_with_"
"""The function that makes Muon (recipes/utils/optimizer_utils.py)."""

_PLAIN = ("GPTModelProvider", "GPTConfig", "TransformerConfig", "MegatronGPTModelProvider")
"""Classes whose layers equal Megatron-LM's defaults."""


def _name_defaults_of_class(keys: Keyed) -> None:
    """Add a problem for a class whose defaults are part of the model: gates, norms and windows."""
    for path in keys.entries:
        made, dot, leaf = path.partition(".")
        if dot and leaf in ("hidden_size", "num_layers") and made[:1].isupper() and made not in _PLAIN:
            text = f"{made} has defaults of its own, which are not known: the model is not"
            keys.add("unknown", text, path, "give --model")
            return


def _named_model(models: tuple[str, ...]) -> ModelSpec | None:
    """The catalogue's model that a recipe names last: by its Hub id, a class, or a function."""
    for name in models[::-1]:
        if "/" in name:
            model = model_of(name)
            if model is not None:
                return model
    for name in models:
        model = model_of(_spelled(name))
        if model is not None:
            return model
    return None


_CLASS = re.compile(
    r"(Llama2|Llama3|Llama31|Mixtral|Nemotron4|Qwen2|Qwen25|Qwen3|GPT|Gpt3)(?:Config|ModelProvider|Provider)(\w+)"
)
_FUNCTION = re.compile(
    r"(llama2|llama3|llama31|mixtral|nemotron4|qwen2|qwen25|qwen3|gpt3)_(\d+x?\d*p?\d*[bm](?:_a\d+b)?)"
)


def _spelled(name: str) -> str:
    """`Llama31Config70B` or `llama31_70b_pretrain_config` as `llama3.1-70b`."""
    match = _CLASS.search(name) or _FUNCTION.search(name.lower())
    if match is None:
        return ""
    family = match.group(1).lower().replace("llama31", "llama3.1").replace("qwen25", "qwen2.5")
    family = "gpt3" if family == "gpt" else family
    return f"{family}-{match.group(2).lower().replace('_', '-').replace('p', '.')}"


_NAMED_DEVICES = re.compile(r"_([0-9]{1,5})gpu_(a100|h100|h200|b200|b300|gb200|gb300)_")


def _devices(keys: Keyed, models: tuple[str, ...]) -> tuple[int | None, int | None, str | None]:
    """Devices of the job and of a node, and their kind, from keys or the recipe's name."""
    named = next((match for name in models if (match := _NAMED_DEVICES.search(name))), None)
    if named is not None:
        return int(named.group(1)) or None, None, {"a100": "a100-80g"}.get(named.group(2), named.group(2))
    by_leaf: Mapping[str, str] = {path.rpartition(".")[2]: path for path in keys.entries}
    nodes = keys.count(by_leaf.get("num_nodes", ""))
    local = keys.count(by_leaf.get("num_gpus_per_node", by_leaf.get("devices", "")))
    return (nodes * local if nodes and local else None), local, None


def _renamed(problem: ConfigProblem, paths: Mapping[str, str], framework: str) -> ConfigProblem:
    """A problem with flags replaced by keys, also in its text."""
    text, remedy = problem.text, problem.remedy
    for flag, path in sorted(paths.items(), key=lambda pair: -len(pair[0])):
        text, remedy = text.replace(flag, path), remedy.replace(flag, path)
    line = problem.line or None
    path = paths.get(problem.flag) or next(iter(keys_of_flags({problem.flag: ""})), "")
    flag = path if problem.flag.startswith("--") else problem.flag
    return dataclasses.replace(problem, flag=flag, text=text, remedy=remedy, line=line)

"""Configurations of torchtitan: TOML files (until 0.2), Python, and flags for their keys.

Defaults are those of torchtitan/config/job_config.py and configs.py, stages those of
distributed/pipeline_parallel.py; keys of earlier releases have the defaults of those releases.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, get_args

from costmodels.catalogue import load_model
from costmodels.catalogue.yaml_files import build
from costmodels.errors import InputError, on_one_line
from costmodels.spec.layout import Fp8Recipe, Layout
from costmodels.spec.model import ModelSpec
from planner.formats.facts.entries import Entries
from planner.formats.facts.keyed import Keyed, defined, todays
from planner.formats.facts.layout_fields import Places, build_layout, degrees_of_world
from planner.formats.facts.optimizers import optimizer_named
from planner.formats.facts.reading import Problems, Reading, in_own_words
from planner.formats.facts.roles import name_others
from planner.formats.facts.source import Source, Surroundings
from planner.formats.torchtitan.flags import CONFIG, CONFIG_FILE
from planner.formats.torchtitan.names import (
    DEBUG_MODEL,
    FIRST_LESS,
    FLAVORS,
    FORMATS,
    KEYS,
    LAST_LESS,
    MICRO_BATCH,
    ROTATE_METHODS,
    SCHEDULES,
    before_0_1,
    zero_stage,
)
from planner.inputs.model import with_seq
from planner.space.shared_stages import stage_layers


def recognises(entries: Entries) -> bool:
    """Return whether keys are those of torchtitan."""
    sections = {path.partition(".")[0] for path in entries if "." in path}
    marks = ({"training.seq_len", "model.flavor"}, {CONFIG, "model.flavor"})
    return {"parallelism", "training"} <= sections or any(mark <= entries.keys() for mark in marks)


def read_torchtitan(source: Source, around: Surroundings) -> Reading:
    """The job that a configuration of torchtitan describes."""
    problems = Problems(source.file)
    assumed: list[str] = []
    entries, own = todays(source.entries, "torchtitan")
    entries, _ = todays(defined(entries, around.define, "torchtitan"), "torchtitan")
    keys = Keyed(entries, "torchtitan", source.file, problems)
    _name_other_state(keys)
    flags = tuple(flag for flag in keys.flags() if flag.line)
    places = Places(KEYS, {path: entry.line for path, entry in keys.entries.items()})
    model = _model(keys, around.model)
    _name_inherited(keys, model)
    degrees = _degrees(keys, model)
    started = around.world_size or source.world_size
    world, device, memory = (None, None, None) if started else _preset(source.text, assumed)
    said = started or _said_world(keys, degrees) or world
    if said is None:
        text = "the number of devices is not known: torchrun says it"
        problems.add("unknown", text, KEYS["data_parallel"], None, "give --world-size")
    release = _Release(own.values(), keys)
    layout = None if model is None or said is None else _layout(keys, model, degrees, said, places, release)
    keys.name_unread()
    name_others(flags, problems, "is no key of torchtitan that is known here")
    reading = Reading(
        framework="torchtitan",
        engine="torchtitan",
        file=source.file,
        model=model,
        layout=layout,
        precision=_precision(keys),
        world_size=said,
        local_world_size=around.local_world_size or source.local_world_size,
        device=device,
        device_memory_gib=memory,
        global_batch_size=None if layout is None else layout.global_batch_size,
        flags=flags,
        names=KEYS,
        training=keys.training(),
        assumed=tuple(assumed),
        problems=tuple(problems.found),
    )
    return in_own_words(reading, own)


class _Release:
    """Defaults that depend on a file's release, which is recognised by its keys."""

    def __init__(self, own: Iterable[str], keys: Keyed) -> None:
        names = set(own)
        self.before_0_1 = "training.batch_size" in names or any(
            name.startswith("experimental.pipeline") for name in names
        )
        """Batches are split into as many microbatches as there are stages."""
        tokens = (KEYS["micro_tokens"], KEYS["global_tokens"])
        self.in_tokens = "training.max_context_length" in names or any(path in keys for path in tokens)
        """Batches are counted in tokens."""


def _name_inherited(keys: Keyed, model: ModelSpec | None) -> None:
    """Add problems for values without a flag of a configuration whose file is not given."""
    file = keys.first(CONFIG_FILE)
    if file is not None:
        keys.add("unknown", f"{file.text} says the job, and is not given", CONFIG_FILE, "give that file too")
    config = keys.first(CONFIG)
    if config is None:
        return
    names = [
        "seq",
        "micro_batch_size",
        "recompute",
        "tensor_parallel",
        "pipeline_parallel",
        "context_parallel",
    ]
    names += ["expert_parallel"] if model is not None and model.experts else []
    for name in names:
        if KEYS[name] not in keys and not (name == "micro_batch_size" and KEYS["micro_tokens"] in keys):
            text = f"is set by {config.text}(), whose config_registry.py is not given"
            keys.add("unknown", text, KEYS[name], f"give that file too, or --define {KEYS[name]}=VALUE")


def _name_other_state(keys: Keyed) -> None:
    if (keys.text("training.dtype") or "float32") != "float32":
        text = "weights, gradients and moments of other formats than float32 are not priced"
        keys.add("unknown", text, "training.dtype")
    if keys.text(KEYS["schedule_file"]):
        keys.add("unknown", "a schedule of its own is not priced", KEYS["schedule_file"])
    for word in (keys.text(KEYS["converters"]) or "").replace(",", " ").split():
        if not re.search(_CONVERTERS, word.lower()):
            keys.add("unknown", f"{word} is not priced", KEYS["converters"])


_CONVERTERS = r"float8|mx|primus_turbo"
"""Converters of layers that are priced, or reported where they are read."""


_PRESET = re.compile(r"preset for ([0-9]{1,5}) ([AHB][0-9]{2,3}) GPUs(?: \(with ([0-9]{1,4}) ?GiB memory\))?")


def _preset(text: str, assumed: list[str]) -> tuple[int | None, str | None, float | None]:
    """Devices from a comment in the file, and their GiB if the comment has them."""
    match = _PRESET.search(text)
    if match is None:
        return None, None, None
    devices = {"A100": "a100-80g", "H100": "h100", "H200": "h200", "B200": "b200", "H800": "h800"}
    memory = f" with {match.group(3)} GiB" if match.group(3) else ""
    assumed.append(f"{match.group(1)} x {match.group(2)}{memory} (a comment of the file says so)")
    gib = float(match.group(3) or 0) or None
    return int(match.group(1)) or None, devices.get(match.group(2)), gib


def _model(keys: Keyed, described: ModelSpec | None) -> ModelSpec | None:
    seq = keys.count(KEYS["seq"]) or 2048
    if described is not None:
        return with_seq(described, seq)
    family = keys.text("model.name") or "llama3"
    flavor = re.sub(r"_(flex|varlen)\w*$", "", keys.text("model.flavor") or "debugmodel")
    if family == "llama3" and flavor == "debugmodel":
        return build(ModelSpec, {**DEBUG_MODEL, "seq": seq}, "model llama3 debugmodel")
    name = FLAVORS.get((family, flavor))
    if name is None:
        known = ", ".join(f"{one} {size}" for one, size in FLAVORS)
        text = f"the model {family} {flavor} is not known ({known})"
        keys.add("unknown", text, "model.flavor", "give its config.json beside it")
        return None
    try:
        return with_seq(load_model(name), seq)
    except InputError as error:
        keys.add("illegal", on_one_line(error), KEYS["seq"])
        return None


def _degrees(keys: Keyed, model: ModelSpec | None) -> dict[str, Any]:
    names = ("tensor_parallel", "pipeline_parallel", "context_parallel")
    degrees: dict[str, Any] = {name: keys.count(KEYS[name]) or 1 for name in names}
    degrees["sequence_parallel"] = keys.switch("parallelism.enable_sequence_parallel", default=True)
    if degrees["context_parallel"] > 1:
        degrees["context_parallel_form"] = ROTATE_METHODS[
            keys.choice(KEYS["context_parallel_form"], ROTATE_METHODS, "allgather")
        ]
    ep = keys.count(KEYS["expert_parallel"]) or 1
    if model is not None and model.experts:
        etp = keys.count(KEYS["expert_tensor_parallel"]) or 1
        degrees["expert_parallel"] = ep
        degrees["expert_tensor_parallel"] = etp if ep > 1 else degrees["tensor_parallel"]
        if ep > 1 and etp not in (1, degrees["tensor_parallel"]):
            text = f"{etp} is neither 1 nor the tensor-parallel degree {degrees['tensor_parallel']}"
            keys.add("illegal", text, KEYS["expert_tensor_parallel"])
    elif ep > 1:
        keys.add("illegal", "there are no experts to spread", KEYS["expert_parallel"])
    return degrees


def _said_world(keys: Keyed, degrees: dict[str, Any]) -> int | None:
    """The product of all degrees, if the number of shards is given and not left open (-1)."""
    shard = keys.first(KEYS["data_parallel"])
    if shard is None or shard.text.startswith("-"):
        return None
    replicate = keys.count(KEYS["zero_replicas"]) or 1
    product = degrees["tensor_parallel"] * degrees["pipeline_parallel"] * degrees["context_parallel"]
    return (keys.count(KEYS["data_parallel"]) or 1) * replicate * int(product)


def _layout(
    keys: Keyed,
    model: ModelSpec,
    degrees: dict[str, Any],
    world: int,
    places: Places,
    release: _Release,
) -> Layout | None:
    problems = keys.problems
    stages = _stages(keys, model, degrees["pipeline_parallel"], release)
    whole = degrees_of_world(degrees, world, places, problems)
    if whole is None or stages is None:
        return None
    whole |= stages
    replicate = keys.count(KEYS["zero_replicas"]) or 1
    shard = keys.first(KEYS["data_parallel"])
    shards = None if shard is None or shard.text.startswith("-") else keys.count(KEYS["data_parallel"])
    if whole["data_parallel"] % replicate or (shards and shards * replicate != whole["data_parallel"]):
        ranks = whole["data_parallel"]
        text = f"replicate {replicate} x shard {shards or '?'} is not the {ranks} data-parallel ranks"
        keys.add("illegal", text, KEYS["zero_replicas"])
        return None
    sharded = whole["data_parallel"] // replicate * whole["context_parallel"]
    policy = keys.choice(KEYS["zero_stage"], ("default", "always", "never"), "default")
    whole["zero_stage"] = zero_stage(sharded, whole["pipeline_parallel"], policy)
    whole["zero_replicas"] = replicate if sharded > 1 else 1
    sizes = _batch(keys, model, len(stages["layers_per_stage"]), release)
    if sizes is None:
        return None
    micro, local, exact = sizes
    whole["micro_batch_size"] = micro
    unit = local * whole["data_parallel"]
    path = KEYS["global_tokens"] if release.in_tokens else KEYS["global_batch_size"]
    if exact is not None and exact % unit:
        ranks = whole["data_parallel"]
        text = f"{exact} is not a multiple of {local} sequences x {ranks} data-parallel ranks"
        keys.add("illegal", text, path, f"use a multiple of {unit}")
        return None
    whole["global_batch_size"] = exact or unit
    whole |= _recompute(keys, model, stages["layers_per_stage"]) | {"precision": _precision(keys)}
    if whole["precision"] == "fp8":
        whole |= _fp8(keys)
    if keys.switch(KEYS["offload_optimizer"]):
        whole["offload_optimizer"] = True
    if whole["zero_stage"] == 0:
        whole.pop("zero_replicas")
    path = KEYS["optimizer"]
    whole["optimizer"] = optimizer_named(keys.text(path), problems, path, keys.line(path))
    return build_layout(whole, places, problems)


def _open(keys: Keyed, path: str) -> int | None:
    """The number of a key; None where it is left open, also by -1."""
    entry = keys.first(path)
    return None if entry is None or entry.text.startswith("-") else keys.count(path)


def _batch(
    keys: Keyed, model: ModelSpec, stages: int, release: _Release
) -> tuple[int, int, int | None] | None:
    """Sequences of a microbatch, of a data-parallel rank, and of a step, if the file gives them."""
    if release.in_tokens:
        path = KEYS["micro_tokens"]
        tokens, total = keys.count(path) or 16384, _open(keys, KEYS["global_tokens"])
        for name, number in ((path, tokens), (KEYS["global_tokens"], total or model.seq)):
            if number % model.seq:
                text = f"{number} tokens are not whole sequences of {model.seq}, which is not priced"
                keys.add("unknown", text, name, f"give --define {name.rpartition('.')[2]}=N")
                return None
        micro = tokens // model.seq
        count = keys.count(KEYS["pipeline_micro_batches"]) or 1
        local = micro * count if stages > 1 else micro
        return micro, local, None if total is None else total // model.seq
    local, exact = keys.count(KEYS["micro_batch_size"]) or 8, _open(keys, KEYS["global_batch_size"])
    if stages == 1:
        return local, local, exact
    if release.before_0_1 or KEYS["pipeline_micro_batches"] in keys:
        count = keys.count(KEYS["pipeline_micro_batches"]) or stages
        if local % count == 0:
            return local // count, local, exact
        keys.add("illegal", f"{local} is not a multiple of {count} microbatches", KEYS["micro_batch_size"])
        return None
    micro = keys.count(MICRO_BATCH) or 1
    if local % micro:
        keys.add("illegal", f"{local} is not a multiple of the microbatch {micro}", KEYS["micro_batch_size"])
        return None
    return micro, local, exact


def _listed_stages(keys: Keyed, layers: int) -> tuple[int, ...] | None:
    """Layers of the stages listed in a file; None, and a problem, where the list is wrong."""
    points = keys.first(KEYS["split_points"])
    if points is not None:
        named = [re.fullmatch(r"layers\.([0-9]{1,5})", point) for point in points.items or (points.text,)]
        cuts = [0, *(int(match[1]) for match in named if match), layers]
        found = tuple(end - start for start, end in pairwise(cuts))
        good = all(named) and min(found) > 0
        path = points.path
    else:
        path = KEYS["modules_of_stages"]
        parts = [entry.text for name, entry in keys.entries.items() if name.startswith(f"{path}.")]
        parts = parts or [part for part in keys.entries[path].text.split("]") if part.strip(", [")]
        found = tuple(len(re.findall(r"layers\.[0-9]+", part)) for part in parts)
        good = sum(found) == layers and min(found) > 0
    if not good:
        text = f"stages of {', '.join(map(str, found))} layers are not priced for a model of {layers}"
        keys.add("unknown", text, path)
        return None
    return found


def _lists_stages(keys: Keyed) -> bool:
    points, path = keys.first(KEYS["split_points"]), KEYS["modules_of_stages"]
    return bool(points is not None and points.text) or path in keys or keys.under(path)


def _stages(keys: Keyed, model: ModelSpec, pipeline: int, release: _Release) -> dict[str, Any] | None:
    """Fields for chunks, schedule, and layers of the stages; embedding and head count as layers."""
    if pipeline == 1:
        return {"layers_per_stage": (model.layers,)}
    word = keys.text(KEYS["schedule"]) or "1F1B"
    known = {name.lower(): name for name in SCHEDULES}
    if word.lower() not in known:
        keys.add("illegal", f"{word!r} is not one of {', '.join(SCHEDULES)}", KEYS["schedule"])
        return None
    name = known[word.lower()]
    if name in ("GPipe", "LoopedBFS"):
        keys.add("note", "is priced as its 1F1B form, which keeps less", KEYS["schedule"])
    schedule = SCHEDULES[name]
    first = keys.count(FIRST_LESS, least=0)
    last = keys.count(LAST_LESS, least=0)
    ends = (1 if first is None else first, 1 if last is None else last)
    each = keys.count(KEYS["virtual_pipeline_parallel"])
    count = pipeline * (1 if schedule == "1f1b" else 2)
    listed: tuple[int, ...] | None = None
    if _lists_stages(keys):
        listed = _listed_stages(keys, model.layers)
        if listed is None:
            return None
        count = len(listed)
    elif each is not None:
        count = -(-(model.layers + sum(ends)) // each)
    single = schedule == "1f1b"
    if (
        count % pipeline
        or (count > pipeline) == single
        or (schedule in ("zbv", "dualpipev") and count != 2 * pipeline)
    ):
        text = f"makes {count} stages for {pipeline} pipeline ranks under {name}"
        keys.add("illegal", text, KEYS["virtual_pipeline_parallel"] if each else KEYS["schedule"])
        return None
    if listed is None:
        listed = (
            before_0_1(model.layers, count)
            if release.before_0_1
            else stage_layers(model.layers, count, *ends)
        )
    if listed is None:
        text = f"{model.layers} layers leave a stage of {count} empty, which is not priced"
        keys.add("unknown", text, KEYS["pipeline_parallel"])
        return None
    return {
        "virtual_pipeline_parallel": count // pipeline,
        "schedule": schedule,
        "layers_per_stage": listed,
    }


def _recompute(keys: Keyed, model: ModelSpec, stages: tuple[int, ...]) -> dict[str, Any]:
    mode = keys.choice(KEYS["recompute"], ("none", "selective", "full", "memory_budget"), "selective")
    if mode == "full":
        return {"recompute": "full"}
    if mode == "memory_budget":
        keys.add("note", "not priced: taken as no recomputation", KEYS["recompute"])
        return {}
    if mode == "none":
        return {}
    option = keys.text(KEYS["recompute_modules"]) or "2"
    if option == "op" and not (model.experts and model.linear_attention):
        return {"recompute": "selective"}
    if option == "op":
        # With linear attention it keeps an amount between nothing and all, and repeats half of the GEMMs.
        text = "keeps attention and every second GEMM; priced as recomputing every second layer"
        keys.add("note", text, KEYS["recompute_modules"])
        option = "2"
    if not re.fullmatch(r"[1-9][0-9]{0,3}", option):
        keys.add("illegal", f"{option!r} is neither op nor a number of layers", KEYS["recompute_modules"])
        return {}
    some = max(stages) // int(option)
    if int(option) == 1 or not some:
        return {"recompute": "full"} if int(option) == 1 else {}
    return {"recompute": "full", "recompute_method": "block", "recompute_num_layers": some}


def _precision(keys: Keyed) -> str:
    converters = (keys.text(KEYS["converters"]) or "").lower()
    if "float8" in converters or (keys.text(KEYS["float8"]) or "").lower() not in ("", "false"):
        return "fp8"
    if "mx" in converters:
        keys.add("note", "not priced: GEMMs are taken as bf16", KEYS["converters"])
    return FORMATS.get(keys.text(KEYS["precision"]) or "bfloat16", "bf16")


def _fp8(keys: Keyed) -> dict[str, Any]:
    """Fields for fp8 scales and the gathering of weights, from the keys of all releases up to 0.2."""
    given = {path.rpartition(".")[2]: path for path in keys.entries if "float8" in path}
    recipe = keys.text(given.get("recipe_name", ""))
    found: dict[str, Any] = {"fp8_recipe": recipe} if recipe in get_args(Fp8Recipe) else {}
    gathers = keys.switch(given.get("enable_fsdp_float8_all_gather", ""))
    return {"fp8_recipe": "tensorwise", "fp8_param_gather": True} if gathers else found

"""Configurations of MindFormers (MindSpore Transformers) for the static graph.

Defaults are those of mindformers/tools/register/template.py, the batch that of
mindformers/trainer/base_trainer.py, layers of stages those of mindformers/models/utils.py
(`set_layer_stage_recompute`).
"""

from __future__ import annotations

import re
from itertools import takewhile
from typing import Any

from costmodels.catalogue import load_model
from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from costmodels.spec.record import GIB
from planner.formats.facts.entries import Entries, Entry
from planner.formats.facts.keyed import Keyed, defined
from planner.formats.facts.layout_fields import Places, build_layout, degrees_of_world
from planner.formats.facts.optimizers import optimizer_named
from planner.formats.facts.reading import Problems, Reading
from planner.formats.facts.roles import name_others
from planner.formats.facts.source import Source, Surroundings
from planner.formats.mindformers.model import read_model
from planner.formats.mindformers.names import (
    CAME,
    CONTEXT_ALGORITHMS,
    EXCERPTS,
    FORMATS,
    KEEP_LESS,
    SCHEDULES,
    STATIC_KEYS,
)
from planner.inputs.model import resolve_model

MOST_CHUNKS = 64
"""Most chunks of a pipeline rank for which lists are read."""


OLDER_NPU_GIB = 32.0
"""GiB of a first-generation Ascend 910; a configuration that may use more is for a later generation."""


def recognises(entries: Entries) -> bool:
    """Return whether keys are those of a configuration for the static graph."""
    return any(
        STATIC_KEYS[name] in entries for name in ("tensor_parallel", "pipeline_parallel", "data_parallel")
    )


def read_static(source: Source, around: Surroundings) -> Reading:
    """The job that a configuration for the static graph describes."""
    problems = Problems(source.file)
    assumed: list[str] = []
    entries, excerpt = _completed(source, assumed)
    keys = Keyed(defined(entries, around.define, "mindformers"), "mindformers", source.file, problems)
    flags = tuple(flag for flag in keys.flags() if flag.line)
    places = Places(STATIC_KEYS, {path: entry.line for path, entry in keys.entries.items() if entry.line})
    model = around.model
    if model is None:
        model = _published(excerpt, keys, assumed) or read_model(keys, problems, assumed)
    world, per_node = launched_devices(source.text)
    memory = device_memory_gib(keys)
    degrees = _degrees(keys, model)
    known = keys.first(STATIC_KEYS["data_parallel"], STATIC_KEYS["tensor_parallel"]) is not None
    shards = degrees["tensor_parallel"] * degrees["pipeline_parallel"] * degrees["context_parallel"]
    said = around.world_size or world or (degrees["data_parallel"] * shards if known else None)
    layout = None
    if model is not None and said is not None:
        layout = _layout(keys, model, degrees, said, places)
        if layout is not None:
            _name_unpriced(keys, model, layout)
    keys.name_unread()
    name_others(flags, problems, "is no key of MindFormers that is known here")
    device = "ascend-910" if memory is not None and memory <= OLDER_NPU_GIB else "ascend-910b"
    flash = keys.switch("model.model_config.use_flash_attention")
    return Reading(
        framework="mindformers",
        engine="mindformers-flash" if flash else "mindformers",
        file=source.file,
        model=model,
        layout=layout,
        precision=_precision(keys),
        world_size=said,
        local_world_size=around.local_world_size or per_node,
        device=device,
        device_memory_gib=memory,
        global_batch_size=None if layout is None else layout.global_batch_size,
        flags=flags,
        names=STATIC_KEYS,
        training=_training(keys),
        assumed=tuple(assumed),
        problems=tuple(problems.found),
        memory_is_bound=_scheduler(keys) in KEEP_LESS,
    )


def _completed(source: Source, assumed: list[str]) -> tuple[Entries, str]:
    """The keys completed by those of the published file that a page quotes in part, and that file's model."""
    if not source.page:
        return source.entries, ""
    for name, (model, rest) in EXCERPTS.items():
        if name in source.text:
            added = {
                path: Entry(path, value, 0) for path, value in rest.items() if path not in source.entries
            }
            if added:
                said = ", ".join(f"{path}: {entry.text}" for path, entry in added.items())
                assumed.append(f"{said} (as in the published {name}, which the page quotes in part)")
            return {
                **source.entries,
                **added,
            }, "" if STATIC_KEYS["layers"] in source.entries else model
    return source.entries, ""


def _published(name: str, keys: Keyed, assumed: list[str]) -> ModelSpec | None:
    if not name:
        return None
    seq = keys.count(STATIC_KEYS["seq"])
    assumed.append(f"the model is {name} (the page gives no sizes)")
    return resolve_model(load_model(name), seq)


_DISTRIBUTE = re.compile(
    r"run_distribute\.sh[^\n]{0,300}?\[\s*([0-9]{1,5})\s*,\s*([0-9]{1,5})\s*\]\s+(?:\w+)\s+([0-9]{1,6})\b"
)
_LAUNCHER = re.compile(
    r"(?:msrun_launcher|run_singlenode|run_mindformer)\.(?:sh|py)[^\n]{0,400}?[\"']\s+([0-9]{1,6})(?:\s+([0-9]{1,4}))?\b"
)
_MSRUN = re.compile(
    r"msrun[^\n]{0,200}?--worker_num[= ]([0-9]{1,6})[^\n]{0,100}?--local_worker_num[= ]([0-9]{1,4})"
)


def launched_devices(text: str) -> tuple[int | None, int | None]:
    """Devices of the job and of one node, from a launcher's command on the page."""
    match = _DISTRIBUTE.search(text)
    if match is not None:
        first, end, world = map(int, match.groups())
        return world or None, (end - first) if end > first else None
    for pattern in (_MSRUN, _LAUNCHER):
        match = pattern.search(text)
        if match is not None:
            world, local = int(match.group(1)), int(match.group(2) or 0)
            return world or None, local or None
    return None, None


def device_memory_gib(keys: Keyed) -> float | None:
    """GiB of a device that the job may use (`max_device_memory`, such as 31GB)."""
    entry = keys.first(STATIC_KEYS["device_memory"])
    if entry is None:
        return None
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*[Gg][Bb]?", entry.text)
    if match is None or not 0 < float(match.group(1)) < 1e5:
        keys.add("illegal", f"{entry.text!r} is no memory such as 31GB", entry.path)
        return None
    return float(match.group(1))


def _precision(keys: Keyed) -> str:
    return FORMATS.get(keys.text(STATIC_KEYS["precision"]) or "float16", "fp16")


def _degrees(keys: Keyed, model: ModelSpec | None) -> dict[str, Any]:
    """Fields of `Layout` that do not depend on the number of devices."""
    degrees: dict[str, Any] = {
        field: keys.count(STATIC_KEYS[field]) or 1
        for field in ("data_parallel", "tensor_parallel", "pipeline_parallel", "context_parallel")
    }
    if model is not None and model.experts:
        degrees["expert_parallel"] = keys.count(STATIC_KEYS["expert_parallel"]) or 1
        degrees["expert_tensor_parallel"] = degrees["tensor_parallel"]
    degrees["sequence_parallel"] = keys.switch(STATIC_KEYS["sequence_parallel"])
    if degrees["context_parallel"] > 1:
        name = keys.choice(STATIC_KEYS["context_parallel_form"], CONTEXT_ALGORITHMS, "colossalai_cp")
        ring = name == "colossalai_cp" and keys.switch("model.model_config.use_ring_attention")
        degrees["context_parallel_form"] = "ring" if ring else CONTEXT_ALGORITHMS[name]
    degrees |= {
        "zero_stage": _zero(keys),
        "offload_activations": keys.switch(STATIC_KEYS["offload_activations"]),
    }
    sharded = STATIC_KEYS["zero_replicas"]
    shards = keys.count(sharded) if degrees["zero_stage"] and keys.text(sharded) != "-1" else None
    ranks = degrees["data_parallel"] * degrees["context_parallel"]
    if shards and ranks % shards == 0:
        degrees["zero_replicas"] = ranks // shards
    return degrees


def _zero(keys: Keyed) -> int:
    """The ZeRO stage with the same memory as MindSpore's optimizer parallelism."""
    if not keys.switch(STATIC_KEYS["zero_stage"]):
        if keys.switch(STATIC_KEYS["shards_optimizer"]):
            text = "has had no effect since MindFormers 0.7"
            keys.add(
                "note", text, STATIC_KEYS["shards_optimizer"], "set parallel.enable_parallel_optimizer: True"
            )
        return 0
    level = keys.text(STATIC_KEYS["optimizer_level"])
    if level is not None:
        return {"level1": 1, "level2": 2, "level3": 3}.get(level.lower(), 1)
    if keys.switch(STATIC_KEYS["gathers_again"]):
        return 3
    return 2 if keys.switch(STATIC_KEYS["shards_gradients"]) else 1


def _layout(
    keys: Keyed, model: ModelSpec, degrees: dict[str, Any], world: int, places: Places
) -> Layout | None:
    problems = keys.problems
    pipeline = degrees["pipeline_parallel"]
    _check_sizes(keys, model, degrees)
    stages = _stages(keys, model, pipeline)
    whole = degrees_of_world(degrees, world, places, problems)
    if whole is None or stages is None:
        return None
    whole |= stages
    batches = keys.count(STATIC_KEYS["micro_batches"]) or 1
    if pipeline > 1 and batches < pipeline:
        text = f"{batches} microbatches are fewer than the {pipeline} pipeline stages"
        keys.add("illegal", text, STATIC_KEYS["micro_batches"], f"use at least {pipeline}")
    if pipeline == 1:
        # Without a pipeline micro_batch_num is not looked at (base_trainer.py).
        if batches > 1:
            keys.add("note", "has no effect without pipeline stages", STATIC_KEYS["micro_batches"])
        batches = keys.count(STATIC_KEYS["accumulated_batches"]) or 1
    interleave = keys.count("micro_batch_interleave_num") or 1
    if interleave > 1:
        text = f"each microbatch is {interleave} that overlap; they are priced as one"
        keys.add("note", text, "micro_batch_interleave_num")
    whole["micro_batch_size"] = (keys.count(STATIC_KEYS["micro_batch_size"]) or 1) * interleave
    whole["global_batch_size"] = whole["micro_batch_size"] * whole["data_parallel"] * batches
    whole |= _recompute(keys, pipeline) | {"precision": _precision(keys)}
    whole |= {"gradient_reduction": "fp32", "optimizer": optimizer_of(keys, STATIC_KEYS["optimizer"])}
    return build_layout(whole, places, problems)


def _check_sizes(keys: Keyed, model: ModelSpec, degrees: dict[str, Any]) -> None:
    tp, dp = degrees["tensor_parallel"], degrees["data_parallel"]
    mode = keys.count(STATIC_KEYS["mode"], least=0)
    sharded = max(tp, degrees["pipeline_parallel"], degrees["context_parallel"]) > 1
    if mode == 0 and sharded:
        text = "0 is data parallelism alone; model and pipeline parallelism need semi-automatic (1)"
        keys.add("illegal", text, "parallel.parallel_mode", "use 1")
    if not keys.switch(STATIC_KEYS["table_on_each_rank"], default=True) and model.vocab % tp:
        text = f"a vocabulary of {model.vocab} does not split over {tp} (vocab_emb_dp is off)"
        keys.add("illegal", text, "model.model_config.vocab_size", "pad it, or set vocab_emb_dp: True")
    ep = degrees.get("expert_parallel", 1)
    if ep > 1 and dp % ep:
        text = f"expert_parallel {ep} does not divide data_parallel {dp}"
        keys.add("illegal", text, STATIC_KEYS["expert_parallel"])


def _stages(keys: Keyed, model: ModelSpec, pipeline: int) -> dict[str, Any] | None:
    """Fields for chunks, schedule, and layers of the stages."""
    chunks = keys.count(STATIC_KEYS["virtual_pipeline_parallel"]) or 1
    if chunks > 1 and not keys.switch(STATIC_KEYS["interleaves"]):
        path = STATIC_KEYS["virtual_pipeline_parallel"]
        keys.add("note", "has no effect without parallel.pipeline_config.pipeline_interleave", path)
        chunks = 1
    scheduler = _scheduler(keys)
    if scheduler not in ("1f1b", "zero_bubble_v"):
        kept = "less" if scheduler == "gpipe" else "more"
        keys.add("note", f"is priced as 1f1b, which keeps {kept}", STATIC_KEYS["schedule"])
    chunks = 2 if scheduler == "zero_bubble_v" else chunks
    stages = pipeline * chunks
    if stages > model.layers:
        text = f"{stages} stages are more than the {model.layers} layers"
        keys.add("illegal", text, STATIC_KEYS["pipeline_parallel"])
        return None
    # MTP modules count as layers, and stand on the last stage (research/deepseek3).
    further = keys.count("model.model_config.mtp_depth", least=0) or 0
    base = (model.layers + further) // stages
    # Layers that do not divide go to the last stage.
    listed = [base] * (stages - 1) + [model.layers + further - base * (stages - 1)]
    rows = _offset_rows(keys)
    if rows:
        words = [word for row in rows for word in row.items or ()]
        moved = [int(word) if re.fullmatch(r"-?[0-9]{1,4}", word) else None for word in words]
        whole = len(rows) == chunks and all(len(row.items or ()) == pipeline for row in rows)
        if not whole or None in moved:
            shown = ", ".join(f"[{row.text}]" for row in rows)
            shape = f"{pipeline} numbers" if chunks == 1 else f"{chunks} lists of {pipeline} numbers"
            keys.add("illegal", f"{shown} is not {shape}", rows[0].path)
            return None
        listed = [base + (offset or 0) for offset in moved]
    listed[-1] -= further
    if sum(listed) != model.layers or min(listed) < 1:
        some = ",".join(map(str, listed[:20]))
        text = f"the stages have {some} layers, {sum(listed)} together, not {model.layers}"
        keys.add("illegal", text, "model.model_config.offset")
        return None
    schedule = SCHEDULES[scheduler] if chunks == 1 or scheduler == "zero_bubble_v" else "interleaved"
    return {"virtual_pipeline_parallel": chunks, "schedule": schedule, "layers_per_stage": tuple(listed)}


def _offset_rows(keys: Keyed) -> list[Entry]:
    """The lists of `offset`, one for each chunk of a stage; empty if every stage has the same layers."""
    path = STATIC_KEYS["layers_per_stage"]
    entry = keys.first(path)
    if entry is not None:
        return [entry] if entry.items is not None else []
    rows = list[Entry]()
    while (row := keys.first(f"{path}.{len(rows)}")) is not None:
        rows.append(row)
    return rows


def _scheduler(keys: Keyed) -> str:
    return keys.choice(STATIC_KEYS["schedule"], SCHEDULES, "1f1b")


def _recompute(keys: Keyed, pipeline: int) -> dict[str, Any]:
    """Fields for recomputation: whole layers (all, or some of each stage), or some operators."""
    whole = _layers_of_stages(keys, STATIC_KEYS["recompute"], pipeline)
    if whole is True:
        return {"recompute": "full"}
    if whole:
        return {"recompute": "full", "recompute_method": "block", "recompute_num_layers": whole}
    some = _layers_of_stages(keys, STATIC_KEYS["recompute_modules"], pipeline)
    section = f"{STATIC_KEYS['recompute_modules']}."
    # With several chunks a pattern has a list for each, which are keys of their own.
    below = (re.sub(r"\.[0-9]+$", "", path) for path in keys.entries if path.startswith(section))
    patterns = list(dict.fromkeys(below))
    counts = [_layers_of_stages(keys, path, pipeline) for path in patterns]
    if counts and not some and not any(count is True for count in counts):
        some = max(counts)
        if len(set(counts)) > 1:
            text = f"operators differ in the layers that recompute; {some} of each stage are priced for all"
            keys.add("note", text, patterns[counts.index(some)])
    text = keys.text(STATIC_KEYS["recompute_modules"]) or ""
    modules = _modules(" ".join([*patterns, text]))
    if not some and not patterns and not modules:
        return {}
    degrees: dict[str, Any] = {"recompute": "selective", "recompute_modules": modules or ("activation",)}
    if not isinstance(some, bool) and some:
        degrees |= {"recompute_method": "block", "recompute_num_layers": some}
    return degrees


def _modules(patterns: str) -> tuple[str, ...]:
    """Modules for patterns of operators (docs, feature_cards/Training_Algorithms)."""
    named = {
        "core_attention": r"attention(?!_norm)[\w\\.]*(?:flash|softmax|dropout|core)",
        "norm": r"norm",
        "activation": r"feed_forward[\w\\.]*(?:mul|activation|silu|gelu)",
    }
    return tuple(module for module, pattern in named.items() if re.search(pattern, patterns))


def _layers_of_stages(keys: Keyed, path: str, pipeline: int) -> bool | int:
    """True if all layers recompute, or the number of recomputed layers of a stage; the largest if they
    differ."""
    entry = keys.first(path)
    if entry is None:
        # With several chunks, a list for each.
        chunks = takewhile(bool, (keys.first(f"{path}.{chunk}") for chunk in range(MOST_CHUNKS)))
        words = [word for chunk in chunks if chunk is not None for word in chunk.items or (chunk.text,)]
    elif entry.items is None:
        if re.fullmatch(r"[0-9]{1,4}", entry.text):
            return int(entry.text)
        return keys.switch(path)
    else:
        words = list(entry.items)
    if not words or not all(re.fullmatch(r"[0-9]{1,4}", word) for word in words):
        return False
    counts = [int(word) for word in words]
    if len(set(counts)) > 1:
        text = f"[{','.join(words)}] differ by stage; {max(counts)} layers of every stage are priced"
        keys.add("note", text, path)
    return max(counts, default=0)


def _name_unpriced(keys: Keyed, model: ModelSpec, layout: Layout) -> None:
    """Add notes on effects that the estimates ignore, with GiB where these are simple to compute."""
    tp = layout.tensor_parallel
    table = keys.first(STATIC_KEYS["table_on_each_rank"])
    if tp > 1 and keys.switch(STATIC_KEYS["table_on_each_rank"], default=True):
        rows = model.vocab * model.hidden * (1 - 1 / tp)
        size = rows * (4 + 12 / layout.zero_shards) / GIB
        text = f"the whole embedding on every rank, priced as split over {tp}: {size:.2f} GiB more on stage 0"
        keys.add("note", text, STATIC_KEYS["table_on_each_rank"] if table else "")
    path = STATIC_KEYS["recompute_slices"]
    if tp > 1 and layout.recompute == "full" and not layout.sequence_parallel and keys.switch(path):
        layers, stages = layout.layers_per_stage[0], layout.pipeline_parallel
        kept = (
            layout.micro_batch_size
            * model.seq
            * model.hidden
            * 2
            * layers
            * min(stages, layout.micro_batches)
        )
        saved = kept * (1 - 1 / tp) / GIB
        text = f"inputs of layers are kept in {tp} slices, priced whole: {saved:.2f} GiB less on stage 0"
        keys.add("note", text, path)
    path = STATIC_KEYS["recompute_messages"]
    if tp > 1 and layout.recompute == "full" and not keys.switch(path, default=True):
        keys.add("note", "collectives of recomputed layers are priced as repeated, and are not", path)


def optimizer_of(keys: Keyed, path: str) -> str:
    """The optimizer that the key `path` names."""
    return optimizer_named(keys.text(path), keys.problems, path, keys.line(path))


def came_training(keys: Keyed, section: str) -> dict[str, str | None]:
    """Parameters of CAME as flags; adds a note for each one without a flag that changes training."""
    for name in ("scale_parameter", "relative_step", "warmup_init"):
        path = f"{section}.{name}"
        if keys.switch(path):
            keys.add("note", "changes learning rates, and no flag says so: rates here are those given", path)
    return {flag: keys.text(f"{section}.{name}") for name, flag in CAME.items()}


def _training(keys: Keyed) -> dict[str, str]:
    """The settings of training, as flags of Megatron-LM and of optimizers that Megatron-LM lacks."""
    pairs: dict[str, str | None] = {**keys.training()}
    if optimizer_of(keys, STATIC_KEYS["optimizer"]) == "came":
        pairs |= dict.fromkeys(("--adam-beta1", "--adam-beta2", "--adam-eps"))
        pairs |= came_training(keys, "optimizer")
    kind = (pairs.pop("--lr-decay-style", None) or "").lower()
    styles = {"cosine": "cosine", "linear": "linear", "constant": "constant", "polynomial": "linear"}
    style = next((word for name, word in styles.items() if name in kind), None)
    if style is not None:
        pairs["--lr-decay-style"] = style
    return {name: value for name, value in pairs.items() if value}

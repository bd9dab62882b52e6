"""Configurations of MindFormers for the dynamic graph, such as `pretrain_gpt_7B.yaml`.

Defaults are those of mindformers/experimental/parallel_core/pynative/config.py.
"""

from __future__ import annotations

import re
from typing import Any

from costmodels.catalogue import load_model
from costmodels.catalogue.yaml_files import build
from costmodels.errors import InputError, on_one_line
from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from planner.formats.facts.entries import Entries
from planner.formats.facts.keyed import Keyed, defined
from planner.formats.facts.layout_fields import Places, build_layout, degrees_of_world, even_stages
from planner.formats.facts.reading import Problems, Reading
from planner.formats.facts.roles import name_others
from planner.formats.facts.source import Source, Surroundings
from planner.formats.mindformers.names import DYNAMIC_KEYS, EXCERPTS, FORMATS
from planner.formats.mindformers.reader import came_training, launched_devices, optimizer_of

NPU = "ascend-910b"
ZERO_LEVELS = {"z1": 1, "z2": 2, "z3": 3}
"""ZeRO stages by `parallel_config.zero_level`."""


def recognises(entries: Entries) -> bool:
    """Return whether keys are those of a configuration for the dynamic graph."""
    return any(path.startswith("parallel_config.tensor_model_parallel") for path in entries) or (
        any(path.startswith("training_config.") for path in entries)
        and any(path.startswith("model_config.") for path in entries)
    )


def read_dynamic(source: Source, around: Surroundings) -> Reading:
    """The job that a configuration for the dynamic graph describes."""
    problems = Problems(source.file)
    assumed: list[str] = []
    keys = Keyed(
        defined(_named(source.entries), around.define, "mindformers-dynamic"),
        "mindformers-dynamic",
        source.file,
        problems,
    )
    flags = tuple(flag for flag in keys.flags() if flag.line)
    places = Places(DYNAMIC_KEYS, {path: entry.line for path, entry in keys.entries.items() if entry.line})
    model = around.model or _model(keys, source, places, assumed)
    world, per_node = launched_devices(source.text)
    if world is None:
        world = per_node = _visible_devices(source.text)
    said = around.world_size or world
    if said is None:
        text = "the number of devices is not known: it is the launcher's (msrun --worker_num)"
        problems.add("unknown", text, "", None, "give --world-size")
    layout = None if model is None or said is None else _layout(keys, model, said, places)
    keys.name_unread()
    name_others(flags, problems, "is no key of MindFormers that is known here")
    return Reading(
        framework="mindformers-dynamic",
        engine="mindformers-dynamic",
        file=source.file,
        model=model,
        layout=layout,
        precision=_precision(keys),
        world_size=said,
        local_world_size=around.local_world_size or per_node,
        device=NPU,
        global_batch_size=None if layout is None else layout.global_batch_size,
        flags=flags,
        names=DYNAMIC_KEYS,
        training=_training(keys),
        assumed=tuple(assumed),
        problems=tuple(problems.found),
    )


def _named(entries: Entries) -> Entries:
    """Keys with the model's section renamed to its usual name, for any type of model."""
    names = {path.partition(".")[0] for path in entries}
    other = next((name for name in ("gpt_config", "llama_config", "mixtral_config") if name in names), None)
    if other is None or "model_config" in names:
        return entries
    found: Entries = {}
    for path, entry in entries.items():
        path = path.replace(f"{other}.", "model_config.", 1) if path.startswith(f"{other}.") else path
        found[path] = entry.__class__(path, entry.text, entry.line, entry.items, entry.quoted)
    return found


def _visible_devices(text: str) -> int | None:
    """Number of devices that a page's launch script makes visible; msrun starts one process on each."""
    match = re.search(r"ASCEND_RT_VISIBLE_DEVICES=[\"']?([0-9]+(?:,[0-9]+)*)", text)
    return len(match.group(1).split(",")) if match is not None and "msrun" in text else None


def _precision(keys: Keyed) -> str:
    return FORMATS.get(keys.text(DYNAMIC_KEYS["precision"]) or "float32", "fp32")


def _model(keys: Keyed, source: Source, places: Places, assumed: list[str]) -> ModelSpec | None:
    before = len(keys.problems.found)
    at = "model_config"
    sizes = {
        name: keys.count(DYNAMIC_KEYS[name]) for name in ("layers", "hidden", "heads", "ffn", "seq", "vocab")
    }
    if len(keys.problems.found) > before:
        return None
    like = None
    if source.page:
        named = next((name for name in EXCERPTS if name in source.text), None)
        if named is not None:
            like = load_model(EXCERPTS[named][0])
            assumed.append(
                f"sizes that the page leaves out of {named} are those of {like.name}: sequences of "
                f"{sizes['seq'] or like.seq} tokens, a vocabulary of {sizes['vocab'] or like.vocab}, "
                "a gated MLP, RMSNorm"
            )
    missing = [DYNAMIC_KEYS[name] for name, size in sizes.items() if not size]
    if missing and like is None:
        text = f"no {', '.join(missing)}: the model is not known, and they have no default"
        keys.problems.add("unknown", text, missing[0])
        return None
    fields: dict[str, Any] = {} if like is None else like.model_dump()
    fields |= {name: size for name, size in sizes.items() if size}
    fields |= {"name": f"gpt of {keys.file.rpartition('/')[2]}"} if like is None else {}
    if like is not None:
        fields |= {"max_positions": max(like.max_positions, fields["seq"]), "published_parameters": 0}
        fields["head_dim"] = fields["hidden"] // fields["heads"]
        fields["kv_heads"] = fields["heads"]
    else:
        gated = (keys.text(f"{at}.hidden_act") or "gelu").lower() in ("swiglu", "silu")
        position = (keys.text(f"{at}.position_embedding_type") or "absolute").lower()
        fields |= {
            "gated": gated,
            "activation": "silu" if gated else "gelu",
            "norm": "rmsnorm" if "rms" in (keys.text(f"{at}.normalization") or "").lower() else "layernorm",
            "norm_eps": keys.number(f"{at}.norm_epsilon") or 1e-5,
            "position": "rope" if position == "rope" else "learned",
            "linear_bias": keys.switch(f"{at}.mlp_has_bias", default=True),
            "qkv_bias": keys.switch(f"{at}.qkv_has_bias", default=True),
        }
    fields["tied"] = not keys.switch(f"{at}.untie_embeddings_and_output_weights")
    if keys.switch(f"{at}.group_query_attention"):
        fields["kv_heads"] = keys.count(DYNAMIC_KEYS["kv_heads"]) or 32
    experts = keys.count(DYNAMIC_KEYS["experts"]) or 1
    if experts > 1:
        top = keys.count("moe_config.moe_router_topk") or 2
        fields |= {"experts": experts, "top_k": top, "expert_ffn": fields["ffn"]}
    try:
        return build(ModelSpec, fields, f"{at} of {keys.file}")
    except InputError as error:
        message = on_one_line(error)
        keys.problems.add("illegal", message, *places.blamed(message))
        return None


def _layout(keys: Keyed, model: ModelSpec, world: int, places: Places) -> Layout | None:
    degrees: dict[str, Any] = {
        field: keys.count(DYNAMIC_KEYS[field]) or 1
        for field in ("tensor_parallel", "pipeline_parallel", "context_parallel", "virtual_pipeline_parallel")
    }
    if degrees["context_parallel"] > 1:
        degrees["context_parallel_form"] = "ring"
    if model.experts:
        degrees["expert_parallel"] = keys.count(DYNAMIC_KEYS["expert_parallel"]) or 1
        degrees["expert_tensor_parallel"] = degrees["tensor_parallel"]
    elif (keys.count(DYNAMIC_KEYS["expert_parallel"]) or 1) > 1:
        keys.add("illegal", "there are no experts to spread", DYNAMIC_KEYS["expert_parallel"])
    degrees["sequence_parallel"] = keys.switch(DYNAMIC_KEYS["sequence_parallel"])
    if degrees["virtual_pipeline_parallel"] > 1 and degrees["pipeline_parallel"] == 1:
        keys.add("illegal", "needs at least 2 pipeline stages", DYNAMIC_KEYS["virtual_pipeline_parallel"])
        return None
    degrees["schedule"] = "interleaved" if degrees["virtual_pipeline_parallel"] > 1 else "1f1b"
    stages = _listed(keys, model, degrees) or even_stages(model, degrees, places, keys.problems)
    whole = degrees_of_world(degrees, world, places, keys.problems)
    if whole is None or stages is None:
        return None
    micro, batches = (
        keys.count(DYNAMIC_KEYS["micro_batch_size"]) or 1,
        keys.count(DYNAMIC_KEYS["micro_batches"]) or 1,
    )
    whole |= {
        "layers_per_stage": stages,
        "micro_batch_size": micro,
        "global_batch_size": micro * batches * whole["data_parallel"],
        "zero_stage": _zero(keys),
        "precision": _precision(keys),
        "optimizer": optimizer_of(keys, DYNAMIC_KEYS["optimizer"]),
    }
    return build_layout(whole | _recompute(keys), places, keys.problems)


def _listed(keys: Keyed, model: ModelSpec, degrees: dict[str, Any]) -> tuple[int, ...] | None:
    entry = keys.first(DYNAMIC_KEYS["layers_per_stage"])
    if entry is None:
        return None
    words = entry.items if entry.items is not None else tuple(re.findall(r"[0-9]+", entry.text))
    counts = tuple(int(word) if re.fullmatch(r"[0-9]{1,4}", word) else 0 for word in words)
    stages = degrees["pipeline_parallel"] * degrees["virtual_pipeline_parallel"]
    if len(counts) != stages or sum(counts) != model.layers or min(counts, default=0) < 1:
        keys.add(
            "illegal", f"{entry.text} is not {stages} stages of {model.layers} layers together", entry.path
        )
        return None
    return counts


def _zero(keys: Keyed) -> int:
    level = keys.text("parallel_config.zero_level")
    if level is not None:
        return ZERO_LEVELS[keys.choice("parallel_config.zero_level", ZERO_LEVELS, "z1")]
    return int(keys.switch(DYNAMIC_KEYS["zero_stage"]))


def _recompute(keys: Keyed) -> dict[str, Any]:
    kind = keys.choice(DYNAMIC_KEYS["recompute"], ("full", "selective"), "none")
    if kind == "full":
        layers = keys.count(DYNAMIC_KEYS["recompute_num_layers"]) or 1
        method = keys.choice(DYNAMIC_KEYS["recompute_method"], ("uniform", "block"), "uniform")
        return {"recompute": "full", "recompute_method": method, "recompute_num_layers": layers}
    if kind == "selective" or keys.switch("model_config.select_recompute"):
        return {"recompute": "selective"}
    return {}


def keys_of_layout(layout: Layout) -> dict[str, str]:
    """The keys of a layout, with their values."""
    values: dict[str, object] = {
        DYNAMIC_KEYS["tensor_parallel"]: layout.tensor_parallel,
        DYNAMIC_KEYS["sequence_parallel"]: layout.sequence_parallel,
        DYNAMIC_KEYS["pipeline_parallel"]: layout.pipeline_parallel,
        DYNAMIC_KEYS["context_parallel"]: layout.context_parallel,
        DYNAMIC_KEYS["expert_parallel"]: layout.expert_parallel,
        DYNAMIC_KEYS["micro_batch_size"]: layout.micro_batch_size,
        DYNAMIC_KEYS["micro_batches"]: layout.micro_batches,
    }
    if layout.virtual_pipeline_parallel > 1:
        values[DYNAMIC_KEYS["virtual_pipeline_parallel"]] = layout.virtual_pipeline_parallel
    if len(set(layout.layers_per_stage)) > 1:
        values[DYNAMIC_KEYS["layers_per_stage"]] = list(layout.layers_per_stage)
    if layout.zero_stage > 1:
        values["parallel_config.zero_level"] = f"z{layout.zero_stage}"
    else:
        values[DYNAMIC_KEYS["zero_stage"]] = layout.zero_stage == 1
    if layout.recompute != "none":
        values[DYNAMIC_KEYS["recompute"]] = layout.recompute
    if layout.recompute == "full":
        values[DYNAMIC_KEYS["recompute_method"]] = layout.recompute_method
        values[DYNAMIC_KEYS["recompute_num_layers"]] = layout.recompute_num_layers
    return {path: str(value).lower() for path, value in values.items()}


def _training(keys: Keyed) -> dict[str, str]:
    """The settings of training, as flags of Megatron-LM and of optimizers that Megatron-LM lacks."""
    betas = keys.first("optimizer_config.betas")
    items = betas.items if betas is not None and betas.items else (None, None)
    cosine = keys.switch("optimizer_config.learning_rate_scheduler_kwargs.use_cosine")
    pairs: dict[str, str | None] = {**keys.training(), "--lr-decay-style": "cosine" if cosine else None}
    if optimizer_of(keys, DYNAMIC_KEYS["optimizer"]) == "came":
        pairs |= {"--adam-eps": None, **came_training(keys, "optimizer_config")}
    else:
        pairs |= {
            "--adam-beta1": items[0],
            "--adam-beta2": items[1] if len(items) > 1 else None,
        }
    return {name: value for name, value in pairs.items() if value}

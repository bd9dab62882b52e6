"""The model and other values from flags of Megatron-LM, read with the planner's own options."""

from __future__ import annotations

import re
import typing
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from costmodels.catalogue.yaml_files import build
from costmodels.errors import InputError, on_one_line
from costmodels.spec.model import ModelSpec
from planner.formats.facts.flag_catalogue import GivenFlag, Role
from planner.formats.facts.reading import Problems
from planner.formats.facts.tokenizers import vocabulary_of, vocabulary_of_type
from planner.formats.megatron.layers import with_layers
from planner.formats.megatron.mindspeed_layers import noop_layers, take_out_noops
from planner.options.experts import ExpertFlags, LatentFlags, list_of_layers
from planner.options.limits import check_bounds
from planner.options.model import ModelOptions

Given = Mapping[str, GivenFlag]
"""Flags by name; the last occurrence counts, as in argparse."""


def last_of_each(flags: tuple[GivenFlag, ...], problems: Problems) -> dict[str, GivenFlag]:
    """The last occurrence of each flag; flags given twice with different values are noted."""
    found: dict[str, GivenFlag] = {}
    for flag in flags:
        before = found.get(flag.name)
        if before is not None and before.text != flag.text:
            text = f"given twice, as {before.text} (line {before.line}) and {flag.text}; the last counts"
            problems.add("note", text, flag.name, flag.line)
        found[flag.name] = flag
    return found


def option_values(given: Given, role: Role, group: type, problems: Problems) -> dict[str, Any]:
    """The fields of `group`, converted from flags of a role; a value of a wrong type adds a problem."""
    hints = typing.get_type_hints(group)
    values: dict[str, Any] = {}
    for flag in given.values():
        name = flag.known.field
        if flag.known.role != role or name not in hints:
            continue
        kinds = typing.get_args(hints[name]) or (hints[name],)
        if flag.known.words and not flag.values:
            remedy = "give one, or leave the flag out"
            problems.add("illegal", "has no value", flag.name, flag.line, remedy, certain=True)
        elif flag.unknown:
            problems.add(*unset(flag))
        elif bool in kinds:
            values[name] = True
        elif int in kinds or float in kinds:
            kind, what = (int, "a whole number") if int in kinds else (float, "a number")
            try:
                values[name] = kind(flag.text)
            except ValueError:
                problems.add("illegal", f"{flag.text!r} is not {what}", flag.name, flag.line, certain=True)
        elif typing.get_origin(hints[name]) is list:
            values[name] = [word.text for word in flag.values]
        else:
            values[name] = flag.text
    return values


def unset(flag: GivenFlag) -> tuple[Any, str, str, int, str]:
    """The problem of a flag with an unknown value."""
    names = ", ".join(flag.unknown)
    known = [name for name in flag.unknown if re.fullmatch(r"[A-Za-z_]\w*|[0-9]+", name)]
    remedy = f"give it: --define {known[0]}=VALUE" if known else "write the value out"
    return (
        "unknown",
        f"{flag.text} depends on {names}, which the file does not set",
        flag.name,
        flag.line,
        remedy,
    )


def read_model(
    given: Given,
    problems: Problems,
    assumed: list[str],
    described: str | None = None,
    framework: str = "megatron",
) -> ModelSpec | None:
    """The model of a command line; None where its flags do not describe one.

    Args:
        described: the file that describes the model; flags override it.
    """
    before = len(problems.found)
    values = option_values(given, "model", ModelOptions, problems)
    take_out_noops(values, given, problems)
    _in_todays_words(values, given, problems)
    _deepspeeds_experts(values, given, framework, problems)
    # MindSpeed's router takes scores of softmax with a bias (mindspeed/core/transformer/moe/router.py).
    biased = framework == "mindspeed" and values.get("moe_router_score_function", "softmax") == "softmax"
    biased = biased and bool(values.pop("moe_router_enable_expert_bias", False))
    if values.get("num_query_groups") and not values.get("group_query_attention"):
        flag = given["--num-query-groups"]
        text = "has no effect without --group-query-attention: every head has keys of its own"
        problems.add("note", text, flag.name, flag.line, "add --group-query-attention, or leave it out")
        del values["num_query_groups"]
    if values.get("multi_latent_attention") and values.pop("kv_channels", None) is not None:
        flag = given["--kv-channels"]
        text = "has no effect with --multi-latent-attention, whose heads have widths of their own"
        problems.add("note", text, flag.name, flag.line)
    if described is None and not values.get("multi_latent_attention"):
        for name in [one.name for one in fields(LatentFlags) if values.pop(one.name, None) is not None]:
            flag = given[f"--{name.replace('_', '-')}"]
            text = "has no effect without --multi-latent-attention"
            problems.add("note", text, flag.name, flag.line)
    if described is None and not values.get("num_experts"):
        _take_out_experts(values, given, problems)
    missing = [
        name for name in ("--num-layers", "--hidden-size", "--num-attention-heads") if name not in given
    ]
    if missing and described is None:
        problems.add(
            "unknown", f"no {', '.join(missing)}: the model is not known", missing[0], None, "give --model"
        )
    if described is not None:
        values["model"] = described
    elif "vocab_size" not in values:
        _vocabulary(values, given, problems, assumed)
    if described is None and "--seq-length" not in given:
        text = "is not given, and Megatron-LM has no default for it"
        problems.add("unknown", text, "--seq-length", None, "give --define seq_length=N")
    if any(problem.severity != "note" for problem in problems.found[before:]):
        return None
    try:
        mixed = _mixed_layers(values, noop_layers(given))
        options = ModelOptions(**values)
        check_bounds(options)
        spec = options.spec()
        changes = with_layers(spec, given, problems) | mixed
        if spec.experts and "--moe-apply-probs-on-input" in given:
            changes["router"] = spec.router.model_dump() | {"weighs_inputs": True}
        if spec.experts and spec.linear_bias and framework == "megatron":
            changes["router"] = spec.router.model_dump() | changes.get("router", {}) | {"bias": True}
        if biased:
            changes["router"] = spec.router.model_dump() | changes.get("router", {}) | {"expert_bias": True}
        if any(problem.severity != "note" for problem in problems.found[before:]):
            return None
        return build(ModelSpec, spec.model_dump() | changes, "the model") if changes else spec
    except InputError as error:
        message = on_one_line(error)
        blamed = blame(message, given)
        problems.add("illegal", message, blamed.name if blamed else "", blamed.line if blamed else None)
        return None


def _mixed_layers(values: dict[str, Any], idle: Collection[int]) -> dict[str, Any]:
    """The field of a model for mixed dense and expert layers; its flags are removed from `values`."""
    text, layers = values.get("moe_layer_freq"), values.get("num_layers")
    if text is not None and text.strip() == "-1":
        del values["moe_layer_freq"]  # MindSpeed-LLM's way to say that it is not given.
        return {}
    if text is None or not isinstance(layers, int) or not values.get("num_experts"):
        return {}
    layers += len(idle)
    if re.fullmatch(r"[2-9]|[1-9][0-9]{1,5}", text):
        found = [int(layer % int(text) == 0) for layer in range(layers)]
    else:
        found = list_of_layers(text) or []
    if idle and len(found) == layers:
        found = [kind for at, kind in enumerate(found) if at not in idle]
        layers = len(found)
        values["moe_layer_freq"] = str(found)
    dense = found.index(1) if 1 in found else len(found)
    if len(found) != layers or 0 not in found[dense:] or not {*found} <= {0, 1}:
        return {}  # Experts follow the leading layers, or it is none of these: said as such.
    del values["moe_layer_freq"]
    return {"mlp_pattern": tuple("experts" if one else "dense" for one in found)}


def _vocabulary(values: dict[str, Any], given: Given, problems: Problems, assumed: list[str]) -> None:
    """Vocabulary size of the named tokenizer, if no flag gives it."""
    named = given.get("--tokenizer-type") or given.get("--patch-tokenizer-type")
    kind = named.text if named is not None else "GPT2BPETokenizer"
    files = TOKENIZERS if kind != "GPT2BPETokenizer" else (*TOKENIZERS, "--vocab-file")
    path = next((given[name] for name in files if name in given), None)
    if path is None and named is not None and named.name == "--patch-tokenizer-type":
        path = named
    size = vocabulary_of(path.text) if path is not None else None
    if size is None:
        size = vocabulary_of_type(kind, path.text if path is not None else None)
    if size is None:
        about = f" of {path.text}" if path is not None else ""
        text = f"is not given, and the entries{about} of a {kind} are not known"
        line = named.line if named is not None else None
        problems.add("unknown", text, "--vocab-size", line, "give --define vocab_size=N")
        return
    values["vocab_size"] = size
    name = path.text if path is not None and path.name in TOKENIZERS else kind
    assumed.append(f"a vocabulary of {size} (no --vocab-size given, tokenizer {name})")


TOKENIZERS = ("--tokenizer-model", "--tokenizer-name-or-path")
"""Flags that name a tokenizer, on the hub or as a file."""


_NORMS = {"layernorm": "LayerNorm", "layernorm1p": "LayerNorm", "rmsnorm": "RMSNorm"}
_POSITIONS = {
    "alibi": "none",
    "relative": "none",
    "rotary": "rope",
    "yarn": "rope",
    "mrope": "rope",
    "absolute": "learned_absolute",
}


def _in_todays_words(values: dict[str, Any], given: Given, problems: Problems) -> None:
    """Values of other parsers translated to the planner's; differences in price are noted."""
    norm = str(values.get("normalization", ""))
    if norm.lower() in _NORMS:
        values["normalization"] = _NORMS[norm.lower()]
    position = str(values.get("position_embedding_type", ""))
    if position.lower() in _POSITIONS:
        name = "--position-embedding-type"
        values["position_embedding_type"] = _POSITIONS[position.lower()]
        if position.lower() in ("alibi", "relative"):
            text = f"{position} is priced as no positions: it adds to the scores of attention"
            problems.add("note", text, name, given[name].line)
    if (
        values.get("multi_latent_attention")
        and "position_embedding_type" not in values
        and not values.get("use_rotary_position_embeddings")
    ):
        name = "--multi-latent-attention"
        text = "rotates its own keys, and positions are learned besides: priced without these"
        problems.add("note", text, name, given[name].line)
        values["position_embedding_type"] = "rope"
    balancing = given.get("--moe-router-load-balancing-type")
    if balancing is not None and balancing.text == "sinkhorn" and values.get("moe_router_topk") == 1:
        values.setdefault(
            "moe_router_score_function", "sigmoid"
        )  # router.py: so is a single expert weighted.
    if values.get("num_experts") == 1 and "moe_router_topk" not in values:
        del values["num_experts"]  # Megatron-DeepSpeed's way to say that there are none.
        values.pop("moe_expert_capacity_factor", None)
    if values.get("moe_router_num_groups") == 1:
        values.pop("moe_router_num_groups")
        values.pop("moe_router_group_topk", None)
    if values.get("moe_router_score_function") == "sigmoid" and values.pop("moe_router_pre_softmax", None):
        name = "--moe-router-pre-softmax"
        problems.add("note", "has no effect with scores of sigmoid", name, given[name].line)
    top, groups = values.get("moe_router_topk"), values.get("moe_router_group_topk")
    if top and groups and top // groups > 2 and "moe_router_num_groups" in values:
        text = f"groups are ranked by their {top // groups} best experts, which is priced as no groups"
        problems.add("note", text, "--moe-router-group-topk", given["--moe-router-group-topk"].line)
        del values["moe_router_num_groups"], values["moe_router_group_topk"]


def _take_out_experts(values: dict[str, Any], given: Given, problems: Problems) -> None:
    """Drop the flags of experts of a model without experts, except a width, which Megatron-LM then refuses
    (`TransformerConfig.__post_init__`)."""
    for name in (one.name for one in fields(ExpertFlags)):
        if name in ("num_experts", "moe_ffn_hidden_size") or values.pop(name, None) is None:
            continue
        flag = given[f"--{name.replace('_', '-')}"]
        problems.add("note", "has no effect without --num-experts", flag.name, flag.line)


def _deepspeeds_experts(values: dict[str, Any], given: Given, framework: str, problems: Problems) -> None:
    """Layers with experts by DeepSpeed's defaults: one expert for each token, in every second layer.

    megatron/arguments.py (`--topk`, `--expert-interval`) and megatron/model/transformer.py
    (`get_num_experts_per_layer`) of Megatron-DeepSpeed.
    """
    flag, layers = given.get(INTERVAL), values.get("num_layers")
    if not values.get("num_experts") or (flag is None and framework != "megatron-deepspeed"):
        return
    # deepspeed/moe/sharded_moe.py (`top1gating`): one expert is weighted by its softmax over all of them.
    if framework == "megatron-deepspeed" and values.setdefault("moe_router_topk", 1) == 1:
        values["moe_router_pre_softmax"] = True
    text = "2" if flag is None else flag.text
    if not re.fullmatch(r"[1-9][0-9]{0,5}", text):
        where = INTERVAL, flag.line if flag is not None else None
        problems.add("illegal", f"{text!r} is not a whole number from 1", *where, certain=True)
    elif isinstance(layers, int) and text != "1":
        values["moe_layer_freq"] = str([int(layer % int(text) == 0) for layer in range(1, layers + 1)])


INTERVAL = "--expert-interval"
"""Flag of Megatron-DeepSpeed and MindSpeed for the interval of expert layers; the last layer of each interval
has experts."""


def blame(message: str, given: Given) -> GivenFlag | None:
    """The first flag that a message names and the script gives."""
    for name in re.findall(r"--[\w-]+", message):
        if name in given:
            return given[name]
    for name, field in _FIELDS.items():
        if re.search(rf"\b{field}\b", message) and name in given:
            return given[name]
    return None


_FIELDS = {
    "--max-position-embeddings": "max_positions",
    "--seq-length": "seq",
    "--num-query-groups": "kv_heads",
    "--num-attention-heads": "heads",
    "--num-layers": "layers",
    "--ffn-hidden-size": "ffn",
    "--hidden-size": "hidden",
    "--num-experts": "experts",
}
"""Fields of the model by flag, with the names used in messages."""

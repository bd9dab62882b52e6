"""The model of a row of measurements."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import ValidationError

from benchmarks.calibration.published_cells import MOST_LAYERS, Unusable, count, note_value, number
from costmodels.catalogue import load_model
from costmodels.catalogue.yaml_files import is_file_name, parse
from costmodels.errors import InputError
from costmodels.spec.model import ModelSpec

SIZES = ("layers", "hidden", "ffn", "heads", "vocab")

OPTIONAL = {
    **dict.fromkeys(("kv_heads", "head_dim", "shared_expert_ffn", "dense_layers"), "sizes"),
    **dict.fromkeys(("gated", "tied"), "switches"),
}
"""Optional columns of a table of measurements, whose cells replace sizes that follow from the model's
name."""

GUESSED_VOCAB = 50257
"""Size of GPT-2's vocabulary, used if neither the row nor the name of its model gives one."""


def published_model(row: Mapping[str, str], known: Mapping[str, Any]) -> tuple[ModelSpec, tuple[str, ...]]:
    """The model of a row, and the assumptions that filled its blanks.

    The name may be that of a YAML file, or fields in braces. A catalogue model is used, with the row's number
    of layers, if no column contradicts its sizes. It is also used for mixtures of experts whose shape has no
    columns. For other models, the columns give the sizes and the name gives the architecture. The name may
    begin as one in `known` or a model of the catalogue, which also fills blanks; otherwise the architecture
    follows from the ratios of sizes.

    Raises:
        Unusable: a size or the architecture is not published.
    """
    text = row.get("model_name", "").strip()
    name = text.lower()
    if not row.get("seq"):
        raise Unusable("seq not published")
    seq = count(row, "seq")
    if text.startswith("{") or is_file_name(text):
        return _of_fields(text, row, seq), ()
    alike = _namesake(name)
    if alike is not None and (number(row, "moe_experts") or alike.experts) != alike.experts:
        alike = None
    if alike is not None and (alike.experts or _same_shape(alike, row)):
        return _of_catalogue(alike, row, seq), ()
    for beginning, entry in known["models"].items():
        if name.startswith(beginning):
            return _of_catalogue(load_model(entry), row, seq), ()
    traits = _traits(name, known["families"], alike, row)
    guessed = []
    sizes: dict[str, Any] = {}
    for field in SIZES:
        if row.get(field):
            sizes[field] = count(row, field, most=MOST_LAYERS) if field == "layers" else count(row, field)
        elif alike is not None:
            sizes[field] = getattr(alike, field)
        elif field == "vocab":
            sizes[field] = int(traits.get("vocab", GUESSED_VOCAB))
            guessed.append(f"vocab {sizes[field]}")
        elif field == "ffn" and sizes.get("hidden") and not traits.get("gated", False):
            sizes[field] = 4 * sizes["hidden"]
            guessed.append("ffn 4 x hidden")
        else:
            raise Unusable(f"{field} not published")
    traits = {field: value for field, value in traits.items() if field != "vocab"}
    if row.get("kv_heads"):
        sizes["kv_heads"] = count(row, "kv_heads")
    if (number(row, "moe_experts") or 0) > 0:
        if not row.get("topk"):
            raise Unusable("topk not published")
        experts = {"experts": count(row, "moe_experts"), "top_k": count(row, "topk")}
        sizes |= {**experts, "expert_ffn": count(row, "expert_ffn", sizes["ffn"])}
    if "tied_embeddings=True" in row.get("notes", ""):
        traits = {**traits, "tied": True}
    values = {"name": text or "unnamed", "seq": seq, **sizes, **traits, **_optional(row)}
    return _checked(values), tuple(guessed)


NOTED: dict[str, dict[str, Any]] = {
    "swiglu": {"gated": True},
    "untie-embeddings-and-output-weights": {"tied": False},
    "disable-bias-linear": {"linear_bias": False},
    "qk-layernorm": {"qk_norm": True},
}
"""Flags of Megatron-LM that may appear in the notes of rows, and the fields of the model that they set."""


def _same_shape(alike: ModelSpec, row: Mapping[str, str]) -> bool:
    """Return whether the sizes of a row equal those of the catalogue's model, except for the number of
    layers."""
    sizes = ("hidden", "ffn", "heads", "kv_heads", "vocab")
    return all(not row.get(size) or number(row, size) == getattr(alike, size) for size in sizes)


def _optional(row: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field, kind in OPTIONAL.items():
        if row.get(field):
            value = number(row, field) if kind == "sizes" else row[field].lower() in ("1", "true", "yes")
            found[field] = int(value) if kind == "sizes" and value is not None else value
    notes = row.get("notes", "")
    for flag, traits in NOTED.items():
        if f"{flag}=True" in notes:
            found = {**traits, **found}
    capacity = re.search(r"capacity factor (\d{1,3}(?:\.\d{1,3})?)", row.get("notes", ""))
    if capacity is not None and re.search(r"\btoken-drop|\bwith drop", row.get("notes", "")):
        found["router"] = {"capacity_factor": float(capacity[1])}
    leading = note_value(row, "dense_layers")
    if leading is not None and leading.isdigit() and len(leading) < 5:
        found["dense_layers"] = int(leading)
    return found


def _of_fields(text: str, row: Mapping[str, str], seq: int) -> ModelSpec:
    try:
        if not text.startswith("{"):
            return _of_catalogue(load_model(text), row, seq)
        fields = parse(text, "model_name")
        alike = fields.pop("like", None)
        fields = (load_model(str(alike)).model_dump() if alike else {"name": "inline"}) | fields
    except InputError as error:
        raise Unusable(f"model not known: {error}") from None
    return _checked(fields | {"seq": seq, "max_positions": max(seq, int(fields.get("max_positions") or 0))})


def _of_catalogue(model: ModelSpec, row: Mapping[str, str], seq: int) -> ModelSpec:
    values = model.model_dump() | {"seq": seq, "max_positions": max(seq, model.max_positions)}
    if row.get("layers"):
        values["layers"] = count(row, "layers", most=MOST_LAYERS)
    values |= _optional(row)
    if values["mtp_layers"] and "mtp layer" in row.get("notes", "").lower():
        # The modules of the published weights were trained too.
        values["mtp"] = {"depths": values["mtp_layers"]}
    values["dense_layers"] = min(values["dense_layers"], values["layers"])
    for field in ("hidden", "heads"):
        if row.get(field) and count(row, field) != values[field]:
            raise Unusable(f"{field} is not that of {model.name}")
    return _checked(values | {"published_parameters": 0})


@cache
def _namesake(name: str) -> ModelSpec | None:
    """The catalogue's model of a name in about any spelling: `LLAMA3.1_405B`, `Qwen3 8B SFT`."""
    words = [word for word in re.split(r"[^a-z0-9.]+", re.sub(r"\(.*?\)", " ", name)) if word]
    for end in range(len(words), 0, -1):
        for joint in ("-", ""):
            try:
                return load_model(joint.join(words[:end]))
            except InputError:
                continue
    return None


def _traits(
    name: str, families: list[dict[str, Any]], alike: ModelSpec | None, row: Mapping[str, str]
) -> dict[str, Any]:
    for family in families:
        if any(name.startswith(beginning) for beginning in family["names"]):
            if "unknown" in family:
                raise Unusable(family["unknown"])
            return {key: value for key, value in family.items() if key != "names"}
    if alike is not None:
        fields = ("gated", "norm", "position", "tied", "linear_bias", "vocab")
        return {field: getattr(alike, field) for field in fields}
    if any(word in name for word in OTHER_LAYERS):
        raise Unusable("layers other than equal attention and MLP")
    missing = [field for field in SIZES if field != "vocab" and not row.get(field)]
    if missing:
        raise Unusable(f"architecture unknown, and {missing[0]} not published")
    plain = count(row, "ffn") == 4 * count(row, "hidden")
    if plain:
        return {"gated": False, "tied": True}
    return {"gated": True, "norm": "rmsnorm", "position": "rope", "tied": False, "linear_bias": False}


OTHER_LAYERS = (
    "mamba",
    "rwkv",
    "-vl",
    "omni",
    "hybrid",
    "linear",
    "moonlight",
    "gemma",
    "glm",
    "jamba",
    "t5",
    "bert",
    "multimodal",
    "mimo",
    "grpo",
)
"""Words in names of models whose layers are not those of a plain decoder."""


def _checked(values: dict[str, Any]) -> ModelSpec:
    try:
        return ModelSpec.model_validate(values)
    except ValidationError as error:
        raise Unusable(f"model not legal: {error.errors()[0]['msg']}") from None

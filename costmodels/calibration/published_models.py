"""The model of a row of measurements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from costmodels.catalogue import load_model
from costmodels.spec.model import ModelSpec


class Unusable(Exception):
    """The reason why a row cannot be priced, under which it is skipped."""


MOST, MOST_LAYERS = 10**7, 10**4
"""More than any model or job has; what is larger would not end in a price."""

SIZES = ("layers", "hidden", "ffn", "heads", "vocab")


def published_model(row: Mapping[str, str], known: Mapping[str, Any]) -> ModelSpec:
    """The model of a row: its columns, and what the beginning of its name tells of the architecture.

    A mixture of experts whose shape the columns cannot hold is that of the catalogue, with the row's layers.

    Raises:
        Unusable: a size or the architecture is not published.
    """
    name = row.get("model_name", "").lower()
    if not row.get("seq"):
        raise Unusable("seq not published")
    seq = _whole(row, "seq")
    for beginning, entry in known["models"].items():
        if name.startswith(beginning):
            return _of_catalogue(entry, row, seq)
    traits = _traits(name, known["families"])
    missing = [field for field in SIZES if not row.get(field)]
    if missing:
        raise Unusable(f"{missing[0]} not published")
    sizes = {field: _whole(row, field) for field in SIZES}
    if row.get("kv_heads"):
        sizes["kv_heads"] = _whole(row, "kv_heads")
    if row.get("moe_experts"):
        if not row.get("topk"):
            raise Unusable("topk not published")
        experts = {"experts": _whole(row, "moe_experts"), "top_k": _whole(row, "topk")}
        sizes |= {**experts, "expert_ffn": sizes["ffn"]}
    if "tied_embeddings=True" in row.get("notes", ""):
        traits = {**traits, "tied": True}
    return _checked({"name": row["model_name"], "seq": seq, **sizes, **traits})


def _of_catalogue(entry: str, row: Mapping[str, str], seq: int) -> ModelSpec:
    model = load_model(entry)
    values = model.model_dump() | {"seq": seq, "max_positions": max(seq, model.max_positions)}
    if row.get("layers"):
        values["layers"] = _whole(row, "layers")
        values["dense_layers"] = min(model.dense_layers, values["layers"])
    for field in ("hidden", "heads"):
        if row.get(field) and _whole(row, field) != values[field]:
            raise Unusable(f"{field} is not that of {entry}")
    return _checked(values)


def _traits(name: str, families: list[dict[str, Any]]) -> dict[str, Any]:
    for family in families:
        if any(name.startswith(beginning) for beginning in family["names"]):
            if "unknown" in family:
                raise Unusable(family["unknown"])
            return {key: value for key, value in family.items() if key != "names"}
    raise Unusable("architecture unknown")


def _whole(row: Mapping[str, str], field: str) -> int:
    try:
        value = float(row[field])
    except ValueError:
        raise Unusable(f"{field} is no number") from None
    most = MOST_LAYERS if field == "layers" else MOST
    if not 1 <= value <= most or value != int(value):
        raise Unusable(f"{field} is no whole number of 1 to {most}")
    return int(value)


def _checked(values: dict[str, Any]) -> ModelSpec:
    try:
        return ModelSpec.model_validate(values)
    except ValidationError as error:
        raise Unusable(f"model not legal: {error.errors()[0]['msg']}") from None

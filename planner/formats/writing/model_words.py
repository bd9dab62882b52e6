"""Parts of a model that a software supports; every other field with an unusual value is reported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from costmodels.spec.model import ModelSpec
from costmodels.spec.model_parts import Router

_NO_PARTS = ("name", "source", "published_parameters", "mtp_layers", "mtp", "lora", "dense_layers")
"""Fields that are not parts of layers, or that others cover: `mlp_pattern` gives the dense layers, and
`targets.export` reports `mtp` and `lora`."""

_WITH_EXPERTS = ("top_k", "expert_ffn", "shared_expert_ffn", "shared_expert_gate")
_WITH_ROPE = ("rope_theta", "rope_scaling", "rotary_dim", "rotates_full")

SIZES = {"layers", "hidden", "ffn", "heads", "vocab", "seq"}
"""Fields of every model that have no usual value."""

Said = Mapping[str, "tuple[object, ...] | None"]
"""Parts that a software supports, by their names in `model_parts`, with the supported values, or None for
any. Other parts must have their usual value."""


def model_parts(model: ModelSpec) -> dict[str, Any]:
    """Values of the fields that have an effect in a model; fields of records by path, such as `router.score`.

    `attention_pattern` and `mlp_pattern` list the kinds of all layers. The two forms of GELU count as one:
    they take the same time, and engines choose the form that they can fuse.
    """
    kinds = [model.layer_kind(layer) for layer in range(model.layers)]
    attention = tuple(kind.attention for kind in kinds)
    limited = bool({"window", "chunk"} & {*attention})
    rope, latent = model.position == "rope", model.latent_attention is not None
    values = {name: getattr(model, name) for name in type(model).model_fields if name not in _NO_PARTS}
    values |= {"attention_pattern": attention, "mlp_pattern": tuple(kind.mlp for kind in kinds)}
    values["activation"] = {"gelu_tanh": "gelu"}.get(model.activation, model.activation)
    values["rotary_dim"] = 0 if model.rotary_dim == model.head_dim else model.rotary_dim
    without: list[str] = [
        *(() if model.experts else (*_WITH_EXPERTS, "router")),
        *(() if rope else _WITH_ROPE),
        *(() if "full" in attention else ("rotates_full",)),
        *(() if limited else ("window", "window_rope_theta")),
        *(() if model.position == "learned" else ("max_positions",)),
        *(() if model.qk_norm else ("qk_norm_width", "qk_norm_weights")),
        *(("qkv_bias", "output_bias") if model.linear_bias else ()),
        *(("kv_heads", "head_dim", "rotary_dim") if latent else ()),
        *(() if "linear" in attention else ("linear_attention",)),
    ]
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name in without:
            continue
        if hasattr(value, "model_dump"):
            found |= {f"{name}.{key}": part for key, part in value.model_dump().items()}
        else:
            found[name] = value
    found.pop("router.loads", None)  # The load of experts, not their kind.
    if model.experts and model.router.groups <= model.router.top_groups:
        groups = ("router.groups", "router.top_groups", "router.group_score")
        found = {key: part for key, part in found.items() if key not in groups}
    return found


def usual_part(model: ModelSpec, name: str) -> Any:
    """The usual value of a part, which needs no words; an object that equals nothing where there is none."""
    if name in ("attention_pattern", "mlp_pattern"):
        kind = "full" if name == "attention_pattern" else "experts" if model.experts else "dense"
        return (kind,) * model.layers
    if name in ("kv_heads", "head_dim", "max_positions"):
        return {
            "kv_heads": model.heads,
            "head_dim": model.hidden // model.heads,
            "max_positions": model.seq,
        }[name]
    record, _, key = name.partition(".")
    if key:
        return Router.model_fields[key].default if record == "router" else object()
    return ModelSpec.model_fields[name].default


def lacks_of_model(
    missing: list[str], model: ModelSpec, said: Said, because: Mapping[str, str] | None = None
) -> None:
    """Add to `missing` each part of a model that a software does not support, as `window=128: why`.

    Args:
        because: reasons by the names of parts, or of their records.
    """
    named = dict.fromkeys(text.partition("=")[0] for text in missing)
    because = because or {}
    for name, value in model_parts(model).items():
        allowed = said.get(name, (usual_part(model, name),))
        if name == "mlp_pattern" and "none" in value:
            allowed = ()  # Layers without an MLP are of no software here.
        if name in SIZES or allowed is None or value in allowed:
            continue
        record = name.partition(".")[0]
        whole = (
            record != name and record != "router" and not any(key.startswith(f"{record}.") for key in said)
        )
        shown, value = (record, _of_record(getattr(model, record))) if whole else (name, value)
        if shown not in named:
            named[shown] = None
            why = because.get(name) or because.get(record) or "it does not support this"
            missing.append(f"{shown}={_shown(shown, value)}: {why}")


def _of_record(record: Any) -> str:
    return str(getattr(record, "kind", "")) or type(record).__name__


def _shown(name: str, value: Any) -> str:
    if name in ("attention_pattern", "mlp_pattern"):
        return ",".join(dict.fromkeys(map(str, value)))
    return str(value).lower() if isinstance(value, bool) else str(value)

"""Readers of single keys of a Hugging Face `config.json`, with defaults and refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Config = dict[str, Any]

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu2": "relu2",
}
"""`ModelSpec.activation` by Hugging Face name."""

SCALING_KEYS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
    "truncate",
)
"""Keys of `rope_scaling` that are fields of `RopeScaling` with the same name."""

STRETCHED_FROM = ("llama3", "yarn", "longrope")
"""Types of `rope_scaling` that depend on the length of pre-training."""

ATTENTION_KINDS = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "chunk",
    "linear_attention": "linear",
    # Another key says which of these layers an indexer reads.
    "indexed_attention": "full",
    "deepseek_sparse_attention": "full",
}
"""Kinds of attention by their names in `layer_types`."""


def whole(config: Config, key: str, default: int | None = None) -> int:
    """A count from a key; `default` if the key is missing or null."""
    value = config[key] if default is None else config.get(key)
    if value is None and default is not None:
        return default
    if value is None:
        raise KeyError(key)
    if isinstance(value, str) and value.strip().isdigit():
        raise ValueError(f"{key} is the text {value!r}, not a number; write {value.strip()} without quotes")
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{key} is {value!r}, not a whole number")
    return value


def number(config: Config, key: str, default: float) -> float:
    """A number from a key; `default` if the key is missing or null."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{key} is {value!r}, not a number")
    return float(value)


def activation(name: Any) -> str:
    """The activation function that Hugging Face calls `name`."""
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def one_of(config: Config, key: str, values: tuple[str, ...]) -> str:
    """The value of a key that selects a method; the first of `values` if the key is missing or null."""
    value = config.get(key)
    if value is None:
        return values[0]
    if value not in values:
        raise ValueError(f"{key} {value!r} is not supported: only {' and '.join(values)}")
    return str(value)


def given(config: Config, key: str, default: Any) -> Any:
    """The value of a key; `default` where it is missing or null."""
    value = config.get(key)
    return default if value is None else value


def refuse_other(config: Config, **usual: Any) -> None:
    """Raise `ValueError` for a key with an unusual value; a missing key and null are accepted."""
    for key, value in usual.items():
        if config.get(key) not in (None, value):
            shown = str(value).lower() if isinstance(value, bool) else value
            raise ValueError(f"{key} {config[key]!r} is not supported: only {shown} is")


def entries(config: Config, key: str) -> list[Any] | None:
    """The list of a key, with one entry per layer; None where the key is missing or null."""
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or not value:
        raise ValueError(f"{key} is {value!r}, not a list with an entry for each layer")
    return value


def period(pattern: Sequence[str]) -> tuple[str, ...]:
    """The shortest prefix of `pattern` whose repetition gives the whole pattern."""
    for length in range(1, len(pattern)):
        if all(one == pattern[index % length] for index, one in enumerate(pattern)):
            return tuple(pattern[:length])
    return tuple(pattern)


def attention_pattern(config: Config, layers: int) -> tuple[str, ...] | None:
    """Kinds of attention of the layers by `layer_types`; None where it is missing."""
    names = entries(config, "layer_types")
    if names is None:
        return None
    unknown = [name for name in names if name not in ATTENTION_KINDS]
    if unknown:
        raise ValueError(f"layer_types has {unknown[0]!r}, and only {', '.join(ATTENTION_KINDS)} are known")
    if len(names) != layers:
        raise ValueError(f"layer_types has {len(names)} entries for num_hidden_layers {layers}")
    return period([ATTENTION_KINDS[name] for name in names])


def every_nth(other: str, last: str, interval: int, layers: int) -> tuple[str, ...]:
    """A pattern whose every `interval`-th layer is `last`, and all others `other`."""
    return period([last if (layer + 1) % interval == 0 else other for layer in range(layers)])


def windows(config: Config, pattern: tuple[str, ...] | None, key: str = "sliding_window") -> Config:
    """The fields of layers that attend to a window of `key` tokens, by the kinds of layers."""
    size = config.get(key)
    if size is None or pattern is None or not {"window", "chunk"} & {*pattern}:
        pattern = pattern and tuple("full" if kind in ("window", "chunk") else kind for kind in pattern)
        return {"attention_pattern": period(pattern)} if pattern else {}
    return {"window": whole(config, key), "attention_pattern": pattern}


def rope(config: Config) -> Config:
    """The fields of the rotary positions of all layers, from any version of the keys."""
    mapping = config.get("rope_parameters")
    main = mapping if isinstance(mapping, dict) else {}
    if "full_attention" in main:
        # Of models whose layers with windows have positions of their own.
        main = main["full_attention"] or {}
    base = config.get("rope_theta") or main.get("rope_theta")
    part = config.get("partial_rotary_factor")
    return {
        "rope_theta": base or 10000.0,
        "rope_scaling": rope_scaling(config),
        "partial": number(main if part is None else config, "partial_rotary_factor", 1.0),
    }


def rope_scaling(config: Config) -> Config | None:
    """The stretching of rotary frequencies; None when they are not stretched."""
    # Transformers 5 calls the mapping rope_parameters, and names an absent scaling "default".
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, dict):
        raise ValueError(f"rope_scaling is {scaling!r}, not a mapping")
    if "full_attention" in scaling:
        scaling = scaling["full_attention"] or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind is None and config.get("rope_scaling"):
        raise ValueError(f"rope_scaling {scaling!r} names no rope_type")
    if kind in (None, "default", "mrope", "proportional"):
        return None
    fields = {name: scaling[name] for name in SCALING_KEYS if scaling.get(name) is not None}
    # As Transformers reads it: outside the mapping it counts first, and without it nothing was stretched.
    key = "original_max_position_embeddings"
    original = config.get(key) or scaling.get(key)
    if not original and kind in STRETCHED_FROM:
        original = config["max_position_embeddings"]
    if "factor" not in fields and kind == "yarn":
        fields["factor"] = whole(config, "max_position_embeddings") / max(1, whole({key: original}, key))
    if "factor" not in fields and kind in ("linear", "llama3"):
        raise ValueError(f"rope_scaling {scaling!r} names no factor")
    return fields | {"kind": str(kind), "original_positions": original or 0}


def rotary_dim(part: float, head_dim: int) -> int:
    """Elements of a head with rotary positions, if only a part has them; 0 where all have them."""
    return 0 if part == 1.0 else int(head_dim * part) // 2 * 2

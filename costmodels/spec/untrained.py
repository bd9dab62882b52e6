"""Parts of models that the bundled runtime does not compute: such models are priced, not trained."""

from __future__ import annotations

from collections.abc import Callable

from costmodels.spec.model import ModelSpec

TRAINED_SCALINGS = ("linear", "llama3", "yarn")
"""Kinds of rotary scaling that the runtime computes."""

PARTS: dict[str, Callable[[ModelSpec], bool]] = {
    "Mamba-2": lambda spec: spec.linear_attention is not None and spec.linear_attention.kind == "mamba2",
    "adapters in linear attention": lambda spec: spec.lora is not None and "linear" in spec.attention_pattern,
    "layers without attention or MLP": lambda spec: "none" in (*spec.attention_pattern, *spec.mlp_pattern),
    "sparse attention with an indexer": lambda spec: spec.indexer is not None,
    "attention to compressed entries": lambda spec: spec.compressed_attention is not None,
    "hyper-connections": lambda spec: spec.residual_streams > 1,
    "sqrtsoftplus scores of experts": lambda spec: spec.experts > 0 and spec.router.score == "sqrtsoftplus",
    "capped or growing scores of latent attention": lambda spec: (
        spec.latent_attention is not None and (spec.attention_softcap > 0 or spec.score_growth is not None)
    ),
    "capped scores beside sinks": lambda spec: spec.attention_softcap > 0 and spec.attention_sinks,
    "norms over all heads without weights": lambda spec: (
        spec.qk_norm and spec.qk_norm_width == "all" and not spec.qk_norm_weights
    ),
    "parameters of other parts": lambda spec: spec.other_layer_parameters + spec.other_parameters > 0,
}
"""Tests if a model has a part, by the name of the part in messages."""


def untrained_parts(spec: ModelSpec) -> list[str]:
    """Parts of a model that the bundled runtime lacks; empty where it trains the model."""
    found = [part for part, has in PARTS.items() if has(spec)]
    scaling = spec.rope_scaling
    if spec.position == "rope" and scaling is not None and scaling.kind not in TRAINED_SCALINGS:
        found.append(f"{scaling.kind} rope scaling (only {', '.join(TRAINED_SCALINGS)})")
    return found

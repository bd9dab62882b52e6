"""Models and layouts whose units have a given structure, with sizes that tell dimensions apart."""

from __future__ import annotations

from typing import Any, NamedTuple

from costmodels import LatentAttention, Layout, ModelSpec
from costmodels.tapes.dimensions import dimensions
from costmodels.tapes.structure import ALIGNED_HEAD, FLOAT8_MULTIPLE, Structure, structure_of
from runtime.dryrun.prime_sizes import FIRST, LEAST_BEFORE, LIMITS, MULTIPLE, Sizes

MOST_RANKS = 2**20
"""Of a sample, whose groups each take time: primes of four kinds of ranks can be millions together."""


class Sample(NamedTuple):
    """One set of sizes."""

    model: ModelSpec
    layout: Layout
    primes: dict[str, int]
    """Of each dimension that varies freely; one that has primes of others comes before them."""
    query_block: int
    """Queries whose capped scores are there at a time."""

    @property
    def dimensions(self) -> dict[str, int]:
        """What sizes are products of."""
        return dimensions(self.model, self.layout, self.query_block)


def sample(structure: Structure, number: int) -> Sample:
    """The set of sizes `number` of a structure.

    Raises:
        ValueError: no model or layout has the structure, or none of few enough ranks.
    """
    chosen = Sizes(structure, number)
    model = ModelSpec.model_validate({"name": structure.unit, "layers": 1, **_model_fields(chosen)})
    layout = Layout.model_validate({"layers_per_stage": (1,), **_layout_fields(chosen)})
    if layout.world_size > MOST_RANKS:
        raise ValueError(f"samples of the structure {structure.name} need {layout.world_size} ranks")
    is_last = structure.offloads_activations == "kept"
    block = chosen.query_block
    found = structure_of(
        model, layout, structure.unit, structure.compiled, is_last=is_last, query_block=block
    )
    # Fewer tokens are in as many chunks where the recorder says so.
    if found._replace(chunks=structure.chunks) != structure:
        raise ValueError(f"no sample has the structure {structure.name}")
    return Sample(model, layout, chosen.free_primes(dimensions(model, layout, block)), block)


def _model_fields(sizes: Sizes) -> dict[str, Any]:
    """Those of the model."""
    structure = sizes.structure
    fields: dict[str, Any] = {
        "hidden": sizes.hidden,
        "ffn": sizes.ffn * sizes.tp,
        "heads": sizes.heads,
        "kv_heads": sizes.kv_heads,
        "head_dim": sizes.head,
        "vocab": sizes.vocabulary(),
        "seq": sizes.seq,
        "max_positions": sizes.chosen.fresh("positions", sizes.seq),
        "gated": structure.gated,
        "activation": structure.activation or "gelu",
        "norm": structure.norm or "layernorm",
        "position": _position(structure),
        "tied": structure.tied,
        "linear_bias": structure.linear_bias,
        "qkv_bias": structure.qkv_bias and not structure.linear_bias,
        "qk_norm": structure.qk_norm,
    }
    fields |= _form_fields(sizes)
    if structure.latent:
        fields |= _latent_fields(sizes)
    if structure.further:
        fields["mtp"] = {"depths": structure.further}
    return fields | _expert_fields(sizes) if structure.routes else fields


def _form_fields(sizes: Sizes) -> dict[str, Any]:
    """What `costmodels.tapes.structure.block_form` says, with values that are none of the usual ones."""
    values: dict[str, Any] = {
        "norm_from_one": True,
        "attention_gate": True,
        "attention_sinks": True,
        "attention_softcap": 30.0,
        "output_bias": True,
        "residual_scale": 0.5,
        "embedding_scale": 2.0,
        "score_scale": 0.25,
        "qk_norm_weights": False,
        "score_growth": {"positions": sizes.seq, "factor": 0.5},
        "logits_scale": 0.5,
        "logits_softcap": 20.0,
    }
    found: dict[str, Any] = {}
    for part in sizes.structure.form:
        name, _, word = part.partition("=")
        if name == "attention":
            found["attention_pattern"] = (word,)
            found |= _linear_fields(sizes) if word == "linear" else {"window": sizes.window()}
            continue
        if name in ("router_bias", "weighs_inputs"):
            # The router's own fields say it.
            continue
        if name == "rotary_dim":
            values[name] = 2 * sizes.chosen.fresh("turned", sizes.head // ALIGNED_HEAD + 1)
        found[name] = word or values[name]
    return found


def _linear_fields(sizes: Sizes) -> dict[str, Any]:
    """Of linear attention, whose heads are those that layers with scores would have."""
    own = sizes.primes
    multiple = FLOAT8_MULTIPLE if sizes.structure.precision == "fp8" else ALIGNED_HEAD
    for name in ("keys", "group", "head"):
        own[f"state_{name}"] = own.pop(name)
    return {
        # No size has these.
        "heads": sizes.tp,
        "kv_heads": sizes.tp,
        "head_dim": 2 * sizes.chosen.fresh("head", FIRST[sizes.number]),
        "linear_attention": {
            "kind": "gated_delta",
            "key_heads": sizes.keys * sizes.tp,
            "value_heads": sizes.keys * sizes.group * sizes.tp,
            "key_dim": sizes.head,
            "value_dim": multiple * sizes.own_prime("state_value", ALIGNED_HEAD),
            "conv_kernel": 1 + sizes.own_prime("before", LEAST_BEFORE),
            "chunk": sizes.step,
        },
    }


def _latent_fields(sizes: Sizes) -> dict[str, Any]:
    nope, rope, shorter, longer = sizes.latent
    value = {"keys": shorter, "values": longer}.get(sizes.structure.longer_heads, nope + rope)
    sizes.primes |= {"nope": nope, "rope": rope, "value": value}
    # No size has it.
    del sizes.primes["head"]
    aligned = FLOAT8_MULTIPLE if sizes.structure.precision == "fp8" else ALIGNED_HEAD
    query_rank = MULTIPLE * sizes.chosen.fresh("query_rank", FIRST[sizes.number])
    latent_rank = MULTIPLE * sizes.chosen.fresh("latent_rank", FIRST[sizes.number])
    scaling = {"kind": "yarn", "factor": 2.0, "original_positions": sizes.seq, "mscale_all_dim": 1.0}
    return {
        "kv_heads": sizes.heads,
        "rope_scaling": scaling if sizes.structure.scales_scores else None,
        "latent_attention": LatentAttention(
            q_lora_rank=query_rank if sizes.structure.latent_queries else 0,
            kv_lora_rank=latent_rank,
            qk_nope_head_dim=aligned * nope,
            qk_rope_head_dim=aligned * rope,
            v_head_dim=aligned * value,
        ),
    }


def _expert_fields(sizes: Sizes) -> dict[str, Any]:
    structure, own = sizes.structure, sizes.primes
    groups = own["groups"] if structure.group_score else 1
    experts = sizes.ep * structure.loop_of_experts
    if not experts:
        # Few for each rank and group, so that no model is too large to be one.
        each = FIRST[sizes.number] // (4 if sizes.ep * groups > 1 else 1)
        experts = sizes.ep * groups * sizes.chosen.fresh("experts", each)
    limit = LIMITS[structure.limited]
    return {
        "experts": experts,
        "top_k": 1 if structure.one_choice else own["choices"],
        "expert_ffn": MULTIPLE * sizes.etp * sizes.chosen.fresh("expert_ffn", FIRST[sizes.number]),
        "shared_expert_ffn": (
            MULTIPLE * sizes.tp * sizes.chosen.fresh("shared_ffn", FIRST[sizes.number])
            if structure.shared_experts
            else 0
        ),
        "shared_expert_gate": structure.shared_gate,
        "router": {
            "score": structure.score,
            "normalised": structure.normalised,
            "scale": 2.0 if structure.scaled else 1.0,
            "groups": groups,
            "top_groups": own["top_groups"] if structure.group_score else 1,
            "group_score": structure.group_score or "max",
            "expert_bias": structure.expert_bias,
            "bias": "router_bias" in structure.form,
            "weighs_inputs": "weighs_inputs" in structure.form,
            "capacity_factor": limit,
        },
    }


def _layout_fields(sizes: Sizes) -> dict[str, Any]:
    """Those of the layout."""
    structure, data_parallel = sizes.structure, sizes.ep * sizes.etp
    # There is no grouped product of experts in this format.
    loops = structure.loop_of_experts > 0
    recompute: dict[str, Any] = {}
    if structure.recompute == ("full",):
        recompute = {"recompute": "full"}
        if structure.offloads_activations:
            recompute |= {"recompute_method": "block"}
    elif structure.recompute:
        recompute = {"recompute": "selective", "recompute_modules": structure.recompute}
    return {
        "tensor_parallel": sizes.tp,
        "sequence_parallel": structure.sequence_parallel,
        "context_parallel": sizes.cp,
        "context_parallel_form": structure.context_form or "all_gather",
        "expert_parallel": sizes.ep,
        "expert_tensor_parallel": sizes.etp,
        "data_parallel": data_parallel,
        "micro_batch_size": sizes.rows,
        "global_batch_size": sizes.rows * data_parallel,
        "precision": "fp16" if loops and structure.precision == "bf16" else structure.precision,
        "fp8_recipe": structure.fp8_recipe or "default",
        "offload_activations": structure.offloads_activations != "",
        # Wraps experts, as ZeRO does where there are ranks for it.
        "offload_optimizer": structure.compiled and structure.routes and not structure.whole,
        **recompute,
    }


def _position(structure: Structure) -> str:
    if structure.rotates:
        return "rope"
    return "learned" if structure.learned_positions else "none"

"""Models and layouts whose units have a given structure, with sizes that tell dimensions apart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import count
from typing import Any, NamedTuple

from costmodels import LatentAttention, Layout, ModelSpec
from costmodels.spec.model import VOCAB_MULTIPLE
from costmodels.tapes.dimensions import dimensions
from costmodels.tapes.structure import Structure, heeds_groups, heeds_rows, structure_of

SAMPLES = 4
"""Sets of sizes that there are; two prove most tapes."""

RANKS = {"tp": (5, 7, 11, 13), "cp": (37, 41, 43, 47)}
"""Primes that seldom are in coefficients, as 2 and 3 are; no two of a set are equal."""

RANK_NAMES = ("tp", "cp", "ep", "etp", "sharers")

SIDES = {
    # Eight times as many elements are heads that every kernel takes.
    "head": (17, 19, 23, 29),
    "group": (13, 11, 7, 5),
    "keys": (7, 5, 13, 11),
    "seq": (89, 97, 101, 103),
    "batch": (107, 109, 113, 127),
}

SHARED = ((3, 7), (5, 3), (5, 3), (3, 7))
"""Where ranks share a head they divide it: their number, and the prime of a head, 8 times both."""

SMALLEST = 5
"""Of primes of small sizes."""

FIRST = (200, 300, 450, 700)
"""Least primes of widths, so that no two sets have the same."""

MULTIPLE = 16
"""Of widths, so that kernels take them."""

SEQ_MULTIPLE = 64
"""Of sequences, so that kernels round nothing."""

FFN_SHARE = 3.5
"""Width of an MLP over that of the model, as models have it: compilers keep the smaller tensors."""


class Sample(NamedTuple):
    """One set of sizes."""

    model: ModelSpec
    layout: Layout
    primes: dict[str, int]
    """Of each dimension that varies freely."""

    @property
    def dimensions(self) -> dict[str, int]:
        """What sizes are products of."""
        return dimensions(self.model, self.layout)


def sample(structure: Structure, number: int) -> Sample:
    """The set of sizes `number` of a structure.

    Raises:
        ValueError: no model or layout has the structure.
    """
    primes = {name: values[number] for name, values in (RANKS | SIDES).items()}
    taken = set(primes.values())
    tp = primes["tp"] if structure.tensor_parallel else 1
    cp = 1
    if structure.context_form:
        cp = structure.context_ranks if structure.context_ranks > 1 else primes["cp"]
    keys = 1 if structure.one_key_head or structure.shares_heads else primes["keys"]
    group = primes["group"] if structure.grouped_queries or not heeds_groups(structure) else 1
    if structure.one_head:
        keys = group = 1
    if structure.latent:
        group = 1
    head = primes["head"] if structure.unaligned_heads else 8 * primes["head"]
    kv_heads = keys * tp
    if structure.shares_heads:
        # As many key/value heads as a second prime says: the rest of the tensor-parallel ranks share them.
        kv_heads = tp
        sharers, primes["head"] = SHARED[number]
        tp, head = tp * sharers, 8 * sharers * primes["head"]
    heads = keys * group * tp
    entries = math.lcm(VOCAB_MULTIPLE, tp) // tp * _fresh_prime(taken, FIRST[number])
    hidden = MULTIPLE * _fresh_prime(taken, max(2 * FIRST[number], heads * head // MULTIPLE))
    ffn = MULTIPLE * _fresh_prime(taken, int(FFN_SHARE * hidden / tp / MULTIPLE))
    seq = SEQ_MULTIPLE * primes["seq"] * tp * 2 * cp
    fields: dict[str, Any] = {
        "hidden": hidden,
        "ffn": ffn * tp,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head,
        "vocab": _vocabulary(entries, tp, structure.pads_vocabulary),
        "seq": seq,
        "max_positions": _fresh_prime(taken, seq),
        "gated": structure.gated,
        "activation": structure.activation or "gelu",
        "norm": structure.norm or "layernorm",
        "position": _position(structure),
        "tied": False,
        "linear_bias": structure.linear_bias,
        "qkv_bias": structure.qkv_bias and not structure.linear_bias,
        "qk_norm": structure.qk_norm,
    }
    if structure.latent:
        fields |= _latent(structure, taken, heads)
    model = ModelSpec(name=structure.unit, layers=1, **fields)
    rows = primes["batch"] if structure.several or not heeds_rows(structure) else 1
    layout = Layout.model_validate(
        {
            "tensor_parallel": tp,
            "sequence_parallel": structure.sequence_parallel,
            "context_parallel": cp,
            "context_parallel_form": structure.context_form or "all_gather",
            "layers_per_stage": (1,),
            "micro_batch_size": rows,
            "global_batch_size": rows,
            "precision": structure.precision,
            "offload_activations": structure.offloads_activations,
            **_recompute(structure),
        }
    )
    if structure_of(model, layout, structure.unit, structure.compiled) != structure:
        raise ValueError(f"no sample has the structure {structure.name}")
    found = dimensions(model, layout)
    ranks = {"tp": primes["tp"] if tp > 1 else 1, "cp": primes["cp"] if cp == primes["cp"] else 1}
    ranks["sharers"] = tp // ranks["tp"]
    sides = _free_primes(found) | {"head": primes["head"]}
    return Sample(model, layout, sides | {name: p for name, p in ranks.items() if p > 1})


def _free_primes(values: Mapping[str, int]) -> dict[str, int]:
    """The largest prime factor of each dimension but ranks: those of a sequence have theirs in it."""
    sides = {name: _largest_factor(value) for name, value in values.items() if name not in RANK_NAMES}
    if sides["tokens"] == sides["vocab"]:
        del sides["tokens"]
    return {name: prime for name, prime in sides.items() if prime > 1}


def _position(structure: Structure) -> str:
    if structure.rotates:
        return "rope"
    return "learned" if structure.learned_positions else "none"


def _recompute(structure: Structure) -> dict[str, Any]:
    if not structure.recompute:
        return {}
    if structure.recompute == ("full",):
        return {"recompute": "full"}
    return {"recompute": "selective", "recompute_modules": structure.recompute}


def _latent(structure: Structure, taken: set[int], heads: int) -> dict[str, Any]:
    nope, rope = 8 * _fresh_prime(taken, SMALLEST), 8 * _fresh_prime(taken, SMALLEST)
    value = nope + rope
    if structure.longer_heads:
        value = 8 * _fresh_prime(taken, SMALLEST)
        if structure.longer_heads == "values":
            value = 8 * _fresh_prime(taken, 2 * (nope + rope) // 8)
    query_rank, latent_rank = (
        MULTIPLE * _fresh_prime(taken, SMALLEST),
        MULTIPLE * _fresh_prime(taken, SMALLEST),
    )
    return {
        "kv_heads": heads,
        "latent_attention": LatentAttention(
            q_lora_rank=query_rank if structure.latent_queries else 0,
            kv_lora_rank=latent_rank,
            qk_nope_head_dim=nope,
            qk_rope_head_dim=rope,
            v_head_dim=value,
        ),
    }


def _vocabulary(rows: int, tp: int, pads: bool) -> int:
    """Entries of a tokenizer of which each of `tp` ranks has `rows`, padding included."""
    if not pads:
        return rows * tp
    # A prime less than a multiple below what is stored.
    entries = rows * tp - 1
    while not _is_prime(entries):
        entries -= 1
    return entries


def _is_prime(value: int) -> bool:
    return value > 1 and all(value % divisor for divisor in range(2, int(value**0.5) + 1))


def _largest_factor(value: int) -> int:
    """The largest prime factor; 1 of 1."""
    found, divisor = 1, 2
    while divisor * divisor <= value:
        while value % divisor == 0:
            found, value = divisor, value // divisor
        divisor += 1
    return max(found, value)


def _fresh_prime(taken: set[int], least: int) -> int:
    """The smallest prime that is at least so large and that nobody has; it is taken then."""
    found = next(value for value in count(least) if value not in taken and _is_prime(value))
    taken.add(found)
    return found

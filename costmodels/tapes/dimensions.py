"""Dimensions: the numbers that the sizes of a unit's tensors are products of."""

from __future__ import annotations

from costmodels.layers.shapes import QUERY_BLOCK, peak_load
from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from costmodels.tapes.structure import FLOAT8_MULTIPLE, has_odd_rows

KERNEL_ROWS = 32
"""Rows of queries of which PyTorch's memory-efficient attention keeps the sums, and fills them up to."""


def dimensions(model: ModelSpec, layout: Layout, query_block: int = QUERY_BLOCK) -> dict[str, int]:
    """The dimensions of a model and a layout on one rank, by name; integers, none of them 0.

    batch: sequences of a micro batch; seq: positions of a rank, before sequence parallelism divides them by
    tp; kernel_seq: the same as a kernel fills them up; tp, cp, ep, etp: ranks; hidden; ffn: of a rank; keys:
    key/value heads of a rank; group: queries of each; head: elements of one, and turned:
    half of those that positions turn, where it is not all; sharers: ranks that share a
    key/value head; vocab: entries of a rank; tokens: those of the first rank that the tokenizer has;
    positions: of the learned table; filled: tokens of a rank as products in 8 bits fill them up, where
    they do.

    Args:
        query_block: queries whose capped scores are there at a time.
    """
    tp, cp = layout.tensor_parallel, layout.context_parallel
    heads = model.heads // tp
    keys = max(1, model.kv_heads // tp)
    vocab = model.padded_vocab(tp) // tp
    found = {
        "batch": layout.micro_batch_size,
        "seq": model.seq // cp,
        "kernel_seq": -(-model.seq // (cp * KERNEL_ROWS)) * KERNEL_ROWS,
        "tp": tp,
        "cp": cp,
        "hidden": model.hidden,
        "ffn": model.ffn // tp,
        "keys": keys,
        "group": heads // keys,
        "head": model.head_dim,
        "turned": max(1, model.rotary_dim // 2),
        "sharers": max(1, tp // model.kv_heads),
        "vocab": vocab,
        "tokens": min(model.vocab, vocab),
        "positions": model.max_positions,
    }
    if has_odd_rows(model, layout):
        found["filled"] = filled_tokens(found["batch"] * found["seq"])
    found |= _latent(model) | _blocks(model, layout, query_block)
    return found | _state(model, layout) | _experts(model, layout)


def filled_tokens(tokens: int) -> int:
    """Tokens as products in 8 bits that sum over them fill them up."""
    return -(-tokens // FLOAT8_MULTIPLE) * FLOAT8_MULTIPLE


def _blocks(model: ModelSpec, layout: Layout, query_block: int) -> dict[str, int]:
    """Of capped scores, which are there for a block of queries at a time, the last of which may be smaller.

    query_block: queries of a whole block; blocks: those of all of them, of each of the two parts that a rank
    has where it gathers keys; last_block: the others; block_keys: keys up to the last whole block of a
    sequence; seen and last_seen: what the last whole block and a smaller one after it see of keys where a
    window limits them.
    """
    if not model.attention_softcap:
        return {}
    gathers = layout.context_parallel > 1 and layout.context_parallel_form == "all_gather"
    part = model.seq // (2 * layout.context_parallel if gathers else 1)
    last = part % query_block
    return {
        "query_block": query_block,
        "blocks": max(1, part - last),
        "last_block": max(1, last),
        "block_keys": max(1, model.seq - last),
        "seen": max(1, min(model.window + query_block - 1, model.seq - last)),
        "last_seen": max(1, min(model.window + last - 1, model.seq)),
    }


def _state(model: ModelSpec, layout: Layout) -> dict[str, int]:
    """state_keys: key heads of linear attention on a rank; state_group: value heads of each; state_head and
    state_value: elements of a key and a value; before: positions of a convolution besides its own; step:
    positions that are computed at once; steps: of a sequence."""
    sizes = model.linear_attention
    if sizes is None:
        return {}
    return {
        "state_keys": max(1, sizes.key_heads // layout.tensor_parallel),
        "state_group": max(1, sizes.value_heads // sizes.key_heads),
        "state_head": sizes.key_dim,
        "state_value": sizes.value_dim,
        "before": max(1, sizes.conv_kernel - 1),
        "step": sizes.chunk,
        "steps": -(-model.seq // sizes.chunk),
    }


def _latent(model: ModelSpec) -> dict[str, int]:
    """query_rank, latent_rank; elements of a head without position (nope), with it (rope), and of values."""
    sizes = model.latent_attention
    if sizes is None:
        return {}
    return {
        "query_rank": max(1, sizes.q_lora_rank),
        "latent_rank": sizes.kv_lora_rank,
        "nope": sizes.qk_nope_head_dim,
        "rope": sizes.qk_rope_head_dim,
        "value": sizes.v_head_dim,
    }


def _experts(model: ModelSpec, layout: Layout) -> dict[str, int]:
    """experts: of a layer, in groups; choices: of a token; expert_ffn and shared_ffn: of a rank; sent and
    arrived: rows that leave a rank and come to it, as `runtime.dryrun.experts` has them."""
    if not model.experts:
        return {}
    limit = model.router.capacity_factor
    ep, etp = layout.expert_parallel, layout.expert_tensor_parallel
    own = layout.micro_batch_size * model.seq // (layout.context_parallel * layout.tensor_parallel)
    gathered = own * (1 if ep > 1 else etp)
    pairs = gathered * model.top_k
    sent = int(pairs * min(1.0, limit or 1.0))
    load = peak_load(model, ep)
    arrived = int(pairs * min(load, limit or load)) if ep > 1 else sent
    return {
        "experts": model.experts,
        "groups": model.router.groups,
        "top_groups": model.router.top_groups,
        "choices": model.top_k,
        "ep": ep,
        "etp": etp,
        "expert_ffn": model.expert_ffn // etp,
        "shared_ffn": max(1, model.shared_expert_ffn // layout.tensor_parallel),
        "sent": sent,
        "arrived": arrived,
    }

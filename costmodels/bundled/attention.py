"""Attention cores, of one rank and over sequences that ranks share, tensor by tensor."""

from __future__ import annotations

from typing import NamedTuple

from costmodels.bundled.operations import (
    cat,
    chunk,
    copy,
    elementwise,
    function,
    keep,
    result_of,
    times,
    view,
)
from costmodels.bundled.replay import COMMUNICATION, Gradients, Node, Size, Storage, Tensor
from costmodels.bundled.structure import (
    ATTENDED,
    ATTENTION_MASK,
    ATTENTION_SCORES,
    GATHERED_PAIR,
    KEY,
    LOG_SUM_EXP,
    PAIR,
    QUERY,
    REPEATED_KEY,
    REPEATED_VALUE,
    TRAVELLING,
    VALUE,
    WHOLE_PAIR,
)


class Sizes(NamedTuple):
    """Of what a core that spans ranks makes."""

    query: Size
    key: Size
    value: Size
    attended: Size
    pair: Size
    gathered_pair: Size
    whole_key: Size
    whole_value: Size
    repeated_key: Size
    repeated_value: Size
    travelling: Size


PLAIN = Sizes(
    QUERY, KEY, VALUE, ATTENDED, PAIR, GATHERED_PAIR, *WHOLE_PAIR, REPEATED_KEY, REPEATED_VALUE, TRAVELLING
)

PADDED_HEADS, PADDED_WHOLE = ("padded", 1.0), ("padded_whole", 1.0)
"""Heads that are filled up to one size, of this rank's tokens and of whole sequences."""

PADDED = Sizes(
    query=PADDED_HEADS,
    key=PADDED_HEADS,
    value=PADDED_HEADS,
    attended=PADDED_HEADS,
    pair=times(PADDED_HEADS, 2),
    gathered_pair=times(PADDED_WHOLE, 2),
    whole_key=PADDED_WHOLE,
    whole_value=PADDED_WHOLE,
    repeated_key=PADDED_HEADS,
    repeated_value=PADDED_HEADS,
    travelling=times(PADDED_HEADS, 3),
)
"""Those of latent attention, whose keys and values must have heads of one size to travel together."""


def kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sizes: tuple[Size, Size, Size],
    out: Size = ATTENDED,
    sums: Size = LOG_SUM_EXP,
) -> Tensor:
    """Flash or memory-efficient attention: keeps queries, keys, values, its result and the log-sum-exp.

    Args:
        sizes: of the gradients of queries, keys and values.
    """
    tape = q.storage.tape

    def backward(node: Node, grads: Gradients) -> Gradients:
        return [Storage(node.tape, size) for size in sizes]

    saved = [q.storage, k.storage, v.storage]
    result = result_of(tape, out, [q, k, v], saved, backward, saves_result=True)
    statistics = Storage(tape, sums)
    keep(result, statistics)
    return result


def scored(q: Tensor, k: Tensor, v: Tensor, several: bool) -> Tensor:
    """Attention of grouped queries without a fused kernel: keeps scaled queries and repeated keys and values,
    and the scores of all heads after the softmax (ATen's `_scaled_dot_product_attention_math`).

    Its result lies head by head.
    """
    tape = q.storage.tape
    q = elementwise(q)
    everyone = Storage(tape, ATTENTION_MASK)
    causal = Storage(tape, ATTENTION_MASK)
    del everyone
    mask = Storage(tape, times(ATTENTION_MASK, 4))
    del causal
    k, v = _changed(k, QUERY, k.size), _changed(v, QUERY, v.size)
    scores = _batched(copy(q, QUERY) if several else q, elementwise(k), ATTENTION_SCORES)
    scores = result_of(tape, ATTENTION_SCORES, [scores], [], lambda node, grads: grads)
    del mask
    scores = elementwise(scores, saves="output")
    result = _batched(scores, v, ATTENDED)
    return reordered(result, ATTENDED) if several else result


def _batched(a: Tensor, b: Tensor, size: Size) -> Tensor:
    """Products of batches of matrices, which keep both; the second one's gradient comes first."""

    def backward(node: Node, grads: Gradients) -> Gradients:
        to_second = Storage(node.tape, b_size)
        return [Storage(node.tape, a_size), to_second]

    a_size, b_size = a.size, b.size
    return result_of(a.storage.tape, size, [a, b], [a.storage, b.storage], backward)


def gathered(q: Tensor, k: Tensor, v: Tensor, several: bool, sizes: Sizes = PLAIN) -> Tensor:
    """`runtime.parallel.context_attention.gathered_attention` on the first rank."""
    if several:
        # The gradient of values comes token by token, and is copied to the order of sequences.
        v = reordered(v, sizes.value)
    half = times(sizes.query, 0.5)
    first, last = chunk(q, [half, half])
    k_first, v_first, k_last, v_last = _gather_prefixes(k, v, sizes)
    parts = []
    # The first rank's first chunk is the sequence's first, and its last one the last.
    prefixes = (
        (first, k_first, v_first, times(sizes.key, 0.5), times(sizes.value, 0.5)),
        (last, k_last, v_last, sizes.whole_key, sizes.whole_value),
    )
    for own, keys, values, key_size, value_size in prefixes:
        parts.append(
            kernel(
                own,
                keys,
                values,
                (half, key_size, value_size),
                times(sizes.attended, 0.5),
                times(LOG_SUM_EXP, 0.5),
            )
        )
    return cat(parts, sizes.attended)


def _gather_prefixes(k: Tensor, v: Tensor, sizes: Sizes) -> list[Tensor]:
    tape = k.storage.tape
    local = Storage(tape, sizes.pair)
    everything = Storage(tape, sizes.gathered_pair, COMMUNICATION)
    whole = Storage(tape, sizes.gathered_pair)
    del local, everything

    def backward(node: Node, grads: Gradients) -> Gradients:
        joined = Storage(node.tape, sizes.gathered_pair)
        by_rank = Storage(node.tape, sizes.gathered_pair)
        own = Storage(node.tape, sizes.pair, COMMUNICATION)
        del joined, by_rank
        return [own, own]

    result = result_of(tape, whole, [k, v], [], backward)
    node = None if result.edge is None else result.edge[0]
    return [Tensor(whole, None if node is None else (node, index)) for index in range(4)]


def exchanged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    several: bool,
    repeats: bool,
    sizes: Sizes = PLAIN,
    one: tuple[bool, bool] = (False, False),
) -> Tensor:
    """`runtime.parallel.context_attention.exchanged_attention`.

    Args:
        one: attention has one head of queries here, and one of keys and values: their gradients come back in
            an order that is theirs.
    """
    if repeats:
        k, v = _changed(k, sizes.repeated_key, sizes.key), _changed(v, sizes.repeated_value, sizes.value)
    given = (q, sizes.query, one[0]), (k, sizes.repeated_key, one[1]), (v, sizes.repeated_value, one[1])
    parts = [view(x) if there else reordered(x, size) for x, size, there in given]
    sent = cat(parts, sizes.travelling)
    received = _exchange(sent, sizes.travelling)
    q, k, v = chunk(received, [sizes.query, sizes.repeated_key, sizes.repeated_value])
    result = kernel(q, k, v, (sizes.query, sizes.repeated_key, sizes.repeated_value), sizes.attended)
    ordered = copy(result, sizes.attended) if several else result
    back = _exchange(ordered, sizes.attended, copies=True)
    del ordered
    return copy(back, sizes.attended)


def _changed(x: Tensor, size: Size, gradient: Size) -> Tensor:
    tape = x.storage.tape
    return result_of(tape, size, [x], [], lambda node, grads: [Storage(node.tape, gradient)])


def reordered(x: Tensor, size: Size) -> Tensor:
    """A view whose gradient must be copied."""
    return result_of(
        x.storage.tape, x.storage, [x], [], lambda node, grads: [Storage(node.tape, size)], size=x.size
    )


def _exchange(x: Tensor, size: Size, copies: bool = False) -> Tensor:
    """One all-to-all; with `copies` its gradient is not in the order that it needs."""
    tape = x.storage.tape

    def backward(node: Node, grads: Gradients) -> Gradients:
        ordered = Storage(node.tape, size) if copies else grads[0]
        result = Storage(node.tape, size, COMMUNICATION)
        del ordered
        return [result]

    return function([x], Storage(tape, size, COMMUNICATION), [], backward)

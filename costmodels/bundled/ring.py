"""Attention over keys and values that go round the ranks (`parallel.ring_attention`), tensor by tensor.

As PyTorch's `_templated_ring_attention` runs on the first rank, which in every round but the first attends
with the second half of its queries (torch/distributed/tensor/experimental/_context_parallel/_attention.py).
"""

from __future__ import annotations

from costmodels.bundled.operations import keep, result_of, times
from costmodels.bundled.replay import COMMUNICATION, Gradients, Node, Size, Storage, Tape, Tensor
from costmodels.bundled.structure import ATTENDED, KEY, LOG_SUM_EXP, PAIR, QUERY, VALUE

ROUNDS = 4
"""Those after this many add nothing new."""

FP32 = 2.0
"""Bytes over those of the 16 bits in which activations are."""

HALF = 0.5


def ring(q: Tensor, k: Tensor, v: Tensor, ranks: int, one_head: bool, one_key_head: bool) -> Tensor:
    """`parallel.ring_attention.ring_attention`; keeps queries, keys, values, its result and the log-sum-exp.

    Args:
        ranks: of the ring.
        one_head: there is one head of queries here, whose order in memory is that of tokens.
        one_key_head: the same of keys and values.
    """
    tape, rounds = q.storage.tape, min(ranks, ROUNDS)
    merged, sums = _forward(tape, rounds, not one_key_head)
    narrow = Storage(tape, ATTENDED)
    del merged
    out = narrow if one_head else Storage(tape, ATTENDED)
    del narrow

    def backward(node: Node, grads: Gradients) -> Gradients:
        return _backward(node.tape, rounds, not one_key_head)

    result = result_of(tape, out, [q, k, v], [q.storage, k.storage, v.storage], backward, saves_result=True)
    keep(result, sums)
    # What cuts off heads that were padded makes a gradient of whole ones.
    return result_of(tape, out, [result], [], lambda node, grads: [Storage(node.tape, ATTENDED)])


def _forward(tape: Tape, rounds: int, copies: bool) -> tuple[Storage, Storage]:
    """The merged result in fp32, and the log-sum-exps."""
    keys = [Storage(tape, size) for size in (KEY, VALUE)] if copies else []
    travelling = _sent(tape, PAIR)
    narrow, sums = Storage(tape, ATTENDED), Storage(tape, LOG_SUM_EXP)
    merged = Storage(tape, _wide(ATTENDED))
    half, half_sums = times(_wide(ATTENDED), HALF), times(LOG_SUM_EXP, HALF)
    for number in range(1, rounds):
        keys = [travelling]
        if number < rounds - 1:
            travelling = _sent(tape, PAIR)
        own, own_sums = Storage(tape, times(ATTENDED, HALF)), Storage(tape, half_sums)
        narrow = own
        block = Storage(tape, half)
        difference = Storage(tape, half_sums)
        factor = Storage(tape, half_sums)
        del difference
        apart = Storage(tape, half)
        weighted = Storage(tape, half)
        del apart, factor
        updated = Storage(tape, half)
        del weighted
        updated_sums = Storage(tape, half_sums)
        sums = Storage(tape, LOG_SUM_EXP)
        merged = Storage(tape, _wide(ATTENDED))
        del own, own_sums, block, updated, updated_sums
    del keys, travelling, narrow
    return merged, sums


def _backward(tape: Tape, rounds: int, copies: bool) -> Gradients:
    """Gradients of queries, keys and values."""
    to_queries = Storage(tape, _wide(QUERY))
    to_keys = [Storage(tape, _wide(size)) for size in (KEY, VALUE)]
    keys = [Storage(tape, size) for size in (KEY, VALUE)] if copies else []
    joined = Storage(tape, PAIR)
    travelling = Storage(tape, PAIR, COMMUNICATION)
    own = [Storage(tape, size) for size in (QUERY, KEY, VALUE)]
    flat = [Storage(tape, _wide(size)) for size in (KEY, VALUE)] if copies else []
    all_keys = Storage(tape, _wide(PAIR))
    flat.clear()
    returning = Storage(tape, _wide(PAIR), COMMUNICATION)
    for number in range(1, rounds):
        keys = [travelling]
        if number < rounds - 1:
            joined = Storage(tape, PAIR)
            travelling = Storage(tape, PAIR, COMMUNICATION)
        sums = Storage(tape, times(LOG_SUM_EXP, HALF))
        own = [Storage(tape, size) for size in (times(QUERY, HALF), KEY, VALUE)]
        all_keys = returning
        to_keys = [returning]
        all_keys = Storage(tape, _wide(PAIR))
        returning = Storage(tape, _wide(PAIR), COMMUNICATION)
        to_queries = Storage(tape, _wide(QUERY))
        del sums
    result = Storage(tape, QUERY)
    del to_queries
    pair = Storage(tape, PAIR)
    del to_keys, keys, joined, travelling, own, all_keys, returning
    return [result, pair, pair]


def _sent(tape: Tape, size: Size) -> Storage:
    """What arrives, for which keys and values are joined first."""
    joined = Storage(tape, size)
    arriving = Storage(tape, size, COMMUNICATION)
    del joined
    return arriving


def _wide(size: Size) -> Size:
    return times(size, FP32)

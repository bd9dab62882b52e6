"""Attention cores of compiled layers, of one rank and over sequences that ranks share."""

from __future__ import annotations

from collections.abc import Sequence

from costmodels.bundled.attention import PLAIN, Sizes
from costmodels.bundled.compiled_graph import (
    INLINED,
    JOINED,
    KERNEL,
    PART,
    REDUCTION,
    Graph,
    Tensor,
    Value,
)
from costmodels.bundled.operations import times
from costmodels.bundled.replay import Size
from costmodels.bundled.structure import (
    ATTENDED,
    ATTENTION_SCORES,
    LOG_SUM_EXP,
    QUERY,
    QUERY_STATISTICS,
    Structure,
)

Gradients = Sequence["Value | None"]


def core(graph: Graph, structure: Structure, q: Tensor, k: Tensor, v: Tensor, sizes: Sizes = PLAIN) -> Tensor:
    """Attention of all heads of this rank."""
    if structure.context_form == "all_gather":
        return gathered(graph, q, k, v, sizes)
    if structure.context_form == "all_to_all":
        return exchanged(graph, q, k, v, structure.repeats_heads, sizes)
    if structure.scores_attention:
        return scored(graph, q, k, v, structure.several)
    return kernel(graph, q, k, v, (q.size, k.size, v.size))


def kernel(
    graph: Graph,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sizes: tuple[Size, Size, Size],
    out: Size = ATTENDED,
    sums: Size = LOG_SUM_EXP,
) -> Tensor:
    """Flash or memory-efficient attention: backward reads queries, keys, values, result and log-sum-exp.

    Args:
        sizes: of the gradients of queries, keys and values, which live as long as the last of them.
    """
    both = graph.add(KERNEL, [q.value, k.value, v.value], out, sums)
    result, statistics = graph.part(both, 0), graph.part(both, 1)

    def backward(grads: Gradients) -> list[Value | None]:
        assert grads[0] is not None
        given = [grads[0], q.value, k.value, v.value, result, statistics]
        every = graph.add(KERNEL, given, *sizes)
        return [graph.part(every, index) for index in range(3)]

    return graph.joins(result, out, [q.edge, k.edge, v.edge], backward)


def scored(graph: Graph, q: Tensor, k: Tensor, v: Tensor, several: bool) -> Tensor:
    """Attention of grouped queries without a fused kernel (`attention.scored`)."""
    q = _computed(graph, q, QUERY)
    k, v = _computed(graph, _repeated(graph, k, QUERY, k.size), QUERY), _repeated(graph, v, QUERY, v.size)
    scores = _batched(graph, q, k, ATTENTION_SCORES)
    largest = graph.add(REDUCTION, [scores.value], QUERY_STATISTICS)
    total = graph.add(REDUCTION, [scores.value, largest], QUERY_STATISTICS)
    shares = graph.add(INLINED, [scores.value, largest, total], ATTENTION_SCORES)

    def backward(grads: Gradients) -> list[Value | None]:
        assert grads[0] is not None
        rows = graph.add(REDUCTION, [grads[0], shares], QUERY_STATISTICS)
        return [graph.add(INLINED, [grads[0], shares, rows], ATTENTION_SCORES)]

    weights = graph.joins(shares, ATTENTION_SCORES, [scores.edge], backward)
    result = _batched(graph, weights, v, ATTENDED)
    if not several:
        return result
    return graph.joins(
        result.value, ATTENDED, [result.edge], lambda grads: [graph.copied(grads[0], ATTENDED)]
    )


def _computed(graph: Graph, x: Tensor, size: Size) -> Tensor:
    """A product with a number, whose gradient is one too."""
    value = graph.add(INLINED, [x.value], size)
    return graph.joins(value, size, [x.edge], lambda grads: [graph.copied(grads[0], size)])


def _batched(graph: Graph, a: Tensor, b: Tensor, size: Size) -> Tensor:
    """Products of batches of matrices; the second one's gradient comes first."""

    def backward(grads: Gradients) -> list[Value | None]:
        assert grads[0] is not None
        to_second = graph.add(KERNEL, [a.value, grads[0]], b.size)
        return [graph.add(KERNEL, [grads[0], b.value], a.size), to_second]

    return graph.joins(graph.add(KERNEL, [a.value, b.value], size), size, [a.edge, b.edge], backward)


def gathered(graph: Graph, q: Tensor, k: Tensor, v: Tensor, sizes: Sizes) -> Tensor:
    """`runtime.parallel.context_attention.gathered_attention` on the first rank."""
    halves = _halves(graph, q, sizes.query)
    local = graph.add(JOINED, [k.value, v.value], sizes.pair)
    whole = graph.add(JOINED, [graph.message([local], sizes.gathered_pair)], sizes.gathered_pair)

    def backward(grads: Gradients) -> list[Value | None]:
        joined = graph.add(JOINED, [grad for grad in grads if grad is not None], sizes.gathered_pair)
        own = graph.message([joined], sizes.pair)
        return [own, own]

    function = graph.joins(whole, sizes.gathered_pair, [k.edge, v.edge], backward).edge
    assert function is not None
    k_first, v_first, k_last, v_last = (
        Tensor(whole, sizes.gathered_pair, (function[0], index)) for index in range(4)
    )
    half, sums = times(sizes.attended, 0.5), times(LOG_SUM_EXP, 0.5)
    # The first rank's first chunk is the sequence's first, and its last one the last.
    first_sizes = halves[0].size, times(sizes.key, 0.5), times(sizes.value, 0.5)
    parts = [
        kernel(graph, halves[0], k_first, v_first, first_sizes, half, sums),
        kernel(
            graph,
            halves[1],
            k_last,
            v_last,
            (halves[1].size, sizes.whole_key, sizes.whole_value),
            half,
            sums,
        ),
    ]
    # The kernel of the last tokens is called in a way whose gradient is copied.
    last = parts[1]
    parts[1] = graph.joins(last.value, half, [last.edge], lambda grads: [graph.copied(grads[0], half)])
    joined = graph.add(JOINED, [part.value for part in parts], sizes.attended)
    return graph.joins(
        joined, sizes.attended, [part.edge for part in parts], lambda grads: [grads[0], grads[0]]
    )


def _halves(graph: Graph, x: Tensor, size: Size) -> list[Tensor]:
    """Both halves of a tensor, whose gradients are joined."""

    def backward(grads: Gradients) -> list[Value | None]:
        return [graph.add(JOINED, [grad for grad in grads if grad is not None], size)]

    edge = graph.joins(x.value, size, [x.edge], backward).edge
    assert edge is not None
    half = times(size, 0.5)
    # What is read by halves is computed again where that is element-wise all the way, as after a norm.
    again = x.value.kind == INLINED and all(arg.kind != JOINED for arg in x.value.args)
    shown = [graph.add(PART, [x.value], half) if again else x.value for _ in range(2)]
    return [Tensor(value, half, (edge[0], index)) for index, value in enumerate(shown)]


def exchanged(graph: Graph, q: Tensor, k: Tensor, v: Tensor, repeats: bool, sizes: Sizes) -> Tensor:
    """`runtime.parallel.context_attention.exchanged_attention`."""
    if repeats:
        k, v = (
            _repeated(graph, k, sizes.repeated_key, sizes.key),
            _repeated(graph, v, sizes.repeated_value, sizes.value),
        )
    sent = graph.add(JOINED, [q.value, k.value, v.value], sizes.travelling)
    received = graph.message([sent], sizes.travelling)
    lengths = sizes.query, sizes.repeated_key, sizes.repeated_value

    def backward(grads: Gradients) -> list[Value | None]:
        joined = graph.add(JOINED, [grad for grad in grads if grad is not None], sizes.travelling)
        returned = graph.message([joined], sizes.travelling)
        return [returned, returned, returned]

    edge = graph.joins(received, sizes.travelling, [q.edge, k.edge, v.edge], backward).edge
    assert edge is not None
    q, k, v = (Tensor(received, size, (edge[0], index)) for index, size in enumerate(lengths))
    result = kernel(graph, q, k, v, lengths, sizes.attended)
    back = graph.message([result.value], sizes.attended)

    def back_again(grads: Gradients) -> list[Value | None]:
        return [graph.message([graph.copied(grads[0], sizes.attended)], sizes.attended)]

    ordered = graph.add(INLINED, [back], sizes.attended)
    return graph.joins(ordered, sizes.attended, [result.edge], back_again)


def _repeated(graph: Graph, x: Tensor, size: Size, gradient: Size) -> Tensor:
    """Heads several times, whose gradients are summed."""

    def backward(grads: Gradients) -> list[Value | None]:
        assert grads[0] is not None
        return [graph.add(REDUCTION, [grads[0]], gradient)]

    return graph.joins(graph.add(INLINED, [x.value], size), size, [x.edge], backward)

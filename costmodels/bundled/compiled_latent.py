"""The operations of latent attention in compiled layers."""

from __future__ import annotations

from collections.abc import Sequence

from costmodels.bundled.compiled_graph import INLINED, JOINED, REDUCTION, Graph, Tensor, Value
from costmodels.bundled.compiled_layers import CompiledLayer
from costmodels.bundled.replay import Size
from costmodels.bundled.structure import (
    ATTENDED,
    COMPRESSED,
    ENTERED,
    ENTERED_KEY,
    ENTERED_QUERY,
    HEAD_WIDTH,
    KEY,
    KEY_VALUE,
    LATENT,
    LATENT_KEY,
    LATENT_QUERY,
    LATENT_STATISTICS,
    QUERY,
    ROTARY_KEY,
    ROTARY_PART,
    ROTARY_QUERY,
    VALUE,
)


class CompiledLatentLayer(CompiledLayer):
    """A layer with latent attention."""

    def attention(self, x: Tensor) -> Tensor:
        """`runtime.model.attention.LatentAttention`."""
        graph = self.graph
        queries, latent, k_rope = self.compress_whole(x)
        q = self.linear(queries, "query", QUERY, False)
        if self.structure.rotates:
            q = self.copying(q)
        kv = self.copying(self.linear(latent, "key_value", KEY_VALUE, False))
        k_nope, values = split(graph, kv, [KEY_VALUE, VALUE])
        v = inlined(graph, values, VALUE)
        if self.structure.rotates:
            q_nope, q_rope = split(graph, q, [QUERY, ROTARY_QUERY])
            q = join(graph, [q_nope, self.rotate(q_rope)], QUERY)
            k_rope = self.rotate(k_rope)
        if self.structure.scales_scores:
            q = inlined(graph, q, QUERY, computes=True)
        k = join(graph, [k_nope, _shared(graph, k_rope)], KEY)
        with graph.computed_again("core_attention" in self.structure.recompute):
            attended = self.core(q, k, v)
        # Flash attention, which takes heads of one size in 16 bits, writes them in the order of queries.
        structure = self.structure
        if not structure.longer and not structure.wide and structure.rotates:
            attended = inlined(graph, attended, ATTENDED)
        return self.rows(attended, "output")

    def copying(self, x: Tensor) -> Tensor:
        """The same, whose gradient comes head by head and is copied to the order of tokens."""
        return self.graph.joins(
            x.value, x.size, [x.edge], lambda grads: [self.graph.copied(grads[0], x.size)]
        )

    def compress_whole(self, x: Tensor) -> list[Tensor]:
        """`runtime.model.attention.Compression`; what it gives is joined where ranks share the heads."""
        if not self.structure.tensor_parallel:
            return self.compress(x)
        # Compiled layers keep this gathered input even where norms are computed again.
        joined = join(self.graph, self.compress(x), COMPRESSED)
        together = self.enter(joined, computes_again=False, whole=ENTERED)
        return split(self.graph, together, [ENTERED_QUERY, ENTERED_KEY, ROTARY_KEY])

    def compress(self, x: Tensor) -> list[Tensor]:
        """For the tokens of this rank."""
        both = self.linear(x, "latent", LATENT, False)
        latent, rope = split(self.graph, both, [LATENT_KEY, ROTARY_PART])
        if self.structure.latent_queries:
            x = self.linear(x, "latent_query", LATENT_QUERY, False)
            x = self.normalise(x, LATENT_STATISTICS, ("head_width",), HEAD_WIDTH)
        return [x, self.normalise(latent, LATENT_STATISTICS, ("head_width",), HEAD_WIDTH), rope]


def split(graph: Graph, x: Tensor, sizes: Sequence[Size]) -> list[Tensor]:
    """Views of the parts of a tensor, whose gradients are joined."""

    def backward(grads: Sequence[Value | None]) -> list[Value | None]:
        return [graph.add(JOINED, [grad for grad in grads if grad is not None], x.size)]

    edge = graph.joins(x.value, x.size, [x.edge], backward).edge
    assert edge is not None
    return [Tensor(x.value, size, (edge[0], index)) for index, size in enumerate(sizes)]


def join(graph: Graph, parts: Sequence[Tensor], size: Size) -> Tensor:
    """Tensors beside each other; gradients are views."""
    value = graph.add(JOINED, [part.value for part in parts], size)
    return graph.joins(value, size, [part.edge for part in parts], lambda grads: [grads[0]] * len(parts))


def inlined(graph: Graph, x: Tensor, size: Size, computes: bool = False) -> Tensor:
    """A copy, or with `computes` a product with a number, whose gradient is one too."""

    def backward(grads: Sequence[Value | None]) -> list[Value | None]:
        return [graph.copied(grads[0], x.size) if computes else grads[0]]

    return graph.joins(graph.add(INLINED, [x.value], size), size, [x.edge], backward)


def _shared(graph: Graph, x: Tensor) -> Tensor:
    """The rotary part of the keys, which all heads share: gradients are summed."""

    def backward(grads: Sequence[Value | None]) -> list[Value | None]:
        assert grads[0] is not None
        return [graph.add(REDUCTION, [grads[0]], x.size)]

    return graph.joins(x.value, x.size, [x.edge], backward)

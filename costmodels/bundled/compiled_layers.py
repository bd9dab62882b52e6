"""The operations of a compiled layer of `runtime.model.transformer`, as AOTAutograd traces them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from costmodels.bundled.compiled_attention import core
from costmodels.bundled.compiled_graph import (
    INLINED,
    JOINED,
    KERNEL,
    REDUCTION,
    SUM,
    Edge,
    Graph,
    Tensor,
    Value,
)
from costmodels.bundled.operations import times
from costmodels.bundled.replay import Size
from costmodels.bundled.structure import (
    ATTENDED,
    BIASES,
    HEAD_WIDTH,
    INNER,
    KEY,
    KEY_HEAD,
    KEY_STATISTICS,
    QUERY,
    QUERY_STATISTICS,
    RESIDUAL,
    STATISTICS,
    VALUE,
    WEIGHTS,
    WHOLE,
    WIDTH,
    Structure,
)

Gradients = Sequence[Value | None]

VECTORS = {name: (f"{name}_bias", size) for name, size in BIASES.items()} | {
    "shared_up": ("shared_bias", ("shared_bias", 1.0)),
    "shared_gate_matrix": ("shared_bias", ("shared_bias", 1.0)),
    "shared_down": ("width", WIDTH),
}
"""Names and sizes of biases."""


def present(gradient: Value | None) -> Value:
    """A gradient that must be there."""
    assert gradient is not None
    return gradient


class CompiledLayer:
    """A layer with a dense MLP."""

    def __init__(self, structure: Structure, graph: Graph) -> None:
        self.structure, self.graph = structure, graph

    def forward(self, x: Tensor) -> Tensor:
        """`runtime.model.transformer.Block`."""
        modules = self.structure.recompute
        with self.graph.computed_again("full" in modules):
            attended = self.attention(self.norm(x))
            return self.with_mlp(self.add(x, attended))

    def with_mlp(self, x: Tensor) -> Tensor:
        """The second half of the layer."""
        normed = self.norm(x)
        with self.graph.computed_again("mlp" in self.structure.recompute):
            result = self.mlp(normed)
        return self.add(x, result)

    def norm(self, x: Tensor) -> Tensor:
        """One of the width of the model."""
        with self.graph.computed_again("norm" in self.structure.recompute):
            return self.normalise(x, STATISTICS, ("width",) * (1 + self.structure.layernorm), WIDTH)

    def normalise(self, x: Tensor, statistics: Size, names: Sequence[str], weight: Size) -> Tensor:
        """A norm: keeps its statistics; what it normalises is there already."""
        graph = self.graph
        known = graph.add(REDUCTION, [x.value], statistics)
        result = graph.add(INLINED, [x.value, known], x.size)

        def backward(grads: Gradients) -> list[Value | None]:
            grad = present(grads[0])
            inputs = [grad, x.value, known]
            own = [graph.add(REDUCTION, inputs, weight) for _ in names]
            rows = graph.add(REDUCTION, inputs, statistics)
            return [graph.add(INLINED, [*inputs, rows], x.size), *own]

        return graph.joins(result, x.size, [x.edge, *((name, 0) for name in names)], backward)

    def attention(self, x: Tensor) -> Tensor:
        """`runtime.model.attention.Attention`."""
        q, k, v = self.heads(x)
        with self.graph.computed_again("core_attention" in self.structure.recompute):
            attended = self.core(q, k, v)
        return self.merge(attended)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values."""
        x = self.enter(x)
        sizes = {"query": QUERY, "key": KEY, "value": VALUE}
        q, k, v = (self.columns(x, name, size) for name, size in sizes.items())
        if self.structure.qk_norm:
            q = self.normalise(q, QUERY_STATISTICS, ("head_width",), HEAD_WIDTH)
            k = self.normalise(k, KEY_STATISTICS, ("head_width",), HEAD_WIDTH)
        if self.structure.rotates:
            q, k = self.rotate(q), self.rotate(k)
        return q, k, v

    def merge(self, attended: Tensor) -> Tensor:
        """What all heads give together."""
        if self.structure.scores_attention and not self.structure.one_head:
            ordered = self.graph.copied(attended.value, ATTENDED)
            attended = self.graph.joins(ordered, ATTENDED, [attended.edge], lambda grads: [grads[0]])
        return self.rows(attended, "output")

    def columns(self, x: Tensor, name: str, size: Size) -> Tensor:
        """A matrix of attention, of which each rank computes its columns."""
        bias = self.structure.bias or self.structure.qkv_bias
        if self.structure.shares_heads and name in ("key", "value"):
            result = self.shared_linear(x, name, size, bias)
        else:
            result = self.linear(x, name, size, bias)
        form = self.structure.context_form
        one = self.structure.one_head if name == "query" else self.structure.one_key_head
        # Gradients that come head by head are copied to the order of tokens.
        copies = self.structure.scores_attention and not one
        copies |= form == "all_gather" and (name == "query" or self.structure.several)
        if copies or form == "all_to_all":
            return self.graph.joins(
                result.value, size, [result.edge], lambda grads: [self.graph.copied(grads[0], size)]
            )
        return result

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of all heads of this rank."""
        return core(self.graph, self.structure, q, k, v)

    def mlp(self, x: Tensor) -> Tensor:
        """`runtime.model.mlp.MLP`."""
        return self.network(x, {name: name for name in ("up", "gate", "down")}, INNER)

    def network(self, x: Tensor, names: dict[str, str], inner: Size) -> Tensor:
        """An MLP whose matrices have these names, of an inner size."""
        entered = self.enter(x, "mlp" not in self.structure.recompute)
        inputs = ("up", "gate") if self.structure.gated else ("up",)
        parts = [self.linear(entered, names[name], inner, self.structure.bias) for name in inputs]
        with self.graph.computed_again("activation" in self.structure.recompute):
            activated = self.activate(*parts)
        return self.rows(activated, names["down"], x.size)

    def activate(self, up: Tensor, gate: Tensor | None = None) -> Tensor:
        """`runtime.model.mlp.Activation`."""
        return self.curve(up) if gate is None else self.multiply(self.curve(gate), up)

    def curve(self, x: Tensor) -> Tensor:
        """The activation function."""
        graph = self.graph

        def backward(grads: Gradients) -> list[Value | None]:
            return [graph.add(INLINED, [present(grads[0]), x.value], x.size)]

        return graph.joins(graph.add(INLINED, [x.value], x.size), x.size, [x.edge], backward)

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        """The product of two tensors."""
        graph = self.graph

        def backward(grads: Gradients) -> list[Value | None]:
            grad = present(grads[0])
            second = graph.add(INLINED, [grad, a.value], b.size)
            return [graph.add(INLINED, [grad, b.value], a.size), second]

        return graph.joins(graph.add(INLINED, [a.value, b.value], a.size), a.size, [a.edge, b.edge], backward)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """The sum of two tensors."""
        value = self.graph.add(INLINED, [a.value, b.value], a.size)
        return self.graph.joins(value, a.size, [a.edge, b.edge], lambda grads: [grads[0], grads[0]])

    def rotate(self, x: Tensor) -> Tensor:
        """`runtime.model.rotary.rotate`: what is turned is joined in fp32."""
        graph, wide = self.graph, x.size if self.structure.wide else times(x.size, 2)

        def turned(value: Value) -> Value:
            joined = graph.add(JOINED, [value], wide)
            return graph.add(INLINED, [value, joined], x.size)

        return graph.joins(turned(x.value), x.size, [x.edge], lambda grads: [turned(present(grads[0]))])

    def linear(self, x: Tensor, name: str, size: Size, bias: bool) -> Tensor:
        """A matrix of this rank, and its bias."""
        edges: list[Edge | None] = [(name, 0)]
        vector, bias_size = VECTORS[name] if bias else ("", None)
        return self.product(x, edges, [], size, WEIGHTS[name], bias_size, vector)

    def product(
        self,
        x: Tensor,
        weight_edges: list[Edge | None],
        weights: list[Value],
        size: Size,
        weight_size: Size,
        bias_size: Size | None,
        bias_name: Edge | str,
    ) -> Tensor:
        """A matrix product: with a bias, the gradient of the input comes before that of the weight.

        Args:
            weights: weight and bias, if they are computed.
        """
        graph = self.graph
        result = graph.add(KERNEL, [x.value, *weights], size)

        def backward(grads: Gradients) -> list[Value | None]:
            grad = present(grads[0])
            if bias_size is None:
                of_weight = graph.add(KERNEL, [grad, x.value], weight_size)
                return [graph.add(KERNEL, [grad, *weights[:1]], x.size), of_weight]
            of_input = graph.add(KERNEL, [grad, *weights[:1]], x.size)
            of_weight = graph.add(KERNEL, [grad, x.value], weight_size)
            return [of_input, of_weight, graph.add(REDUCTION, [grad], bias_size)]

        edges = [x.edge, *weight_edges]
        if bias_size is not None:
            edges.append((bias_name, 0) if isinstance(bias_name, str) else bias_name)
        return graph.joins(result, size, edges, backward)

    def shared_linear(self, x: Tensor, name: str, size: Size, bias: bool) -> Tensor:
        """One whose weight ranks that share a head gather for each use."""
        weight = self.gathered(name, KEY_HEAD, WEIGHTS[name])
        if not bias:
            return self.product(x, [weight.edge], [weight.value], size, KEY_HEAD, None, "")
        # Of a head: small beside all else.
        vector = self.gathered(f"{name}_bias", HEAD_WIDTH, BIASES[name])
        assert vector.edge is not None
        values = [weight.value, vector.value]
        return self.product(x, [weight.edge], values, size, KEY_HEAD, HEAD_WIDTH, vector.edge)

    def gathered(self, name: str, whole: Size, part: Size) -> Tensor:
        """A parameter that is gathered from the ranks that hold parts of it."""
        graph = self.graph

        def backward(grads: Gradients) -> list[Value | None]:
            return [graph.message([present(grads[0])], part)]

        return graph.joins(graph.message([], whole), whole, [(name, 0)], backward)

    def rows(self, x: Tensor, name: str, size: Size = RESIDUAL) -> Tensor:
        """A matrix whose rows are spread over ranks, which sum the products; what is left has this size."""
        bias, split = self.structure.bias, self.structure.tensor_parallel
        result = self.leave(self.linear(x, name, WHOLE, bias and not split), size)
        return self.add_bias(result, *VECTORS[name]) if bias and split else result

    def add_bias(self, x: Tensor, name: str, size: Size) -> Tensor:
        """`x` and a vector."""
        graph = self.graph

        def backward(grads: Gradients) -> list[Value | None]:
            return [grads[0], graph.add(REDUCTION, [present(grads[0])], size)]

        return graph.joins(graph.add(INLINED, [x.value], x.size), x.size, [x.edge, (name, 0)], backward)

    def enter(self, x: Tensor, computes_again: bool = True, whole: Size = WHOLE) -> Tensor:
        """`_Region.enter`: gathered from all ranks, or copied to them."""
        again = computes_again and "norm" in self.structure.recompute
        if not self.structure.tensor_parallel:
            return x
        with self.graph.computed_again(again and self.structure.sequence_parallel):
            if self.structure.sequence_parallel:
                return self.collective(
                    x,
                    lambda value: self.join(value, whole),
                    whole,
                    lambda value: self.sum_slice(value, x.size),
                )
            return self.collective(x, lambda value: value, x.size, self.sum)

    def leave(self, x: Tensor, size: Size) -> Tensor:
        """`_Region.leave`: the sum over ranks, or a slice of it."""
        if not self.structure.tensor_parallel:
            return x
        if self.structure.sequence_parallel:
            return self.collective(
                x,
                lambda value: self.sum_slice(value, size),
                size,
                lambda value: self.join(value, WHOLE),
            )
        return self.collective(x, self.sum, x.size, lambda value: value)

    def collective(
        self, x: Tensor, forward: Callable[[Value], Value], size: Size, backward: Callable[[Value], Value]
    ) -> Tensor:
        """What a function of tensors on all ranks gives here."""
        return self.graph.joins(forward(x.value), size, [x.edge], lambda grads: [backward(present(grads[0]))])

    def sum(self, value: Value) -> Value:
        """Over ranks."""
        return self.graph.add(SUM, [value], value.sizes[0])

    def join(self, value: Value, size: Size) -> Value:
        """`runtime.parallel.collectives._join`: in order, where there are several sequences."""
        whole = self.graph.message([value], size)
        return self.graph.copied(whole, size) if self.structure.several else whole

    def sum_slice(self, value: Value, size: Size) -> Value:
        """`runtime.parallel.collectives._sum_slice`, of this size."""
        parts = self.graph.copied(value, value.sizes[0]) if self.structure.several else value
        return self.graph.message([parts], size)

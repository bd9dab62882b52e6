"""The operations of a layer of `runtime.model.transformer`, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from costmodels.bundled.attention import exchanged, gathered, kernel, reordered, scored
from costmodels.bundled.operations import (
    add,
    call,
    cat,
    chunk,
    copy,
    elementwise,
    function,
    keep,
    linear,
    multiply,
    present,
    result_of,
    square,
    times,
    view,
)
from costmodels.bundled.recomputing import dropping_outputs, recomputed
from costmodels.bundled.replay import (
    COMMUNICATION,
    LOGITS,
    TEMPORARIES,
    Gradients,
    Leaf,
    Node,
    Size,
    Storage,
    Tensor,
)
from costmodels.bundled.ring import ring
from costmodels.bundled.structure import (
    ATTENDED,
    BIASES,
    EXPONENTS,
    HEAD_WIDTH,
    INNER,
    KEY,
    KEY_HEAD,
    KEY_STATISTICS,
    LOGITS_SIZE,
    POSITION,
    QUERY,
    QUERY_STATISTICS,
    RESIDUAL,
    STATISTICS,
    TOKEN,
    VALUE,
    WEIGHTS,
    WHOLE,
    WIDTH,
    Structure,
)

Weights = dict[str, Leaf]


class Layer:
    """A layer with a dense MLP."""

    def __init__(
        self,
        structure: Structure,
        weights: Weights,
        mixture: Callable[[Layer, Tensor], Tensor] | None = None,
    ) -> None:
        self.structure, self.weights, self.mixture = structure, weights, mixture
        self.shared: Callable[[Tensor], Tensor] | None = None
        self.activated: Callable[..., Tensor] | None = None
        """Compute shared experts, and the activation of experts, where both are not done one by one."""

    def forward(self, x: Tensor) -> Tensor:
        """`runtime.model.transformer.Block`, with what `runtime.parallel.recomputation` wraps."""
        modules, tape = self.structure.recompute, x.storage.tape
        if "full" in modules:
            return call(recomputed(tape, self.block), x)
        drops = modules & {"norm", "activation"}
        return call(dropping_outputs(tape, self.block) if drops else self.block, x)

    def block(self, x: Tensor) -> Tensor:
        """Attention and MLP, each of which adds to what comes in."""
        tape = x.storage.tape
        attended = call(self.attention, self.module("norm", self.norm, x))
        x = add(x, attended)
        del attended
        normed = self.module("norm", self.norm, x)
        mlp = recomputed(tape, self.mlp) if "mlp" in self.structure.recompute else self.mlp
        result = call(mlp, normed)
        del normed
        return add(x, result)

    def module(self, name: str, forward: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Call a module whose result is computed again, if `name` is."""
        if name not in self.structure.recompute:
            return call(forward, *inputs)
        tensors = [one for one in inputs if isinstance(one, Tensor)]
        rest = [one for one in inputs if not isinstance(one, Tensor)]
        again = recomputed(tensors[0].storage.tape, lambda *those: forward(*those, *rest), drop_output=True)
        return call(again, *tensors)

    def norm(self, x: Tensor, statistics_size: Size = STATISTICS) -> Tensor:
        """One that keeps its input and statistics; the gradients of its weights are small."""
        tape = x.storage.tape
        size, weight = x.size, WIDTH if statistics_size is STATISTICS else HEAD_WIDTH
        layernorm = self.structure.layernorm and weight is WIDTH
        vectors = 1 + layernorm
        leaves = [Tensor(x.storage, (self.weights[weight[0]], 0))] * vectors

        def backward(node: Node, grads: Gradients) -> Gradients:
            # The fused kernel of rmsnorm has all results whether they are asked for or not.
            sizes = (size, *[weight] * vectors)
            if not layernorm:
                return [Storage(node.tape, one) for one in sizes]
            return [node.gradient(place, one) for place, one in enumerate(sizes)]

        result = result_of(tape, size, [x, *leaves], [x.storage], backward)
        statistics = Storage(tape, statistics_size)
        keep(result, statistics)
        return result

    def attention(self, x: Tensor) -> Tensor:
        """`runtime.model.attention.Attention`."""
        x = self.enter_module(x)
        sizes = {"query": QUERY, "key": KEY, "value": VALUE}
        q, k, v = (
            self.projection(x, name, size, there)
            for (name, size), there in zip(sizes.items(), self.in_token_order(), strict=True)
        )
        if self.structure.qk_norm:
            q, k = self.norm(q, QUERY_STATISTICS), self.norm(k, KEY_STATISTICS)
        if self.structure.rotates:
            q, k = self.rotate(q), self.rotate(k)
        attended = self.core_attention(q, k, v)
        # Fused kernels write results in the order in which the output matrix reads them.
        in_order = not self.structure.scores_attention or self.structure.one_head
        attended = view(attended) if in_order else copy(attended, ATTENDED)
        return call(self.leave_rows, attended, "output")

    def projection(self, x: Tensor, name: str, size: Size, in_order: bool) -> Tensor:
        """Queries, keys or values, whose gradient is copied where it does not come in the order of tokens."""
        result = self.linear(x, name, size, self.structure.qkv_bias)
        return result if in_order else reordered(result, size)

    def in_token_order(self) -> tuple[bool, bool, bool]:
        """Whether gradients of queries, keys and values come token by token, not head by head."""
        structure = self.structure
        norms, one, one_key = structure.qk_norm, structure.one_head, structure.one_key_head
        if structure.context_form == "all_to_all":
            # Those of several heads are copied when they come back; what is rotated or repeated is new.
            norms |= structure.rotates
            one, one_key = not one, not one_key or structure.repeats_heads
        elif structure.context_form != "ring" and not structure.scores_attention:
            return True, True, True
        return one or norms, one_key or norms, one_key

    def core_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention itself, computed again where the structure says so."""
        core = self.core
        if "core_attention" in self.structure.recompute:
            core = recomputed(q.storage.tape, core)
        return call(core, q, k, v)

    def mlp(self, x: Tensor) -> Tensor:
        """`runtime.model.mlp.MLP`, or what the layer has instead."""
        if self.mixture is not None:
            return self.mixture(self, x)
        x = self.enter_module(x, "mlp" not in self.structure.recompute)
        up = call(self.linear, x, "up", INNER, self.structure.bias)
        if self.structure.gated:
            gate = call(self.linear, x, "gate", INNER, self.structure.bias)
            inner = self.activate(up, gate)
            del gate
        else:
            inner = self.activate(up)
        del up
        return call(self.leave_rows, inner, "down")

    def enter_module(self, x: Tensor, recomputes: bool = True, whole: Size = WHOLE) -> Tensor:
        """The input of attention or an MLP, which recomputed norms gather again."""
        if recomputes and self.structure.sequence_parallel:
            return self.module("norm", self.enter, x, whole)
        return call(self.enter, x, whole)

    def activate(self, *inputs: Tensor) -> Tensor:
        """The activation, computed again where the structure says so and the MLP as a whole is not."""
        if "mlp" in self.structure.recompute:
            return call(self.activation, *inputs)
        return self.module("activation", self.activation, *inputs)

    def activation(self, up: Tensor, gate: Tensor | None = None) -> Tensor:
        """`runtime.model.mlp.Activation`."""
        if gate is None:
            return self.curve(up)
        return multiply(self.curve(gate), up)

    def curve(self, x: Tensor) -> Tensor:
        """The activation function."""
        if self.structure.activation != "relu2":
            return elementwise(x, saves="input")
        return square(elementwise(x, saves="output"))

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of all heads of this rank."""
        form, several = self.structure.context_form, self.structure.several
        if form == "all_gather":
            return gathered(q, k, v, several)
        if form == "all_to_all":
            one = self.structure.one_head, self.structure.one_key_head
            return exchanged(q, k, v, several, self.structure.repeats_heads, one=one)
        if form == "ring":
            structure = self.structure
            return ring(q, k, v, structure.ring_ranks, structure.one_head, structure.one_key_head)
        if self.structure.scores_attention:
            return scored(q, k, v, several)
        return kernel(q, k, v, (q.size, k.size, v.size))

    def rotate(self, x: Tensor) -> Tensor:
        """`runtime.model.rotary.rotate`, in fp32."""
        wide = x.size if self.structure.wide else times(x.size, 2)
        half = times(wide, 0.5)
        first, second = chunk(self.to_wide(x, wide), [half, half])
        turned = cat([elementwise(second), first], wide)
        table = elementwise
        total = add(table(self.to_wide(x, wide)), table(turned))
        return total if self.structure.wide else elementwise(total, x.size)

    def to_wide(self, x: Tensor, wide: Size) -> Tensor:
        """`x` in fp32."""
        return x if self.structure.wide else elementwise(x, wide)

    def linear(self, x: Tensor, name: str, size: Size, bias: bool) -> Tensor:
        """One that each rank computes its columns of."""
        own = (self.weights[f"{name}_bias"], BIASES[name]) if bias else None
        if self.structure.shares_heads and name in ("key", "value"):
            return self.shared_linear(x, name, size, own)
        return linear(x, self.weights[name], size, WEIGHTS[name], own)

    def shared_linear(self, x: Tensor, name: str, size: Size, bias: tuple[Leaf, Size] | None) -> Tensor:
        """One whose weight ranks that share a head gather for each use."""
        tape = x.storage.tape

        def part(node: Node, grads: Gradients) -> Gradients:
            return [Storage(node.tape, WEIGHTS[name], COMMUNICATION)]

        whole = Storage(tape, KEY_HEAD, COMMUNICATION)
        weight = function([Tensor(x.storage, (self.weights[name], 0))], whole, [], part)
        return linear(x, weight, size, KEY_HEAD, bias)

    def leave_rows(self, x: Tensor, name: str) -> Tensor:
        """One whose rows are spread over ranks, which sum the products."""
        bias = self.structure.bias
        split = self.structure.tensor_parallel
        own = (self.weights[f"{name}_bias"], BIASES[name])
        result = linear(x, self.weights[name], WHOLE, WEIGHTS[name], own if bias and not split else None)
        result = self.leave(result)
        return self.add_bias(result, *own) if bias and split else result

    def add_bias(self, x: Tensor, leaf: Leaf, size: Size) -> Tensor:
        """`x` and a vector."""
        tape = x.storage.tape
        vector = Tensor(x.storage, (leaf, 0))
        return result_of(
            tape, x.size, [x, vector], [], lambda node, grads: [grads[0], node.gradient(1, size)]
        )

    def enter(self, x: Tensor, whole: Size = WHOLE) -> Tensor:
        """`_Region.enter`: with sequence parallelism, gathered from all ranks."""
        return gather(x, self.structure.several, whole) if self.structure.sequence_parallel else x

    def leave(self, x: Tensor) -> Tensor:
        """`_Region.leave`."""
        return reduce_scatter(x, self.structure.several) if self.structure.sequence_parallel else x


class Ends(Layer):
    """Embedding, and head with the loss."""

    def embed(self, nothing: Tensor) -> Tensor:
        """`runtime.model.transformer.Embedding`."""
        split = self.structure.tensor_parallel
        x = call(self.look_up_part if split else self.look_up, nothing)
        if "positions" in self.weights:
            x = add(x, self.embedding(nothing.storage, "positions", POSITION))
        return x

    def look_up(self, nothing: Tensor) -> Tensor:
        """Rows of the whole vocabulary."""
        return self.embedding(nothing.storage, "tokens", RESIDUAL)

    def look_up_part(self, nothing: Tensor) -> Tensor:
        """Rows of this rank's part, zero where a token is another rank's."""
        tape = nothing.storage.tape
        shifted, foreign = Storage(tape, times(TOKEN, 8)), Storage(tape, TOKEN)
        found = self.embedding(Storage(tape, times(TOKEN, 8)), "tokens", WHOLE)
        masked = Storage(tape, WHOLE)
        cleared = result_of(tape, masked, [found], [foreign], lambda node, grads: [Storage(node.tape, WHOLE)])
        del masked, foreign, found
        result = self.leave(cleared)
        del shifted
        return result

    def embedding(self, indices: Storage, name: str, size: Size) -> Tensor:
        """Rows of a table: keeps their numbers; the gradient is a whole table."""
        tape = indices.tape
        table = Tensor(indices, (self.weights[name], 0))
        out = Storage(tape, size)
        return result_of(
            tape, out, [table], [indices], lambda node, grads: [Storage(node.tape, WEIGHTS[name])]
        )

    def loss(self, x: Tensor) -> Tensor:
        """Final norm, output matrix and `runtime.parallel.loss`."""
        logits = call(self.head, call(self.norm, x))
        logits.storage.become(LOGITS)
        del x
        logits.storage.tape.marks["scores"] = len(logits.storage.tape.changes)
        return call(self.cross_entropy, self.marked(logits, "scored"))

    def head(self, x: Tensor) -> Tensor:
        """The output matrix."""
        return linear(call(self.enter, x), self.weights["head"], LOGITS_SIZE, WEIGHTS["head"])

    def marked(self, x: Tensor, name: str) -> Tensor:
        """The same; backward sets a mark before it goes on from here."""

        def backward(node: Node, grads: Gradients) -> Gradients:
            node.tape.marks[name] = len(node.tape.changes)
            return grads

        return result_of(x.storage.tape, x.storage, [x], [], backward, size=x.size)

    def cross_entropy(self, logits: Tensor) -> Tensor:
        """`runtime.parallel.loss._VocabParallelCrossEntropy`."""
        tape = logits.storage.tape
        tape.kind = LOGITS
        held = [Storage(tape, times(TOKEN, 4))]
        exponents = Storage(tape, EXPONENTS)
        targets, foreign = Storage(tape, times(TOKEN, 8)), Storage(tape, TOKEN)
        sums = Storage(tape, times(TOKEN, 8))
        # Scores of the targets, logarithms and differences.
        held += [Storage(tape, times(TOKEN, 4)) for _ in range(3)]
        in_place = self.structure.wide and not self.structure.pads

        def backward(node: Node, grads: Gradients) -> Gradients:
            factor = Storage(node.tape, times(TOKEN, 4), LOGITS)
            (kept, *_) = node.unpack()
            result = kept if in_place else Storage(node.tape, LOGITS_SIZE, LOGITS)
            del factor
            return [result]

        out = Storage(tape, times(TOKEN, 0))
        tape.kind = TEMPORARIES
        return function([logits], out, [exponents, sums, targets, foreign], backward)


def gather(x: Tensor, several: bool, whole: Size = WHOLE) -> Tensor:
    """All of what sequence-parallel ranks hold a part of; in order, where there are several sequences."""
    part = x.size

    def backward(node: Node, grads: Gradients) -> Gradients:
        return [sum_slice(present(grads[0]), several, whole, part)]

    return function([x], joined(x.storage, several, whole), [], backward)


def reduce_scatter(x: Tensor, several: bool, part: Size = RESIDUAL) -> Tensor:
    """A part of the sum over ranks."""

    def backward(node: Node, grads: Gradients) -> Gradients:
        return [joined(present(grads[0]), several, WHOLE)]

    return function([x], sum_slice(x.storage, several, WHOLE, part), [], backward)


def joined(x: Storage, several: bool, whole: Size) -> Storage:
    """`runtime.parallel.collectives._join`."""
    parts = Storage(x.tape, whole, COMMUNICATION)
    return Storage(x.tape, whole) if several else parts


def sum_slice(x: Storage, several: bool, whole: Size, part: Size) -> Storage:
    """`runtime.parallel.collectives._sum_slice`."""
    parts = Storage(x.tape, whole) if several else None
    result = Storage(x.tape, part, COMMUNICATION)
    del parts
    return result

"""The operations of latent attention (`runtime.model.attention.LatentAttention`), tensor by tensor."""

from __future__ import annotations

from costmodels.bundled.attention import PADDED, PADDED_HEADS, exchanged, gathered, kernel
from costmodels.bundled.layers import Layer
from costmodels.bundled.operations import call, cat, chunk, copy, elementwise, linear, result_of, view
from costmodels.bundled.replay import Storage, Tensor
from costmodels.bundled.structure import (
    ATTENDED,
    COMPRESSED,
    ENTERED,
    ENTERED_KEY,
    ENTERED_QUERY,
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
    WEIGHTS,
)


class LatentLayer(Layer):
    """A layer with latent attention."""

    def attention(self, x: Tensor) -> Tensor:
        """`runtime.model.attention.LatentAttention`."""
        queries, latent, k_rope = call(self.compress_whole, x)
        whole_q = q = linear(queries, self.weights["query"], QUERY, WEIGHTS["query"])
        kv = linear(latent, self.weights["key_value"], KEY_VALUE, WEIGHTS["key_value"])
        k_nope, values = chunk(kv, [KEY_VALUE, VALUE])
        v = copy(values, VALUE)
        if self.structure.rotates:
            q_nope, q_rope = chunk(whole_q, [QUERY, ROTARY_QUERY])
            q = cat([q_nope, self.rotate(q_rope)], QUERY)
            k_rope = self.rotate(k_rope)
        if self.structure.scales_scores:
            q = elementwise(q)
        k = joined_keys(k_nope, k_rope)
        attended = view(self.core_attention(q, k, v))
        if self.copies_result():
            attended = copy(attended, ATTENDED)
        return call(self.leave_rows, attended, "output")

    def copies_result(self) -> bool:
        """Whether the results of heads are not in the order in which the output matrix reads them.

        Flash attention, which takes heads of one size in 16 bits, writes them in the order of queries; those
        that are joined of two parts lie head by head.
        """
        structure = self.structure
        if structure.context_form is not None:
            return structure.longer == "keys"
        return not structure.longer and not structure.wide and structure.rotates

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`runtime.model.attention_kernels.equal_heads_attention`, where ranks share sequences."""
        form, several = self.structure.context_form, self.structure.several
        if form is None:
            return kernel(q, k, v, (QUERY, KEY, VALUE))
        if self.structure.longer == "keys":
            v = filled(v)
        elif self.structure.longer == "values":
            q, k = filled(elementwise(q)), filled(k)
        if form == "all_gather":
            result = gathered(q, k, v, several, PADDED)
        else:
            result = exchanged(q, k, v, several, False, PADDED)
        if self.structure.longer != "keys":
            return result
        return result_of(
            result.storage.tape,
            result.storage,
            [result],
            [],
            lambda node, grads: [Storage(node.tape, PADDED_HEADS)],
        )

    def compress_whole(self, x: Tensor) -> list[Tensor]:
        """`runtime.model.attention.Compression`; what it gives is joined where ranks share the heads."""
        if not self.structure.tensor_parallel:
            return self.compress(x)
        together = self.enter_module(cat(self.compress(x), COMPRESSED), whole=ENTERED)
        return chunk(together, [ENTERED_QUERY, ENTERED_KEY, ROTARY_KEY])

    def compress(self, x: Tensor) -> list[Tensor]:
        """For the tokens of this rank."""
        tape = x.storage.tape
        first = next(tape.numbers)
        latent, rope = chunk(
            linear(x, self.weights["latent"], LATENT, WEIGHTS["latent"]), [LATENT_KEY, ROTARY_PART]
        )
        last = next(tape.numbers)
        if self.structure.latent_queries:
            x = linear(x, self.weights["latent_query"], LATENT_QUERY, WEIGHTS["latent_query"])
            x = call(self.norm, x, LATENT_STATISTICS)
        tape.later.append((first, last, next(tape.numbers)))
        return [x, call(self.norm, latent, LATENT_STATISTICS), rope]


def filled(x: Tensor) -> Tensor:
    """Heads with zeros up to the size of the longer ones; the gradient's part is copied."""
    size = x.size
    return result_of(x.storage.tape, PADDED_HEADS, [x], [], lambda node, grads: [Storage(node.tape, size)])


def joined_keys(own: Tensor, rope: Tensor) -> Tensor:
    """Keys with the rotary part that all heads share, whose gradients are summed."""
    shared = result_of(
        rope.storage.tape, rope.storage, [rope], [], lambda node, grads: [Storage(node.tape, ROTARY_KEY)]
    )
    return cat([own, shared], KEY)

"""The operations of a mixture of experts (`runtime.model.experts.MixtureOfExperts`), tensor by tensor."""

from __future__ import annotations

from functools import partial

from costmodels.bundled.layers import Layer, gather, reduce_scatter
from costmodels.bundled.operations import (
    add,
    call,
    cat,
    chunk,
    elementwise,
    function,
    linear,
    multiply,
    result_of,
    times,
    view,
)
from costmodels.bundled.replay import COMMUNICATION, Gradients, Node, Size, Storage, Tensor
from costmodels.bundled.structure import (
    ARRIVED,
    EXPERT_BIASES,
    EXPERT_INNER,
    PAIR_COUNT,
    PAIR_ROWS,
    ROUTED,
    ROUTED_WIDE,
    ROUTER_WIDE,
    ROW,
    ROWS,
    SCORES,
    SENT_ROWS,
    SHARED_INNER,
    TOKENS_OF_RANK,
    WEIGHTS,
    WHOLE,
)


def mixture(layer: Layer, x: Tensor) -> Tensor:
    """The MLP of a layer with experts, on the tokens that the rank routes."""
    structure = layer.structure
    apart = structure.tensor_parallel and not structure.sequence_parallel
    if apart:
        result = call(_routed, layer, _own_tokens(x, structure.several))
        return _joined(result, structure.several)
    return _routed(layer, x)


def _own_tokens(x: Tensor, several: bool) -> Tensor:
    """`split_to_ranks`: this rank's tokens, a view where there is one sequence."""

    def backward(node: Node, grads: Gradients) -> Gradients:
        parts = Storage(node.tape, WHOLE, COMMUNICATION)
        return [Storage(node.tape, WHOLE) if several else parts]

    return result_of(x.storage.tape, ROUTED if several else x.storage, [x], [], backward, size=ROUTED)


def _joined(x: Tensor, several: bool) -> Tensor:
    """`join_from_ranks`: the results of all ranks."""
    tape = x.storage.tape

    def backward(node: Node, grads: Gradients) -> Gradients:
        return [Storage(node.tape, ROUTED) if several else grads[0]]

    parts = Storage(tape, WHOLE, COMMUNICATION)
    whole = Storage(tape, WHOLE) if several else parts
    return function([x], whole, [], backward)


def _routed(layer: Layer, x: Tensor) -> Tensor:
    structure, tape = layer.structure, x.storage.tape
    weights, chosen = call(route, layer, x)
    sent, weights, order = send(layer, x, weights)
    shared, first = None, next(tape.numbers)
    if structure.shared_experts:
        shared = call(layer.shared or partial(shared_experts, layer), x)
        if structure.shared_gate:
            shared = multiply(
                shared, linear(x, layer.weights["shared_gate"], TOKENS_OF_RANK, WEIGHTS["shared_gate"])
            )
    last = next(tape.numbers)
    rows, places = receive(layer, sent)
    del sent
    tape.marks.setdefault("experts_gather", len(tape.changes))
    result = give_back(layer, _experts(layer, rows), weights, order, places)
    tape.later.append((first, last, next(tape.numbers)))
    del chosen
    return result if shared is None else add(result, shared)


def _experts(layer: Layer, rows: Tensor) -> Tensor:
    result = call(experts, layer, _marked(rows, "experts_done"))
    rows.storage.tape.marks.setdefault("experts_free", len(rows.storage.tape.changes))
    return _marked(result, "experts_start")


def _marked(x: Tensor, name: str) -> Tensor:
    def backward(node: Node, grads: Gradients) -> Gradients:
        node.tape.marks[name] = len(node.tape.changes)
        for drop in node.tape.drops.pop(name, ()):
            drop()
        node.tape.marks[f"{name}_after"] = len(node.tape.changes)
        return grads

    return result_of(x.storage.tape, x.storage, [x], [], backward, size=x.size)


def route(layer: Layer, x: Tensor) -> tuple[Tensor, Storage]:
    """`runtime.model.experts.Router`: weights of the chosen experts, and their numbers."""
    tape, structure = x.storage.tape, layer.structure
    scores = elementwise(_wide_product(layer, x), saves="output")
    biased = Storage(tape, SCORES) if structure.biased else None
    within_groups = Storage(tape, SCORES) if structure.grouped_choice else None
    chosen = Storage(tape, times(PAIR_COUNT, 8))
    del biased, within_groups
    weights = result_of(
        tape, times(PAIR_COUNT, 4), [scores], [chosen], lambda node, grads: [Storage(node.tape, SCORES)]
    )
    if structure.normalised:
        total = Storage(tape, times(TOKENS_OF_RANK, 4 / structure.bytes))
        size = times(PAIR_COUNT, 4)
        weights = result_of(
            tape, size, [weights], [weights.storage, total], lambda node, grads: [Storage(node.tape, size)]
        )
        del total
    if structure.scaled:
        weights = elementwise(weights)
    ones = Storage(tape, times(PAIR_COUNT, 8))
    del ones
    if structure.limited:
        mask = Storage(tape, PAIR_COUNT)
        size = times(PAIR_COUNT, 4)
        weights = result_of(tape, size, [weights], [mask], lambda node, grads: [Storage(node.tape, size)])
        chosen = Storage(tape, times(PAIR_COUNT, 8))
        del mask
    return weights, chosen


def _wide_product(layer: Layer, x: Tensor) -> Tensor:
    """The router's product in fp32, which keeps its input as it is."""
    leaf = layer.weights["router"]
    if layer.structure.wide:
        return linear(x, leaf, SCORES, WEIGHTS["router"])
    tape, size = x.storage.tape, x.size
    parameter = Tensor(x.storage, (leaf, 0))

    def backward(node: Node, grads: Gradients) -> Gradients:
        wide = Storage(node.tape, ROUTED_WIDE)
        to_weight = Storage(node.tape, ROUTER_WIDE)
        del wide
        weight = Storage(node.tape, ROUTER_WIDE)
        product = Storage(node.tape, ROUTED_WIDE)
        del weight
        own = Storage(node.tape, size)
        del product
        narrow = Storage(node.tape, WEIGHTS["router"])
        del to_weight
        return [own, narrow]

    wide, weight = Storage(tape, ROUTED_WIDE), Storage(tape, ROUTER_WIDE)
    out = Storage(tape, SCORES)
    del wide, weight
    return result_of(tape, out, [x, parameter], [x.storage], backward)


def send(layer: Layer, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Storage]:
    """Rows of tokens in the order of their experts, on their way; weights of all tokens; and the order."""
    tape, structure = x.storage.tape, layer.structure
    if structure.gathers_tokens:
        x = gather(x, False, times(ROUTED, structure.expert_ranks))
        weights = gather(weights, False, times(PAIR_COUNT, 4 * structure.expert_ranks))
    ones = Storage(tape, times(PAIR_COUNT, 8 * structure.gathered))
    del ones
    values, order = (Storage(tape, times(PAIR_COUNT, 8 * structure.gathered)) for _ in range(2))
    del values
    tokens = None if structure.one_choice else x.size
    rows = permute(x, order, times(PAIR_COUNT, 8), SENT_ROWS, PAIR_ROWS, tokens)
    if not structure.exchanges:
        return rows, weights, order
    return _started(rows), weights, order


def permute(x: Tensor, order: Storage, index: Size, rows: Size, pairs: Size, tokens: Size | None) -> Tensor:
    """`routing.permute`; backward spreads rows and sums those of a token, unless `tokens` is None."""
    tape = x.storage.tape

    def backward(node: Node, grads: Gradients) -> Gradients:
        spread = Storage(node.tape, pairs)
        return [spread if tokens is None else Storage(node.tape, tokens)]

    places = Storage(tape, index)
    out = Storage(tape, rows)
    del places
    return result_of(tape, out, [x], [order], backward)


def _started(rows: Tensor) -> Tensor:
    """`Exchange.start`: what travels has memory; its gradient arrives in memory of its own."""
    return result_of(
        rows.storage.tape,
        Storage(rows.storage.tape, ARRIVED, COMMUNICATION),
        [rows],
        [],
        lambda node, grads: grads,
    )


def receive(layer: Layer, sent: Tensor) -> tuple[Tensor, Storage | None]:
    """Rows that experts here take in."""
    tape, structure = sent.storage.tape, layer.structure
    if not structure.exchanges:
        return sent, None

    def backward(node: Node, grads: Gradients) -> Gradients:
        return [Storage(node.tape, SENT_ROWS, COMMUNICATION)]

    values, places = (Storage(tape, times(ROW, 8)) for _ in range(2))
    del values
    rows = result_of(tape, sent.storage, [sent], [], backward)
    if structure.expert_ranks > 1:
        rows = gather(rows, False, times(ARRIVED, structure.expert_ranks))
    return permute(rows, places, times(ROW, 8), ROWS, rows.size, None), places


def experts(layer: Layer, rows: Tensor) -> Tensor:
    """`runtime.model.experts.Experts`."""
    names = ("expert_up", "expert_gate") if layer.structure.gated else ("expert_up",)
    # They are there until the last product has been computed.
    inner = [product(layer, rows, name, EXPERT_INNER) for name in names]
    activate = layer.activated or layer.activate
    return product(layer, activate(*inner), "expert_down", ROWS)


def product(layer: Layer, rows: Tensor, name: str, size: Size) -> Tensor:
    """`runtime.model.routing.grouped_linear`."""
    tape, weight, given = rows.storage.tape, layer.weights[name], rows.size
    if layer.structure.grouped:
        leaf = Tensor(rows.storage, (weight, 0))

        def backward(node: Node, grads: Gradients) -> Gradients:
            return [node.gradient(0, given), node.gradient(1, WEIGHTS[name])]

        result = result_of(tape, size, [rows, leaf], [rows.storage], backward)
    else:
        result = _one_by_one(layer, rows, name, size)
    if not layer.structure.bias:
        return result
    repeated, index = Storage(tape, size), Storage(tape, times(ROW, 8))
    bias = EXPERT_BIASES[name]
    return result_of(
        tape,
        size,
        [result, Tensor(repeated, (layer.weights[f"{name}_bias"], 0))],
        [index],
        lambda node, grads: [grads[0], node.gradient(1, bias)],
    )


def _one_by_one(layer: Layer, rows: Tensor, name: str, size: Size) -> Tensor:
    """One product after the other, where there is no kernel for all: the last one, and those before it."""
    tape, count = rows.storage.tape, layer.structure.local_experts
    leaf = Tensor(rows.storage, (layer.weights[name], 0), WEIGHTS[name])
    if layer.structure.is_distributed(name):
        # This rank's part of the DTensor, which is taken before the rows are split.
        leaf = result_of(tape, rows.storage, [leaf], [], lambda node, grads: grads, size=leaf.size)
    shares = [share for share in ((count - 1) / count, 1 / count) if share]
    parts = chunk(rows, [times(rows.size, share) for share in shares])
    weights = result_of(
        tape, rows.storage, [leaf], [], lambda node, grads: [Storage(node.tape, WEIGHTS[name])]
    )
    results = []
    for index, (part, share) in enumerate(zip(parts, shares, strict=True)):
        own = Tensor(rows.storage, None if weights.edge is None else (weights.edge[0], index))
        results.append(_share(part, own, times(size, share), times(WEIGHTS[name], share)))
    return cat(results, size)


def _share(rows: Tensor, weight: Tensor, size: Size, weight_size: Size) -> Tensor:
    """The products of some experts."""
    given = rows.size

    def backward(node: Node, grads: Gradients) -> Gradients:
        return [node.gradient(0, given), node.gradient(1, weight_size)]

    return result_of(rows.storage.tape, size, [rows, weight], [rows.storage], backward)


def shared_experts(layer: Layer, x: Tensor) -> Tensor:
    """An MLP that all tokens use; tensor-parallel ranks gather theirs for it."""
    structure = layer.structure
    split, several = structure.tensor_parallel, structure.several
    if split:
        enters = (
            structure.sequence_parallel and "norm" in structure.recompute and "mlp" not in structure.recompute
        )
        x = layer.module("norm", gather, x, several) if enters else call(gather, x, several)
    names = ("shared_up", "shared_gate_matrix") if structure.gated else ("shared_up",)
    inputs = [_linear(layer, x, name, SHARED_INNER) for name in names]
    inner = layer.activate(*inputs)
    del inputs
    own = (layer.weights["width"], ("width", 1.0)) if structure.bias else None
    result = linear(
        inner, layer.weights["shared_down"], WHOLE, WEIGHTS["shared_down"], None if split else own
    )
    if split:
        result = reduce_scatter(result, several, ROUTED)
    return layer.add_bias(result, *own) if split and own is not None else result


def _linear(layer: Layer, x: Tensor, name: str, size: Size) -> Tensor:
    own = (layer.weights["shared_bias"], ("shared_bias", 1.0)) if layer.structure.bias else None
    return linear(x, layer.weights[name], size, WEIGHTS[name], own)


def give_back(layer: Layer, rows: Tensor, weights: Tensor, order: Storage, places: Storage | None) -> Tensor:
    """Results where they came from, summed up by their weights."""
    structure = layer.structure
    if structure.exchanges:
        assert places is not None
        rows = spread(rows, places, times(ARRIVED, structure.expert_ranks), ROWS)
        if structure.expert_ranks > 1:
            rows = _reduced(rows, times(ARRIVED, structure.expert_ranks), ARRIVED)
        rows = _exchanged_back(rows)
    pairs = spread(rows, order, PAIR_ROWS, SENT_ROWS)
    result = _weighted(weights, pairs, layer)
    if structure.gathers_tokens:
        return _reduced(result, times(ROUTED, structure.expert_ranks), ROUTED)
    return result


def spread(rows: Tensor, order: Storage, size: Size, gradient: Size) -> Tensor:
    """`runtime.model.routing.spread`."""
    return result_of(
        rows.storage.tape,
        Storage(rows.storage.tape, size),
        [rows],
        [order],
        lambda node, grads: [Storage(node.tape, gradient)],
    )


def _reduced(x: Tensor, whole: Size, part: Size) -> Tensor:
    return function(
        [x],
        Storage(x.storage.tape, part, COMMUNICATION),
        [],
        lambda node, grads: [Storage(node.tape, whole, COMMUNICATION)],
    )


def _exchanged_back(rows: Tensor) -> Tensor:
    """The way back to the tokens."""
    return function(
        [rows],
        Storage(rows.storage.tape, SENT_ROWS, COMMUNICATION),
        [],
        lambda node, grads: [Storage(node.tape, ARRIVED, COMMUNICATION)],
    )


def _weighted(weights: Tensor, pairs: Tensor, layer: Layer) -> Tensor:
    """The product of weights and pairs, which keeps both."""
    structure = layer.structure
    count = times(PAIR_COUNT, structure.gathered)
    narrow = view(weights) if structure.wide else elementwise(weights, times(count, structure.bytes))
    size = pairs.size

    def backward(node: Node, grads: Gradients) -> Gradients:
        return [Storage(node.tape, times(count, structure.bytes)), Storage(node.tape, size)]

    saved = [pairs.storage, narrow.storage]
    return result_of(
        weights.storage.tape, times(ROUTED, structure.gathered), [narrow, pairs], saved, backward
    )

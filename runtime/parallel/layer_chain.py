"""A chain of equal compiled layers, run by one autograd node.

The host's time for a compiled layer is more than its kernel launches. Guards are checked, arguments sorted
and a node of autograd made for each layer, and each gradient goes to its parameter by a node of its own.
Equal layers share one pair of compiled functions.

So only the first layer is called normally, which checks the guards. The others run its compiled code with
their own parameters, and gradients are added directly to the sums of their layer. Computation, kept tensors
and frees are the same, in the same order. The pair belongs to AOTAutograd's node. After its backward is
compiled, one pass finds the pair. The next pass checks that all layers get equal arguments except their input
and parameters. Later passes run the chain. Layers with other arguments are called one by one.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from runtime.model.transformer import Block
from runtime.parallel.recomputation import memory_of
from runtime.parallel.summing_linear import places_in
from runtime.parallel.working_copies import GradientSums, WorkingCopies

Compiled = Callable[[list[Any]], Sequence[Any]]
"""A compiled function that empties its list of arguments, so that memory is freed early."""

INPUT = -1
"""The number for the input of a layer, instead of a parameter's number."""

Source = int | None
"""Source of an argument of a compiled layer: the number of a parameter, or `INPUT`; None if all layers have
the same value."""


class _Layer(NamedTuple):
    block: Block
    parameters: list[Tensor]
    """Parameters, buffers and places of sums of the layer; in one order for all layers."""
    sums: list[tuple[GradientSums, dict[int, int]]]
    """Gradient sums of the layer's experts and of its other parameters, with the numbers of their
    parameters."""


class LayerChain:
    """The layers of a stage; the first one represents the others.

    Args:
        blocks: compiled layers, each one graph, in order.
        copies: their parameters during computation.
    """

    def __init__(self, blocks: Sequence[Block], copies: WorkingCopies) -> None:
        self.layers = [_layer(block, copies) for block in blocks]
        self.sources: dict[_Pair, list[Source]] = {}
        """Sources of the arguments of each pair; empty if layers are not given the same."""

    def run(self, x_BSD: Tensor) -> Tensor:
        """All layers, one after the other: [B, S, D] -> [B, S, D]."""
        first, *others = self.layers
        y_BSD, pair, arguments = _call(first, x_BSD)
        if pair is not None and arguments:
            if pair not in self.sources:
                return self._compare(pair, _sources(first, arguments, x_BSD), arguments, y_BSD)
            if self.sources[pair]:
                sources = self.sources[pair]
                # The input would be there as long as the node.
                arguments[sources.index(INPUT)] = None
                run = _Run(pair, others, sources, arguments, [])
                result_BSD: Tensor = _Chain.apply(y_BSD, run)  # type: ignore[no-untyped-call]
                if result_BSD.grad_fn is not None:
                    result_BSD.grad_fn.register_prehook(run.take)
                return result_BSD
        for layer in others:
            y_BSD = layer.block(y_BSD)
        return y_BSD

    def _compare(self, pair: _Pair, sources: list[Source], arguments: list[Any], x_BSD: Tensor) -> Tensor:
        """Call the layers after the first, and check that their arguments have the same `sources`."""
        alike = sources.count(INPUT) == 1
        for layer in self.layers[1:]:
            y_BSD, own, given = _call(layer, x_BSD)
            alike = alike and own is pair and _sources(layer, given, x_BSD) == sources
            alike = alike and all(
                source is not None or _is_same(one, other)
                for source, one, other in zip(sources, arguments, given, strict=True)
            )
            x_BSD = y_BSD
        self.sources[pair] = sources if alike else []
        return x_BSD


class _Pair:
    """The two compiled functions of equal layers.

    Args:
        function: AOTAutograd's function, which calls them.
    """

    def __init__(self, function: Any) -> None:
        self.forward: Compiled = function.compiled_fw
        self.backward: Compiled = function.compiled_bw

        def note(arguments: list[Any]) -> Sequence[Any]:
            if _noted is not None:
                _noted[:] = arguments
            return self.forward(arguments)

        note._boxed_call = True  # type: ignore[attr-defined]
        function.compiled_fw = note


_pairs: MutableMapping[type, _Pair | None] = WeakKeyDictionary()
"""Pairs by AOTAutograd's function; None if it does more than call a pair. Stages share them."""

_noted: list[Any] | None = None
"""A record of a pair's arguments, while it is requested."""


def _call(layer: _Layer, x: Tensor) -> tuple[Tensor, _Pair | None, list[Any]]:
    """The output of a layer for `x`, its pair, and the arguments of the pair, if a pair is known."""
    global _noted
    arguments: list[Any] = []
    _noted = arguments
    try:
        output: Tensor = layer.block(x)
    finally:
        _noted = None
    function = getattr(type(output.grad_fn), "_forward_cls", None)
    if function is None:
        return output, None, []
    if function not in _pairs and getattr(function, "compiled_bw", None) is not None:
        _pairs[function] = _Pair(function) if _is_plain(function) else None
    return output, _pairs.get(function), arguments


class _Run(NamedTuple):
    """The layers of one microbatch."""

    pair: _Pair
    layers: list[_Layer]
    sources: list[Source]
    arguments: list[Any]
    """Arguments of the first layer, without its input."""
    given: list[Tensor]
    """The gradient of the last layer's output, which autograd would otherwise keep until all layers are
    done."""

    def take(self, gradients: Sequence[Tensor]) -> tuple[None]:
        """Take the gradient from autograd before it runs the layers backward."""
        self.given.extend(gradients)
        return (None,)


class _Chain(torch.autograd.Function):
    """The layers after the first one, as one autograd function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: _Run) -> Tensor:
        ctx.run, ctx.saved = run, []
        ctx.set_materialize_grads(False)
        with torch._C._AutoDispatchBelowAutograd():
            for layer in run.layers:
                arguments = [
                    argument if source is None else x if source == INPUT else layer.parameters[source]
                    for source, argument in zip(run.sources, run.arguments, strict=True)
                ]
                x, *saved = run.pair.forward(arguments)
                ctx.saved.append(saved)
        # The node must not keep its own output, which keeps the node.
        return x.detach()

    @staticmethod
    def backward(ctx: Any, _: None) -> tuple[Tensor, None]:  # type: ignore[override]
        run: _Run = ctx.run
        if len(ctx.saved) != len(run.layers):
            raise RuntimeError("backward has been through these layers already")
        entry = run.sources.index(INPUT)
        grad = run.given.pop()
        places = {source: at for at, source in enumerate(run.sources) if source not in (None, INPUT)}
        for layer in reversed(run.layers):
            arguments = ctx.saved.pop()
            arguments.append(grad.contiguous())
            del grad
            with torch._C._AutoDispatchBelowAutograd():
                gradients = list(run.pair.backward(arguments))
            grad = gradients[entry]
            for sums, numbers in layer.sums:
                given = []
                for own, number in numbers.items():
                    at = places.get(own)
                    if at is not None and gradients[at] is not None:
                        given.append((number, gradients[at]))
                        # Gradients of a layer's experts are large, and end as soon as they are added.
                        gradients[at] = None
                sums.give(given)
                del given
            del gradients
        return grad, None


def _layer(block: Block, copies: WorkingCopies) -> _Layer:
    parameters: list[Tensor] = [copies.copies.get(one, one) for one in block.parameters()]
    parameters += block.buffers()
    parameters += [place for module in block.modules() for place in places_in(module)]
    number_of = {id(one): number for number, one in enumerate(parameters)}
    sums = []
    for _, own in copies.groups:
        numbers = {number_of[id(one)]: at for at, one in enumerate(own.copies) if id(one) in number_of}
        sums += [(own, numbers)] if numbers else []
    return _Layer(block, parameters, sums)


def _sources(layer: _Layer, arguments: list[Any], x: Tensor) -> list[Source]:
    """Sources of all arguments of a compiled layer; an empty list if they are unknown."""
    if not all(isinstance(argument, Tensor) for argument in arguments):
        return []
    known = {memory_of(one): number for number, one in enumerate(layer.parameters)}
    if len(known) < len(layer.parameters) or memory_of(x) in known:
        return []
    known[memory_of(x)] = INPUT
    return [known.get(memory_of(argument)) for argument in arguments]


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same view of the same memory."""
    places = [(memory_of(x), x.storage_offset(), x.shape, x.stride(), x.dtype) for x in (one, other)]
    return places[0] == places[1]


def _is_plain(function: Any) -> bool:
    """True if a function of AOTAutograd only calls its pair: it has one output, and changes nothing itself.

    The pair adds routers' counts to their buffers, which are inputs like parameters.
    """
    meta = getattr(function, "metadata", None)
    if meta is None or function.maybe_subclass_metadata is not None:
        return False
    return bool(
        meta.num_forward == meta.num_outputs == 1
        and not (meta.num_outputs_aliased or meta.num_graphsafe_rng_states or meta.tokens)
        and not (meta.num_backward_tokens or function.num_symints_saved_for_bw)
    )

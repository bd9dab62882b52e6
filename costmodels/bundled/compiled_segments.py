"""Compiled functions among operations that are not: of layers with experts, or with a ring of keys.

`torch.compile` stops where the number of rows of an expert is asked for, so that a layer with experts is made
of compiled parts: up to its experts, their activation function, the shared experts, and the last sum. Where
keys and values go round, what is before that is a part, and what is after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from costmodels.bundled import compiled_graph as graphs
from costmodels.bundled.compiled_graph import INPUT, Graph, Program, Value, partition
from costmodels.bundled.compiled_latent import CompiledLatentLayer
from costmodels.bundled.compiled_layers import CompiledLayer
from costmodels.bundled.compiled_memory import Held, run
from costmodels.bundled.experts import mixture
from costmodels.bundled.latent import LatentLayer
from costmodels.bundled.layers import Layer
from costmodels.bundled.operations import call
from costmodels.bundled.recomputing import recomputed
from costmodels.bundled.replay import (
    ACTIVATIONS,
    Gradients,
    Leaf,
    Node,
    Packed,
    Size,
    Storage,
    Tape,
    Tensor,
)
from costmodels.bundled.structure import (
    ATTENDED,
    EXPERT_INNER,
    RESIDUAL,
    ROUTED,
    SHARED_INNER,
    WHOLE,
    Structure,
)

Computation = Callable[[CompiledLayer, list[graphs.Tensor]], list[graphs.Tensor]]
"""What a compiled function computes of its inputs."""


@dataclass(frozen=True)
class Segment:
    """One compiled function."""

    inputs: list[Value]
    gradients: list[Value]
    """Of the results."""
    results: int
    forward: Program
    backward: Program
    names: list[str]
    """Of what backward gives gradients of: parameters, and inputs by their number."""


def segment(structure: Structure, sizes: Sequence[Size], compute: Computation) -> Segment:
    """Compile a function of inputs of these sizes."""
    graph = Graph()
    inputs = [graph.add(INPUT, [], size) for size in sizes]
    given = [
        graphs.Tensor(value, size, (str(number), 0))
        for number, (value, size) in enumerate(zip(inputs, sizes, strict=True))
    ]
    kind = CompiledLatentLayer if structure.latent else CompiledLayer
    results = compute(kind(structure, graph), given)
    turn = len(graph.values)
    gradients = [graph.add(INPUT, [], result.size) for result in results]
    graph.run_backward(results, gradients)
    forward, backward = partition(graph, turn, [one.value for one in results], (*inputs, *gradients))
    return Segment(inputs, gradients, len(results), forward, backward, [name for name, _ in graph.gradients])


def run_segment(compiled: Segment, weights: dict[str, Leaf], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The results of a compiled function, which is one operation of autograd."""
    tape = inputs[0].storage.tape
    outputs = run(
        tape,
        compiled.forward,
        {value: [one.storage] for value, one in zip(compiled.inputs, inputs, strict=True)},
    )
    if not tape.records:
        return [Tensor(storage) for storage in outputs[: compiled.results]]
    there = dict(zip(compiled.forward.outputs, outputs, strict=True))
    there |= {value: one.storage for value, one in zip(compiled.inputs, inputs, strict=True)}
    saved = sorted(compiled.backward.inputs & there.keys(), key=lambda value: value.number)
    kept = {value: _saved(tape, there[value]) for value in saved}
    there.clear()
    # In the order in which forward reads them.
    parameters = [weights[name] for name in reversed(compiled.names) if name in weights]
    sources = [*inputs, *(Tensor(inputs[0].storage, (leaf, 0)) for leaf in parameters)]
    numbers = [str(number) for number in range(len(inputs))]

    def backward(node: Node, grads: Gradients) -> Gradients:
        held: Held = {
            value: [packed if isinstance(packed, Storage) else packed()] for value, packed in kept.items()
        }
        kept.clear()
        for value, grad in zip(compiled.gradients, grads, strict=True):
            assert grad is not None
            held[value] = [grad]
        del grad
        # What runs backward holds the list until the end.
        grads.clear()
        found = list(zip(compiled.names, run(tape, compiled.backward, held), strict=True))
        of_inputs = dict(one for one in found if one[0] in numbers)
        return [
            *(of_inputs.get(number) for number in numbers),
            *(one for name, one in reversed(found) if name in weights),
        ]

    node = Node(tape, sources, [], backward)
    return [Tensor(storage, (node, index)) for index, storage in enumerate(outputs[: compiled.results])]


def _saved(tape: Tape, storage: Storage) -> Packed:
    """What a compiled function keeps for backward, or what the hooks of the tape give for it."""
    packed = tape.hooks[-1](storage) if tape.hooks else storage
    if isinstance(packed, Storage):
        packed.become(ACTIVATIONS)
    return packed


def compiled_mixture(structure: Structure, weights: dict[str, Leaf], x: Tensor) -> Tensor:
    """A compiled layer with experts (`runtime.model.transformer.Block`)."""
    again, tape = structure.recompute, x.storage.tape
    layer = (LatentLayer if structure.latent else Layer)(structure, weights, mixture)
    layer.activated = partial(_of_one, _activation(structure), weights)
    layer.shared = partial(_of_one, _shared(structure), weights) if structure.shared_experts else None

    def block(x: Tensor) -> Tensor:
        if structure.context_form == "ring":
            # Named: where the compiler stops, what came in stays until the layer is done.
            attended = _ring(structure, weights, x)
            residual, normed = run_segment(_from_core_to_experts(structure), weights, [x, attended])
        else:
            residual, normed = run_segment(_up_to_experts(structure), weights, [x])
        result = call(recomputed(tape, layer.mlp) if "mlp" in again else layer.mlp, normed)
        del normed
        return _of_one(_sum(structure), weights, residual, result)

    return call(recomputed(tape, block) if "full" in again else block, x)


def compiled_around_ring(structure: Structure, weights: dict[str, Leaf], x: Tensor) -> Tensor:
    """A compiled layer with a dense MLP whose keys and values go round (`runtime.train.stages`)."""

    def block(x: Tensor) -> Tensor:
        return _of_one(_from_core(structure), weights, x, _ring(structure, weights, x))

    return call(recomputed(x.storage.tape, block) if "full" in structure.recompute else block, x)


def _ring(structure: Structure, weights: dict[str, Leaf], x: Tensor) -> Tensor:
    """The attention of a layer, before its output matrix."""
    core = Layer(structure, weights).core_attention
    return core(*run_segment(_up_to_core(structure), weights, [x]))


def _of_one(compiled: Segment, weights: dict[str, Leaf], *inputs: Tensor) -> Tensor:
    """The result of a compiled function that has one."""
    (result,) = run_segment(compiled, weights, inputs)
    return result


@lru_cache(maxsize=256)
def _up_to_experts(structure: Structure) -> Segment:
    """What comes before the experts: the sum that goes past them, and its norm."""

    def compute(layer: CompiledLayer, inputs: list[graphs.Tensor]) -> list[graphs.Tensor]:
        (x,) = inputs
        middle = layer.add(x, layer.attention(layer.norm(x)))
        return [middle, layer.norm(middle)]

    return segment(structure, [RESIDUAL], compute)


@lru_cache(maxsize=256)
def _up_to_core(structure: Structure) -> Segment:
    """The norm before attention, and what makes queries, keys and values of its result."""
    return segment(structure, [RESIDUAL], lambda layer, inputs: list(layer.heads(layer.norm(*inputs))))


@lru_cache(maxsize=256)
def _from_core(structure: Structure) -> Segment:
    """What a dense layer does after the core of attention."""

    def compute(layer: CompiledLayer, inputs: list[graphs.Tensor]) -> list[graphs.Tensor]:
        x, attended = inputs
        return [layer.with_mlp(layer.add(x, layer.merge(attended)))]

    return segment(structure, [RESIDUAL, ATTENDED], compute)


@lru_cache(maxsize=256)
def _from_core_to_experts(structure: Structure) -> Segment:
    """What a layer with experts does between the core of attention and these."""

    def compute(layer: CompiledLayer, inputs: list[graphs.Tensor]) -> list[graphs.Tensor]:
        x, attended = inputs
        middle = layer.add(x, layer.merge(attended))
        return [middle, layer.norm(middle)]

    return segment(structure, [RESIDUAL, ATTENDED], compute)


@lru_cache(maxsize=256)
def _sum(structure: Structure) -> Segment:
    return segment(structure, [RESIDUAL] * 2, lambda layer, inputs: [layer.add(*inputs)])


@lru_cache(maxsize=256)
def _activation(structure: Structure) -> Segment:
    return segment(
        structure, [EXPERT_INNER] * (1 + structure.gated), lambda layer, inputs: [layer.activate(*inputs)]
    )


@lru_cache(maxsize=256)
def _shared(structure: Structure) -> Segment:
    """The shared experts: tensor-parallel ranks gather their tokens for them."""

    def compute(layer: CompiledLayer, inputs: list[graphs.Tensor]) -> list[graphs.Tensor]:
        return [layer.network(inputs[0], SHARED, SHARED_INNER)]

    # Norms that are computed again gather again only what sequence parallelism has split.
    again = structure.recompute - (frozenset() if structure.sequence_parallel else {"norm"})
    split = structure._replace(sequence_parallel=structure.tensor_parallel, recompute=again)
    return segment(split, [ROUTED if structure.tensor_parallel else WHOLE], compute)


SHARED = {"up": "shared_up", "gate": "shared_gate_matrix", "down": "shared_down"}
"""Names of the matrices of the shared experts."""

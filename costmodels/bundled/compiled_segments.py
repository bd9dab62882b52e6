"""Compiled functions among operations that are not: of a layer with experts all but the experts' products.

`torch.compile` stops where the number of rows of an expert is asked for, so that such a layer is made of
compiled parts: up to its experts, their activation function, the shared experts, and the last sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from costmodels.bundled import compiled_graph as graphs
from costmodels.bundled.compiled_graph import INPUT, Graph, Program, Value, partition
from costmodels.bundled.compiled_latent import CompiledLatentLayer
from costmodels.bundled.compiled_layers import CompiledLayer
from costmodels.bundled.compiled_memory import Held, run
from costmodels.bundled.experts import mixture
from costmodels.bundled.layers import Layer
from costmodels.bundled.operations import call
from costmodels.bundled.replay import ACTIVATIONS, Gradients, Leaf, Node, Size, Tensor
from costmodels.bundled.structure import (
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
    there = dict(zip(compiled.forward.outputs, outputs, strict=True))
    there |= {value: one.storage for value, one in zip(compiled.inputs, inputs, strict=True)}
    kept: Held = {value: [there[value]] for value in compiled.backward.inputs if value in there}
    for (storage,) in kept.values():
        storage.become(ACTIVATIONS)
    parameters = [weights[name] for name in compiled.names if name in weights]
    sources = [*inputs, *(Tensor(inputs[0].storage, (leaf, 0)) for leaf in parameters)]
    numbers = [str(number) for number in range(len(inputs))]

    def backward(node: Node, grads: Gradients) -> Gradients:
        held = dict(kept)
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
            *(one for name, one in found if name in weights),
        ]

    node = Node(tape, sources, [], backward)
    return [Tensor(storage, (node, index)) for index, storage in enumerate(outputs[: compiled.results])]


class CompiledMixtureLayer(Layer):
    """A compiled layer with experts."""

    def __init__(self, structure: Structure, weights: dict[str, Leaf]) -> None:
        super().__init__(structure, weights, mixture)
        self.shared = self.compiled_shared

    def forward(self, x: Tensor) -> Tensor:
        """`runtime.model.Block`."""
        residual, normed = run_segment(_up_to_experts(self.structure), self.weights, [x])
        result = call(self.mlp, normed)
        del normed
        (out,) = run_segment(_sum(self.structure), self.weights, [residual, result])
        return out

    def activate(self, *inputs: Tensor) -> Tensor:
        """The activation function of the experts."""
        (result,) = run_segment(_activation(self.structure), self.weights, inputs)
        return result

    def compiled_shared(self, x: Tensor) -> Tensor:
        """The shared experts."""
        (result,) = run_segment(_shared(self.structure), self.weights, [x])
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

    split = structure._replace(sequence_parallel=structure.tensor_parallel)
    return segment(split, [ROUTED if structure.tensor_parallel else WHOLE], compute)


SHARED = {"up": "shared_up", "gate": "shared_gate_matrix", "down": "shared_down"}
"""Names of the matrices of the shared experts."""

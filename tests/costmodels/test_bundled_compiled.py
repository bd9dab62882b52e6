"""Graphs of compiled layers: what they keep for backward, when their memory is there, and what is covered."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from costmodels import LatentAttention, Layout, ModelSpec, even_split
from costmodels.bundled import covers, peak_bytes, rank_peaks
from costmodels.bundled.compiled_graph import INPUT, KERNEL, Graph, Tensor, partition
from costmodels.bundled.compiled_layers import CompiledLayer
from costmodels.bundled.compiled_memory import run
from costmodels.bundled.compiled_tapes import compiled_layer_tape
from costmodels.bundled.replay import Storage, Tape
from costmodels.bundled.structure import RESIDUAL, Structure
from costmodels.bundled.tapes import layer_tape
from costmodels.spec.table import LayoutTable

GPT = ModelSpec(name="gpt", layers=4, hidden=512, heads=8, vocab=1024, seq=256)
LATENT = GPT.model_copy(
    update={
        "latent_attention": LatentAttention(
            q_lora_rank=128, kv_lora_rank=64, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64
        )
    }
)

PLAIN = Structure(
    layernorm=True,
    bias=True,
    qkv_bias=True,
    qk_norm=False,
    rotates=False,
    gated=False,
    activation="gelu",
    wide=False,
)


def layout(**fields: object) -> Layout:
    """A layout of the model."""
    stages = int(fields.get("pipeline_parallel", 1))  # type: ignore[call-overload]
    return Layout.model_validate(
        {"layers_per_stage": even_split(GPT.layers, stages), "global_batch_size": 8, **fields}
    )


def kept(structure: Structure) -> list[str]:
    """Names of the sizes of what a compiled layer keeps besides its input."""
    graph = Graph()
    x = graph.add(INPUT, [], RESIDUAL)
    out = CompiledLayer(structure, graph).forward(Tensor(x, RESIDUAL, ("input", 0)))
    turn = len(graph.values)
    gradient = graph.add(INPUT, [], RESIDUAL)
    graph.run_backward([out], [gradient])
    forward, backward = partition(graph, turn, [out.value], (x, gradient))
    assert set(forward.outputs[1:]) == backward.inputs - {x, gradient}
    return [value.sizes[0][0] for value in forward.outputs[1:]]


def test_a_compiled_layer_keeps_what_kernels_give_and_kernels_of_backward_read() -> None:
    # In order: statistics and result of a norm, queries, keys, values, result and log-sum-exp of attention,
    # its output matrix, the same of the other norm, and both ends of the activation function.
    assert kept(PLAIN) == [
        *("statistics", "residual", "query", "key", "value", "attended", "log_sum_exp"),
        *("whole", "statistics", "residual", "inner", "inner"),
    ]


def test_what_is_computed_again_is_not_kept() -> None:
    assert kept(PLAIN._replace(recompute=frozenset({"full"}))) == []
    assert "inner" not in kept(PLAIN._replace(recompute=frozenset({"mlp"})))
    core = kept(PLAIN._replace(recompute=frozenset({"core_attention"})))
    assert "log_sum_exp" not in core and "attended" not in core


def test_between_two_calls_that_are_computed_again_a_result_is_kept() -> None:
    split = PLAIN._replace(tensor_parallel=True, sequence_parallel=True)
    norms = kept(split._replace(recompute=frozenset({"norm"})))
    # The norms' own results instead of what is gathered of them.
    assert kept(split).count("whole") == norms.count("whole") + 2
    assert norms.count("residual") == kept(split).count("residual") + 2


def test_a_buffer_lives_from_its_kernel_to_its_last_reader() -> None:
    graph, size = Graph(), ("x", 1.0)
    x = graph.add(INPUT, [], size)
    first, second = graph.add(KERNEL, [x], ("first", 1.0)), graph.add(KERNEL, [x], ("second", 1.0))
    third = graph.add(KERNEL, [first, second], ("third", 1.0))
    out = graph.add(KERNEL, [third], ("out", 1.0))
    program, _ = partition(graph, len(graph.values), [out], (x,))
    tape = Tape()
    outputs = run(tape, program, {x: [Storage(tape, size)]})
    names = [f"{name}{factor:+.0f}" for _, name, factor in tape.changes]
    assert names[:3] == ["x+1", "first+1", "second+1"]
    # The input leaves with its last reader here, as nobody else holds it.
    assert names.index("x-1") < names.index("third+1") < names.index("first-1") < names.index("out+1")
    assert names[-1] == "third-1" and len(outputs) == 1


@pytest.mark.parametrize("modules", [(), ("core_attention",), ("mlp",), ("norm", "activation"), ("full",)])
@pytest.mark.parametrize("structure", [PLAIN, PLAIN._replace(layernorm=False, gated=True, rotates=True)])
def test_a_layer_ends_with_nothing_but_gradients(structure: Structure, modules: tuple[str, ...]) -> None:
    tape = compiled_layer_tape(structure._replace(recompute=frozenset(modules)))
    for first, name in ((True, "first_backward"), (False, "backward")):
        left: dict[str, float] = {}
        for part in (tape.passes["forward"], tape.passes[name]):
            for place, factor in zip(part.name.tolist(), part.factors[:, 0].tolist(), strict=True):
                size = part.names[place]
                left[size] = left.get(size, 0.0) + factor
        names = {size for size, factor in left.items() if factor}
        assert all("weight" in size or "bias" in size or size == "width" for size in names)
        assert bool(names) == first


def test_compiled_layers_keep_less_than_eager_ones() -> None:
    gated = PLAIN._replace(gated=True, layernorm=False, rotates=True, bias=False, qkv_bias=False)
    sizes = {name: np.ones(1) for name in ("statistics", "log_sum_exp")}
    totals = []
    for tape in (compiled_layer_tape(gated), layer_tape(gated)):
        forward = tape.passes["forward"]
        totals.append(forward.changes(dict.fromkeys(forward.names, np.full(1, 8.0)) | sizes).sum())
    assert totals[0] < totals[1]


def test_less_is_kept_the_more_is_computed_again() -> None:
    layouts = [
        layout(precision="bf16"),
        layout(precision="bf16", recompute="selective", recompute_modules=("mlp",)),
        layout(precision="bf16", recompute="full"),
    ]
    table = LayoutTable.of(layouts)
    assert covers(GPT, table, compiled=True).all()
    peaks = peak_bytes(GPT, table, compiled=True)
    assert all(more > less for more, less in pairwise(peaks))
    totals, compositions = rank_peaks(GPT, table, compiled=True)
    assert compositions.sum(axis=0) == pytest.approx(totals)
    assert totals.max(axis=1) == pytest.approx(peaks)


@pytest.mark.parametrize(
    ("model", "fields", "known"),
    [
        (GPT, {"tensor_parallel": 2, "sequence_parallel": True, "pipeline_parallel": 2}, True),
        (GPT, {"context_parallel": 2, "context_parallel_form": "all_to_all"}, True),
        (LATENT, {"tensor_parallel": 2}, True),
        (LATENT, {"context_parallel": 2}, False),
        (GPT, {"context_parallel": 2, "context_parallel_form": "ring"}, True),
        (GPT, {"precision": "fp8"}, False),
        (GPT, {"offload_activations": True}, False),
    ],
)
def test_what_is_known_of_compiled_layers(model: ModelSpec, fields: dict[str, object], known: bool) -> None:
    table = LayoutTable.of([layout(**{"precision": "bf16", **fields})])
    assert covers(model, table, compiled=True).tolist() == [known]

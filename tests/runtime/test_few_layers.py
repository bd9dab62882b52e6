"""Dry runs of few layers tell what those of all layers find, to the byte."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from costmodels import ModelSpec
from runtime.dryrun import run as dry
from runtime.dryrun.course import Course, UnlikeError, matched, of_more_layers
from runtime.dryrun.few_layers import few_layers
from runtime.dryrun.memory_trace import BLOCK_BYTES
from runtime.dryrun.run import trace
from tests.support.layouts import layout_of

SMALL: dict[str, Any] = {
    "name": "small",
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 128,
    "vocab": 512,
    "seq": 32,
    "gated": True,
    "activation": "silu",
    "norm": "rmsnorm",
    "position": "rope",
    "tied": False,
    "linear_bias": False,
}

EXPERTS = {"experts": 4, "top_k": 2, "expert_ffn": 32}

LINEAR = {
    "attention_pattern": ("linear", "full"),
    "linear_attention": {
        "kind": "gated_delta",
        "key_heads": 4,
        "value_heads": 4,
        "key_dim": 16,
        "value_dim": 16,
        "chunk": 16,
    },
}

BF16: dict[str, Any] = {"precision": "bf16"}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zero 0": ({"layers": 11}, {"global_batch_size": 3}),
    "zero 3": ({"layers": 11}, {"data_parallel": 2, "zero_stage": 3, "global_batch_size": 4}),
    "tensor parallel": ({"layers": 11}, {"tensor_parallel": 2, "sequence_parallel": True}),
    "1f1b": ({"layers": 22}, {"pipeline_parallel": 2, "global_batch_size": 5}),
    "interleaved": (
        {"layers": 36},
        {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2, "schedule": "interleaved"}
        | {"global_batch_size": 8, "data_parallel": 2, "zero_stage": 1},
    ),
    "zbv": (
        {"layers": 36},
        {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2, "schedule": "zbv", "global_batch_size": 4},
    ),
    "uneven stages": ({"layers": 23}, {"pipeline_parallel": 2, "layers_per_stage": (10, 13)}),
    "block": (
        {"layers": 26},
        {"recompute": "full", "recompute_method": "block", "recompute_num_layers": 13},
    ),
    "units": ({"layers": 19}, {"recompute": "full", "recompute_num_layers": 2}),
    "dense layers before experts": (
        {"layers": 28, "dense_layers": 12, **EXPERTS},
        {"data_parallel": 2, "expert_parallel": 2, "zero_stage": 1, "global_batch_size": 4},
    ),
    "windows": ({"layers": 20, "window": 16, "attention_pattern": ("window", "window", "full")}, {}),
    "linear attention": ({"layers": 16, **LINEAR}, {}),
    "further tokens": ({"layers": 12, "mtp": {"depths": 1}}, {}),
    "in host memory": ({"layers": 12}, {"offload_activations": True, "offload_optimizer": True}),
    "muon": ({"layers": 12}, {"optimizer": "muon"}),
}


def built_layers(spec: ModelSpec, layout: Any, **flags: Any) -> tuple[Any, list[int]]:
    """A dry run, and the layers of the models that were built for it."""
    built: list[int] = []
    steps = dry._run_steps

    def counting(tracker: Any, model: ModelSpec, *rest: Any) -> None:
        built.append(model.layers)
        steps(tracker, model, *rest)

    with patch.object(dry, "_run_steps", counting):
        return trace(spec, layout, **flags), built


def check(spec: ModelSpec, layout: Any, rank: int, compiled: bool = False) -> None:
    found, built = built_layers(spec, layout, pipeline_rank=rank, compiled=compiled)
    assert max(built) < spec.layers
    whole = trace(spec, layout, pipeline_rank=rank, compiled=compiled, whole=True)
    assert (found.peak.label, found.peak.live) == (whole.peak.label, whole.peak.live)
    assert found.host_bytes == whole.host_bytes
    assert found.moments.keys() == whole.moments.keys()
    for label, moment in whole.moments.items():
        assert found.moments[label].live == moment.live, label
        # The allocator's blocks of tensors with a number for each layer differ.
        assert abs(found.moments[label].total - moment.total) <= 4 * BLOCK_BYTES, label


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_few_layers_tell_the_peak_of_all(name: str) -> None:
    fields, split = CASES[name]
    spec = ModelSpec.model_validate(SMALL | fields)
    check(spec, layout_of(spec, **BF16, **split), rank=split.get("pipeline_parallel", 1) - 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero 3", "1f1b", "block", "dense layers before experts"])
def test_few_compiled_layers_tell_the_peak_of_all(name: str) -> None:
    fields, split = CASES[name]
    spec = ModelSpec.model_validate(SMALL | fields)
    check(spec, layout_of(spec, **BF16, **split), rank=0, compiled=True)


def test_layers_of_every_run_are_left_out() -> None:
    spec = ModelSpec.model_validate(SMALL | {"layers": 60, "dense_layers": 12, **EXPERTS})
    layout = layout_of(spec, recompute="full", recompute_method="block", recompute_num_layers=30)
    found = few_layers(spec, layout, 0)
    assert found is not None
    model, short = found.few
    # Four dense layers, four that are recomputed, and four others.
    assert (model.layers, model.dense_layers, short.recompute_num_layers) == (12, 4, 8)
    assert [(more.layers, periods) for more, _, periods in found.more] == [(13, 8), (13, 14), (13, 26)]
    for more, longer, _ in found.more:
        kinds = {more.layer_kind(layer) for layer in range(more.layers)}
        assert kinds == {spec.layer_kind(layer) for layer in range(spec.layers)}
        assert sum(longer.layers_per_stage) == more.layers


def test_models_of_few_layers_are_run_as_they_are() -> None:
    spec = ModelSpec.model_validate(SMALL | {"layers": 6})
    assert few_layers(spec, layout_of(spec), 0) is None


def course(changes: list[int]) -> Course:
    """A step with these changes of memory."""
    sizes = np.array(changes, dtype=np.int64)
    held = sizes.cumsum()[None, :]
    return Course(
        labels=np.array(["forward"] * len(sizes)),
        changes=sizes,
        places=np.zeros(len(sizes), dtype=np.int64),
        kinds=(("temporaries", "other"),),
        allocated=held,
        live=held,
        host_bytes=0,
        operations=len(sizes),
    )


def step(layers: int) -> list[int]:
    """Layers that keep 3 of 10 bytes each; a loss; layers backward, which leave gradients of 9."""
    return [100, *[10, -7] * layers, 50, 4 * layers, -4 * layers, -50, *[9, -3] * layers, 7, -7]


def test_steps_have_another_highest_moment_with_more_layers() -> None:
    assert [np.cumsum(step(layers)).argmax() < 3 + 2 * layers for layers in (4, 5, 1000)] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("layers", [7, 20, 1000])
def test_the_highest_moment_may_be_another_one_with_more_layers(layers: int) -> None:
    whole = of_more_layers(course(step(4)), [(course(step(5)), layers - 4)])
    moment = whole.moments()["forward"]
    assert moment.total == np.cumsum(step(layers)).max()


def test_changes_are_matched_from_both_ends() -> None:
    few, more = course(step(4)), course(step(5))
    places = matched(few, more)
    assert (places[0], places[-1]) == (0, len(step(5)) - 1)
    assert np.all(np.diff(places) > 0)
    assert [step(4)[at] for at in (0, 1, 2)] == [step(5)[at] for at in places[:3]]


def test_steps_that_are_not_alike_are_refused() -> None:
    with pytest.raises(UnlikeError):
        matched(course([1, 2, 3, 4, 5, 6]), course([1, 2, 9, -9, 9, 5, -6, 7]))

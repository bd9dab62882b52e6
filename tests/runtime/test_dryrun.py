"""The dry run: bytes that can be counted by hand, and agreement with a step that is really run."""

from __future__ import annotations

import gc
import sys
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from costmodels import Layout, ModelSpec
from costmodels.errors import InputError
from costmodels.layers.shapes import PEAK_LOAD
from runtime.dryrun import run as dry
from runtime.dryrun.memory_trace import MemoryTrace, Moment, block_bytes
from runtime.dryrun.roles import label_layers, roles, tag_optimizer_state, tag_state
from runtime.dryrun.run import trace
from runtime.dryrun.steady import enough_micro_batches
from runtime.dryrun.tracker import Tracker
from runtime.model.transformer import Transformer
from runtime.settings.training_options import TrainingOptions
from runtime.train.trainer import Trainer
from tests.support.layouts import layout_of

GPT = ModelSpec.model_validate(
    {"name": "gpt", "layers": 2, "hidden": 64, "heads": 4, "vocab": 128, "seq": 32}
)
LLAMA: dict[str, Any] = {
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 128,
    "vocab": 128,
    "seq": 32,
    "gated": True,
    "activation": "silu",
    "norm": "rmsnorm",
    "position": "rope",
    "tied": False,
    "linear_bias": False,
}


def llama(layers: int = 2, **fields: Any) -> ModelSpec:
    return ModelSpec.model_validate({"name": "llama", "layers": layers, **LLAMA, **fields})


EXPERTS = {"experts": 4, "top_k": 2, "expert_ffn": 32}


def sizes(traced: MemoryTrace) -> dict[str, dict[str, int]]:
    """Bytes of every moment by category."""
    return {label: dict(moment.live) for label, moment in traced.moments.items()}


def test_blocks_are_those_of_the_allocator() -> None:
    assert [block_bytes(size) for size in (0, 1, 512, 513)] == [0, 512, 512, 1024]


def test_states_of_adam_in_fp32() -> None:
    traced = trace(GPT, layout_of(GPT, global_batch_size=1), device="cpu")
    moment = traced.moments["optimizer"].live
    weights = 4 * GPT.parameters
    # The vocabulary has no padding here. Positions are a table of 8-byte numbers.
    assert moment["parameters"] == weights + 8 * GPT.seq
    assert moment["gradients"] == weights
    tensors = 2 + 16 * GPT.layers
    assert moment["optimizer"] == 2 * weights + 4 * (tensors + 2)
    assert moment["activations"] == moment["logits"] == moment["communication"] == 0


def test_mixed_precision_gathers_weights_and_reduces_in_fp32() -> None:
    spec = llama()
    traced = trace(
        spec, layout_of(spec, precision="bf16", global_batch_size=2, data_parallel=2, zero_stage=3)
    )
    shard = spec.parameters // 2
    held = traced.moments["optimizer"].live
    assert held["gradients"] == 4 * shard
    assert abs(held["parameters"] - 4 * shard) <= 3 * 4 * spec.seq * spec.head_dim
    # Nothing stays gathered at the end of a step with ZeRO 3.
    assert held["communication"] == 0
    # With ZeRO 1 the whole weights stay in bf16 from the first microbatch to the last.
    kept = trace(spec, layout_of(spec, precision="bf16", global_batch_size=4, data_parallel=2, zero_stage=1))
    assert kept.moments["forward"].live["communication"] >= 2 * spec.parameters
    assert kept.moments["forward"].live["gradients"] == 4 * spec.parameters


TOKENS = 32
SEED_BYTES = 24
"""Bytes that flash attention keeps for dropout, used or not."""

PER_LAYER = {
    # Bytes of a token: inputs and outputs of norms, queries, keys, values and results, statistics, the MLP.
    (): 2 * (4 * 64 + 2 * 64 + 2 * 32 + 4 * 128) + 4 * 4 + 2 * 4,
    ("core_attention",): 2 * (4 * 64 + 2 * 64 + 2 * 32 + 4 * 128) + 2 * 4,
    ("mlp",): 2 * (4 * 64 + 2 * 64 + 2 * 32) + 4 * 4 + 2 * 4,
    ("norm",): 2 * (2 * 64 + 2 * 64 + 2 * 32 + 4 * 128) + 4 * 4,
    ("activation",): 2 * (4 * 64 + 2 * 64 + 2 * 32 + 2 * 128) + 4 * 4 + 2 * 4,
    ("full",): 2 * 64,
}
"""Bytes that an eager layer of `llama` keeps of a token in bf16, as `parallel.recompute` counts them."""


@pytest.mark.parametrize("modules", PER_LAYER, ids=lambda modules: "+".join(modules) or "none")
def test_a_layer_keeps_what_the_runtime_says(modules: tuple[str, ...]) -> None:
    fields: dict[str, Any] = {"precision": "bf16", "global_batch_size": 1}
    if modules == ("full",):
        fields["recompute"] = "full"
    elif modules:
        fields |= {"recompute": "selective", "recompute_modules": modules}
    spec = llama(2)
    # The loss comes after the last layer has saved all, and before backward.
    kept = trace(spec, layout_of(spec, **fields)).moments["forward"].live["activations"]
    keeps_attention = "core_attention" not in modules and "full" not in modules
    layer = TOKENS * PER_LAYER[modules] + keeps_attention * SEED_BYTES
    # Besides, token ids, and of the last norm the input and statistics, but not the result: the head has used
    # it. While a layer that is recomputed runs, its temporaries are more than that.
    assert kept == 2 * layer + TOKENS * (8 + (2 * 64 + 4) * (modules != ("full",)))


def test_layers_have_names() -> None:
    traced = trace(llama(), layout_of(llama(), precision="bf16", global_batch_size=1))
    forward = traced.moments["forward"]
    assert set(forward.layers) >= {"attention", "mlp", "norm"}
    assert sum(forward.layers.values()) == forward.allocated["activations"]
    assert traced.peak.total == max(
        traced.moments[label].total for label in traced.moments if label != "build"
    )


def really(spec: ModelSpec, layout: Layout, steps: int = 2) -> dict[str, Moment]:
    """The moments of a step that is really run on the CPU."""
    tracker = Tracker(on_gpu=False, fake=False)
    with ExitStack() as stack:
        stack.enter_context(dry.fake_process_group(layout.world_size, 0))
        stack.enter_context(roles(tracker))
        stack.enter_context(tracker)
        with tracker.scope(phase="build"):
            trainer = Trainer(spec, layout, TrainingOptions(no_compile=True), torch.device("cpu"))
            tag_state(tracker, trainer.executor)
        label_layers(tracker, trainer.executor, compiled=False)
        samples = np.zeros((len(trainer.rows), spec.seq + 1), dtype=np.int64)
        for number in range(steps):
            if number == steps - 1:
                tracker.mark()
            trainer.train_step(samples)
            tag_optimizer_state(tracker)
        return tracker.moments()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "fields"),
    [
        (GPT, {"precision": "bf16"}),
        (llama(), {"recompute": "selective", "recompute_modules": ("norm", "activation")}),
        (llama(**EXPERTS), {}),
    ],
    ids=["bf16", "recompute", "experts"],
)
def test_a_real_step_holds_the_same_bytes(spec: ModelSpec, fields: dict[str, Any]) -> None:
    layout = layout_of(spec, global_batch_size=2, **fields)
    found, real = trace(spec, layout, device="cpu").moments, really(spec, layout)
    assert found.keys() == real.keys()
    for label, moment in real.items():
        for category, size in moment.live.items():
            # Real numbers that Python made are tensors of 4 bytes here and constants there.
            assert abs(found[label].live[category] - size) <= 16, (label, category)


@pytest.mark.slow
def test_all_ranks_of_a_stage_hold_the_same() -> None:
    spec = llama(4)
    layout = layout_of(
        spec, tensor_parallel=2, sequence_parallel=True, data_parallel=2, pipeline_parallel=2, zero_stage=1
    )
    first = sizes(trace(spec, layout, rank=4))
    for rank in (5, 7):
        assert sizes(trace(spec, layout, rank=rank)) == first


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zb", "zbv"])
def test_few_micro_batches_show_the_peak_of_many(schedule: Any) -> None:
    chunks = 1 if schedule == "1f1b" else 2
    spec = llama(2 * chunks)
    layout = layout_of(
        spec,
        pipeline_parallel=2,
        virtual_pipeline_parallel=chunks,
        schedule=schedule,
        global_batch_size=10,
        precision="bf16",
    )
    assert enough_micro_batches(layout, 0) < 10
    short = trace(spec, layout)
    with patch.object(dry, "enough_micro_batches", lambda *_: 10):
        whole = trace(spec, layout)
    assert (short.micro_batches < 10, whole.micro_batches) == (True, 10)
    # Losses of microbatches that are left out count from the start.
    assert 0 <= short.peak.total - whole.peak.total <= 512 * 10
    assert short.peak.label == whole.peak.label


def test_accumulation_shows_its_peak_in_three_micro_batches() -> None:
    layout = layout_of(GPT, precision="bf16", global_batch_size=8)
    short = trace(GPT, layout)
    with patch.object(dry, "enough_micro_batches", lambda *_: 8):
        assert trace(GPT, layout).peak == short.peak
    assert short.micro_batches == 3


def test_the_fullest_rank_of_experts_is_traced() -> None:
    spec = llama(**EXPERTS, dense_layers=0)
    one = trace(spec, layout_of(spec, precision="bf16", data_parallel=2, global_batch_size=2))
    spread = trace(
        spec, layout_of(spec, precision="bf16", data_parallel=2, global_batch_size=2, expert_parallel=2)
    )
    rows = TOKENS * spec.top_k
    # Each row keeps its result and what the MLP of an expert keeps of it; inputs are copied once more.
    grown = spread.moments["forward"].layers["experts"] - one.moments["forward"].layers["experts"]
    assert grown >= (PEAK_LOAD - 1) * rows * spec.layers * 2 * (64 + 4 * 32)


FEATURES: dict[str, dict[str, Any]] = {
    "fp16": {"precision": "fp16"},
    "sgd": {"optimizer": "sgd"},
    "adafactor": {"optimizer": "adafactor", "data_parallel": 2, "zero_stage": 1},
    "came": {"optimizer": "came", "data_parallel": 2, "zero_stage": 1, "tensor_parallel": 2},
    "muon": {"optimizer": "muon", "data_parallel": 2, "zero_stage": 1, "tensor_parallel": 2},
    "hybrid": {"data_parallel": 4, "zero_stage": 2, "zero_replicas": 2, "gradient_reduction": "bf16"},
    "all_gather": {"context_parallel": 2},
    "all_to_all": {"context_parallel": 2, "context_parallel_form": "all_to_all"},
    "ring": {"context_parallel": 2, "context_parallel_form": "ring"},
}


@pytest.mark.oldest
@pytest.mark.parametrize("name", FEATURES)
def test_features_are_traced(name: str) -> None:
    spec = llama(1)
    fields: dict[str, Any] = {"precision": "bf16", "global_batch_size": 4, **FEATURES[name]}
    traced = trace(spec, layout_of(spec, **fields))
    assert traced.peak.total > 0
    assert traced.moments["optimizer"].live["optimizer"] > 0


def test_optimizer_states_by_kind() -> None:
    spec = llama(1)
    states = {}
    for optimizer in ("adam", "sgd", "adafactor", "came"):
        layout = layout_of(spec, precision="bf16", global_batch_size=1, optimizer=optimizer)
        states[optimizer] = trace(spec, layout).moments["optimizer"].live["optimizer"]
    assert states["sgd"] == 4 * spec.parameters
    assert 2 * states["sgd"] < states["adam"] < 2 * states["sgd"] + 1000
    assert states["adafactor"] < states["sgd"] / 10
    vectors = sum(p.numel() for p in Transformer(spec, spec.vocab).parameters() if p.ndim == 1)
    assert states["came"] - states["sgd"] == 2 * states["adafactor"] - 4 * vectors


def test_offloading_moves_bytes_to_the_host() -> None:
    spec = llama(2)
    here = trace(spec, layout_of(spec, precision="bf16", global_batch_size=1))
    away = trace(spec, layout_of(spec, precision="bf16", global_batch_size=1, offload_activations=True))
    # All but the last layer send inputs of attention, queries, keys, values and results.
    sent = TOKENS * 2 * (64 + 2 * 64 + 2 * 32)
    assert here.moments["forward"].live["activations"] - away.moments["forward"].live["activations"] == sent
    assert away.host_bytes >= sent
    optimizer = trace(spec, layout_of(spec, precision="bf16", global_batch_size=1, offload_optimizer=True))
    assert optimizer.peak.live["optimizer"] == 0
    assert optimizer.host_bytes >= 12 * spec.parameters


@pytest.mark.slow
def test_compiled_layers_offload_what_a_ring_keeps() -> None:
    spec = llama(3)
    ring: dict[str, Any] = {"context_parallel": 2, "context_parallel_form": "ring"}
    fields: dict[str, Any] = {"precision": "bf16", "global_batch_size": 1, **ring}
    freed = []
    for compiled in (False, True):
        here, away = (
            trace(spec, layout_of(spec, **fields, offload_activations=offload), compiled=compiled)
            for offload in (False, True)
        )
        assert here.moments["forward"].layers["attention"] > 0
        kept = [traced.moments["forward"].live["activations"] for traced in (here, away)]
        freed.append(kept[0] - kept[1])
    assert freed[0] == freed[1] > 0


@pytest.mark.oldest
@pytest.mark.slow
def test_compiled_layers_save_less() -> None:
    spec = llama()
    layout = layout_of(spec, precision="bf16", global_batch_size=2, tensor_parallel=2, sequence_parallel=True)
    eager, compiled = trace(spec, layout), trace(spec, layout, compiled=True)
    assert (eager.compiled, compiled.compiled) == (False, True)
    assert compiled.operations < eager.operations
    kept = [traced.moments["forward"].live["activations"] for traced in (compiled, eager)]
    # At least the results of SiLU are computed again.
    assert kept[1] - kept[0] >= spec.layers * TOKENS * 2 * 128 // 2
    for category in ("parameters", "gradients", "optimizer"):
        assert compiled.moments["optimizer"].live[category] == eager.moments["optimizer"].live[category]


@pytest.mark.oldest
@pytest.mark.slow
def test_compiled_layers_recompute_what_the_layout_says() -> None:
    spec = llama(3)
    fields: dict[str, Any] = {"precision": "bf16", "global_batch_size": 1}
    full = trace(spec, layout_of(spec, **fields, recompute="full"), compiled=True)
    none = trace(spec, layout_of(spec, **fields), compiled=True)
    assert full.moments["forward"].live["activations"] < none.moments["forward"].live["activations"] / 3


def test_a_schedule_that_splits_backward_is_not_compiled() -> None:
    spec = llama(4)
    layout = layout_of(
        spec, pipeline_parallel=2, virtual_pipeline_parallel=2, schedule="zbv", precision="bf16"
    )
    with pytest.raises(InputError, match="splits backward"):
        trace(spec, layout, compiled=True)


def kept_models() -> int:
    gc.collect()
    return sum(type(one) is Transformer for one in gc.get_objects())


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_ends_with_its_dry_run(compiled: bool) -> None:
    """The model dies with its dry run: no collector sees references that hooks of its parameters hold."""
    spec, reports, before = llama(), sys.excepthook, kept_models()
    trace(spec, layout_of(spec, precision="bf16", data_parallel=2), compiled=compiled)
    # Fewer, where compiled functions have held one of another test.
    assert kept_models() <= before
    assert sys.excepthook is reports


def test_ranks_that_do_not_exist_are_refused() -> None:
    with pytest.raises(InputError, match="rank 1: the layout has ranks 0 to 0"):
        trace(GPT, layout_of(GPT), rank=1)

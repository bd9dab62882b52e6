"""The formula of memory equals dry runs of schedules with several stages on a rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.memory import compare
from costmodels import Layout, ModelSpec
from costmodels.bundled import KINDS, covers, rank_peaks
from costmodels.spec.table import LayoutTable
from runtime.dryrun.run import trace

LLAMA = ModelSpec(
    name="llama",
    layers=5,
    hidden=1024,
    heads=8,
    kv_heads=4,
    vocab=8192,
    seq=1024,
    ffn=2816,
    norm="rmsnorm",
    position="rope",
    gated=True,
    activation="silu",
    linear_bias=False,
    tied=False,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "fields"),
    [
        (1, {"schedule": "zbv", "data_parallel": 2, "zero_stage": 1}),
        (0, {"schedule": "dualpipev", "recompute": "selective", "recompute_modules": ("norm", "mlp")}),
        (0, {"schedule": "interleaved_zb", "tensor_parallel": 2, "sequence_parallel": True}),
        (1, {"schedule": "interleaved", "recompute": "full"}),
    ],
)
def test_peaks_of_several_stages_equal_the_dry_run(rank: int, fields: dict[str, Any]) -> None:
    data = int(fields.get("data_parallel", 1))
    layout = Layout(
        pipeline_parallel=2,
        virtual_pipeline_parallel=2,
        layers_per_stage=(2, 1, 1, 1),
        micro_batch_size=1,
        global_batch_size=6 * data,
        precision="bf16",
        **fields,
    )
    table = LayoutTable.of([layout])
    assert covers(LLAMA, table).all()
    totals, compositions = rank_peaks(LLAMA, table)
    found = trace(LLAMA, layout, pipeline_rank=rank).peak
    assert totals[0, rank] == pytest.approx(found.live_total, abs=2**16)
    held = dict(zip(KINDS, np.round(compositions[:, 0, rank]), strict=True))
    for kind in ("parameters", "optimizer", "activations", "logits", "communication"):
        assert held[kind] == pytest.approx(found.live[kind], abs=2**20), kind
    # Gradients that no hook of autograd sees are temporaries to the tracker.
    both = held["gradients"] + held["temporaries"]
    assert both == pytest.approx(found.live["gradients"] + found.live["temporaries"], abs=2**20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "rank", "compiled", "fields"),
    [
        # Stages that free their parameters in between, and layers that do.
        ({"layers": 8}, 0, False, {"virtual_pipeline_parallel": 4, "data_parallel": 2, "zero_stage": 3}),
        # Halves of what is element-wise are computed again.
        (
            {"layers": 4, "qk_norm": True, "position": "none"},
            1,
            True,
            {"virtual_pipeline_parallel": 2, "context_parallel": 2, "zero_stage": 1},
        ),
        # Gradients of one rank alone, which are wider once they are reduced.
        (
            {"layers": 8, "experts": 4, "top_k": 2, "expert_ffn": 1024},
            1,
            False,
            {"virtual_pipeline_parallel": 4, "recompute": "full", "gradient_reduction": "bf16"},
        ),
    ],
)
def test_interleaved_peaks_equal_the_dry_run(
    model: dict[str, Any], rank: int, compiled: bool, fields: dict[str, Any]
) -> None:
    spec = LLAMA.model_copy(update=model)
    layout = Layout(
        pipeline_parallel=2,
        schedule="interleaved",
        layers_per_stage=(1,) * spec.layers,
        micro_batch_size=1,
        global_batch_size=4 * int(fields.get("data_parallel", 1)),
        precision="bf16",
        **fields,
    )
    assert covers(spec, LayoutTable.of([layout]), compiled).all()
    errors = compare(spec, layout, rank, compiled)
    assert not errors.misses, (errors.misses, errors.peak, errors.by_kind, errors.traced)

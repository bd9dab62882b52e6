"""What tapes play of memory equals dry runs of schedules with several stages on a rank."""

from __future__ import annotations

from typing import Any

import pytest

from costmodels import Layout
from tests.support.models import llama
from tests.support.played_memory import compare

LLAMA = llama("llama", layers=5, hidden=1024, heads=8, kv_heads=4, vocab=8192, seq=1024, ffn=2816)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "fields"),
    [
        (1, {"schedule": "zbv", "data_parallel": 2, "zero_stage": 1}),
        (0, {"schedule": "dualpipev", "recompute": "selective", "recompute_modules": ("norm", "mlp")}),
        (0, {"schedule": "interleaved_zb", "tensor_parallel": 2, "sequence_parallel": True}),
        (1, {"schedule": "interleaved", "recompute": "full"}),
        # The head's gradients of weights end a backward pass of FSDP2's root.
        (1, {"schedule": "interleaved_zb", "data_parallel": 2, "zero_stage": 0}),
        # What mixes the results of experts ends with the output of a stage, if its layer is the last there.
        (1, {"schedule": "zbv", "model": {"experts": 4, "top_k": 2, "expert_ffn": 1024}}),
        # Gradients of weights apart are no gradients yet when they are added.
        (
            1,
            {"schedule": "zbv", "precision": "fp32", "model": {"experts": 4, "top_k": 2, "expert_ffn": 4096}},
        ),
    ],
)
def test_peaks_of_several_stages_equal_the_dry_run(rank: int, fields: dict[str, Any]) -> None:
    spec = LLAMA.model_copy(update=fields.get("model", {}))
    data = int(fields.get("data_parallel", 1))
    layout = Layout(
        pipeline_parallel=2,
        virtual_pipeline_parallel=2,
        layers_per_stage=(2, 1, 1, 1),
        micro_batch_size=1,
        global_batch_size=6 * data,
        **{"precision": "bf16"} | {name: value for name, value in fields.items() if name != "model"},
    )
    errors = compare(spec, layout, rank)
    assert not errors.misses, (errors.misses, errors.peak, errors.by_kind, errors.traced)


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
    errors = compare(spec, layout, rank, compiled)
    assert not errors.misses, (errors.misses, errors.peak, errors.by_kind, errors.traced)

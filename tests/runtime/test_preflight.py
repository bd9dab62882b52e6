"""Models, layouts and folders that cannot work are refused before a job starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from costmodels import RopeScaling
from costmodels.catalogue import load_model
from costmodels.errors import InputError
from costmodels.spec.untrained import TRAINED_SCALINGS
from planner.inputs.trained_here import check_model
from runtime.model.rotary import ROPE_KINDS
from runtime.settings.checks import check_folder, check_job
from tests.support.layouts import layout_of
from tests.support.models import MODELS

SPEC = MODELS["gpt2"]


@pytest.mark.parametrize("name", ["gpt3-175b", "llama3-70b", "qwen3-8b", "mixtral-8x7b", "deepseek-v3"])
def test_the_fields_architectures_are_trained(name: str) -> None:
    check_model(load_model(name))


def test_a_rotary_scaling_that_is_not_computed_is_refused() -> None:
    stretched = {"rope_scaling": RopeScaling(kind="longrope", factor=2.0)}
    spec = MODELS["llama"].model_copy(update=stretched)
    with pytest.raises(
        InputError, match=r"does not compute longrope rope scaling \(only linear, llama3, yarn\)"
    ):
        check_model(spec)
    check_model(SPEC.model_copy(update=stretched))
    assert tuple(ROPE_KINDS) == TRAINED_SCALINGS


@pytest.mark.parametrize(
    ("fields", "world_size", "message"),
    [
        ({"data_parallel": 2}, 4, "the plan is for world size 2, but this job's is 4; start 2 ranks or plan"),
        ({"precision": "tf32"}, 1, "precision tf32: the runtime computes in fp32 or bf16 or fp16 or fp8"),
        ({"expert_parallel": 2, "data_parallel": 2}, 2, "expert_parallel 2"),
        ({"tensor_parallel": 3}, 3, "tensor_parallel 3 does not divide 4 heads; use 1, 2, 4"),
        ({"tensor_parallel": 8}, 8, "tensor_parallel 8 does not divide 4 heads"),
        ({"layers_per_stage": (3,)}, 1, "layers_per_stage adds up to 3 layers, but parity-gpt2 has 4"),
        (
            {"pipeline_parallel": 4, "global_batch_size": 2},
            4,
            "2 microbatches do not fill pipeline_parallel 4",
        ),
    ],
)
def test_a_layout_that_cannot_run_is_refused(fields: dict[str, Any], world_size: int, message: str) -> None:
    with pytest.raises(InputError) as refused:
        check_job(SPEC, layout_of(SPEC, **fields), world_size)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_every_layout_of_the_runtime_passes() -> None:
    for fields in (
        {},
        {"tensor_parallel": 4, "sequence_parallel": True},
        {"pipeline_parallel": 3, "layers_per_stage": (1, 2, 1), "precision": "bf16"},
        {"data_parallel": 2, "zero_stage": 2, "pipeline_parallel": 2},
        {"context_parallel": 2, "context_parallel_form": "ring", "precision": "fp16"},
        {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2, "schedule": "zbv"},
    ):
        layout = layout_of(SPEC, **fields)
        check_job(SPEC, layout, layout.world_size)


def test_a_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert check_folder(folder, "--save") == folder
    assert check_folder(str(folder), "--save") == folder
    assert list(folder.iterdir()) == []


def test_a_folder_below_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        InputError, match=r"--save .*file/below: cannot write there \(Not a directory\); give"
    ):
        check_folder(tmp_path / "file" / "below", "--save")

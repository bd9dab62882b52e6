"""The exchange of experts in scripts and exports: what is written was priced, and is read back as that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import planner
from costmodels.spec.model_parts import MultiTokenPrediction
from planner.formats.check import check

JOB: dict[str, Any] = {"model": "qwen3-30b-a3b", "world_size": 16, "device": "h100", "global_batch_size": 256}


def plan_of(engine: str, chunks: int = 2) -> planner.Plan:
    pins = {"pp": 2, "vpp": chunks, "ep": 8, "recompute": "none", "micro_batch_size": 1}
    return planner.suggest(**JOB, engine=engine, pin=pins)


def script(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "job.sh"
    file.write_text(f"torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py {text.replace(chr(10), ' ')}\n")
    return file


def test_exports_say_the_exchange_that_was_priced_and_are_read_at_its_price(tmp_path: Path) -> None:
    plan = plan_of("megatron")
    text = planner.export(plan, to="megatron").text
    for flag in (
        "--moe-token-dispatcher-type flex",
        "--moe-flex-dispatcher-backend deepep",
        "--moe-router-dtype fp32",
        "--overlap-moe-expert-parallel-comm",
    ):
        assert flag in text
    found = check([script(tmp_path, text)], device="h100")
    assert found.plan is not None and found.legal
    assert found.plan.estimate.step_time_s == pytest.approx(plan.estimate.step_time_s)
    exported = planner.export(plan, to="megatron")
    assert exported.environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


def test_connections_for_the_exchange_are_those_of_exports(tmp_path: Path) -> None:
    pins = {"tp": 2, "pp": 1, "ep": 8, "recompute": "none", "micro_batch_size": 1}
    exported = planner.export(planner.suggest(**JOB, engine="megatron", pin=pins), to="megatron")
    assert exported.environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    named = [one.flag for one in check([script(tmp_path, exported.text)], device="h100").problems]
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in named
    shown = exported.text.replace("--overlap-moe-expert-parallel-comm", "")
    named = [one.flag for one in check([script(tmp_path, shown)], device="h100").problems]
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in named


def test_scripts_without_these_flags_wait_longer_for_the_exchange(tmp_path: Path) -> None:
    text = planner.export(plan_of("megatron"), to="megatron").text

    def exchange(given: str) -> float:
        found = check([script(tmp_path, given)], device="h100")
        assert found.plan is not None
        return found.plan.estimate.time.expert_parallel

    shown = text.replace("--overlap-moe-expert-parallel-comm", "")
    plain = shown.replace("--moe-token-dispatcher-type flex", "--moe-token-dispatcher-type alltoall")
    assert exchange(text) < exchange(shown) < exchange(plain)
    forced = f"{text} --moe-router-force-load-balancing"
    found = check([script(tmp_path, forced)], device="h100")
    assert found.plan is not None and found.plan.expert_load == 1
    natural = check([script(tmp_path, text)], device="h100")
    assert any("natural routing" in note for note in natural.assumed)


def test_a_pipeline_without_chunks_hides_no_exchange() -> None:
    assert (
        "--overlap-moe-expert-parallel-comm" not in planner.export(plan_of("megatron", 1), to="megatron").text
    )


def test_two_mtp_modules_hide_no_exchange() -> None:
    pins = {"pp": 2, "vpp": 2, "ep": 8, "recompute": "none", "micro_batch_size": 1}
    found = {}
    for depths in (1, 2):
        modules = MultiTokenPrediction(depths=depths)
        found[depths] = planner.suggest(**JOB, engine="megatron", pin=pins, mtp=modules)
    written = {depths: planner.export(plan, to="megatron").text for depths, plan in found.items()}
    assert [("--overlap-moe-expert-parallel-comm" in text) for text in written.values()] == [True, False]
    assert found[2].estimate.time.expert_parallel > 1.3 * found[1].estimate.time.expert_parallel


@pytest.mark.parametrize(
    "given, blamed",
    [
        ("--moe-shared-expert-overlap", "--moe-shared-expert-overlap"),
        ("--mtp-num-layers 2", "--overlap-moe-expert-parallel-comm"),
        ("--recompute-granularity full --recompute-method uniform", "--overlap-moe-expert-parallel-comm"),
        ("--recompute-granularity selective --recompute-modules layernorm moe", "--recompute-modules"),
    ],
)
def test_scripts_that_hide_an_exchange_which_megatron_refuses_are_illegal(
    tmp_path: Path, given: str, blamed: str
) -> None:
    text = planner.export(plan_of("megatron"), to="megatron").text
    assert check([script(tmp_path, text)], device="h100").legal
    found = check([script(tmp_path, f"{text} {given}")], device="h100")
    assert not found.legal
    assert blamed in [problem.flag for problem in found.problems if problem.severity == "illegal"]


def test_overrides_of_megatron_bridge_say_the_exchange_and_are_read_at_its_price(tmp_path: Path) -> None:
    plan = plan_of("nemo")
    text = planner.export(plan, to="megatron-bridge").text
    for words in (
        "moe_token_dispatcher_type: flex",
        "moe_flex_dispatcher_backend: deepep",
        "overlap_moe_expert_parallel_comm: true",
    ):
        assert words in text
    file = tmp_path / "overrides.yaml"
    file.write_text(text)
    found = check([file], device="h100", world_size=16)
    assert found.plan is not None and found.legal
    assert found.plan.estimate.step_time_s == pytest.approx(plan.estimate.step_time_s)


def test_overrides_of_megatron_bridge_say_in_which_format_gradients_are_summed(tmp_path: Path) -> None:
    narrow = planner.export(plan_of("nemo"), to="megatron-bridge")
    assert "grad_reduce_in_fp32" not in narrow.text and "summed in bf16" in str(narrow.notes)
    wide = planner.export(plan_of("megatron"), to="megatron-bridge")
    assert "summed in bf16" not in str(wide.notes)
    file = tmp_path / "overrides.yaml"
    ratios = []
    for text in (narrow.text, wide.text):
        file.write_text(text)
        found = check([file], device="h100", world_size=16)
        assert found.plan is not None
        stage = found.plan.estimate.memory[0]
        ratios.append(stage.gradients / stage.parameters)
    assert ratios == pytest.approx([1, 2])

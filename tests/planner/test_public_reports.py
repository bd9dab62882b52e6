"""Jobs that people reported: their seconds lie in the range, and whether they fit is told as it was seen."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from costmodels.catalogue import load_device, load_engine, load_model
from costmodels.spec.engine import Engine
from costmodels.spec.estimate import Estimate
from costmodels.spec.model import ModelSpec
from costmodels.spec.record import GIB
from planner import check, evaluate


class Reported(NamedTuple):
    """A job and how long its step was seen to take."""

    layout: str
    model: str
    seq: int
    device: str
    engine: str
    batch: int
    seconds: float
    fields: Mapping[str, Any] = MappingProxyType({})
    """Fields of the model that differ."""


def model_of(job: Reported) -> ModelSpec:
    model = load_model(job.model).model_copy(update={"seq": job.seq})
    router = model.router.model_copy(update=job.fields)
    return model.model_copy(update={"router": router})


def estimate_of(job: Reported, engine: Engine | str | None = None, **given: Any) -> Estimate:
    world = given.pop("world_size", 16 if "pp" in job.layout else 8)
    return evaluate(
        job.layout,
        model=model_of(job),
        device=job.device,
        engine=engine or job.engine,
        world_size=world,
        global_batch_size=job.batch,
        **given,
    )


DROPS = {"capacity_factor": 1.0}

REPORTS = {
    # alibaba/Pai-Megatron-Patch#643: 16 H800, capacity 1.0 with dropping; both ran.
    "pai 643, pp 2": Reported(
        "pp=2 ep=8 dp=8 zero=1 mbs=1", "qwen3-30b-a3b", 8192, "h800", "megatron", 128, 10.361, DROPS
    ),
    "pai 643, pp 4": Reported(
        "pp=4 ep=4 dp=4 zero=1 mbs=1", "qwen3-30b-a3b", 8192, "h800", "megatron", 256, 20.992, DROPS
    ),
    # QwenLM/Qwen3#1278: 16 A800, packed samples, all recomputed.
    "qwen3 1278": Reported(
        "pp=2 ep=8 dp=8 zero=1 mbs=1 recompute=full", "qwen3-30b-a3b", 8192, "a800-80g", "megatron", 16, 9.6
    ),
    # pytorch/torchtitan#929: 2,931 tokens/s of each of 8 A100, operators chosen.
    "torchtitan 929": Reported(
        "dp=8 zero=3 mbs=1 recompute=selective", "llama3-8b", 8192, "a100-80g", "torchtitan", 8, 8192 / 2931
    ),
}


@pytest.mark.parametrize("name", REPORTS)
def test_the_step_lies_in_the_range_and_the_job_that_ran_fits(name: str) -> None:
    job = REPORTS[name]
    found = estimate_of(job)
    assert found.step_time_low_s <= job.seconds <= found.step_time_high_s
    assert found.peak_memory_bytes <= load_device(job.device).memory_bytes
    assert found.peak_memory_low_bytes < found.peak_memory_bytes < found.peak_memory_high_bytes


def test_memory_of_reported_jobs_is_met() -> None:
    # Before its loss was compiled, torchtitan had logits in fp32 several times.
    then = load_engine("torchtitan").with_constants({"loss.logits_copies": 3})
    titan = estimate_of(REPORTS["torchtitan 929"], then)
    assert titan.memory[0].reserved / GIB == pytest.approx(47.6, rel=0.1)
    swift = estimate_of(REPORTS["qwen3 1278"])
    # Experts of this run take whatever their routers give them.
    assert 46 < swift.peak_memory_bytes / GIB < 60


def test_fsdp_on_amd_is_as_slow_as_it_was_measured() -> None:
    # ROCm/TransformerEngine#79: Llama 3 8B on 8 MI300X, 410 TFLOP/s in bf16.
    for seq in (4096, 8192):
        job = Reported("dp=8 zero=3 mbs=4", "llama3-8b", seq, "mi300x", "fsdp", 32, 0.0)
        found = estimate_of(job)
        rates = [
            found.tflops_per_device * found.step_time_s / seconds
            for seconds in (found.step_time_high_s, found.step_time_low_s)
        ]
        assert rates[0] < 410 < rates[1]


def test_fp8_runs_out_of_memory_where_bf16_fits() -> None:
    # NVIDIA/Megatron-LM#1237: 7B on 8 H100, the same flags but for --fp8-format.
    job = Reported("dp=8 zero=1 mbs=1", "llama2-7b", 4096, "h100", "megatron", 64, 0.0)
    bf16, fp8 = (estimate_of(job, precision=name) for name in ("bf16", "fp8"))
    layers = load_model("llama2-7b").parameters - 2 * 32000 * 4096
    assert fp8.memory[0].parameters - bf16.memory[0].parameters == pytest.approx(2 * layers, rel=1e-3)
    assert bf16.peak_memory_bytes < fp8.peak_memory_bytes
    limit = (bf16.peak_memory_bytes + fp8.peak_memory_bytes) / 2
    assert 60 * GIB < limit < 80 * GIB


def test_nanotron_asks_for_as_many_micro_batches_as_fill_its_pipeline(tmp_path: Path) -> None:
    # huggingface/nanotron#347: AssertionError with one microbatch on eight stages.
    text = """
model:
  model_config: {hidden_size: 16, intermediate_size: 64, num_attention_heads: 4, num_key_value_heads: 4,
    num_hidden_layers: 8, vocab_size: 256, max_position_embeddings: 256, tie_word_embeddings: false}
parallelism: {dp: 1, pp: 8, tp: 1, pp_engine: 1f1b}
tokens: {batch_accumulation_per_replica: COUNT, micro_batch_size: 2, sequence_length: 256}
"""
    for count, legal in ((1, False), (7, True)):
        file = tmp_path / "config.yaml"
        file.write_text(text.replace("COUNT", str(count)))
        assert check(file, device="h100", world_size=8).legal is legal

"""Configurations of NeMo-RL are read as the job of the policy: what trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from costmodels.catalogue import load_model
from costmodels.spec.model_parts import LORA_TARGETS
from planner.inputs.model import with_seq
from tests.planner.test_public_cases import Read, written

COMMON = """\
sft:
  max_num_steps: 10
policy:
  model_name: meta-llama/Llama-3.1-8B
  train_global_batch_size: 32
  train_micro_batch_size: 1
  max_total_sequence_length: 2048
  precision: bfloat16
  sequence_packing:
    enabled: false
    train_mb_tokens: ${{mul:${{policy.max_total_sequence_length}}, ${{policy.train_micro_batch_size}}}}
  dtensor_cfg:
    enabled: {dtensor}
    cpu_offload: false
    sequence_parallel: true
    activation_checkpointing: {recompute}
    tensor_parallel_size: 2
    context_parallel_size: 1
    custom_parallel_plan: null
    lora_cfg:
      enabled: {lora}
      match_all_linear: true
      dim: 8
      alpha: 32
  megatron_cfg:
    enabled: {megatron}
    activation_checkpointing: {recompute}
    recompute_granularity: full
    recompute_modules: null
    tensor_model_parallel_size: 4
    pipeline_model_parallel_size: 2
    context_parallel_size: 1
    sequence_parallel: true
    mtp_num_layers: 0
    peft:
      enabled: {lora}
      dim: 8
    optimizer:
      optimizer: adam
      lr: 1.0e-5
      use_distributed_optimizer: true
    distributed_data_parallel_config:
      grad_reduce_in_fp32: true
      overlap_grad_reduce: true
    fp8_cfg:
      enabled: false
      fp8: e4m3
cluster:
  gpus_per_node: 8
  num_nodes: 2
"""


def config(trains: str, recompute: str = "false", lora: str = "false") -> str:
    """A configuration whose policy trains with Megatron-LM or with DTensor."""
    on = {name: str(trains == name).lower() for name in ("megatron", "dtensor")}
    return COMMON.format(**on, recompute=recompute, lora=lora)


def read_one(folder: Path, text: str, **given: Any) -> Read:
    """The reading of one file."""
    return written(folder, {"job.yaml": text}, **given)


def test_a_policy_under_megatron(tmp_path: Path) -> None:
    read = read_one(tmp_path, config("megatron", recompute="true"))
    assert read.legal and (read.reading.framework, read.reading.engine) == ("nemo-rl", "megatron")
    assert read.shown == "tp=4+sp pp=2 dp=2 zero=1 mbs=1 x 16 recompute=full"
    assert read.reading.model == with_seq(load_model("llama3.1-8b"), 2048)
    assert read.reading.precision == "bf16" and read.reading.local_world_size == 8


def test_a_policy_under_dtensor(tmp_path: Path) -> None:
    read = read_one(tmp_path, config("dtensor", recompute="true"))
    assert read.legal and (read.reading.framework, read.reading.engine) == ("nemo-rl", "torchtitan")
    assert read.shown == "tp=2+sp pp=1 dp=8 zero=3 mbs=1 x 4 recompute=full"
    whole = read_one(
        tmp_path, config("dtensor").replace("tensor_parallel_size: 2", "tensor_parallel_size: 1")
    )
    assert whole.legal and whole.reading.engine == "fsdp"


def test_keys_of_the_part_that_is_off_say_nothing(tmp_path: Path) -> None:
    other = config("dtensor").replace("mtp_num_layers: 0", "mtp_num_layers: 2\n    own_parallel: 3")
    assert read_one(tmp_path, other).legal
    assert read_one(tmp_path, other.replace("fp8: e4m3", "fp8: wrong")).legal


FP8 = "enabled: {}\n      fp8: e4m3"
PACKED = "sequence_packing:\n    enabled: {}"
MEGATRON = "megatron_cfg:\n    enabled: {}"


@pytest.mark.parametrize(
    ("old", "new", "precision"),
    [("bfloat16", "float32", "fp32"), (FP8.format("false"), FP8.format("true"), "fp8")],
)
def test_formats(old: str, new: str, precision: str, tmp_path: Path) -> None:
    assert read_one(tmp_path, config("megatron").replace(old, new)).reading.precision == precision


def test_adapters_train_under_dtensor_alone(tmp_path: Path) -> None:
    read = read_one(tmp_path, config("dtensor", lora="true"))
    assert read.legal and read.reading.model is not None and read.reading.model.lora is not None
    assert (read.reading.model.lora.rank, read.reading.model.lora.alpha) == (8, 32.0)
    assert read.reading.model.lora.targets == LORA_TARGETS
    megatron = read_one(tmp_path, config("megatron", lora="true"))
    assert megatron.legal is None and megatron.unknown == ("policy.megatron_cfg.peft.enabled",)


@pytest.mark.parametrize(
    ("old", "new", "unknown"),
    [
        ("sft:", "grpo:", "grpo.max_num_steps"),
        ("sft:", "dpo:", "dpo.max_num_steps"),
        (PACKED.format("false"), PACKED.format("true"), "policy.sequence_packing.enabled"),
        ("  precision: bfloat16\n", "", "policy.precision"),
        ("parallel_plan: null", "parallel_plan: own.plan", "policy.dtensor_cfg.custom_parallel_plan"),
        (
            "cpu_offload",
            "expert_parallel_size: 8\n    cpu_offload",
            "policy.dtensor_cfg.expert_parallel_size",
        ),
        ("Llama-3.1-8B", "Own-8B", "policy.model_name"),
        ("  precision", "  hf_config_overrides:\n    a: 1\n  precision", "policy.hf_config_overrides.a"),
        ("train_micro_batch_size: 1", "train_micro_batch_size: ${a.b}", "policy.train_micro_batch_size"),
        ("  precision", "  own_parallel_size: 2\n  precision", "policy.own_parallel_size"),
    ],
)
def test_what_decides_and_is_not_priced_is_not_known(
    old: str, new: str, unknown: str, tmp_path: Path
) -> None:
    read = read_one(tmp_path, config("dtensor").replace(old, new))
    assert read.legal is None and unknown in read.unknown


def test_packing_is_left_out_as_its_line_says(tmp_path: Path) -> None:
    text = config("dtensor").replace(
        "sequence_packing:\n    enabled: false", "sequence_packing:\n    enabled: true"
    )
    define = {"policy.sequence_packing.enabled": "false"}
    assert read_one(tmp_path, text, define=define).legal


def test_both_parts_or_none_train_nothing_that_is_known(tmp_path: Path) -> None:
    both = config("dtensor").replace(MEGATRON.format("false"), MEGATRON.format("true"))
    for text in (config("none"), both):
        read = read_one(tmp_path, text)
        assert read.legal is None and read.unknown == ("policy.megatron_cfg.enabled",)
        assert read.reading.layout is None


CHILD = """\
defaults: ../common/base.yaml
policy:
  dtensor_cfg:
    tensor_parallel_size: 4
cluster:
  num_nodes: 1
"""


def test_a_file_starts_from_another(tmp_path: Path) -> None:
    read = written(tmp_path, {"job.yaml": CHILD, "base.yaml": config("dtensor")})
    assert read.legal and read.shown == "tp=4+sp pp=1 dp=2 zero=3 mbs=1 x 16 recompute=none"
    wrong = config("dtensor").replace("train_global_batch_size: 32", "train_global_batch_size: 33")
    (problem,) = written(tmp_path, {"job.yaml": CHILD, "base.yaml": wrong}).reading.problems
    assert (problem.severity, Path(problem.file).name, problem.line) == ("illegal", "base.yaml", 5)


def test_without_it_nothing_is_taken_for_granted(tmp_path: Path) -> None:
    read = written(tmp_path, {"job.yaml": CHILD})
    (problem,) = [one for one in read.reading.problems if one.flag == "defaults"]
    assert read.legal is None and read.reading.layout is None
    assert problem.line == 1 and "base.yaml is not given" in problem.text


OWN_DEVICES = """\
  generation:
    colocated:
      enabled: false
      resources:
        num_nodes: 1
        gpus_per_node: 8
"""


def test_generation_has_devices_of_its_own(tmp_path: Path) -> None:
    read = read_one(tmp_path, config("dtensor").replace("  precision", OWN_DEVICES + "  precision"))
    assert read.reading.world_size == 8

"""Settings that few public files have, and that say what is priced, are read or named as not known."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.planner.test_public_cases import Read, written

FACTORY = """\
model_name_or_path: Qwen/Qwen2.5-7B
stage: sft
finetuning_type: full
cutoff_len: 1024
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
bf16: true
"""

AXOLOTL = """\
base_model: Qwen/Qwen2.5-7B
sequence_len: 1024
micro_batch_size: 1
gradient_accumulation_steps: 1
bf16: true
"""

SHARDED = "fsdp: [full_shard]\n"
SWIFT = (
    "NPROC_PER_NODE=8 swift sft --model Qwen/Qwen2.5-7B --tuner_type full --max_length 4096 "
    "--torch_dtype bfloat16"
)


def factory(folder: Path, more: str) -> Read:
    """The reading of a job of LLaMA-Factory with these further keys."""
    return written(folder, {"job.yaml": FACTORY + more}, world_size=8)


@pytest.mark.parametrize(
    ("more", "optimizer", "unknown"),
    [
        ("use_muon: true\n", "muon", ()),
        ("use_muon: false\noptim: adamw_8bit\n", "adam8bit", ()),
        ("use_apollo: true\n", "adam", ("--use_apollo",)),
        ("use_badam: true\n", "adam", ("--use_badam",)),
        ("use_adam_mini: true\n", "adam", ("--use_adam_mini",)),
    ],
)
def test_switches_of_optimizers_say_the_optimizer(
    tmp_path: Path, more: str, optimizer: str, unknown: tuple[str, ...]
) -> None:
    found = factory(tmp_path, more)
    assert (found.layout.optimizer, found.unknown) == (optimizer, unknown)
    assert found.legal  # Memory and time alone rest on the states.


@pytest.mark.parametrize(
    ("software", "more"),
    [
        ("factory", "finetuning_type: freeze\n"),
        ("factory", "use_llama_pro: true\n"),
        ("factory", "freeze_trainable_layers: 2\n"),
        ("axolotl", "unfrozen_parameters:\n  - ^lm_head.weight$\n"),
    ],
)
def test_weights_that_do_not_train_are_not_known(tmp_path: Path, software: str, more: str) -> None:
    text = {"factory": FACTORY, "axolotl": AXOLOTL}[software]
    kept = "\n".join(line for line in text.split("\n") if line.partition(":")[0] != more.partition(":")[0])
    found = written(tmp_path, {"job.yaml": kept + more}, world_size=8)
    assert found.legal is None and found.unknown == (f"--{more.partition(':')[0]}",)


@pytest.mark.parametrize(
    ("text", "more"),
    [
        (AXOLOTL + SHARDED + "sample_packing: true\n", "activation_offloading: legacy\n"),
        (AXOLOTL + SHARDED + "sample_packing: true\n", "tiled_mlp: true\n"),
        (FACTORY.replace("Qwen/Qwen2.5-7B", "gpt2") + "packing: true\n", "enable_liger_kernel: true\n"),
    ],
)
def test_a_job_that_keeps_less_than_is_priced_is_not_called_too_big(
    tmp_path: Path, text: str, more: str
) -> None:
    off = more.replace("true", "false").replace("legacy", "false")
    found = [written(tmp_path, {"job.yaml": text + added}, world_size=1).reading for added in (more, off)]
    assert [one.activations_are_bound for one in found] == [True, False]


def test_sequences_of_swift_are_split_by_heads(tmp_path: Path) -> None:
    script = SWIFT.replace("4096", "4095")  # A sample is padded to a multiple.
    found = written(tmp_path, {"job.sh": f"{script} --sequence_parallel_size 4\n"})
    assert found.reading.model is not None and found.reading.model.seq == 4096
    assert found.legal and found.shown.startswith("tp=1 pp=1 cp=4 cp_form=all_to_all dp=2")


def test_shards_of_axolotl_are_known(tmp_path: Path) -> None:
    more = (
        "dp_shard_size: 4\ndp_replicate_size: 2\nfsdp_version: 2\nfsdp_config: {reshard_after_forward: true}"
    )
    found = written(tmp_path, {"job.yaml": AXOLOTL + more}, world_size=8)
    assert found.unknown == () and (found.layout.zero_stage, found.layout.zero_replicas) == (3, 2)

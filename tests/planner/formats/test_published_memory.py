"""Memory that authors of fine-tuning examples published lies in the range that is told for the same flags."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from costmodels.spec.record import GIB
from planner import check
from planner.formats.check import Check


class Published(NamedTuple):
    """A public example, and the GiB of each device that its authors state."""

    source: str
    file: str
    text: str
    world_size: int
    gib: tuple[float, ...]
    """All values that are stated for these flags."""


def swift(flags: str) -> str:
    return f"swift sft --torch_dtype bfloat16 --attn_impl flash_attn {flags}\n"


GPT_OSS = (
    "base_model: openai/gpt-oss-20b\nmodel_quantization_config: Mxfp4Config\n"
    "model_quantization_config_kwargs: {dequantize: true}\nsequence_len: 4096\nsample_packing: true\n"
    "plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]\n"
    "micro_batch_size: 1\noptimizer: adamw_torch_8bit\nbf16: true\ngradient_checkpointing: true\n"
    "activation_offloading: true\n"
)
SHARDED = (
    "gradient_accumulation_steps: 2\nfsdp_version: 2\n"
    "fsdp_config: {offload_params: false, reshard_after_forward: true}\n"
)
LORA = "gradient_accumulation_steps: 8\nadapter: lora\nlora_r: 8\nlora_alpha: 16\nlora_target_linear: true\n"
SEVEN = "--model Qwen/Qwen2.5-7B --tuner_type full --per_device_train_batch_size 1 "

PUBLISHED = {
    "gpt-oss, adapters": Published("axolotl, examples/gpt-oss", "a.yaml", GPT_OSS + LORA, 1, (44,)),
    "gpt-oss, all weights": Published("axolotl, examples/gpt-oss", "a.yaml", GPT_OSS + SHARDED, 4, (46,)),
    # 54 without Liger, 42 with it.
    "liger": Published(
        "ms-swift, examples/train/liger/sft.sh",
        "a.sh",
        swift(SEVEN + "--max_length 8192 --packing true --deepspeed zero3 --use_liger_kernel true"),
        4,
        (42, 44),
    ),
    "no liger": Published(
        "ms-swift, examples/train/liger/sft.sh",
        "a.sh",
        swift(SEVEN + "--max_length 8192 --packing true --deepspeed zero3"),
        4,
        (52, 54),
    ),
    "16k": Published(
        "ms-swift, examples/train/packing/liger_kernel.sh, flash_attention_3/transformers.sh",
        "a.sh",
        swift(SEVEN + "--max_length 16384 --packing true --deepspeed zero3 --use_liger_kernel true"),
        4,
        (42, 43),
    ),
    # `adamw_torch` was the default where PyTorch was older than 2.8 (transformers/training_args.py).
    "one device": Published(
        "ms-swift, examples/train/full/train.sh",
        "a.sh",
        swift(SEVEN + "--max_length 2048 --optim adamw_torch"),
        1,
        (76,),
    ),
    "one device, liger": Published(
        "ms-swift, examples/train/agent/qwen2_5.sh",
        "a.sh",
        swift(
            SEVEN.replace("7B", "3B")
            + "--max_length 8192 --packing true --use_liger_kernel true --optim adamw_torch"
        ),
        1,
        (35,),
    ),
    "zero 2": Published(
        "ms-swift, examples/train/multi-gpu/deepspeed/train_zero2.sh",
        "a.sh",
        swift(
            "--model Qwen/Qwen2.5-7B-Instruct --tuner_type lora --lora_rank 8 --target_modules all-linear "
            "--per_device_train_batch_size 1 --max_length 2048 --deepspeed zero2"
        ),
        2,
        (18,),
    ),
}


def checked(folder: Path, job: Published, device: str = "a100-80g") -> Check:
    file = folder / job.file
    file.write_text(job.text)
    return check([file], device=device, world_size=job.world_size)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_memory_lies_in_the_range(tmp_path: Path, name: str) -> None:
    job = PUBLISHED[name]
    found = checked(tmp_path, job)
    assert found.legal and found.fits and found.plan is not None, found.problems
    low, high = (
        size / GIB
        for size in (found.plan.estimate.peak_memory_low_bytes, found.plan.estimate.peak_memory_high_bytes)
    )
    for gib in job.gib:
        assert low <= gib <= high


def test_a_job_that_ran_on_its_own_devices_fits(tmp_path: Path) -> None:
    # axolotl, examples/gpt-oss: 1 x 48 GB and 8 x 48 GB.
    for job in (PUBLISHED["gpt-oss, adapters"], PUBLISHED["gpt-oss, all weights"]._replace(world_size=8)):
        assert checked(tmp_path, job, "rtx-a6000").fits
    # ms-swift, examples/train/full/train.sh: 76 GiB; examples/megatron/benchmark/deepspeed.sh: 8 x 80 GiB.
    assert checked(tmp_path, Published("", "a.sh", swift(SEVEN + "--max_length 2048"), 1, ())).fits
    flags = (
        "--model Qwen/Qwen2.5-14B --tuner_type full --per_device_train_batch_size 1 --max_length 8192 "
        "--packing true --deepspeed zero2"
    )
    assert checked(tmp_path, Published("", "a.sh", swift(flags), 8, ())).fits


def test_samples_that_are_not_packed_may_fit_but_states_may_not(tmp_path: Path) -> None:
    # examples/train/new_special_tokens/train.sh: 26 GB on each of 4, with short samples.
    flags = (
        "--model Qwen/Qwen2.5-7B-Instruct --tuner_type lora --lora_rank 16 --target_modules all-linear "
        "--per_device_train_batch_size 16 --max_length 2048 --padding_free true --deepspeed zero2"
    )
    found = checked(tmp_path, Published("", "a.sh", swift(flags), 4, ()))
    assert found.legal and found.fits is None
    assert any("longest sample" in one for one in found.assumed)
    packed = checked(tmp_path, Published("", "a.sh", swift(flags + " --packing true"), 4, ()))
    assert packed.fits is False
    whole = flags.replace("lora ", "full ").replace("7B-Instruct", "32B").replace("--deepspeed zero2", "")
    assert checked(tmp_path, Published("", "a.sh", swift(whole), 4, ())).fits is False


def test_buckets_of_deepspeed_are_as_its_file_says(tmp_path: Path) -> None:
    script = "deepspeed --num_gpus 8 train.py --model_name_or_path Qwen/Qwen2.5-7B --bf16 true "
    script += "--model_max_length 1024 --per_device_train_batch_size 1 --deepspeed ds.json\n"
    (tmp_path / "train.sh").write_text(script)

    def buffers(zero: str) -> float:
        config = '{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "zero_optimization": {%s}}'
        (tmp_path / "ds.json").write_text(config % zero)
        found = check([tmp_path / "train.sh", tmp_path / "ds.json"], device="a100-80g", world_size=8)
        assert found.plan is not None, found.problems
        return found.plan.engine.allocator.workspace_bytes

    # One bucket in 16 bits of ZeRO 1 and 2, two if reductions overlap (stage_1_and_2.py); of ZeRO 3 one.
    assert buffers('"stage": 2') == 2 * 5e8
    assert buffers('"stage": 1, "overlap_comm": true, "reduce_bucket_size": 2e8') == 2 * 2 * 2e8
    assert buffers('"stage": 2, "contiguous_gradients": false') == 0
    assert buffers('"stage": 3, "overlap_comm": true, "reduce_bucket_size": "auto"') == 2 * 3584**2


def deepspeed(folder: Path, zero: str) -> Check:
    """Llama 2 13B on 4 nodes of 8 under DeepSpeed, with these keys of `zero_optimization`."""
    (folder / "train.sh").write_text(
        "torchrun --nnodes 4 --nproc_per_node 8 train.py --model_name_or_path meta-llama/Llama-2-13b-hf "
        "--bf16 True --model_max_length 2048 --per_device_train_batch_size 1 --gradient_accumulation_steps 2 "
        "--gradient_checkpointing True --deepspeed ds.json\n"
    )
    keys = '{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "zero_optimization": {%s}}'
    (folder / "ds.json").write_text(keys % zero)
    return check([folder / "train.sh", folder / "ds.json"], device="a100-80g")


def test_a_second_copy_within_nodes_takes_memory_and_saves_gathering(tmp_path: Path) -> None:
    plain, second = (
        deepspeed(tmp_path, f'"stage": 3{more}').plan for more in ("", ', "zero_hpz_partition_size": 8')
    )
    assert plain is not None and second is not None
    # 2 bytes a parameter over the ranks of a node (partition_parameters.py, `_partition_param_sec`).
    more = second.estimate.peak_memory_bytes - plain.estimate.peak_memory_bytes
    assert more == pytest.approx(2 * plain.model.parameters / 8, rel=1e-3)
    assert second.estimate.step_time_s < plain.estimate.step_time_s
    exposed = second.estimate.time.data_parallel, plain.estimate.time.data_parallel
    assert 0 < exposed[0] < exposed[1]


def test_a_second_copy_must_divide_the_ranks_and_belongs_to_zero_3(tmp_path: Path) -> None:
    assert deepspeed(tmp_path, '"stage": 3, "zero_hpz_partition_size": 12').legal is False
    assert deepspeed(tmp_path, '"stage": 3, "zero_hpz_partition_size": 64').legal
    found = deepspeed(tmp_path, '"stage": 2, "zero_hpz_partition_size": 8').plan
    assert found is not None and not found.engine.sharding.secondary_shards


def test_quantised_messages_are_named_where_they_are_on(tmp_path: Path) -> None:
    for switch, named in (("true", True), ("false", False)):
        found = deepspeed(tmp_path, f'"stage": 3, "zero_quantized_weights": {switch}')
        assert any("zero_quantized_weights" in one.flag for one in found.problems) is named


def test_gradients_that_zero_3_updates_in_groups_are_not_cast_at_once(tmp_path: Path) -> None:
    # ms-swift, examples/train/full/qwen2_5_32b.sh: 8 x 80 GiB.
    flags = (
        "--model Qwen/Qwen2.5-32B --tuner_type full --per_device_train_batch_size 1 --max_length 8192 "
        "--packing true --deepspeed zero3 --use_liger_kernel true"
    )
    assert checked(tmp_path, Published("", "a.sh", swift(flags), 8, ())).fits
    group = deepspeed(tmp_path, '"stage": 3, "sub_group_size": 1e8').plan
    assert group is not None and group.engine.sharding.stepping_group == 1e8


def test_a_zero_in_a_configuration_of_deepspeed_is_no_default(tmp_path: Path) -> None:
    usual = deepspeed(tmp_path, '"stage": 3').plan
    zeros = '"stage3_max_live_parameters": 0, "sub_group_size": 0, "reduce_bucket_size": 0'
    none = deepspeed(tmp_path, f'"stage": 3, {zeros}').plan
    assert usual is not None and none is not None
    # Parameters are freed after each layer, and the largest one is updated by itself.
    assert usual.engine.sharding.live_parameters == 1e9 and none.engine.sharding.live_parameters == 0
    assert none.engine.sharding.stepping_group == 5120 * 32000
    assert none.engine.allocator.workspace_bytes == 0
    assert none.estimate.memory[0].parameters < usual.estimate.memory[0].parameters


def test_layers_that_train_as_a_whole_beside_adapters_are_not_priced(tmp_path: Path) -> None:
    # ms-swift, examples/train/agent/loss_scale/train.sh: 20 GB.
    flags = (
        "--model Qwen/Qwen2.5-3B --tuner_type lora --target_modules all-linear --max_length 2048 "
        "--per_device_train_batch_size 1"
    )
    found = checked(
        tmp_path, Published("", "a.sh", swift(flags + " --modules_to_save embed_tokens lm_head"), 1, ())
    )
    assert found.legal and found.fits is None and found.plan is None
    assert checked(tmp_path, Published("", "a.sh", swift(flags), 1, ())).fits


@pytest.mark.parametrize(
    ("before", "more", "legal", "fits"),
    [
        # ms-swift, examples/train/multi-gpu/device_map: a model of 72B over 2 devices.
        ("CUDA_VISIBLE_DEVICES=0,1", "", True, None),
        ("CUDA_VISIBLE_DEVICES=0,1,2,3 NPROC_PER_NODE=2", "", True, None),
        ("CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=2", "", True, False),
        ("CUDA_VISIBLE_DEVICES=0", "", True, False),
        ("CUDA_VISIBLE_DEVICES=0,1 SWIFT_SINGLE_DEVICE_MODE=1", "", True, False),
        # swift/utils/env.py, `is_mp`; swift/arguments/sft_args.py.
        ("CUDA_VISIBLE_DEVICES=0,1,2 NPROC_PER_NODE=2", "", False, None),
        ("CUDA_VISIBLE_DEVICES=0,1", "--deepspeed zero2", False, None),
    ],
)
def test_layers_that_are_spread_over_visible_devices_are_not_priced(
    tmp_path: Path, before: str, more: str, legal: bool, fits: bool | None
) -> None:
    file = tmp_path / "a.sh"
    flags = "--model Qwen/Qwen2.5-72B-Instruct --tuner_type lora --max_length 2048 --packing true"
    file.write_text(f"{before} {swift(flags)}".replace("\n", f" {more}\n"))
    found = check([file], device="a100-80g")
    assert (found.legal, found.fits) == (legal, fits), found.problems

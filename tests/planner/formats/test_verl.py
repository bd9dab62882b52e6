"""Jobs of verl are read as what trains: the actor, or a model on given answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from costmodels.catalogue import load_model
from costmodels.spec.model_parts import LORA_TARGETS
from planner.inputs.model import with_seq
from tests.planner.test_public_cases import Read, written

COMMON = """\
python3 -m verl.trainer.main_ppo CONFIG \\
    data.train_batch_size=256 \\
    data.max_prompt_length=512 \\
    data.max_response_length=1536 \\
    actor_rollout_ref.model.path=Qwen/Qwen3-8B \\
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=8 \\
    actor_rollout_ref.rollout.n=4 \\
    algorithm.adv_estimator=grpo \\
    MORE \\
    trainer.n_gpus_per_node=8 \\
    trainer.nnodes=2
"""

OBJECTIVE = "algorithm.adv_estimator"


def actor(folder: Path, more: str = "", config: str = "", **given: Any) -> Read:
    """The reading of a job with these further keys."""
    keys = " ".join(f"actor_rollout_ref.{key}" for key in more.split())
    text = COMMON.replace("CONFIG", config).replace("MORE", keys or "trainer.total_epochs=1")
    return written(folder, {"run.sh": text}, **given)


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        # Four answers of each of 32 prompts; layers are recomputed unless a key says otherwise.
        ("", "tp=1 pp=1 dp=16 zero=3 mbs=2 x 4 recompute=full"),
        ("model.enable_gradient_checkpointing=False", "tp=1 pp=1 dp=16 zero=3 mbs=2 x 4 recompute=none"),
        (
            "actor.ulysses_sequence_parallel_size=4 actor.strategy=fsdp2",
            "tp=1 pp=1 cp=4 cp_form=all_to_all dp=4 zero=3 mbs=2 x 16 recompute=full",
        ),
        ("actor.fsdp_config.fsdp_size=8", "tp=1 pp=1 dp=16 zero=3 zero_replicas=2 mbs=2 x 4 recompute=full"),
        (
            "actor.megatron.tensor_model_parallel_size=4 actor.megatron.pipeline_model_parallel_size=2",
            "tp=4+sp pp=2 dp=2 zero=1 mbs=2 x 32 recompute=none",
        ),
        (
            "actor.megatron.override_transformer_config.recompute_granularity=full "
            "actor.megatron.override_transformer_config.recompute_method=uniform "
            "actor.megatron.override_transformer_config.recompute_num_layers=1",
            "tp=1 pp=1 dp=16 zero=1 mbs=2 x 4 recompute=full",
        ),
    ],
)
def test_the_actor_is_read(more: str, shown: str, tmp_path: Path) -> None:
    read = actor(tmp_path, more)
    assert read.shown == shown and read.legal is None and read.unknown == (OBJECTIVE,)
    assert read.reading.framework == "verl" and read.reading.precision == "bf16"
    assert read.reading.model == with_seq(load_model("qwen3-8b"), 2048)


def test_the_file_of_defaults_names_the_engine(tmp_path: Path) -> None:
    read = actor(tmp_path, config="--config-name='ppo_megatron_trainer.yaml'")
    assert read.reading.engine == "megatron" and read.layout.zero_stage == 1


def test_adapters_of_the_actor_train(tmp_path: Path) -> None:
    model = actor(tmp_path, "model.lora_rank=32").reading.model
    assert model is not None and model.lora is not None
    assert (model.lora.rank, model.lora.alpha, model.lora.targets) == (32, 16.0, LORA_TARGETS)


@pytest.mark.parametrize(
    ("more", "unknown"),
    [
        ("actor.use_dynamic_bsz=True", "actor_rollout_ref.actor.use_dynamic_bsz"),
        ("actor.strategy=own", "actor_rollout_ref.actor.strategy"),
        ("actor.fsdp_config.model_dtype=bf16", "actor_rollout_ref.actor.fsdp_config.model_dtype"),
        ("model.path=own/own", "actor_rollout_ref.model.path"),
    ],
)
def test_what_is_not_priced_is_named(more: str, unknown: str, tmp_path: Path) -> None:
    assert set(actor(tmp_path, more).unknown) == {OBJECTIVE, unknown}


ANSWERS = """\
torchrun --nnodes=1 --nproc_per_node=$1 -m verl.trainer.fsdp_sft_trainer \\
    data.train_files=train.parquet \\
    data.micro_batch_size_per_gpu=2 \\
    data.max_length=2048 \\
    model.partial_pretrain=Qwen/Qwen3-8B \\
    trainer.project_name=own
"""


def test_the_trainer_of_given_answers_has_no_rollouts(tmp_path: Path) -> None:
    assert written(tmp_path, {"run.sh": ANSWERS}).unknown == ("",)  # The number of devices.
    read = written(tmp_path, {"run.sh": ANSWERS}, define={"1": "8"})
    assert read.legal and read.shown == "tp=1 pp=1 dp=8 zero=3 mbs=2 x 16 recompute=full"
    assert read.reading.model == with_seq(load_model("qwen3-8b"), 2048)
    own = ANSWERS.replace("trainer.project", "model.own_parallel_size=4 trainer.project")
    assert written(tmp_path, {"run.sh": own}, define={"1": "8"}).unknown == ("model.own_parallel_size",)

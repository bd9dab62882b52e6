"""The objective of a job is a fact: any but the next token of one model leaves the job's price unknown."""

from __future__ import annotations

from pathlib import Path

import pytest

from costmodels.errors import InputError
from planner.formats.facts.reading import NEXT_TOKEN
from planner.formats.files import read_files
from tests.planner.test_public_cases import Read, read, written

SWIFT = (
    "megatron {} --model Qwen/Qwen2.5-7B-Instruct --tensor_model_parallel_size 4 --micro_batch_size 1 "
    "--global_batch_size 16 --max_length 2048"
)
FACTORY = (
    "model_name_or_path: Qwen/Qwen3-4B-Instruct-2507\nstage: {}\nfinetuning_type: lora\ncutoff_len: 512\n"
    "per_device_train_batch_size: 1\ntemplate: qwen3\nbf16: true\n"
)
AXOLOTL = (
    "base_model: NousResearch/Llama-2-7b-hf\nsequence_len: 512\nmicro_batch_size: 1\nbf16: auto\n"
    "gradient_accumulation_steps: 2\n{}\n"
)
TRL = (
    "model_name_or_path: Qwen/Qwen3-4B-Instruct-2507\nmax_length: 512\nbf16: true\n"
    "per_device_train_batch_size: 1\n{}\n"
)
TRAINER = (
    "torchrun {} --model_name_or_path Qwen/Qwen3-4B-Instruct-2507 --bf16 true "
    "--per_device_train_batch_size 1 --max_length 512"
)
MEGATRON = (
    "torchrun --nproc_per_node 8 {} --num-layers 8 --hidden-size 512 --num-attention-heads 8 "
    "--seq-length 512 --max-position-embeddings 512 --micro-batch-size 1 --vocab-size 32000 --bf16"
)
NEOX = (
    "pipe_parallel_size: 1\nmodel_parallel_size: 1\nnum_layers: 8\nhidden_size: 512\nnum_attention_heads: 8\n"
    "seq_length: 512\nmax_position_embeddings: 512\ntrain_micro_batch_size_per_gpu: 4\n"
    "padded_vocab_size: 50304\n{}\n"
)
PLUGINS = "plugins:\n  - axolotl.integrations.liger.LigerPlugin\n  - axolotl.integrations.{}"


def job(folder: Path, file: str, text: str, **given: object) -> Read:
    """The reading of one file, for a job of eight devices."""
    return written(folder, {file: text}, world_size=8, **given)


@pytest.mark.parametrize(
    ("file", "text", "objective", "flag"),
    [
        ("train.yaml", FACTORY.format("sft"), NEXT_TOKEN, ""),
        ("train.yaml", FACTORY.format("pt"), NEXT_TOKEN, ""),
        ("train.yaml", FACTORY.format("kto"), "preferences", "--stage"),
        ("train.yaml", FACTORY.format("rm"), "a reward model", "--stage"),
        ("train.yaml", FACTORY.format("sft") + "do_predict: true\n", "nothing", "--do_predict"),
        ("train.yaml", FACTORY.format("sft") + "do_predict: true\ndo_train: true\n", NEXT_TOKEN, ""),
        ("train.yml", AXOLOTL.format(""), NEXT_TOKEN, ""),
        ("train.yml", AXOLOTL.format(PLUGINS.format("spectrum.SpectrumPlugin")), NEXT_TOKEN, ""),
        ("train.yml", AXOLOTL.format(PLUGINS.format("diffusion.DiffusionPlugin")), "diffusion", "--plugins"),
        ("train.yml", AXOLOTL.format("diffusion:\n  noise_schedule: cosine"), "diffusion", None),
        ("train.yml", AXOLOTL.format(PLUGINS.format("kd.KDPlugin")), "distillation", "--plugins"),
        ("train.yml", AXOLOTL.format("rl: dpo"), "preferences", "--rl"),
        ("train.yml", AXOLOTL.format("reward_model: true"), "a reward model", "--reward_model"),
        ("train.yml", AXOLOTL.format("reward_model: false"), NEXT_TOKEN, ""),
        ("train.yml", AXOLOTL.format("model_type: AutoModelForCausalLM"), NEXT_TOKEN, ""),
        (
            "train.yml",
            AXOLOTL.format("model_type: AutoModelForSequenceClassification"),
            "classes",
            "--model_type",
        ),
        ("train.sh", SWIFT.format("sft"), NEXT_TOKEN, ""),
        ("train.sh", SWIFT.format("rlhf --rlhf_type dpo"), "preferences", "--rlhf_type"),
        ("train.sh", SWIFT.format("rlhf"), "preferences", ""),
        ("train.sh", SWIFT.format("sft --task_type seq_cls"), "seq_cls", "--task_type"),
        ("train.sh", TRAINER.format("train.py"), NEXT_TOKEN, ""),
        ("train.sh", TRAINER.format("run_clm.py"), NEXT_TOKEN, ""),
        ("train.sh", TRAINER.format("run_mlm.py"), "masked words", ""),
        ("train.sh", TRAINER.format("generate.py"), "nothing", ""),
        ("train.sh", TRAINER.format("eval/train.py"), NEXT_TOKEN, ""),
        ("train.sh", TRAINER.format("finetune_and_evaluate.py"), NEXT_TOKEN, ""),
        ("train.sh", MEGATRON.format("tools/run_text_generation_server.py"), "nothing", ""),
        ("train.sh", MEGATRON.format("examples/detxoify_lm/generate_samples_gpt.py"), "nothing", ""),
        ("train.sh", MEGATRON.format("tasks/main.py"), "a task after pretraining", ""),
        ("train.sh", MEGATRON.format("examples/post_training/modelopt/quantize.py"), "nothing", ""),
        ("train.sh", MEGATRON.format("train_esm2.py"), "masked words", ""),
        (
            "train.yml",
            AXOLOTL.format("model_type: Mistral3ForConditionalGeneration"),
            NEXT_TOKEN,
            "",
        ),
        ("train.sh", TRAINER.format("scripts/run_dpo.py"), "preferences", ""),
        ("train.sh", TRAINER.format("grpo/train.py"), "rewards", ""),
        ("train.sh", TRAINER.format("train.py --tune_vision true"), "images", "--tune_vision"),
        ("train.sh", TRAINER.format("train.py --tune_vision false"), NEXT_TOKEN, ""),
        ("train.sh", TRAINER.format("train.py --num_generations 8"), "rewards", "--num_generations"),
        ("train.yaml", TRL.format("packing: false"), NEXT_TOKEN, ""),
        ("train.yaml", TRL.format("beta: 0.1"), "preferences", "--beta"),
        ("train.yaml", TRL.format(""), "not known", ""),
        ("train.sh", MEGATRON.format("pretrain_gpt.py"), NEXT_TOKEN, ""),
        ("train.sh", MEGATRON.format("pretrain_bert.py"), "masked words", ""),
        ("train.sh", MEGATRON.format("pretrain_t5.py"), "an encoder and a decoder", ""),
        ("train.sh", MEGATRON.format("examples/multimodal/train.py"), "images", ""),
        ("train.sh", MEGATRON.format("posttrain_gpt.py --stage dpo"), "preferences", "--stage"),
        ("train.sh", MEGATRON.format("posttrain_gpt.py --stage sft"), NEXT_TOKEN, ""),
        ("neox.yml", NEOX.format(""), NEXT_TOKEN, ""),
        ("neox.yml", NEOX.format("train_impl: normal"), NEXT_TOKEN, ""),
        ("neox.yml", NEOX.format("train_impl: dpo"), "preferences", "train_impl"),
    ],
)
def test_an_objective_is_read_or_named(
    file: str, text: str, objective: str, flag: str | None, tmp_path: Path
) -> None:
    found = job(tmp_path, file, text)
    assert found.reading.objective == objective
    assert (found.legal is None) == (objective != NEXT_TOKEN), found.reading.problems
    assert flag is None or ((flag in found.unknown) == (objective != NEXT_TOKEN))


def test_a_command_says_what_a_configuration_of_its_trainer_does_not(tmp_path: Path) -> None:
    text = TRL.format("")
    for program, objective in (("sft.py", NEXT_TOKEN), ("dpo.py", "preferences")):
        script = f"accelerate launch --num_processes 8 --mixed_precision bf16 {program} --config train.yaml\n"
        found = written(tmp_path, {"train.sh": script, "train.yaml": text})
        assert found.reading.objective == objective
        assert (found.legal is None) == (objective != NEXT_TOKEN)


def test_a_caller_says_what_is_learned(tmp_path: Path) -> None:
    found = job(tmp_path, "train.yaml", TRL.format(""), define={"objective": "next-token"})
    assert found.legal and found.reading.objective == NEXT_TOKEN
    alone = job(tmp_path, "train.sh", TRAINER.format("dpo.py"), define=["objective=next-token"])
    assert alone.legal
    said = job(tmp_path, "train.sh", TRAINER.format("train.py"), define={"objective": "grpo"})
    assert said.legal is None and said.reading.objective == "rewards"


def test_the_file_of_an_objective_is_named(tmp_path: Path) -> None:
    """The objective stands in one of several files that start from each other."""
    base = "grpo:\n  max_num_steps: 10\npolicy:\n  model_name: meta-llama/Llama-3.1-8B\n"
    (tmp_path / "base.yaml").write_text(base)
    (tmp_path / "own.yaml").write_text("defaults: base.yaml\npolicy:\n  train_global_batch_size: 8\n")
    reading = read_files([tmp_path / "own.yaml", tmp_path / "base.yaml"])
    problem = next(one for one in reading.problems if one.flag == "grpo.max_num_steps")
    assert Path(problem.file).name == "base.yaml" and problem.line == 2


def test_a_wrong_definition_is_still_an_error(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text(FACTORY.format("sft"))
    with pytest.raises(InputError, match="define objektive"):
        read(tmp_path / "train.yaml", define={"objektive": "next-token"})

"""Files as people have them are read right, or it is said which fact of them is not known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from costmodels.errors import InputError
from costmodels.spec.layout import Layout
from planner import check
from planner.formats.check import name_what_is_missing
from planner.formats.facts.reading import Problems, Reading, verdict
from planner.formats.files import read_files
from tests.support import ROOT

FOLDERS = tuple(folder / "shared" / "cases" / "configs" for folder in (ROOT.parent, ROOT.parent.parent))


def case(name: str) -> Path:
    """The path of a file that people have; skips the test that asks for it where there is no copy."""
    for folder in FOLDERS:
        if (folder / name).is_file():
            return folder / name
    pytest.skip(f"no copy of {name} in {FOLDERS[0]}")


class Read(NamedTuple):
    """The reading of a file, and its verdict."""

    reading: Reading
    legal: bool | None
    unknown: tuple[str, ...]
    """Flags or keys that are not known."""

    @property
    def layout(self) -> Layout:
        """The layout of files that say one."""
        assert self.reading.layout is not None, self.reading.problems
        return self.reading.layout

    @property
    def shown(self) -> str:
        """The layout in words."""
        return self.layout.describe()


def read(*files: str | Path, **given: Any) -> Read:
    """The reading of files and their verdict, without a search."""
    reading = read_files(list(files), **given)
    problems = Problems(reading.file, list(reading.problems))
    name_what_is_missing(reading, problems)
    legal, kept = verdict(problems.found)
    return Read(reading, legal, tuple(one.flag for one in kept if one.severity == "unknown"))


def written(folder: Path, texts: Mapping[str, str], **given: Any) -> Read:
    """The reading of files with these texts."""
    for name, text in texts.items():
        (folder / name).write_text(text)
    return read(*(folder / name for name in texts), **given)


CASES: Mapping[str, tuple[dict[str, Any], Callable[[Read], object]]] = {
    "accelerate_flags.sh": (
        {"model": "llama2-7b"},
        lambda r: r.legal
        and r.shown == "tp=1 pp=1 dp=8 zero=3 mbs=1 x 4 recompute=none"
        and r.reading.precision == "bf16",
    ),
    "accelerate_absent_file.sh": (
        {"model": "llama2-7b"},
        lambda r: r.legal is None and r.unknown == ("--config_file",),
    ),
    "accelerate_alone.yaml": (
        {"model": "llama2-7b"},
        lambda r: r.legal is None and r.unknown == ("--per_device_train_batch_size",),
    ),
    "nemo_recipe_flag.py": ({}, lambda r: r.legal and r.layout.tensor_parallel == 2),
    "bridge_inherited_batch.py": (
        {},
        lambda r: r.legal is None and "train.global_batch_size" in r.unknown,
    ),
    "bridge_layout_helper.py": (
        {"world_size": 64, "define": {"mixed_precision": "bf16_mixed"}},
        lambda r: r.legal
        and r.layout.layers_per_stage == (15, 16, 16, 14)
        and r.layout.pipeline_parallel == 4,
    ),
    "megatron_quick_geglu.sh": (
        {},
        lambda r: r.legal
        and r.reading.model
        and (r.reading.model.gated, r.reading.model.attention_sinks) == (True, True)
        and r.reading.model.window == 128
        and r.reading.model.attention_pattern == ("window", "full") * 12,
    ),
    "deepspeed_auto.json": (
        {"model": "llama2-7b", "world_size": 8},
        lambda r: r.legal is None and r.unknown == ("bf16.enabled",),
    ),
    "megatron_no_seq_length.sh": ({}, lambda r: r.legal is None and r.unknown == ("--seq-length",)),
    "mindspeed_moe_freq.sh": (
        {},
        lambda r: r.legal and r.reading.model and r.reading.model.moe_layers == r.reading.model.layers == 24,
    ),
    "mindspeed_softmax_bias.sh": (
        {},
        lambda r: r.legal
        and r.reading.model
        and (r.reading.model.router.score, r.reading.model.router.expert_bias) == ("softmax", True),
    ),
    "megatron_unknown_tp.sh": (
        {},
        lambda r: r.legal is None and r.unknown == ("--tensor-model-parallel-size",),
    ),
    "verl.sh": (
        {},
        lambda r: r.legal is None
        and r.reading.framework == "verl"
        and (r.layout.tensor_parallel, r.layout.pipeline_parallel, r.reading.world_size) == (2, 2, 8),
    ),
    "nanotron_few_micro_batches.yaml": ({"world_size": 8}, lambda r: r.legal is False),
    "nemo_query_groups.yaml": (
        {},
        lambda r: r.legal
        and r.reading.model
        and (r.reading.model.kv_heads, r.reading.model.vocab) == (8, 128256)
        and r.reading.model.parameters == pytest.approx(8.03e9, rel=0.01),
    ),
    "ms_swift.sh": (
        {"model": "qwen3-30b-a3b"},
        lambda r: r.legal
        and r.reading.framework == "ms-swift"
        and r.shown == "tp=2+sp pp=2 ep=4 dp=2 zero=1 mbs=1 x 8 recompute=full"
        and r.reading.model
        and r.reading.model.seq == 8192,
    ),
    "axolotl_qlora.yaml": (
        {"model": "llama3-70b", "world_size": 8},
        lambda r: r.reading.framework == "axolotl"
        and r.shown == "tp=1 pp=1 dp=8 zero=3 mbs=1 x 4 recompute=full offload=optimizer"
        and r.reading.model
        and r.reading.model.lora
        and (r.reading.model.lora.rank, r.reading.model.lora.quantize_base) == (8, "nf4")
        and (r.reading.model.seq, r.reading.precision) == (512, "bf16"),
    ),
    "gpt_neox.yml": (
        {"world_size": 64},
        lambda r: r.legal
        and r.shown == "tp=2 pp=4 dp=8 zero=1 mbs=4 x 16 recompute=full"
        and r.reading.precision == "fp16",
    ),
    "mindspeed_noop_layers.sh": (
        {},
        lambda r: r.legal
        and r.reading.model
        and r.reading.model.layers == 20
        and r.layout.layers_per_stage == (6, 6, 6, 2),
    ),
    "trainer_lora.sh": (
        {"model": "qwen2.5-7b"},
        lambda r: r.reading.model
        and r.reading.model.lora
        and (r.reading.model.lora.rank, r.reading.model.lora.alpha) == (16, 32)
        and r.reading.model.lora.quantize_base == "nf4",
    ),
    "slurm_gpus_per_node.sh": (
        {},
        lambda r: r.legal and (r.layout.tensor_parallel, r.reading.world_size) == (4, 16),
    ),
    "sbatch_heredoc.sh": ({}, lambda r: r.legal and r.reading.world_size == 16),
    "printf_v.sh": ({}, lambda r: r.legal and r.reading.model and r.reading.model.moe_layers == 8),
    "deepspeed_absent_file.sh": (
        {"model": "llama2-7b"},
        lambda r: r.legal is None and r.unknown == ("--deepspeed",),
    ),
    "trainer_unknown_flag.sh": (
        {"model": "llama2-7b"},
        lambda r: r.legal is None and set(r.unknown) == {"--deepspeed", "--sequence_parallel_size"},
    ),
}  # fmt: skip
"""Cases by the name of a file: the other inputs, and conditions on the result."""


@pytest.mark.parametrize("name", CASES)
def test_files_that_people_have(name: str) -> None:
    given, holds = CASES[name]
    found = read(case(name), **given)
    assert holds(found), found


@pytest.mark.parametrize("name", CASES)
def test_all_that_is_not_known_is_named_with_its_place_and_how_to_give_it(name: str) -> None:
    given, _ = CASES[name]
    found = read(case(name), **given)
    for problem in found.reading.problems:
        if problem.severity == "unknown":
            assert problem.file.endswith(name) and problem.flag and problem.remedy


def test_values_that_a_caller_gives_are_taken() -> None:
    one = read(case("accelerate_alone.yaml"), model="llama2-7b", define={"per_device_train_batch_size": "3"})
    assert one.legal and one.layout.micro_batch_size == 3
    assert read(case("nemo_recipe_flag.py"), define={"fast": "True"}).layout.tensor_parallel == 8
    assert read(case("megatron_unknown_tp.sh"), define={"1": "4"}).layout.tensor_parallel == 4
    tp = read(case("megatron_unknown_tp.sh"), define={"tensor_model_parallel_size": "4"})
    assert tp.legal and tp.layout.tensor_parallel == 4
    with pytest.raises(InputError, match="define nonsense_key: no variable, flag or key of"):
        read(case("accelerate_alone.yaml"), model="llama2-7b", define={"nonsense_key": "1"})


MEGATRON = (
    "pretrain_gpt.py --num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 512 "
    "--max-position-embeddings 512 --micro-batch-size 1 --global-batch-size 32 --bf16 --vocab-size 1000"
)


@pytest.mark.parametrize(
    ("script", "define", "shown"),
    [
        (f"srun bash -exc 'torchrun --nproc_per_node 4 {MEGATRON}'", {}, "tp=1 pp=1 dp=4"),
        (
            f"#!/bin/bash\n#SBATCH -N2\n#SBATCH --gres=gpu:a100:4\nsrun python {MEGATRON} "
            "--tensor-model-parallel-size $SLURM_GPUS_ON_NODE --pipeline-model-parallel-size $SLURM_NNODES",
            {},
            "tp=4 pp=2 dp=1",
        ),
        (
            f"sbatch --nodes=4 --gpus-per-node=2 <<'END'\n#!/bin/bash\nsrun python {MEGATRON} "
            "--pipeline-model-parallel-size $SLURM_JOB_NUM_NODES\nEND\n",
            {},
            "tp=1 pp=4 dp=2",
        ),
        (
            'printf -v SIZE "%s %d" --tensor-model-parallel-size 2\n'
            f"torchrun --nproc_per_node 8 {MEGATRON} $SIZE",
            {},
            "tp=2 pp=1 dp=4",
        ),
        (
            "N=$(for x in 1; do echo 2; done)\nM=$(printf '%d' 2)\n"
            f"torchrun --nproc_per_node 8 {MEGATRON} --tensor-model-parallel-size $M "
            "--context-parallel-size ${N:-1}",
            {"N": "2"},
            "tp=2 pp=1 cp=2 cp_form=ring dp=2",
        ),
    ],
)
def test_scripts_in_scripts(tmp_path: Path, script: str, define: dict[str, str], shown: str) -> None:
    found = written(tmp_path, {"job.sh": script}, define=define)
    assert found.legal and found.shown.startswith(shown)


@pytest.mark.parametrize(
    ("flags", "unknown"),
    [
        ("--tensor-model-parallel-size $TP --sequence-parallel", ("--tensor-model-parallel-size",)),
        ("--fancy-parallel-size 4", ("--fancy-parallel-size",)),
        ("--fancy-parallel-size 0 --eval-batch-fancy 3 --shiny", ()),
        ("--experimental-attention-variant other", ("--experimental-attention-variant",)),
        ("--yaml-cfg job.yaml", ("--yaml-cfg",)),
        ("--global-batch-size $((8 * $N))", ("--global-batch-size",)),
        ("--fp8-format $FORMAT", ("--fp8-format",)),
        ("$(cat more.txt)", ("",)),
    ],
)
def test_a_verdict_rests_on_nothing_that_is_not_known(
    tmp_path: Path, flags: str, unknown: tuple[str, ...]
) -> None:
    script = f"torchrun --nproc_per_node 8 --nnodes 3 {MEGATRON} --global-batch-size 24 {flags}"
    found = written(tmp_path, {"job.sh": script})
    assert found.unknown == unknown and found.legal is (None if unknown else True)
    if unknown:
        answer = check(tmp_path / "job.sh", device="h100")
        assert (answer.legal, answer.fits, answer.plan, answer.best, answer.gain) == (None,) * 5
        assert answer.changes == () and answer.unknown
    # A value that is wrong by itself stays wrong.
    wrong = written(tmp_path, {"job.sh": script + " --kv-channels two"})
    assert wrong.legal is False


def test_variables_that_are_set_under_a_condition_may_hold_flags(tmp_path: Path) -> None:
    script = "if [ -f more ]; then MORE='--fp8-format hybrid'; fi\n"
    script += f"torchrun --nproc_per_node 8 {MEGATRON} $MORE $UNSET\n"
    assert written(tmp_path, {"job.sh": script}).legal is None
    assert (
        written(tmp_path, {"job.sh": script}, define={"MORE": "--fp8-format e4m3"}).reading.precision == "fp8"
    )


@pytest.mark.parametrize(
    ("flags", "model"),
    [
        ("--window-size 63,0 --window-attn-skip-freq [1,1,0,1,1,0,1,1]",
         {"window": 64, "attention_pattern": ("window", "window", "full") * 2 + ("window", "window")}),
        ("--window-size (15,0)", {"window": 16, "attention_pattern": ("window",) * 8}),
        ("--quick-geglu --glu-linear-offset 1.0", {"gated": True, "activation": "clamped_silu"}),
        ("--attention-output-gate --qk-l2-norm", {"attention_gate": True, "qk_norm_weights": False}),
        ("--rotary-percent 0.5 --position-embedding-type rope", {"rotary_dim": 32}),
        ("--num-experts 4 --moe-layer-freq 2", {"mlp_pattern": ("experts", "dense") * 4, "moe_layers": 4}),
        ("--num-experts 4 --moe-layer-freq 1 --first-k-dense-replace 3", {"dense_layers": 3}),
        ("--noop-layers 6,7", {"layers": 6}),
    ],
)  # fmt: skip
def test_flags_of_layers(tmp_path: Path, flags: str, model: dict[str, object]) -> None:
    found = written(
        tmp_path,
        {"job.sh": f"torchrun --nproc_per_node 8 {MEGATRON} {flags}".replace("(", r"\(").replace(")", r"\)")},
    )
    assert found.reading.model is not None, found.reading.problems
    assert {name: getattr(found.reading.model, name) for name in model} == model


@pytest.mark.parametrize(
    ("tokenizer", "vocab"),
    [
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Llama-3.1-8B", 128256),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model /data/Qwen2.5-7B", 151936),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model /data/tokenizer.model", 32000),
        ("--tokenizer-type GPT2BPETokenizer --vocab-file vocab.json", 50257),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model mistralai/Mistral-7B-v0.1", 32000),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model mine", None),
        ("--tokenizer-type NullTokenizer", None),
    ],
)
def test_vocabularies_by_the_name_of_a_tokenizer(tmp_path: Path, tokenizer: str, vocab: int | None) -> None:
    command = MEGATRON.replace("--vocab-size 1000", tokenizer)
    found = written(tmp_path, {"job.sh": f"torchrun --nproc_per_node 8 {command}"})
    if vocab is None:
        assert found.unknown == ("--vocab-size",)
    else:
        assert found.reading.model is not None and found.reading.model.vocab == vocab


BASE = """
def base(steps=10, short=False):
    cfg = ConfigContainer(train=TrainingConfig(global_batch_size=64, micro_batch_size=2))
    cfg.mixed_precision = bf16_mixed()
    if short:
        cfg.train.global_batch_size = 32
    return cfg
"""

JOB = """
from team.defaults import base
TP = [1, 2][0] if False else 2

def job_16gpu_h100_config(wide: bool = False):
    cfg = base(SHORT)
    cfg.model = AutoBridge.from_hf_pretrained("Qwen/Qwen3-8B").to_megatron_provider()
    cfg.model.tensor_model_parallel_size = TP if not wide else 8
    cfg.model.pipeline_model_parallel_size = 2
    cfg.model.seq_length = 2048
    place(cfg.model, 18)
    return cfg

def place(model, first):
    stages = [["embedding"] + ["decoder"] * first]
    stages.append(["decoder"] * (36 - first) + ["loss"])
    model.pipeline_model_parallel_layout = stages
"""


def test_recipes_that_are_given_together(tmp_path: Path) -> None:
    job, base = JOB.replace("SHORT", "short=True"), {"defaults.py": BASE}
    alone = written(tmp_path, {"job.py": job})
    assert alone.legal is None
    assert set(alone.unknown) == {"train.global_batch_size", "train.micro_batch_size", "mixed_precision"}
    both = written(tmp_path, {"job.py": job, **base})
    assert both.legal and both.shown == "tp=2 pp=2 dp=4 zero=1 mbs=2 x 4 recompute=none"
    assert both.layout.layers_per_stage == (18, 18)
    assert written(tmp_path, {"job.py": job, **base}, define={"wide": "True"}).layout.tensor_parallel == 8
    longer = written(tmp_path, {"job.py": job.replace("short=True", ""), **base})
    assert longer.layout.global_batch_size == 64
    either = written(tmp_path, {"job.py": job.replace("short=True", "short=asked()"), **base})
    assert either.legal is None and "train.global_batch_size" in either.unknown


TRAINER = (
    "torchrun --nproc_per_node 8 train.py --model_name_or_path meta-llama/Llama-2-7b-hf --bf16 "
    "--max_seq_length 512"
)
TORCHRUN, ACCELERATE = (
    "torchrun --nproc_per_node",
    "accelerate launch --zero_stage 2 --use_deepspeed --num_processes",
)
LLAMA = "model_name_or_path: meta-llama/Llama-2-7b-hf\nbf16: true\n"


@pytest.mark.parametrize(
    ("texts", "holds"),
    [
        (
            {"job.sh": TRAINER.replace(TORCHRUN, ACCELERATE)},
            lambda r: r.legal and "dp=8 zero=2" in r.shown and r.reading.engine == "deepspeed",
        ),
        (
            {"job.sh": TRAINER.replace(f"{TORCHRUN} 8", "deepspeed --include localhost:0,1,2,3")},
            lambda r: r.reading.world_size == 4,
        ),
        (
            {"job.sh": TRAINER.replace("--max_seq_length 512", "--seed 1")},
            lambda r: r.unknown == ("--max_seq_length",),
        ),
        (
            {"job.sh": TRAINER + " --use_lora --lora_rank 4 --lora_target_modules q_proj v_proj o_proj"},
            lambda r: r.legal and r.reading.model.lora.targets == ("query", "value", "output"),
        ),
        ({"job.sh": TRAINER + " --use_lora"}, lambda r: r.unknown == ("--use_lora",)),
        ({"job.sh": TRAINER + " --load_in_8bit --lora_r 4"}, lambda r: r.unknown == ("--load_in_8bit",)),
        (
            {"job.sh": TRAINER + " --fsdp_config fsdp.json --fsdp full_shard"},
            lambda r: r.unknown == ("--fsdp_config",),
        ),
        (
            {"job.sh": "NPROC_PER_NODE=4 swift sft --model Qwen/Qwen3-8B --max_length 512 --bf16 true "
             "--torch_dtype bfloat16 --per_device_train_batch_size 1"},
            lambda r: r.reading.framework == "ms-swift"
            and (r.reading.world_size, r.reading.model.lora.rank) == (4, 8),
        ),
        (
            {
                "sft.yaml": LLAMA + "stage: sft\nfinetuning_type: lora\ncutoff_len: 512\ntemplate: llama2\n"
                "per_device_train_batch_size: 2\ngradient_accumulation_steps: 4\n",
                "job.sh": "NPROC_PER_NODE=2 llamafactory-cli train sft.yaml",
            },
            lambda r: r.reading.framework == "llama-factory"
            and r.reading.world_size == 2
            and r.shown == "tp=1 pp=1 dp=2 zero=0 mbs=2 x 4 recompute=full"
            and r.reading.model.lora.rank == 8,
        ),
        (
            {
                "grpo.yaml": LLAMA + "per_device_train_batch_size: 2\nmax_seq_length: 512\n",
                "zero3.yaml": "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 8\n"
                "num_machines: 1\ndeepspeed_config: {zero_stage: 3}\n",
                "job.sh": "accelerate launch --config_file zero3.yaml sft.py --config grpo.yaml",
            },
            lambda r: r.legal and r.reading.framework == "trl" and "dp=8 zero=3 mbs=2 x 1" in r.shown,
        ),
    ],
)  # fmt: skip
def test_trainers(tmp_path: Path, texts: dict[str, str], holds: Callable[[Read], object]) -> None:
    found = written(tmp_path, texts)
    assert holds(found), found


@pytest.mark.parametrize(
    ("name", "text", "software"),
    [
        ("a.yml", "per_device_batch_size: 4\nici_fsdp_parallelism: -1\n", "MaxText"),
        ("a.yaml", "max_duration: 10ba\nmodel: {name: mpt}\ntrain_loader: {name: text}\n", "llm-foundry"),
        ("a.yaml", "model: {_component_: torchtune.models.llama3.llama3_8b}\nbatch_size: 2\n", "torchtune"),
        ("a.yaml", "distributed: {fsdp_type: full_shard, dp_shard: 1}\n", "lingua"),
        ("a.py", "parallel = dict(zero1=dict(size=8), tensor=dict(size=2))\n", "InternEvo"),
        ("a.py", "from olmo_core.train import TrainerConfig\n", "OLMo-core"),
        ("a.yaml", "trainer: {mp: 'p=f32,c=bfloat16', train_batch_size: 8}\n", "Levanter"),
        ("a.sh", "python -m levanter.main.train_lm --config_path a.yaml\n", "Levanter"),
    ],
)
def test_software_that_is_known_and_not_read(tmp_path: Path, name: str, text: str, software: str) -> None:
    with pytest.raises(InputError, match=f"is of {software}, whose files are not read"):
        written(tmp_path, {name: text})


def test_a_flag_that_nobody_knows_is_left_out_as_its_line_says(tmp_path: Path) -> None:
    text = (
        "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 256 --vocab-size 1000 "
        "--num-attention-heads 4 --seq-length 512 --max-position-embeddings 512 --micro-batch-size 1 "
        "--own-parallel 2\n"
    )
    read = written(tmp_path, {"job.sh": text})
    (problem,) = [one for one in read.reading.problems if one.severity == "unknown"]
    (given,) = [word.rstrip("=") for word in problem.remedy.split() if word.endswith("=")]
    assert read.legal is None and written(tmp_path, {"job.sh": text}, define={given: ""}).legal
    assert written(tmp_path, {"job.sh": text}, define=[f"{given}="]).legal
    still = written(tmp_path, {"job.sh": text}, define={given: "4"})
    assert still.legal is None and still.unknown == ("--own-parallel",)


NEMO = """\
trainer:
  devices: 8
  num_nodes: 1
  precision: bf16
  limit_val_batches: 4
model:
  tensor_model_parallel_size: 2
  num_layers: 4
  hidden_size: 256
  num_attention_heads: 4
  ffn_hidden_size: 1024
  encoder_seq_length: 512
  max_position_embeddings: 512
  micro_batch_size: 1
  global_batch_size: 8
  peft:
    peft_scheme: null
    lora_tuning:
      adapter_dim: 32
"""


@pytest.mark.parametrize(
    ("old", "new", "unknown"),
    [
        ("  num_layers", "  own_parallel_size: 4\n  num_layers", "model.own_parallel_size"),
        ("peft_scheme: null", "peft_scheme: lora", "model.peft.peft_scheme"),
        ("  num_layers", "  hybrid_override_pattern: M*M*\n  num_layers", "model.hybrid_override_pattern"),
    ],
)
def test_keys_of_nemo_that_decide_and_are_not_read_are_not_known(
    old: str, new: str, unknown: str, tmp_path: Path
) -> None:
    assert written(tmp_path, {"nemo.yaml": NEMO}).legal
    read = written(tmp_path, {"nemo.yaml": NEMO.replace(old, new)})
    assert read.legal is None and read.unknown == (unknown,)


NEMO_RECIPE = """\
import nemo_run as run


def finetune_recipe(peft_scheme: str = "lora") -> run.Partial:
    recipe = run.Partial(
        llm.finetune,
        model=run.Config(llm.LlamaModel, config=run.Config(llm.Llama3Config8B)),
        trainer=run.Config(
            nl.Trainer,
            devices=8,
            num_nodes=1,
            strategy=run.Config(
                nl.MegatronStrategy, tensor_model_parallel_size=4, pipeline_model_parallel_size=1
            ),
        ),
        data=run.Config(llm.SquadDataModule, seq_length=2048, micro_batch_size=1, global_batch_size=8),
    )
    if peft_scheme is None or peft_scheme.lower() == "none":
        recipe.trainer.strategy.tensor_model_parallel_size = 2
    else:
        recipe.peft = run.Config(PEFT[peft_scheme.lower()])
    return recipe
"""


def test_adapters_of_a_recipe_are_not_known(tmp_path: Path) -> None:
    read = written(tmp_path, {"recipe.py": NEMO_RECIPE})
    assert read.legal is None and "peft" in read.unknown and read.layout.tensor_parallel == 4
    whole = written(tmp_path, {"recipe.py": NEMO_RECIPE}, define={"peft_scheme": "None"})
    assert "peft" not in whole.unknown and whole.layout.tensor_parallel == 2


def test_what_a_function_that_is_not_given_returns_is_never_illegal(tmp_path: Path) -> None:
    text = """\
from megatron.bridge.recipes.common import _pretrain_common
from own import layout_of


def pretrain_config():
    cfg = _pretrain_common()
    cfg.model = GPTModelProvider(num_layers=61, hidden_size=1024, num_attention_heads=8, seq_length=2048)
    cfg.model.tensor_model_parallel_size = 1
    cfg.model.pipeline_model_parallel_size = 4
    cfg.model.pipeline_model_parallel_layout = layout_of(4)
    cfg.train.micro_batch_size = 1
    cfg.train.global_batch_size = 64
    return cfg
"""
    read = written(tmp_path, {"recipe.py": text}, world_size=8)
    assert read.legal is None and "model.pipeline_model_parallel_layout" in read.unknown

"""Settings in public scripts and configurations are read as their software takes them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from costmodels.errors import InputError
from planner import check
from planner.formats.check import Check
from planner.formats.facts.reading import verdict
from planner.formats.files import read_files
from planner.formats.recognised import NotReadError
from planner.inputs.huggingface.script_names import model_of
from tests.planner.test_public_cases import Read, written

MEGATRON = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 8 --hidden-size 512 --num-attention-heads 8 "
    "--seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 64 --bf16 "
)
MINDSPEED = MEGATRON + "--vocab-size 32000 --use-fused-rmsnorm "
DEEPSPEED = MEGATRON + "--vocab-size 32000 --deepspeed "
NEOX = (
    "pipe_parallel_size: 1\nmodel_parallel_size: 1\nnum_layers: 8\nhidden_size: 512\nnum_attention_heads: 8\n"
    "seq_length: 1024\nmax_position_embeddings: 1024\npos_emb: rotary\npadded_vocab_size: 50304\n"
)
NEOX_BATCH = "train_micro_batch_size_per_gpu: 4\n"
TRAINER = "deepspeed --num_gpus 8 train.py --model_name_or_path meta-llama/Llama-2-7b-hf --bf16 True "
SWIFT = "NPROC_PER_NODE=2 swift sft --model Qwen/Qwen3-8B --max_length 512 --per_device_train_batch_size 1 "
NANOTRON = (
    "parallelism:\n  dp: 8\n  pp: 1\n  tp: 1\ntokens:\n  batch_accumulation_per_replica: 2\n"
    "  micro_batch_size: 2\n  sequence_length: 1024\nmodel:\n  dtype: bfloat16\n  model_config:\n"
    "    hidden_size: 512\n    intermediate_size: 2048\n    num_attention_heads: 8\n"
    "    num_hidden_layers: 8\n"
    "    num_key_value_heads: 8\n    vocab_size: 32000\n    max_position_embeddings: 1024\n"
)
NEMO = (
    "trainer: {devices: 8, num_nodes: 1, precision: bf16}\nmodel:\n  micro_batch_size: 1\n"
    "  global_batch_size: 8\n  tensor_model_parallel_size: 1\n  pipeline_model_parallel_size: 1\n"
    "  encoder_seq_length: 512\n  max_position_embeddings: 512\n  num_layers: 4\n  hidden_size: 256\n"
    "  ffn_hidden_size: 1024\n  num_attention_heads: 4\n  tokenizer: {type: GPT2BPETokenizer}\n"
)
AXOLOTL = (
    "base_model: NousResearch/Llama-2-7b-hf\nsequence_len: 512\nmicro_batch_size: 1\nbf16: auto\n"
    "gradient_accumulation_steps: 2\n"
)
SWIFT_FULL = (
    "NPROC_PER_NODE=8 swift sft --model Qwen/Qwen2.5-7B --tuner_type full --max_length 512 "
    "--per_device_train_batch_size 1"
)
BRIDGE = """
import torch
from megatron.bridge import AutoBridge

def recipe_8gpu_h100_bf16_config():
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("Qwen/Qwen3-30B-A3B").get_model_config()
    cfg.model.seq_length = 4096
    cfg.model.tensor_model_parallel_size = 1
    cfg.model.pipeline_model_parallel_size = 1
    cfg.model.context_parallel_size = 1
    cfg.model.expert_model_parallel_size = 8
    cfg.train.global_batch_size = 64
    cfg.train.micro_batch_size = 1
    cfg.optimizer.main_grads_dtype = torch.float32
    cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=True)
    return cfg
"""

CASES: dict[str, tuple[str, str, Callable[[Read], object]]] = {
    "a vocabulary that is padded to a size": (
        "job.sh",
        MEGATRON + "--pad-vocab-size-to 250880 --tokenizer-type PretrainedFromHF",
        lambda r: r.legal and r.reading.model.vocab == 250880,
    ),
    "tokenizers of Pai-Megatron-Patch": (
        "job.sh",
        MEGATRON + "--patch-tokenizer-type LLama3Tokenizer --extra-vocab-size 256",
        lambda r: r.legal and r.reading.model.vocab == 128256,
    ),
    "a tokenizer of Pai-Megatron-Patch that several models have": (
        "job.sh",
        MEGATRON + "--patch-tokenizer-type DeepSeekV2Tokenizer",
        lambda r: r.legal is None and r.unknown == ("--vocab-size",),
    ),
    "a tokenizer in a file whose name is not known": (
        "job.sh",
        MEGATRON + "--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model $DATA/any.model",
        lambda r: r.legal is None and "--vocab-size" in r.unknown,
    ),
    "a file that the script writes under the number of its job": (
        "job.sh",
        'config="./ds.$SLURM_JOBID.json"\ncat <<EOT > $config\n{"train_micro_batch_size_per_gpu": 1,\n'
        '"train_batch_size": 64, "zero_optimization": {"stage": 2}}\nEOT\n'
        + DEEPSPEED
        + "--deepspeed_config $config",
        lambda r: r.legal and "zero=2" in r.shown,
    ),
    "flags of a branch that does not run": (
        "job.sh",
        'if [ "$1" != none ]; then\n  LOAD="--load $1"\nfi\n' + MEGATRON + "--vocab-size 32000 $LOAD",
        lambda r: r.legal,
    ),
    "flags of a branch that may run": (
        "job.sh",
        'if [ -f "$1" ]; then\n  MORE="--tensor-model-parallel-size 2"\nfi\n'
        + MEGATRON
        + "--vocab-size 32000 $MORE",
        lambda r: r.legal is None,
    ),
    "flags of a branch that changes no price": (
        "job.sh",
        'if [ -d "$CKPT" ]; then\n  NEW=""\nelse\n  NEW="--finetune \\\n --no-load-rng"\nfi\n'
        + MEGATRON
        + "--vocab-size 32000 $NEW",
        lambda r: r.legal,
    ),
    "a branch that an argument decides": (
        "job.sh",
        'PR=$1\nif [ $PR = bf16 ]; then\n  OPTS="--bf16"\nelif [ $PR = fp16 ]; then\n  OPTS="--fp16"\nfi\n'
        + MEGATRON.replace("--bf16 ", "")
        + "--vocab-size 32000 $OPTS",
        lambda r: r.legal is None,
    ),
    "a case that an argument decides": (
        "job.sh",
        'case $1 in\n  8) OPTS="--tensor-model-parallel-size 8";;\n  *) OPTS="";;\nesac\n'
        + MEGATRON
        + "--vocab-size 32000 $OPTS",
        lambda r: r.legal is None,
    ),
    "arguments that a loop takes": (
        "job.sh",
        'TP=2\nif [ "$1" = "" ]; then PP=1; fi\n'
        'while [[ "$1" != "" ]]; do\n  case $1 in\n    --tp) TP=$2; shift 2;;\n  esac\ndone\n'
        + MEGATRON
        + "--vocab-size 32000 --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP",
        lambda r: r.legal and r.layout.tensor_parallel == 2,
    ),
    "flags of a trainer that a command sets": (
        "job.sh",
        "EXTRA=$(python flags.py)\n"
        + TRAINER.replace("train.py ", "train.py $EXTRA ")
        + "--model_max_length 512 --per_device_train_batch_size 2 --gradient_accumulation_steps 2",
        lambda r: r.legal is None and r.unknown == ("",),
    ),
    "keys that an argument decides": (
        "job.sh",
        'if [ "$1" = tp ]; then\n  MORE="model.tensor_model_parallel_size=4"\nfi\n'
        "python3 -m verl.trainer.fsdp_sft_trainer data.train_batch_size=64 data.max_length=512 "
        "model.partial_pretrain=Qwen/Qwen3-8B data.micro_batch_size_per_gpu=1 trainer.project_name=x $MORE\n",
        lambda r: r.legal is None and "" in r.unknown,
    ),
    "flags of a trainer after a value": (
        "job.sh",
        'if [ "$1" = z ]; then\n  MORE="--deepspeed z.json"\nelse\n  MORE=""\nfi\n'
        + TRAINER
        + "--model_max_length 512 --per_device_train_batch_size 2 --gradient_accumulation_steps 2 $MORE",
        lambda r: r.legal is None and r.unknown == ("",) and r.layout.micro_batches == 2,
    ),
    "idle flags of a trainer": (
        "job.sh",
        'if [ -d "$1" ]; then\n  MORE="--report_to wandb"\nelse\n  MORE=""\nfi\n'
        + TRAINER
        + "--model_max_length 512 --per_device_train_batch_size 2 --gradient_accumulation_steps 2 $MORE",
        lambda r: r.legal,
    ),
    "a batch that grows in steps": (
        "job.sh",
        MEGATRON.replace("--global-batch-size 64", "--step-batch-size-schedule '0:16 1.5B:32'"),
        lambda r: r.legal and r.layout.global_batch_size == 32,
    ),
    "flags with underscores": (
        "job.sh",
        MEGATRON.replace("-size", "_size").replace("num-", "num_") + "--tensor_model_parallel_size 2",
        lambda r: r.reading.framework == "megatron" and "tp=2" in r.shown,
    ),
    "one expert and a capacity": (
        "job.sh",
        DEEPSPEED
        + "--zero-stage 1 --num-experts 1 --moe-train-capacity-factor 1.0 --moe-expert-parallel-size 1",
        lambda r: r.legal and r.reading.model.experts == 0,
    ),
    "stages of the embedding alone": (
        "job.sh",
        DEEPSPEED + "--zero-stage 1 --pipeline-model-parallel-size 8 --num-layers 7 "
        "--pp-partition-method 'type:transformer|embedding'",
        lambda r: r.legal is None and r.unknown == ("--pipeline-model-parallel-size",),
    ),
    "more stages than layers": (
        "job.sh",
        DEEPSPEED + "--zero-stage 1 --pipeline-model-parallel-size 8 --num-layers 7",
        lambda r: r.legal is False,
    ),
    "recomputation of no layers": (
        "job.sh",
        MINDSPEED + "--recompute-num-layers 0 --enable-recompute-layers-per-pp-rank --swap-attention "
        "--recompute-activation-function",
        lambda r: r.legal and r.layout.recompute_modules == ("activation",),
    ),
    "whole layers, and activation functions of the others": (
        "job.sh",
        MINDSPEED + "--recompute-granularity full --recompute-method block --recompute-num-layers 1 "
        "--recompute-activation-function",
        lambda r: r.legal and r.layout.recompute == "full" and r.reading.memory_is_bound,
    ),
    "MindSpeed's uniform recomputation beside that of activation functions": (
        "job.sh",
        MINDSPEED + "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
        "--recompute-activation-function",
        lambda r: r.legal is False,
    ),
    "adapters of MindSpeed-LLM": (
        "job.sh",
        MINDSPEED + "--swiglu --lora-r 4 --lora-alpha 8 --lora-target-modules linear_qkv linear_fc1",
        lambda r: (
            r.legal
            and (r.reading.model.lora.rank, r.reading.model.lora.alpha) == (4, 8)
            and {*r.reading.model.lora.targets} == {"query", "key", "value", "gate", "up"}
        ),
    ),
    "adapters of layers that nobody knows": (
        "job.sh",
        MINDSPEED + "--lora-target-modules linear_other",
        lambda r: r.legal is None and r.unknown == ("--lora-target-modules",),
    ),
    "GLM in MindFormers": (
        "glm.yaml",
        "parallel_config: {data_parallel: 8, model_parallel: 1, pipeline_stage: 1}\nuse_parallel: true\n"
        "runner_config: {batch_size: 1}\nmodel:\n  model_config:\n    type: ChatGLM2Config\n"
        "    num_layers: 4\n    hidden_size: 512\n    ffn_hidden_size: 1536\n    num_attention_heads: 8\n"
        "    kv_channels: 64\n    multi_query_attention: true\n    multi_query_group_num: 2\n"
        "    padded_vocab_size: 1024\n    seq_length: 512\n    add_qkv_bias: true\n"
        "    compute_dtype: bfloat16\n",
        # Queries and outputs, keys and values, biases, three matrices of the MLP, norms; two embeddings.
        lambda r: (
            r.legal
            and r.reading.model.parameters
            == 4 * (2 * 512**2 + 2 * 512 * 128 + 512 + 256 + 3 * 512 * 1536 + 2 * 512) + 2 * 1024 * 512 + 512
        ),
    ),
    "multi-query attention of BigCode's fork": (
        "job.sh",
        MEGATRON + "--vocab-size 49152 --attention-head-type multiquery",
        lambda r: r.legal and r.reading.model.kv_heads == 1,
    ),
    "formats of PyTorch, and overlap that turns itself off": (
        "recipe.py",
        BRIDGE,
        lambda r: r.legal and r.layout.expert_parallel == 8,
    ),
    "a class of models with defaults of its own": (
        "recipe.py",
        BRIDGE.replace(
            'AutoBridge.from_hf_pretrained("Qwen/Qwen3-30B-A3B").get_model_config()',
            "Gemma3ModelProvider(num_layers=26, hidden_size=1152, num_attention_heads=4, window_size=512)",
        ),
        lambda r: r.legal is None and "Gemma3ModelProvider.num_layers" in r.unknown,
    ),
    "a gated MLP of GPT-NeoX": (
        "neox.yml",
        NEOX + NEOX_BATCH + "activation: swiglu\nintermediate_size: 4608\nfp16: {enabled: true}\n",
        lambda r: r.legal and r.reading.model.gated and r.reading.model.ffn == 1536,
    ),
    "GPT-NeoX's fp16 that is bf16": (
        "neox.yml",
        NEOX + NEOX_BATCH + "fp16: {enabled: true, type: bfloat16}\nfp32_allreduce: true\n",
        lambda r: r.legal and r.reading.precision == "bf16",
    ),
    "a configuration of GPT-NeoX without its batch": (
        "neox.yml",
        NEOX,
        lambda r: r.legal is None and r.unknown == ("train_micro_batch_size_per_gpu",),
    ),
    "a rank of adapters beside a base that is not quantised": (
        "job.sh",
        TRAINER + "--model_max_length 512 --per_device_train_batch_size 2 --lora_r 8 --q_lora False",
        lambda r: r.reading.model.lora.rank == 8 and r.reading.model.lora.quantize_base is None,
    ),
    "adapters that a switch turns off": (
        "job.sh",
        TRAINER + "--model_max_length 512 --per_device_train_batch_size 2 --lora_r 8 --use_lora False",
        lambda r: r.reading.model.lora is None,
    ),
    "a sequence that nothing says": (
        "job.sh",
        TRAINER + "--per_device_train_batch_size 2 --gradient_accumulation_steps 2",
        lambda r: r.legal is None and "--max_seq_length" in r.unknown,
    ),
    "ms-swift's own batch": (
        "job.sh",
        SWIFT.replace("--per_device_train_batch_size 1", ""),
        lambda r: r.shown.startswith("tp=1 pp=1 dp=8 zero=0 mbs=1 x 2"),
    ),
    "axolotl's own microbatch": (
        "axolotl.yml",
        AXOLOTL.replace("micro_batch_size: 1", "sample_packing: true"),
        lambda r: r.layout.micro_batch_size == 1,
    ),
    "nanotron without its microbatch": (
        "nanotron.yaml",
        NANOTRON.replace("  micro_batch_size: 2\n", ""),
        lambda r: r.legal is None and r.unknown == ("tokens.micro_batch_size",),
    ),
    "a degree of nanotron that nothing says": (
        "nanotron.yaml",
        NANOTRON.replace("  pp: 1\n", ""),
        lambda r: r.legal is None and r.unknown == ("parallelism.pp",),
    ),
    "a format of fp8 that nothing turns on": (
        "nemo.yaml",
        NEMO.replace("  num_layers", "  fp8_hybrid: true\n  num_layers"),
        lambda r: r.legal and r.reading.precision == "bf16",
    ),
    "what a model calls itself": (
        "job.sh",
        SWIFT + "--model_name swift-robot --deepspeed zero3",
        lambda r: (
            r.legal
            and "zero=3" in r.shown
            and (r.reading.model.name, r.reading.precision, r.layout.recompute)
            == ("qwen3-8b", "bf16", "full")
        ),
    ),
    "ms-swift under another launcher": (
        "job.sh",
        SWIFT.replace("NPROC_PER_NODE=2 swift sft", "torchrun --nproc_per_node 2 swift/cli/sft.py"),
        lambda r: r.reading.framework == "ms-swift",
    ),
    "adapters under ms-swift's Megatron": (
        "job.sh",
        "NPROC_PER_NODE=2 megatron sft --model Qwen/Qwen3-8B --tuner_type lora --lora_rank 4 "
        "--tensor_model_parallel_size 2 --max_length 512",
        lambda r: r.legal and "tp=2" in r.shown and r.reading.model.lora.rank == 4,
    ),
    "steps that expr computes": (
        "job.sh",
        "n=2\n" + SWIFT + "--gradient_accumulation_steps $(expr 16 / $n)",
        lambda r: r.layout.micro_batches == 8,
    ),
    "inputs of layers that wait in host memory": (
        "axolotl.yml",
        AXOLOTL + "gradient_checkpointing: offload\n",
        lambda r: r.layout.recompute == "full" and r.reading.activations_are_bound,
    ),
    "TRL's own defaults": (
        "sft.yaml",
        "model_name_or_path: Qwen/Qwen3-8B\nmax_length: 512\nper_device_train_batch_size: 1\n",
        lambda r: (r.reading.precision, r.layout.recompute) == ("bf16", "full"),
    ),
    "a loop of its own, whose precision its launcher says": (
        "sft.yaml",
        "model_name_or_path: Qwen/Qwen3-8B\nmax_seq_length: 512\nper_device_train_batch_size: 1\n"
        "use_slow_tokenizer: true\ncheckpointing_steps: epoch\n",
        lambda r: r.legal is None and r.unknown == ("--mixed_precision",),
    ),
    "flags of experts of a model without experts": (
        "job.sh",
        MEGATRON + "--vocab-size 32000 --moe-router-topk 2 --moe-layer-freq 2 --moe-router-pre-softmax",
        lambda r: (
            r.legal
            and not r.reading.model.experts
            and "has no effect without --num-experts" in {one.text for one in r.reading.problems}
        ),
    ),
    "a width of experts that are not there": (
        "job.sh",
        MEGATRON + "--vocab-size 32000 --moe-ffn-hidden-size 512",
        lambda r: r.legal is False,  # "Please set num_moe_experts or remove moe_ffn_hidden_size."
    ),
    "counts that a script's own text leaves to variables": (
        "fsdp.yaml",
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\n"
        "fsdp_config: {fsdp_version: 2}\nnum_machines: $NUM_NODES\nnum_processes: $NUM_PROCESSES\n",
        lambda r: r.legal is None and {"num_machines", "num_processes"} <= {*r.unknown},
    ),
    "a value that Hydra's caller must give": (
        "nemo.yaml",
        NEMO.replace("tensor_model_parallel_size: 1", "tensor_model_parallel_size: ???"),
        lambda r: r.legal is None and r.unknown == ("model.tensor_model_parallel_size",),
    ),
    "earlier names of layers and sequences alone": (
        "job.sh",
        MEGATRON.replace("--num-layers", "--encoder-num-layers").replace(
            "--seq-length", "--encoder-seq-length"
        )
        + "--vocab-size 32000",
        lambda r: r.legal and (r.reading.model.layers, r.reading.model.seq) == (8, 1024),
    ),
    "earlier and present names of layers": (
        "job.sh",
        MEGATRON + "--vocab-size 32000 --encoder-num-layers 8",
        lambda r: r.legal is False,
    ),
    "a method of NeMo that selective recomputation does not use": (
        "nemo.yaml",
        NEMO.replace(
            "  num_layers",
            "  activations_checkpoint_granularity: selective\n  activations_checkpoint_method: uniform\n"
            "  activations_checkpoint_num_layers: 1\n  num_layers",
        ),
        lambda r: r.legal and r.layout.recompute == "selective",
    ),
    "weights that stay in fp8": (
        "job.sh",
        MEGATRON + "--vocab-size 32000 --fp8-format hybrid --fp8-param-gather --use-distributed-optimizer",
        lambda r: r.legal and r.reading.memory_is_bound,
    ),
    "accelerate's launcher as a module": (
        "job.sh",
        "uv run python -m accelerate.commands.launch --mixed_precision bf16 --num_processes 4 tune.py "
        "--model_name_or_path Qwen/Qwen3-0.6B --max_seq_length 512 --per_device_train_batch_size 2 "
        "--use_lora --lora_rank 64\n",
        lambda r: r.legal and (r.reading.precision, r.reading.program) == ("bf16", "tune.py"),
    ),
    "a command in a block of a page": (
        "README.md",
        'Run\n\n```bash\nMODEL="meta-llama/Llama-2-7b-hf"\n\n'
        + TRAINER.replace("meta-llama/Llama-2-7b-hf", "$MODEL").replace(" --", " \\\n    --")
        + "\\\n    --model_max_length 512 \\\n    --per_device_train_batch_size 2\n```\nand it's done.\n",
        lambda r: r.reading.model.name == "llama2-7b",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_public_habits(tmp_path: Path, name: str) -> None:
    file, text, holds = CASES[name]
    found = written(tmp_path, {file: text}, world_size=8)
    assert holds(found), found


def test_a_file_about_fsdp_beside_its_command(tmp_path: Path) -> None:
    command = TRAINER.replace("deepspeed --num_gpus 8", "torchrun --nproc_per_node 8") + (
        "--fsdp 'full_shard auto_wrap' --fsdp_config=fsdp.json --block_size=512 "
        "--per_device_train_batch_size=2"
    )
    alone = written(tmp_path, {"job.sh": command})
    assert alone.legal is None and alone.unknown == ("--fsdp_config",)
    config = '{"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "activation_checkpointing": true}'
    found = written(tmp_path, {"job.sh": command, "fsdp.json": config})
    assert found.legal and found.reading.framework == "transformers"
    assert found.shown == "tp=1 pp=1 dp=8 zero=3 mbs=2 x 1 recompute=full"


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("Qwen/Qwen3-4B-Instruct-2507", "qwen3-4b"),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", "qwen2.5-7b"),
        ("/models/Qwen/Qwen2___5-Coder-1___5B/", "qwen2.5-1.5b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", "qwen2.5-14b"),
        ("casperhansen/llama-3-70b-fp16", "llama3-70b"),
        ("hugging-quants/Meta-Llama-3.1-405B-BNB-NF4-BF16", "llama3-405b"),
        ("lmsys/vicuna-13b-v1.5", "llama2-13b"),
        ("google/gemma-2b-it", "gemma-2b"),
        ("allenai/OLMo-2-1124-13B", "olmo2-13b"),
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct", None),
        ("someone/my-llama", None),
    ],
)
def test_names_of_the_hub(name: str, model: str | None) -> None:
    found = model_of(name)
    assert (None if found is None else found.name) == model


@pytest.mark.parametrize(
    ("file", "text", "software"),
    [
        ("olmo.yaml", "device_train_microbatch_size: 2\ntokenizer: {identifier: t.json}\n", "OLMo"),
        (
            "mpt.yaml",
            "model: {name: mpt_causal_lm, d_model: 64, n_layers: 2}\ntrain_loader: {name: text}\n"
            "max_duration: 10ba\ndevice_train_microbatch_size: 8\n",
            "llm-foundry",
        ),
        ("train.sh", "deepspeed --module openrlhf.cli.train_sft --train.batch_size 2", "OpenRLHF"),
        ("train.yaml", "experiment:\n  runner: {nnodes: 1}\n  task: {type: train}\n", "FlagScale"),
        (
            "qwen3.yaml",
            "model: {model_name_or_path: /Qwen3-8B}\ndata: {cutoff_len: 4096, template: qwen3}\n"
            "parallel:\n  fsdp_modules:\n    - model.layers.{*}\n  recompute: true\ntraining: {stage: pt}\n",
            "MindSpeed-LLM's FSDP2 backend",
        ),
        (
            "tune.sh",
            "torchrun --nproc_per_node 8 train_fsdp2.py examples/fsdp2/qwen3/tune.yaml",
            "MindSpeed-LLM's FSDP2 backend",
        ),
        (
            "32b.yaml",
            "system: {tensor_model_parallel_size: 8, precision: {bf16: true}}\n"
            "model: {num_layers: 64, hidden_size: 5120, micro_batch_size: 1}\n"
            "data: {tokenizer: {vocab_size: 32000}}\n",
            "FlagScale",
        ),
        (
            "job.yaml",
            "apiVersion: kubeflow.org/v1\nkind: PyTorchJob\nspec: {nprocPerNode: 8}\n",
            "Kubernetes",
        ),
        (
            "job.yaml-template",
            "apiVersion: kubeflow.org/v1\nkind: PyTorchJob\nspec:\n  nprocPerNode: $GPUS\n",
            "Kubernetes",
        ),
        (
            "rlvr.yaml",
            "num_gpus_per_node: 8\nactor_train:\n  strategy_args:\n    strategy_name: megatron_train\n"
            "    strategy_config: {tensor_model_parallel_size: 2}\nreference: {model_args: {dtype: bf16}}\n",
            "ROLL",
        ),
        (
            "hf_llama.yaml",
            "model_source: hf\ntrainer: {devices: 32, num_nodes: 4}\n"
            "distributed_strategy: {tensor_model_parallel_size: 32, zero1: true}\nmodel: {num_layers: 80}\n",
            "NeuronX Distributed Training",
        ),
        (
            "vl.yaml",
            "model: {model_id: qwen3vl}\nparallel: {fsdp_plan: {param_dtype: bf16}}\n",
            "MindSpeed-MM's FSDP2 backend",
        ),
    ],
)
def test_software_that_is_known_and_not_read_is_named(
    tmp_path: Path, file: str, text: str, software: str
) -> None:
    (tmp_path / file).write_text(text)
    with pytest.raises(NotReadError, match=f"is of {software},") as raised:
        read_files([tmp_path / file])
    assert raised.value.software == software


def test_several_documents_of_one_file_are_no_fault_of_its_yaml(tmp_path: Path) -> None:
    (tmp_path / "jobs.yaml").write_text("num_processes: 8\n---\nnum_processes: 4\n")
    with pytest.raises(InputError, match="holds several YAML documents"):
        read_files([tmp_path / "jobs.yaml"])


def _checked(folder: Path, file: str, text: str, engine: str | None = None) -> Check:
    (folder / file).write_text(text)
    return check([folder / file], world_size=8, device="a100-80g", engine=engine)


def test_what_an_engine_is_not_priced_with_is_no_fault(tmp_path: Path) -> None:
    unpriced = _checked(tmp_path, "nemo.yaml", NEMO.replace("precision: bf16", "precision: 32"))
    assert unpriced.legal is None and "precision fp32" in unpriced.unknown[0].text
    with_fp8 = NEMO.replace("  num_layers", "  fp8: true\n  fp8_hybrid: true\n  num_layers")
    eight = _checked(tmp_path, "nemo.yaml", with_fp8)
    assert eight.legal is False  # An A100 has no products in fp8.


@pytest.mark.parametrize(
    ("activation", "matrices"),
    [("gelu", 2), ("geglu", 3), ("fast-geglu", 3), ("swiglu", 3), ("fast-swiglu", 3), ("squared-relu", 2)],
)
def test_activations_of_nemo_have_gates_by_their_names(
    tmp_path: Path, activation: str, matrices: int
) -> None:
    config = NEMO.replace("  num_layers", f"  activation: {activation}\n  bias: false\n  num_layers")
    model = _checked(tmp_path, "nemo.yaml", config).reading.model
    assert model is not None and model.gated == (matrices == 3)
    assert model.layer_parameters(model.layer_kind(0)) == 4 * 256**2 + matrices * 256 * 1024 + 4 * 256


def test_a_file_of_nemos_launcher_names_its_own_keys_from_outside(tmp_path: Path) -> None:
    config = NEMO + "  data: {seq_length: '${training.model.encoder_seq_length}'}\n"
    model = _checked(tmp_path, "nemo.yaml", config).reading.model
    assert model is not None and model.seq == 512


def test_offload_of_the_little_that_adapters_keep_is_no_fault(tmp_path: Path) -> None:
    config = AXOLOTL + "adapter: lora\nlora_r: 8\nfsdp: [full_shard]\nfsdp_config: {offload_params: true}\n"
    found = _checked(tmp_path, "axolotl.yml", config)
    assert found.legal and verdict(found.problems)[0]
    assert found.plan is not None and found.plan.layout.offload_optimizer


def test_attention_and_mlp_of_gpt_neox_may_be_beside_each_other(tmp_path: Path) -> None:
    config = (
        "{pipe_parallel_size: 1, model_parallel_size: 1, num_layers: 4, hidden_size: 512, norm: layernorm,\n"
        "num_attention_heads: 8, seq_length: 512, max_position_embeddings: 512, precision: bfloat16,\n"
        "train_micro_batch_size_per_gpu: 4, gpt_j_residual: VALUE}\n"
    )
    for value in ("true", "false"):
        model = _checked(tmp_path, "neox.yml", config.replace("VALUE", value)).reading.model
        assert model is not None and model.parallel_residual == (value == "true")


@pytest.mark.parametrize(
    ("kinds", "named"),
    [('[[["flash"], 4]]', None), ('[[["global", "local"], 2]]', "local"), ('[[["mamba"], 4]]', "mamba")],
)
def test_layers_of_gpt_neox_without_full_attention_are_not_known(
    tmp_path: Path, kinds: str, named: str | None
) -> None:
    heads = 12 if named == "mamba" else 8  # Mamba's layers ignore heads.
    config = (
        f"{{pipe_parallel_size: 1, model_parallel_size: 1, num_layers: 4, hidden_size: 512,\n"
        f"num_attention_heads: {heads}, seq_length: 512, max_position_embeddings: 512, norm: layernorm,\n"
        f"attention_config: {kinds}, train_micro_batch_size_per_gpu: 4, precision: bfloat16}}\n"
    )
    found = _checked(tmp_path, "neox.yml", config)
    assert found.legal is (True if named is None else None)
    assert [one.text for one in found.unknown] == ([f"layers of {named} are not priced"] if named else [])


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model $TOKENIZER", 32000),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model /data/tokenizer.model", 32000),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model /data/own-100k.ver3.model", None),
        ("--tokenizer-type GPT2BPETokenizer --vocab-file data/gpt2-vocab.json", 50257),
        ("--tokenizer-type GPT2BPETokenizer --vocab-file /data/vocab.json", 50257),
        ("--tokenizer-type GPT2BPETokenizer --vocab-file /data/own-tokenizer/vocab.json", None),
    ],
)
def test_the_file_of_another_tokenizer_has_another_vocabulary(
    tmp_path: Path, flags: str, size: int | None
) -> None:
    found = written(tmp_path, {"train.sh": f"{MEGATRON}{flags}\n"})
    assert found.unknown == (() if size else ("--vocab-size",))
    assert size is None or (found.reading.model is not None and found.reading.model.vocab == size)


def test_the_callers_devices_stand_for_those_of_mpirun(tmp_path: Path) -> None:
    text = f"python{MEGATRON.partition('8')[2]}--vocab-size 32000 --world-size $OMPI_COMM_WORLD_SIZE\n"
    assert written(tmp_path, {"train.sh": text}).unknown[0] == "--world-size"
    found = written(tmp_path, {"train.sh": text}, world_size=16)
    assert found.legal and not found.unknown and found.layout.data_parallel == 16


@pytest.mark.parametrize(
    ("file", "text", "fits"),
    [
        ("train.yml", AXOLOTL, True),
        ("train.yml", AXOLOTL.replace("bf16: auto", "bf16: false"), False),
        ("train.yml", AXOLOTL + "adapter: lora\nlora_r: 8\n", True),
        ("train.sh", SWIFT_FULL, True),
        ("train.sh", SWIFT_FULL + " --torch_dtype float32", False),
    ],
)
def test_a_model_that_is_loaded_in_16_bits_stays_so(
    tmp_path: Path, file: str, text: str, fits: bool | None
) -> None:
    found = _checked(tmp_path, file, text)
    assert found.legal and found.fits is fits


@pytest.mark.parametrize(
    ("before", "devices"),
    [
        ("", None),
        ("CUDA_VISIBLE_DEVICES=0,1 ", 2),
        ("NPROC_PER_NODE=4 ", 4),
        ("NPROC_PER_NODE=4 NNODES=2 ", 8),
    ],
)
def test_llama_factory_starts_on_all_devices(tmp_path: Path, before: str, devices: int | None) -> None:
    command = "llamafactory-cli train --stage sft --do_train --finetuning_type full --cutoff_len 512 --bf16"
    more = " --model_name_or_path Qwen/Qwen3-8B --per_device_train_batch_size 1\n"
    assert written(tmp_path, {"train.sh": before + command + more}).reading.world_size == devices


def test_a_script_is_read_with_the_script_that_it_starts(tmp_path: Path) -> None:
    inner = MEGATRON.replace("--nproc_per_node 8", "--nproc_per_node 8 --nnodes $NODES")
    texts = {
        "job.sbatch": "#SBATCH --nodes 4\nexport NODES=$SLURM_NNODES\nsrun bash scripts/train.sh --tp 2\n",
        "train.sh": f"# started by job.sbatch\n{inner}--vocab-size 32000 --tensor-model-parallel-size $2\n",
    }
    for names in (["job.sbatch", "train.sh"], ["train.sh", "job.sbatch"]):
        found = written(tmp_path, {name: texts[name] for name in names})
        assert found.legal and found.reading.world_size == 32 and found.layout.tensor_parallel == 2


@pytest.mark.parametrize(
    ("more", "whole"),
    [
        ("", True),
        ("plugins: [axolotl.integrations.liger.LigerPlugin]\n", True),
        ("plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]\n", False),
        ("plugins: [a.CutCrossEntropyPlugin]\ncut_cross_entropy: false\n", True),
        ("liger_fused_linear_cross_entropy: true\n", False),
    ],
)
def test_logits_are_whole_unless_the_loss_is_fused(tmp_path: Path, more: str, whole: bool) -> None:
    tokens = 65536
    long = re.sub("sequence_len: .*", f"sequence_len: {tokens}", AXOLOTL) + "fsdp: [full_shard]\n"
    found = _checked(tmp_path, "axolotl.yml", long + "sample_packing: true\n" + more)
    assert found.legal and found.plan is not None
    logits = tokens * 32000 * 2
    assert (found.plan.estimate.memory[0].logits > logits) is whole
    assert found.fits is (None if found.reading.activations_are_bound and not found.plan.fits else False)


def test_flash_attention_of_gpt_neox_and_deepspeed_writes_no_scores(tmp_path: Path) -> None:
    neox = (
        "{pipe_parallel_size: 1, model_parallel_size: 1, num_layers: 4, hidden_size: 512, norm: layernorm,\n"
        "num_attention_heads: 8, seq_length: 2048, max_position_embeddings: 2048, precision: bfloat16,\n"
        'train_micro_batch_size_per_gpu: 16, attention_config: [[["KIND"], 4]]}\n'
    )
    script = MEGATRON + "--vocab-size 32000 --deepspeed --zero-stage 1 "
    pairs = {
        "neox.yml": (neox.replace("KIND", "flash"), neox.replace("KIND", "global")),
        "train.sh": (script + "--use-flash-attn-v2\n", script + "\n"),
    }
    for file, texts in pairs.items():
        flash, written_out = (_checked(tmp_path, file, text).plan for text in texts)
        assert flash is not None and written_out is not None
        assert flash.engine.name == "megatron-deepspeed-flash"
        assert flash.estimate.peak_memory_bytes < written_out.estimate.peak_memory_bytes


def test_changes_of_gpt_neox_are_its_own_keys(tmp_path: Path) -> None:
    config = (
        "{pipe_parallel_size: 1, model_parallel_size: 1, num_layers: 4, hidden_size: 512, norm: layernorm,\n"
        "num_attention_heads: 8, seq_length: 512, max_position_embeddings: 512, precision: bfloat16,\n"
        "train_micro_batch_size_per_gpu: 4, checkpoint_activations: true, checkpoint_num_layers: 1,\n"
        "zero_optimization: {stage: 1, offload_optimizer: {device: cpu}}}\n"
    )
    found = _checked(tmp_path, "neox.yml", config)
    assert found.plan is not None and found.plan.layout.offload_optimizer
    names = {change.flag for change in found.changes}
    assert {"checkpoint_activations", "zero_optimization.cpu_offload"} <= names
    assert not [name for name in names if name.startswith("--")]


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("  encoder: {num_layers: 4, hidden_size: 512}\n", "a part encoder"),
        ("  vision: {num_layers: 4}\n", "a part vision"),
        ("  bert_binary_head: true\n", "masked words"),
    ],
)
def test_models_of_nemo_that_are_no_decoder_alone_are_not_known(tmp_path: Path, line: str, part: str) -> None:
    found = _checked(tmp_path, "nemo.yaml", NEMO + line)
    assert found.legal is None and part in found.unknown[0].text


def test_blocks_of_no_layers_recompute_nothing_in_nemo(tmp_path: Path) -> None:
    names = {"granularity": "full", "method": "block", "num_layers": "0"}
    lines = "".join(f"  activations_checkpoint_{name}: {value}\n" for name, value in names.items())
    found = _checked(tmp_path, "nemo.yaml", NEMO + lines)
    assert found.legal and found.plan is not None and found.plan.layout.recompute == "none"


@pytest.mark.parametrize("packs, fits", [("--packing true", False), ("", None)])
def test_samples_of_ms_swift_without_packing_may_be_shorter(
    tmp_path: Path, packs: str, fits: bool | None
) -> None:
    file = tmp_path / "sft.sh"
    file.write_text(
        "NPROC_PER_NODE=2 megatron sft --load Qwen2.5-7B --tensor_model_parallel_size 2 --sequence_parallel "
        f"true --micro_batch_size 64 --global_batch_size 64 --max_length 4096 {packs}\n"
    )
    found = check([file], device="a100-80g")
    assert found.legal and found.fits is fits, found.problems
    assert any("longest sample" in one for one in found.assumed) is (fits is None)


MIND = (
    "torchrun --nnodes 1 --nproc_per_node 8 pretrain_gpt.py --spec mindspeed_llm.spec layer "
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 8 --seq-length 4096 --micro-batch-size 1 "
    "--max-position-embeddings 4096 --global-batch-size 16 --vocab-size 32000 --bf16 --swap-optimizer "
)


def test_flags_of_mindspeed_on_other_devices_have_no_price(tmp_path: Path) -> None:
    """Forks of Megatron-LM have some of MindSpeed's flags too."""
    file = tmp_path / "pretrain.sh"
    file.write_text(MIND)
    found = check([file], device="h100")
    assert found.legal is None
    assert [one.flag for one in found.unknown] == ["--device"], found.problems
    with pytest.raises(InputError, match="engine mindspeed does not run on h100"):
        check([file], device="h100", engine="mindspeed")


@pytest.mark.parametrize(
    "flags, idle",
    [
        (
            "--swap-attention --recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 1",
            "--swap-attention",
        ),
        ("--kv-channels 128 --q-lora-rank 512 --kv-lora-rank 512", "--q-lora-rank"),
    ],
)
def test_flags_of_mindspeed_without_effect_make_nothing_illegal(
    tmp_path: Path, flags: str, idle: str
) -> None:
    file = tmp_path / "pretrain.sh"
    file.write_text(f"{MIND}{flags}\n")
    found = check([file], device="ascend-910b")
    assert found.legal, found.problems
    notes = [one.text for one in found.problems if one.flag == idle]
    assert len(notes) == 1 and notes[0].startswith("has no effect")


def test_presets_of_primus_are_no_configuration_of_gpt_neox(tmp_path: Path) -> None:
    experiment = tmp_path / "experiment.yaml"
    experiment.write_text(
        "modules:\n  pre_trainer:\n    framework: megatron\n    config: pre_trainer.yaml\n"
        "    model: small.yaml\n    overrides: {micro_batch_size: 1, global_batch_size: 64}\n"
    )
    preset = tmp_path / "small.yaml"
    preset.write_text(
        "num_layers: 4\nhidden_size: 512\nnum_attention_heads: 8\nseq_length: 2048\n"
        "model_parallel_size: null\nmax_position_embeddings: 2048\nvocab_size: 32000\n"
        "position_embedding_type: rope\n"
    )
    assert check([experiment, preset], device="mi300x", world_size=8).reading.framework == "primus"


@pytest.mark.parametrize("dequantizes, legal", [("true", True), ("false", None)])
def test_weights_that_axolotl_dequantizes_train_in_the_usual_format(
    tmp_path: Path, dequantizes: str, legal: bool | None
) -> None:
    file = tmp_path / "full.yaml"
    file.write_text(
        "base_model: openai/gpt-oss-20b\nmodel_quantization_config: Mxfp4Config\n"
        f"model_quantization_config_kwargs: {{dequantize: {dequantizes}}}\nsequence_len: 4096\n"
        "sample_packing: true\nmicro_batch_size: 1\ngradient_accumulation_steps: 2\nbf16: true\n"
        "gradient_checkpointing: true\nfsdp_version: 2\nfsdp_config: {reshard_after_forward: true}\n"
    )
    found = check([file], device="h100", world_size=8)
    assert found.legal is legal, found.problems

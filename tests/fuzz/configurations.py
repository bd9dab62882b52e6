"""Scripts and configurations of other software, corrupted: reading them may run and touch nothing."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from costmodels.catalogue.yaml_files import yaml_loader
from planner.formats.check import check
from planner.formats.files import read_files
from tests.fuzz.valid_files import Target

ALLOWED = tuple(
    str(Path(folder).resolve()) for folder in (Path(__file__).parents[2], sys.prefix, sys.base_prefix)
)
"""Folders that Python reads its own files from."""

FORBIDDEN = (
    *("subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "pty.", "socket."),
    *("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.chmod", "os.link", "os.symlink", "os.truncate"),
    *("os.putenv", "os.unsetenv", "os.kill", "shutil.", "ctypes.", "urllib.", "webbrowser."),
)
"""Events (docs.python.org/3/library/audit_events.html) that reading a file has no business with."""


class Watch:
    """Forbidden events while a file is read."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.events: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event.startswith(FORBIDDEN):
            self.events.append(f"{event} {arguments}"[:200])
        elif event == "open":
            path, mode = str(arguments[0]), str(arguments[1] or "")
            writes = any(letter in mode for letter in "wax+")
            own = path.startswith((self.folder, *ALLOWED)) or not path.startswith("/")
            if writes or not own:
                self.events.append(f"open {path} {mode}"[:200])

    @contextmanager
    def during(self, folder: Path) -> Iterator[None]:
        """Raise `AssertionError` where what follows runs, writes or opens something."""
        self.folder, self.events = str(folder.resolve()), []
        try:
            yield
        finally:
            self.folder = None
            assert not self.events, "; ".join(self.events[:3])


_watch: list[Watch] = []


def watch() -> Watch:
    """The one of this process: a hook cannot be taken away again."""
    if not _watch:
        _watch.append(Watch())
    return _watch[0]


SCRIPT = """#!/bin/bash
#SBATCH --nodes=4 --gpus-per-node=8
export CUDA_DEVICE_MAX_CONNECTIONS=1
NNODES=${NNODES:-4}
TP=2; PP=$((4 / 2))
NAME=$(touch CANARY); OTHER=`touch CANARY`
if [ -z "$MODE" ]; then MODE=plain; fi
case $MODE in fast) LR=1e-3;; *) LR=1e-4;; esac
DISTRIBUTED_ARGS=(--nproc_per_node 8 --nnodes $NNODES --master_addr "${MASTER_ADDR:-localhost}")
MODEL="
  --num-layers 24 --hidden-size 2048 \\
  --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 --vocab-size 50257
"
for i in 1 2 3; do echo $i > CANARY; done
(cd CANARY; TP=9; touch CANARY)
source CANARY
cat <<EOT > CANARY
{"zero_optimization": {"stage": $PP}}
EOT
run_cmd="torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py $MODEL --tensor-model-parallel-size ${TP} \\
  --pipeline-model-parallel-size $PP --micro-batch-size 1 --global-batch-size 64 --lr $LR --bf16 \\
  --sequence-parallel --use-distributed-optimizer --train-iters 100 --recompute-granularity full \\
  --recompute-method uniform --recompute-num-layers 1 $@"
eval $run_cmd && rm -rf CANARY
"""

TRAINER = """torchrun --nproc_per_node=8 train.py --model_name_or_path meta-llama/Llama-2-7b-hf --bf16 True \\
  --per_device_train_batch_size 4 --gradient_accumulation_steps 8 --learning_rate 2e-5 \\
  --fsdp "full_shard auto_wrap"
"""

OVERRIDES = """srun -N 2 python3 megatron_gpt_pretraining.py --config-name=gpt trainer.num_nodes=2 \\
  trainer.devices=8 model.tensor_model_parallel_size=2 \\
  ++model.pipeline_model_parallel_size=$((1 + 1)) model.num_layers=8 model.hidden_size=512 \\
  model.num_attention_heads=8 model.encoder_seq_length=512 model.micro_batch_size=1 \\
  model.global_batch_size=64 model.data.data_prefix=[1.0,CANARY] trainer.precision=bf16
"""

MINDFORMERS = {
    "context": {"max_device_memory": "31GB"},
    "runner_config": {"batch_size": 2},
    "parallel": {"parallel_mode": 1, "enable_parallel_optimizer": True},
    "parallel_config": {"data_parallel": 4, "model_parallel": 2, "pipeline_stage": 4, "micro_batch_num": 24},
    "recompute_config": {"recompute": [4, 2, 2, 0], "select_recompute": True},
    "model": {
        "model_config": {
            "type": "GPT2Config",
            "num_layers": 40,
            "hidden_size": 5120,
            "num_heads": 40,
            "seq_length": 2048,
            "offset": [1, 0, 0, -1],
        }
    },
}

DYNAMIC = {
    "training_config": {"use_distributed_optimizer": True},
    "parallel_config": {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "sequence_parallel": True,
    },
    "model_config": {
        "num_layers": 8,
        "hidden_size": 512,
        "ffn_hidden_size": 2048,
        "num_attention_heads": 8,
        "vocab_size": 1000,
        "seq_length": 512,
        "compute_dtype": "bfloat16",
    },
    "dataset_config": {"batch_size": 1, "micro_batch_num": 8},
}

NANOTRON = {
    "model": {
        "dtype": "bfloat16",
        "model_config": {
            "hidden_size": 512,
            "intermediate_size": 2048,
            "num_attention_heads": 8,
            "num_hidden_layers": 8,
            "num_key_value_heads": 4,
            "vocab_size": 1000,
        },
    },
    "optimizer": {"zero_stage": 1},
    "parallelism": {"dp": 4, "tp": 2, "pp": 2, "tp_mode": "REDUCE_SCATTER", "pp_engine": "1f1b"},
    "tokens": {"sequence_length": 512, "micro_batch_size": 1, "batch_accumulation_per_replica": 8},
}

NEMO = {
    "trainer": {"num_nodes": 2, "devices": 8, "precision": "bf16"},
    "model": {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "micro_batch_size": 1,
        "global_batch_size": 64,
        "num_layers": 8,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "encoder_seq_length": 512,
        "ffn_hidden_size": "${multiply:4, ${.hidden_size}}",
        "max_position_embeddings": 512,
    },
}

ACCELERATE = {
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "num_machines": 2,
    "num_processes": 16,
    "fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD", "fsdp_activation_checkpointing": True},
}

DEEPSPEED = {
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
}

TORCHTITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 4
seq_len = 4096  # tokens
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
[activation_checkpoint]
mode = "full"
"""

RECIPE = """
import os
os.system("touch CANARY")
SEQUENCE = 4 * 1024
def pretrain_config(nodes: int = 2):
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("meta-llama/Meta-Llama-3-8B").get_model_config()
    cfg.model.tensor_model_parallel_size = 2
    cfg.model.pipeline_model_parallel_size = 2
    cfg.model.seq_length = SEQUENCE
    cfg.train.micro_batch_size = 1
    cfg.train.global_batch_size = 16 * nodes
    return other(cfg, open("CANARY", "w"))
def other(cfg, file, tensor_parallelism: int = 4):
    return run.Partial(fn, trainer=run.Config(Trainer, tensor_model_parallel_size=tensor_parallelism))
"""

PAGE = f"""# How to train

Use this:

```yaml
{yaml.safe_dump(MINDFORMERS, sort_keys=False)}```

and start it with `bash run_distribute.sh TABLE ../run.yaml [0,8] train 32`.
"""

TRAPS = (
    *(
        "$(touch CANARY)",
        "`touch CANARY`",
        "; rm -rf CANARY;",
        "> CANARY",
        "<<EOF\n",
        "<(cat CANARY)",
        "| sh",
    ),
    *(
        "${A:-${B:-$(touch CANARY)}}",
        "${!X}",
        "$((1/0))",
        "$((9**9**9))",
        "${X@P}",
        '"',
        "'",
        "\\",
        "((((",
        "}}",
    ),
    *(
        "eval",
        "exec",
        "source CANARY",
        "if [ ! -f CANARY ]; then",
        "while true; do",
        "function f() {",
        "done",
    ),
    *(
        "&anchor",
        "*anchor",
        "!!python/object/apply:os.system ['touch CANARY']",
        "<<: *x",
        "? {a: b}",
        "- - - -",
    ),
    *(
        "${oc.env:HOME}",
        "${model.hidden_size}",
        "{{ template }}",
        "%YAML 9.9",
        "...",
        "\x00",
        "\u202e",
        "\ufeff",
    ),
    *("--tensor-model-parallel-size 999999999999", "--num-layers -4", "--lr nan", "--micro-batch-size", "--"),
    *("__import__('os').system('touch CANARY')", "lambda: 0", "[[", "=", ":", "#", "\t"),
)
"""Words that would run, open or confuse something."""


def with_traps(data: bytes, source: random.Random) -> bytes:
    """A text with a few such words between its own, or in their place."""
    words = data.decode("utf-8", "replace").split(" ")
    for _ in range(source.randint(1, 6)):
        at = source.randrange(len(words))
        words[at : at + source.randrange(2)] = [source.choice(TRAPS)]
    return " ".join(words).encode("utf-8", "surrogatepass")


def _load(folder: Path, name: str) -> Any:
    with watch().during(folder):
        reading = read_files([folder / name], world_size=16 if name.endswith((".toml", ".json")) else None)
        problems = [problem.describe() for problem in reading.problems]
    return reading.framework, None if reading.layout is None else reading.layout.describe(), problems


def _check(folder: Path, name: str) -> Any:
    with watch().during(folder):
        answer = check([folder / name], device="h100")
    return answer.legal, answer.fits, None if answer.best is None else answer.best.layout.describe()


def _target(name: str, file: str, text: str, weight: int = 1, checks: bool = False) -> Target:
    def load(folder: Path) -> Any:
        return (_check if checks else _load)(folder, file)

    def parse(words: str) -> Any:
        return json.loads(words) if file.endswith(".json") else yaml.load(words, yaml_loader())

    structured = file.endswith((".json", ".yaml"))
    data = {file: text.encode()}
    return Target(name, data, (file,), load, parse if structured else None, weight=weight, mutate=with_traps)


def configuration_targets() -> list[Target]:
    """One of each kind that `planner check` reads."""
    files: dict[str, tuple[str, Any]] = {
        "MindFormers": ("static.yaml", MINDFORMERS),
        "MindFormers dynamic": ("dynamic.yaml", DYNAMIC),
        "nanotron": ("nanotron.yaml", NANOTRON),
        "NeMo": ("nemo.yaml", NEMO),
        "accelerate": ("accelerate.yaml", ACCELERATE),
    }
    written = {
        name: (file, yaml.safe_dump(content, sort_keys=False)) for name, (file, content) in files.items()
    }
    return [
        _target("configuration: script of Megatron-LM", "train.sh", SCRIPT, weight=3),
        _target("configuration: script, checked", "train.sh", SCRIPT, checks=True),
        _target("configuration: script of a trainer", "run.sh", TRAINER, weight=2),
        _target("configuration: keys in a command", "nemo.sh", OVERRIDES),
        *(_target(f"configuration: {name}", file, text) for name, (file, text) in written.items()),
        _target("configuration: DeepSpeed", "ds.json", json.dumps(DEEPSPEED, indent=1)),
        _target("configuration: torchtitan", "train.toml", TORCHTITAN),
        _target("configuration: recipe", "recipe.py", RECIPE, weight=2),
        _target("configuration: page", "GUIDE.md", PAGE),
    ]

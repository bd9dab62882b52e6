"""The jobs of five public guides, done with this tool: planned on their hardware, and trained in small.

python examples/guides.py [NAME...] [--train]
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile

GUIDES = {
    # PAI's llmacc: a GPT of 22 B parameters on two nodes of eight A100.
    "pai-llmacc": (
        "--model gpt-22b --world-size 16 --local-world-size 8 --device a100-80g --max-global-batch-size 32",
        "--tp 2 --sequence-parallel",
    ),
    # MindFormers: GPT-2 13B on 32 Ascend 910, static graph.
    "mindformers-gpt2-13b": (
        "--model mindformers-gpt2-13b --world-size 32 --device ascend-910 --engine mindformers "
        "--global-batch-size 192 --fp16",
        "--pp 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    # MindFormers: GPT 7B on eight Ascend 910B, dynamic graph.
    "mindformers-dynamic-gpt": (
        "--model mindformers-gpt-7b --world-size 8 --device ascend-910b --engine mindformers-dynamic "
        "--global-batch-size 16",
        "--pp 2 --micro-batch-size 2",
    ),
    # MindSpeed: two layers of a mixture of experts, with sequences of 8,192 tokens.
    "mindspeed-moe": (
        "--num-layers 2 --hidden-size 12288 --num-attention-heads 96 --seq-length 8192 --vocab-size 50257 "
        "--max-position-embeddings 8192 --position-embedding-type rope --disable-bias-linear --num-experts 4 "
        "--moe-router-topk 2 --world-size 8 --device ascend-910b --global-batch-size 4 --bf16",
        "--num-experts 4 --moe-router-topk 2 --ep 2",
    ),
    # DistributedTrainingGPT2: data parallelism alone.
    "distributed-training-gpt2": (
        "--model gpt2-small --world-size 8 --device v100-32g --tp 1 --pp 1 --max-global-batch-size 64",
        "--tp 1 --pp 1",
    ),
}
"""Flags that say the job of a guide, and what its layout is like, for a run in small."""

SMALL = (
    "planner launch --model gpt2-nano --device cpu --world-size 2 --global-batch-size 8 --train-iters 5 "
    "--log-interval 1 --eval-iters 0 --lr 1e-3"
)


def run(command: str, folder: str | None = None) -> None:
    """Show a command, run it, and end with it where it fails."""
    print(f"\n$ {command}", flush=True)
    done = subprocess.run([sys.executable, "-m", *shlex.split(command)], cwd=folder)
    if done.returncode:
        raise SystemExit(done.returncode)


def main() -> None:
    """Plan the guides that are named, or all; `--train` trains each in small too."""
    for name in [word for word in sys.argv[1:] if word != "--train"] or GUIDES:
        job, layout = GUIDES[name]
        run(f"planner suggest {job}")
        if "--train" in sys.argv:
            with tempfile.TemporaryDirectory() as folder:
                run(f"{SMALL} {layout}", folder)


if __name__ == "__main__":
    main()

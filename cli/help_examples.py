"""Examples at the end of each command's help; a test runs them in this order."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, ...]] = {
    "suggest": (
        "planner suggest --model llama3-8b --world-size 16 --device h100 --gbs 256",
        "planner suggest --model llama3-8b --world-size 16 --device h100 --gbs 256 \\",
        "    --pin tp=2..8 --save plan.json",
        "planner suggest --model llama3-8b --world-size 8..32 --device h100 \\",
        "    --gbs 256 --tokens 1T --price-per-hour 2.5",
    ),
    "explain": (
        "planner explain --model llama3-8b --world-size 16 --device h100 --gbs 256 \\",
        "    --layout tp=8,pp=2",
        "planner explain --plan plan.json --no-what-if",
    ),
    "check": ("planner check train.sh --world-size 64 --device h100",),
    "export": ("planner export plan.json --to megatron",),
    "convert-config": ("planner convert-config train.sh --to megatron-bridge",),
    "script": ("planner script plan.json --to slurm",),
    "launch": (
        "planner launch --model gpt2-nano --device cpu --world-size 2 --gbs 32",
        "planner launch --plan plan.json --train-iters 1000 --save checkpoints",
    ),
    "sweep": ("planner sweep --models gpt2-nano --device cpu --world-size 2 --gbs 32",),
    "timeline": ("planner timeline plan.json --out trace.json",),
    "report": ("planner report plan.json --out report.html", "planner report runs/my-run --figures figures"),
    "web": ("planner web --port 8000",),
    "watch": ("planner watch runs/my-run", "planner watch runs/one runs/other --serve"),
    "compare": ("planner compare plan.json other.json",),
    "dryrun": ("planner dryrun --plan plan.json --stage 0",),
    "models": ("planner models --json",),
    "devices": ("planner devices",),
    "engines": ("planner engines",),
    "convert": ("planner convert --input Qwen3-0.6B --output checkpoints",),
    "generate": ('planner generate --load checkpoints --prompt "def main" --max-new-tokens 40',),
}
"""The examples of each command, in the order of the commands."""

"""Answers to varied questions before and after a change of the code that must not change answers.

python -m benchmarks.answers --save before.json          # in the tree before the change
python -m benchmarks.answers --against before.json       # in the changed tree: lists differences

Numbers are compared to nine digits, as another order of summation changes later ones.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

QUESTIONS = {
    "dense": "suggest --model llama2-70b --world-size 64 --local-world-size 8 --max-global-batch-size 16",
    "no model": "suggest --world-size 64 --local-world-size 8 --max-global-batch-size 16 --top 20",
    "long": "suggest --model llama3-8b --world-size 8 --device h100 --global-batch-size 64 "
    "--seq-length 32768",
    "experts": "suggest --model mixtral-8x7b --world-size 64 --device h100 --max-global-batch-size 256",
    "latent attention": "suggest --model deepseek-v3 --world-size 1024 --device h100 "
    "--max-global-batch-size 2048 --pin pp=8..16 --pin ep=32,64",
    "two kinds of nodes": "suggest --model llama2-13b --world-size 32 --device a100-80g:2,v100-32g:2 "
    "--global-batch-size 64",
    "pinned": "suggest --model llama2-70b --world-size 64 --global-batch-size 128 --tp 8 --pp 4 "
    "--sequence-parallel --use-distributed-optimizer --recompute-granularity selective",
    "narrowed": "suggest --model llama3-70b --world-size 128 --device h100 --max-global-batch-size 512 "
    "--pin tp=2..8 --pin pp=..4 --forbid schedule=zbv,dualpipev --objective memory",
    "offload": "suggest --model llama2-13b --world-size 2 --device a100-40g --global-batch-size 4",
    "budget": "suggest --model llama2-7b --world-size 16 --device h100 --global-batch-size 128 --tokens 2T "
    "--price-per-hour 2.5 --mtbf-hours 50000 --objective cost",
    "world sizes": "suggest --model llama2-13b --world-size 8..64 --device h100 --max-global-batch-size 256 "
    "--tokens 300B --price-per-hour 2",
    "another engine": "suggest --model llama3-8b --world-size 32 --engine megatron "
    "--max-global-batch-size 128 --objective step-time",
    "NPUs": "suggest --model llama2-7b --world-size 16 --device ascend-910b --max-global-batch-size 64",
    "nothing fits": "suggest --model llama3-405b --world-size 16 --global-batch-size 16 --pin tp=8",
    "nothing legal": "suggest --model llama2-70b --world-size 48 --global-batch-size 7 --pin tp=6",
    "explanation": "explain --model llama2-7b --world-size 16 --global-batch-size 64 --layout tp=16,pp=1 "
    "--layout zero=2,dp=16 --against tp=8 --pin mbs=1..4",
    "explanation of experts": "explain --model mixtral-8x7b --world-size 64 --device h100 "
    "--max-global-batch-size 256 --layout tp=8,ep=8 --against pp=4",
    "explanation of little": "explain --model gpt2-small --world-size 4 --device h100 --global-batch-size 16",
    "explanation of latent attention": "explain --model deepseek-v3 --world-size 512 --device h100 "
    "--max-global-batch-size 2048 --pin pp=8..16 --pin ep=32,64 --prefer fastest",
    "sizes of experts": "suggest --model mixtral-8x7b --world-size 64..512 --device h100 "
    "--max-global-batch-size 256 --tokens 2T --price-per-hour 2.5EUR --deadline-days 60",
    "sizes of an objective": "suggest --model llama3-8b --world-size 4,8,12,48 --device h100 "
    "--global-batch-size 96 --objective memory --headroom 4",
    "explanation of two kinds": "explain --model llama2-7b --world-size 16 --device a100-80g:1,v100-32g:1 "
    "--global-batch-size 32 --no-what-if --layout tp=4,pp=3",
}
"""Arguments of the command line, by a short name of the question."""

DIGITS = 9
"""Significant digits of a number that is compared."""

MOST_SHOWN = 5
"""Differences of one answer that are printed."""


def answer(words: str) -> dict[str, Any]:
    """The command's exit code, its lines for people, and its JSON without the time that it took."""
    command = [sys.executable, "-m", "planner", *words.split(), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    found = json.loads(done.stdout) if done.stdout else {}
    found.pop("elapsed_s", None)
    result: dict[str, Any] = rounded({"exit": done.returncode, "lines": done.stderr.splitlines()} | found)
    return result


def rounded(value: Any) -> Any:
    """A JSON value with its numbers to `DIGITS` digits."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def differences(before: Any, after: Any, where: str = "") -> Iterator[str]:
    """Paths at which two JSON values differ, with both values."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in before | after:
            yield from differences(before.get(name), after.get(name), f"{where}.{name}".lstrip("."))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differences(one, other, f"{where}[{number}]")
    elif before != after:
        yield f"{where}: {str(before)[:200]} -> {str(after)[:200]}"


def main() -> None:
    """Answer all questions."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the answers to this file")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with the answers of this file")
    arguments = parser.parse_args()
    before = None if arguments.against is None else json.loads(arguments.against.read_text())
    found, changed = {}, 0
    for name, words in QUESTIONS.items():
        found[name] = answer(words)
        digest = hashlib.sha256(json.dumps(found[name], sort_keys=True).encode()).hexdigest()[:12]
        print(f"{digest}  {name}", flush=True)
        wrong = [] if before is None else list(differences(before.get(name), found[name]))
        changed += bool(wrong)
        for line in wrong[:MOST_SHOWN]:
            print(f"  {line}")
    if arguments.save is not None:
        arguments.save.write_text(json.dumps(found, indent=1) + "\n")
    if before is not None:
        print(f"{changed} of {len(QUESTIONS)} answers differ")
        sys.exit(bool(changed))


if __name__ == "__main__":
    main()

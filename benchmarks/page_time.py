"""The time of the page's answers, beside the command that answers the same question.

    python -m benchmarks.page_time 3

Each question goes, by turns, to a running `planner web` and to a process `planner suggest --json`. The page's
script sends it, and the time ends with the last byte of the answer. The page also receives figures, files and
HTML; the command also starts Python. Neither time includes drawing in a browser.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import httpx

from benchmarks.pictures import served
from planner.service.questions import read_question
from planner.web.server import question_app

QUESTIONS = (
    ("gpt2-small", "h100", 4, 8, "bundled"),
    ("llama3-8b", "h100", 8, 64, "bundled"),
    ("llama3-8b", "h200", 16, 64, "megatron"),
    ("llama3-8b", "mi300x", 8, 64, "torchtitan"),
    ("gpt2-medium", "l40s", 2, 32, "bundled"),
    ("mixtral-8x7b", "h100", 16, 64, "megatron"),
    ("llama2-70b", "a100-80g", 64, 256, "megatron"),
    ("llama3-70b", "b200", 64, 256, "bundled"),
)
"""Model, device, devices, sequences of a step, and engine of each question."""


def seconds(call: Callable[[], object]) -> float:
    """The seconds that a call takes."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def main() -> None:
    """Print the median seconds of the page and of the command for each question, and their ratio."""
    rounds = int(sys.argv[1]) if sys.argv[1:] else 3
    names = ("model", "device", "world_size", "global_batch_size", "engine")
    print(f"{'question':<42}{'page s':>8}{'command s':>11}{'ratio':>7}")
    with served(question_app("127.0.0.1")) as site, httpx.Client(timeout=None) as client:
        for values in QUESTIONS:
            question = dict(zip(names, map(str, values), strict=True))
            command = [sys.executable, "-m", "planner", "suggest", *read_question(question).words, "--json"]

            def ask(question: dict[str, str] = question) -> None:
                assert "answer" in client.post(f"{site}answer", json=question).json(), question

            def run(command: list[str] = command) -> None:
                subprocess.run(command, check=True, capture_output=True)

            pairs = [(seconds(ask), seconds(run)) for _ in range(rounds)]
            page, typed = (statistics.median(found) for found in zip(*pairs, strict=True))
            print(f"{' '.join(question.values()):<42}{page:8.2f}{typed:11.2f}{page / typed:7.2f}", flush=True)


if __name__ == "__main__":
    main()

"""Packages that commands with an immediate answer must not load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SLOW = ("networkx", "pandas", "scipy", "torch", "transformers")

LOADED = f"""
import sys
from cli.main import main
try:
    main()
except SystemExit as stop:
    code = stop.code
print(code, [name for name in {SLOW} if name in sys.modules])
"""


@pytest.mark.parametrize(
    "words",
    [
        pytest.param("--help", marks=pytest.mark.slow),
        "suggest --model llama2-7b --world-size 8 --max-global-batch-size 16",
        pytest.param(
            "explain --model llama2-7b --world-size 8 --max-global-batch-size 16", marks=pytest.mark.slow
        ),
        "launch --help",
    ],
)
def test_no_module_that_takes_seconds_is_loaded(words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *words.split()], capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr

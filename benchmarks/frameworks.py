"""Checks that the software's own parsers accept exports. Prints the software that was checked, and rules that
are copied by hand.

    python -m venv frameworks && frameworks/bin/pip install '.[test,frameworks]'
    PYTHONPATH=Megatron-LM:nanotron/src frameworks/bin/python -m benchmarks.frameworks

Runs tests/planner/test_framework_parsers.py: layouts of the planner's own space, drawn at random.
"""

from __future__ import annotations

import contextlib
import io
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

PACKAGES = (
    "accelerate",
    "deepspeed",
    "megatron-core",
    "megatron-bridge",
    "torchtitan",
    "transformers",
    "torch",
)

SOURCES = ("megatron/training/arguments.py", "nanotron/config/config.py")
"""Files, on PYTHONPATH, of software without a package in an index."""

MIRRORED = (
    (
        "MindSpeed-LLM",
        "mindspeed/features_manager/*: read at commit 028de58c (July 2026); its flags are of no package",
    ),
    (
        "MindFormers",
        "configs/README.md, modules/transformer/transformer.py, models/utils.py at fd4deebc (July 2025)",
    ),
    (
        "Megatron-Bridge",
        "models/gpt_provider.py and training/config.py: field names are read off its sources, which "
        "import Transformer Engine",
    ),
)
"""Software that cannot be installed here, and the files from which its rules were copied."""


class Outcomes:
    """Outcomes of the tests, a line each."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the outcome of a test."""
        if report.when == "call" or report.skipped:
            name = report.nodeid.partition("::")[2].removeprefix("test_").replace("_", " ")
            why = ""
            if report.skipped and isinstance(report.longrepr, tuple):
                why = f": {report.longrepr[2].removeprefix('Skipped: ')[:120]}"
            self.lines.append(f"{report.outcome:8} {name}{why}")


def main() -> int:
    """Print installed software, checks, and copied rules."""
    for name in PACKAGES:
        try:
            print(f"{name} {version(name)}")
        except PackageNotFoundError:
            print(f"{name} is not installed")
    for source in SOURCES:
        found = [path for path in sys.path if (Path(path) / source).is_file()]
        print(f"{source}: {'on PYTHONPATH' if found else 'not on PYTHONPATH'}")
    outcomes = Outcomes()
    file = Path(__file__).parents[1] / "tests" / "planner" / "test_framework_parsers.py"
    words = [str(file), "-n0", "-qq", "--no-summary", "-p", "no:cacheprovider", "-W", "ignore"]
    with contextlib.redirect_stdout(io.StringIO()):
        code = pytest.main(words, [outcomes])
    print("\n".join(outcomes.lines))
    for name, source in MIRRORED:
        print(f"mirrored {name}: {source}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())

"""Run a module of this installation: `python .../runtime/entry.py MODULE ARGUMENTS`.

With `python -m MODULE`, the module and its imports may come from the working directory, where a user may have
another `runtime` or `typing.py`. A file started by its path imports nothing from there.
"""

import os
import sys

if __name__ == "__main__" and not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
    # Python put this file's folder first, whose modules are those of the package `runtime` alone.
    del sys.path[0]

from pathlib import Path
from runpy import run_module

ENTRY = str(Path(__file__).resolve())
ROOT = str(Path(__file__).resolve().parents[1])


def command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of these packages, or another installed module."""
    return [sys.executable, ENTRY, module, *arguments]


def main() -> None:
    """Run the module that the first argument names in this process."""
    if ROOT not in map(os.path.realpath, sys.path):
        sys.path.insert(0, ROOT)  # A source tree, say, that is not installed.
    del sys.argv[0]
    run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

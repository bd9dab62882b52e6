"""The import path of `python -m runtime.pretrain`: this installation, without the working directory.

This module is imported before all others of these packages, and so imports none of them.
"""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

NEEDED_PACKAGES = ("costmodels", "planner")
"""Packages that ranks import besides this package."""


def runs_package(package: str) -> bool:
    """Return whether this Python runs a module of `package`: `python -m package.module`."""
    words = sys.orig_argv
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    return module.partition(".")[0] == package


def leave_working_directory(root: Path) -> None:
    """Import nothing further from the working directory, unless the packages are there, in `root`.

    Ends the process, with one line, where another module on the path has the name of one of the packages.
    """
    here = Path.cwd()
    if here != root and sys.path[:1] in ([""], [str(here)]):
        del sys.path[0]
    for name in NEEDED_PACKAGES:
        found = PathFinder.find_spec(name)
        file = None if found is None else found.origin
        # The path may go over links, such as that of a home folder, which `root` does not.
        own = root / f"{name}.py", root / name / "__init__.py"
        if file is not None and Path(file).resolve() not in own:
            print(
                f"runtime: error: {file} is in the way of the package {name} in {root}: rename it, or take "
                "its folder out of PYTHONPATH",
                file=sys.stderr,
            )
            sys.exit(2)

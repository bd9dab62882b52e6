"""The least versions that pyproject.toml allows, as pip's constraints: `name==version`, one a line."""

from __future__ import annotations

import re
from pathlib import Path

LEAST = re.compile(r'"([A-Za-z0-9_.-]+)>=([0-9.]+)[";]')


def least_versions(text: str) -> dict[str, str]:
    """The least version of each package that is needed to run, by `text` of a pyproject.toml, and to test."""
    needed = text[text.index("\ndependencies = [") : text.index("\n]\n")]
    extras = [line for line in text.splitlines() if line.startswith(("fp8 = ", "test = "))]
    return dict(LEAST.findall("\n".join([needed, *extras])))


if __name__ == "__main__":
    for name, version in least_versions(Path("pyproject.toml").read_text()).items():
        print(f"{name}=={version}")

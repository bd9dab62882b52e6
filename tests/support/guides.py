"""The public guides that the first users come from, where a copy of them lies beside the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import ROOT

FOLDERS = (ROOT.parent / "shared" / "guides", ROOT.parent.parent / "shared" / "guides")


def guide(name: str) -> Path:
    """The path of a guide's text; skips the test that asks for it where there is no copy."""
    for folder in FOLDERS:
        if (folder / name).is_file():
            return folder / name
    pytest.skip(f"no copy of the guide {name} in {FOLDERS[0]}")

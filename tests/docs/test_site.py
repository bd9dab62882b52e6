"""The documentation builds without a warning."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

pytest.importorskip("mkdocs", reason="the site is built with the extra docs")
pytest.importorskip("mkdocstrings", reason="the site is built with the extra docs")


@pytest.mark.slow
def test_the_site_builds(tmp_path: Path) -> None:
    site = str(tmp_path / "site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", site]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "tutorial" / "index.html").is_file()

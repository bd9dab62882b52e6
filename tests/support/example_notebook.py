"""The notebook of the examples, executed: `python -m tests.support.example_notebook` writes its outputs."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tests.support import ROOT

NOTEBOOK = ROOT / "examples" / "planning.ipynb"

TIMEOUT_S = 240


def executed(folder: Path) -> dict[str, Any]:
    """The notebook with the outputs of a run in `folder`, as JSON; raises where a cell does."""
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(book, timeout=TIMEOUT_S, kernel_name="python3", resources=resources).execute()
    for cell in book.cells:
        cell.metadata = {}
    book.metadata = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["metadata"]
    found: dict[str, Any] = json.loads(nbformat.writes(book))
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as run:
        NOTEBOOK.write_text(json.dumps(executed(Path(run)), indent=1) + "\n", encoding="utf-8")

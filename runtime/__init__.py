"""Training of a `Plan` on PyTorch's distributed stack."""

import os
from pathlib import Path

from runtime import import_path

PARENT = os.getppid()
"""The parent process, noted before the imports of PyTorch, which take seconds."""

if import_path.runs_package(__name__):
    import_path.leave_working_directory(Path(__file__).resolve().parents[1])

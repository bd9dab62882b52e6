"""Training of a `Plan` on PyTorch's distributed stack."""

import os
from pathlib import Path

from runtime import own_path

PARENT = os.getppid()
"""The process that started this one, noted before the imports of PyTorch, which take seconds."""

if own_path.started_as(__name__):
    own_path.leave_working_directory(Path(__file__).resolve().parents[1])

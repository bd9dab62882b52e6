"""One command of a kind: `python -m benchmarks.gpu_kinds.process FILE MODULE ARGUMENTS`.

Runs MODULE as `python -m` does. When the module ends or fails, the peak bytes that the GPU's allocator
allocated and reserved are written to FILE. Without a GPU no file is written.
"""

from __future__ import annotations

import atexit
import json
import sys
from pathlib import Path
from runpy import run_module


def _keep_peaks(file: Path) -> None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return
    peaks = {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }
    file.write_text(json.dumps(peaks), encoding="utf-8")


def main() -> None:
    """Run the module of the command line in this process."""
    file, module, *words = sys.argv[1:]
    atexit.register(_keep_peaks, Path(file))
    sys.argv = [module, *words]
    run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

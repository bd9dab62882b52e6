"""metrics.jsonl: one JSON object for each logged step and each evaluation. Never imports torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"


def read_metrics(log_dir: str | Path) -> list[dict[str, Any]]:
    """Records of a run so far; a last line that is still being written is left out."""
    path = Path(log_dir) / METRICS_FILE
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def keep_until(log_dir: str | Path, iteration: int) -> Path:
    """Drop the records of steps after `iteration`, which a resumed run takes again; returns the file."""
    path = Path(log_dir) / METRICS_FILE
    kept = [record for record in read_metrics(log_dir) if 0 < iteration >= record["iteration"]]
    path.write_text("".join(json.dumps(record) + "\n" for record in kept))
    return path

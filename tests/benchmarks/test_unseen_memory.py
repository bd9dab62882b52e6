"""The table of memory on unseen sources: from rows of a file to figures."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from benchmarks import unseen_memory
from tests.benchmarks.calibration.test_measurements import ROW

KIND = "torch max_allocated"


def written(folder: Path) -> str:
    """Two jobs of 32 devices that publish a peak, one of them no time, and one that ran out of memory."""
    rows = [
        {"peak_mem_gib": "30", "mem_kind": KIND, "source_id": "simumax_b200"},
        {"peak_mem_gib": "34", "row_status": "memory_only", "mem_kind": "nvidia-smi", "step_time_s": ""},
        {"row_status": "oom", "step_time_s": "", "mbs": "32", "gbs": "1024"},
        {"gpu": "abacus"},
    ]
    path = folder / "rows.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, ROW)
        table.writeheader()
        table.writerows({**ROW, "source_id": "primus_pipeline", **row} for row in rows)
    return str(path)


def test_sources_are_scored_by_engine_and_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path)
    monkeypatch.setattr("sys.argv", ["unseen_memory", "--rows", file, "--json"])
    unseen_memory.main()
    found = json.loads(capsys.readouterr().out)["sources"]
    assert list(found) == ["primus_pipeline", "simumax_b200"]
    assert list(found["simumax_b200"]["memory"]["engines"]) == ["megatron, allocated"]
    here = found["primus_pipeline"]
    assert (here["memory"]["n"], here["oom"]["n"]) == (1, 1)
    assert list(here["memory"]["engines"]) == ["megatron, device"]
    monkeypatch.setattr("sys.argv", ["unseen_memory", "--rows", file, "--skipped"])
    unseen_memory.main()
    shown = capsys.readouterr()
    assert "gpu unknown" in shown.err
    assert "Median over 2 sources with peaks" in shown.out
    assert "Of the 1 rows that ran out of memory" in shown.out

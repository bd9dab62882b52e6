"""Rows of measured peaks, and what of them is compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.memory_h100 import memory_h100, row_of
from costmodels.errors import InputError
from costmodels.spec.record import GIB

RAW = {
    "model_name": "qwen3-1.7b",
    "layers": "4",
    "seq": "4096",
    "source_ref": "the runtime, torch 2.11.0+cu130, one H100",
    "notes": "median of 5 steps; offload_activations=1",
    "mbs": "2",
    "gbs": "8",
    "recompute": "none",
    "zero_stage": "0",
    "precision": "bf16",
    "optimizer": "adam",
    "gpu": "H100-80GB",
    "peak_mem_gib": "38.5",
}


def test_a_row_is_a_cut_model_and_its_layout() -> None:
    row = row_of(RAW)
    assert (row.model.layers, row.model.seq, row.layout.micro_batches) == (4, 4096, 4)
    assert row.layout.offload_activations and not row.layout.offload_optimizer
    assert (row.device, row.version, row.allocated) == ("h100", "2.11", 38.5 * GIB)


def test_steps_in_fp16_had_updated_nothing() -> None:
    assert row_of(RAW | {"precision": "fp16"}).skips and not row_of(RAW).skips


def test_files_that_are_no_table_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--rows"):
        memory_h100(tmp_path / "none.csv")
    file = tmp_path / "other.csv"
    file.write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="no column layers"):
        memory_h100(file)
    with pytest.raises(InputError, match="names no version"):
        row_of(RAW | {"source_ref": "somewhere"})

"""A run that is killed at random goes on as if it had not been: the soak of `benchmarks.faults`, small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.fault_audit import Attempt, audit
from benchmarks.faults import TOLERANCE, Soak
from runtime.logs.sample_log import SampleLog, drop_samples_after, read_samples
from tests.support.running_jobs import forked


@pytest.mark.ranks
def test_killed_ranks_lose_no_sample_and_no_step(tmp_path: Path) -> None:
    said: list[str] = []
    soak = Soak(tmp_path, 18, 3, forked, said.append)
    kills, attempts, found = soak.soak(2)
    assert found.failures(TOLERANCE) == []
    assert [kill.left_over for kill in kills] == [0, 0] and len(said) == 2
    assert len(attempts) == 3
    assert attempts[-1].reached == 18


def log_of(folder: Path, losses: dict[int, float], samples: dict[int, list[int]]) -> Path:
    """The log folder of an attempt."""
    folder.mkdir()
    lines = [json.dumps({"iteration": i, "loss": loss}) for i, loss in losses.items()]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    rows = [
        json.dumps({"iteration": i, "samples": row, "checksums": [7 * n for n in row]})
        for i, row in samples.items()
    ]
    (folder / "samples-0.jsonl").write_text("".join(f"{row}\n" for row in rows))
    return folder


def test_the_audit_finds_what_is_wrong(tmp_path: Path) -> None:
    steps = {1: 3.0, 2: 2.0, 3: 1.0}
    samples = {1: [0, 1], 2: [2, 3], 3: [4, 5]}
    reference = log_of(tmp_path / "reference", steps, samples)

    def attempt(
        name: str, resumed: int, saved: int, first: int = 1, **changes: dict[int, list[int]]
    ) -> Attempt:
        rows = {i: row for i, row in samples.items() if i >= first} | changes.get("rows", {})
        folder = log_of(tmp_path / name, {i: loss for i, loss in steps.items() if i >= first}, rows)
        return Attempt(folder, "", resumed, saved, "dp=2", 3)

    whole = [attempt("a", 0, 1), attempt("b", 1, 3, first=2)]
    assert audit(whole, reference, 3).failures(1e-5) == []
    lost = audit([attempt("c", 0, 2), attempt("d", 1, 3, first=2)], reference, 3)
    assert lost.failures(1e-5) == ["1 lost checkpoints"]
    skipped = audit([attempt("e", 0, 1), attempt("f", 2, 3, first=3)], reference, 4)
    assert "1 missing" in skipped.failures(1e-5)[0]
    again = audit([attempt("g", 0, 3, rows={3: [4, 0]})], reference, 3)
    assert (again.repeated, again.lost, again.changed) == ([0], [5], [0])


def test_samples_are_logged_with_the_sums_of_their_tokens(tmp_path: Path) -> None:
    import numpy as np

    first, second = (SampleLog(tmp_path, rank) for rank in (0, 1))
    for step in (1, 2, 3):
        first.step(step, [2 * step], np.full((1, 5), step))
        second.step(step, [2 * step + 1], np.full((1, 5), step))
    found = read_samples(tmp_path)
    assert {step: sorted(row) for step, row in found.items()} == {1: [2, 3], 2: [4, 5], 3: [6, 7]}
    assert found[1][2] == found[1][3] != found[2][4]
    drop_samples_after(tmp_path, 2)
    assert sorted(read_samples(tmp_path)) == [1, 2]
    second.step(2, [4], np.full((1, 5), 2))
    second.file.path.write_text(
        second.file.path.read_text() + '{"iteration": 2, "samples": [4], "checksums": [1]}\n'
    )
    with pytest.raises(ValueError, match="sample 4 twice in the step of iteration 2"):
        read_samples(tmp_path)

"""The rows that one GPU is measured with, and what is said of those that were not."""

from __future__ import annotations

import json
import sys

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import gpu
from benchmarks.gpu import CASES, RUNTIME, TRANSFORMERS, Case, command, sized
from costmodels.errors import InputError


@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rows_are_layouts_that_run(case: Case, on_gpu: bool) -> None:
    spec, layout = sized(case, on_gpu)
    assert layout.world_size == 1 and layout.micro_batches > 1
    assert on_gpu or spec.hidden < 128
    assert command(case, RUNTIME, True)[-3:] == [case.name, RUNTIME, "compiled"]


@pytest.fixture
def without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark finds every package but torchao."""
    monkeypatch.setattr(gpu, "find_spec", lambda name: None if name == "torchao" else object())


@pytest.mark.usefixtures("without_torchao")
def test_rows_in_fp8_are_refused_without_torchao() -> None:
    with pytest.raises(InputError, match=r"^torchao: not installed; run `pip install '.*fp8.*'`$"):
        gpu.gpu(only="llama3-8b fp8")


@pytest.mark.usefixtures("without_torchao")
def test_rows_that_fail_are_named_and_the_others_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def stands_in(case: Case, contestant: str, compiled: bool) -> list[str]:
        seconds = {RUNTIME: 1.0, TRANSFORMERS: 1.5}[contestant]
        script = f'print(\'{{"step_time_s": {seconds}, "peak_memory_bytes": 1}}\')'
        return [sys.executable, "-c", "raise SystemExit('no room')" if "xl" in case.name else script]

    monkeypatch.setattr(gpu, "command", stands_in)
    app = typer.Typer()
    app.command()(gpu.gpu)
    result = CliRunner().invoke(app, ["--json", "--only", "gpt2"])
    rows = json.loads(result.stdout)["rows"]
    assert rows["gpt2-medium"]["over_transformers"] == pytest.approx(1.5)
    assert rows["gpt2-xl"][RUNTIME] == {"failed": "no room"}
    assert "over_transformers" not in rows["gpt2-xl"]

"""`planner models`, `devices` and `engines`."""

from __future__ import annotations

import json
import sys

import pytest
import yaml

from cli import main as command_line
from cli.catalogues import _besides
from costmodels.catalogue import device_names, device_template, engine_names, load_model, model_names


def printed(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", ["planner", *words])
    with pytest.raises(SystemExit) as stop:
        command_line.main()
    assert stop.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "names"),
    [("models", model_names()), ("devices", device_names()), ("engines", engine_names())],
)
@pytest.mark.parametrize("columns", ["80", "200"])
def test_every_entry_is_listed_whole(
    command: str,
    names: list[str],
    columns: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    first_words = {
        line.split()[0] for line in printed([command], monkeypatch, capsys).splitlines() if line.strip()
    }
    assert set(names) <= first_words
    records = json.loads(printed([command, "--json"], monkeypatch, capsys))
    assert [record["name"] for record in records] == names
    assert all(record["source"] for record in records)


def test_models_state_their_parameters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    records = {
        record["name"]: record for record in json.loads(printed(["models", "--json"], monkeypatch, capsys))
    }
    assert records["gpt-22b"]["parameters"] == pytest.approx(22.1e9, rel=0.005)


def test_devices_state_memory_and_peaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(["devices"], monkeypatch, capsys).splitlines()
    line = next(line for line in lines if line.startswith("a100-80g"))
    assert "312 bf16" in line and "2039" in line
    rows = "\n".join(lines)
    assert "2250 bf16" in rows and "989.4 bf16" in rows
    assert "e+" not in rows


def test_a_template_of_a_device_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(["devices", "--template"], monkeypatch, capsys)
    assert text == device_template()
    assert set(yaml.safe_load(text)) >= {"peak_flops", "memory_bytes", "intra_node", "source"}


def test_models_say_what_they_have_besides(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(["models"], monkeypatch, capsys)
    assert "deepseek-v3: 1 module for multi-token prediction besides, with --mtp-num-layers" in text
    records = json.loads(printed(["models", "--json"], monkeypatch, capsys))
    assert all(record["untrained"] == [] for record in records)
    mixed = load_model("llama3-8b").model_copy(update={"name": "mixed", "other_parameters": 1})
    assert list(_besides(mixed)) == ["mixed: priced, not trained here, for parameters of other parts"]

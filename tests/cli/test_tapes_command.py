"""`planner tapes`: what it records is what plans of the model are then played with."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cli import main as command_line
from costmodels import Layout
from costmodels.tapes import player, store
from planner.inputs.model import resolve_model

CONFIG = {
    "model_type": "granite", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 176,
    "num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 64,
    "attention_multiplier": 0.3, "residual_multiplier": 0.7, "embedding_multiplier": 3.0,
    "logits_scaling": 5.0,
}  # fmt: skip
"""Of a form that no model of the catalogue has."""


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["planner", *words])
    with pytest.raises(SystemExit) as stop:
        command_line.main()
    return int(stop.value.code or 0)


@pytest.mark.slow
def test_a_models_own_tapes_make_its_memory_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, config = tmp_path / "tapes.zip", tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    words = ("tapes", "--model", str(config), "--layers", "eager", "--file", str(file))
    assert run(monkeypatch, *words, "--most", "3") == 0
    assert f"3 tapes recorded in {file}, 0 were there" in capsys.readouterr().out
    assert run(monkeypatch, *words, "--most", "4") == 0
    assert f"1 tapes recorded in {file}, 3 were there" in capsys.readouterr().out
    names = list(store.structure_names(file))
    assert len(names) == 4 and all("residual_scale" in name for name in names if "dense" in name)

    spec = resolve_model(config)
    layout = Layout.model_validate({"layers_per_stage": (2,), "global_batch_size": 4})
    wanted: dict[str, Any] = {
        one.structure.name: one.structure for one in player.structures_of_stage(spec, layout, 0, False)
    }
    assert set(wanted) <= set(names)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "no-such-model"), "no-such-model"),
        (("--precision", "bf16", "--fp8-recipe", "tensorwise"), "fp8"),
        (("--most", "0"), "--most 0"),
    ],
)
def test_tapes_of_nothing_are_refused(
    words: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "tapes.zip"
    assert run(monkeypatch, "tapes", "--file", str(file), *words) != 0
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not file.exists()

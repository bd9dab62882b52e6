"""The glossary has every symbol that layouts are written with."""

from __future__ import annotations

from typing import get_args

import pytest

from costmodels.spec.layout import SHORT_NAMES, ContextParallelForm, Recompute, Schedule
from tests.support import ROOT

PAGE = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("symbol", [*SHORT_NAMES, "offload"])
def test_every_symbol_of_the_notation_has_a_line(symbol: str) -> None:
    assert any(
        f"`{symbol}`" in row or f"`{symbol}=" in row for row in PAGE.splitlines() if row.startswith("| `")
    )


@pytest.mark.parametrize("name", [*get_args(Schedule), *get_args(ContextParallelForm), *get_args(Recompute)])
def test_every_word_of_a_layout_is_named(name: str) -> None:
    assert f"`{name}`" in PAGE

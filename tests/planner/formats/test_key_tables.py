"""The tables of keys: each key once, in the section that it has in reading and in exports."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest
import yaml

from planner.formats.facts.flag_catalogue import Role
from planner.formats.facts.key_table import DEFAULTS, FOLDER, OTHERS, key_table
from tests.planner.test_public_cases import written
from tests.support.key_page import PAGE, page

TABLES = sorted(path.stem for path in FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("software", TABLES)
def test_a_key_has_one_role(software: str) -> None:
    sections = yaml.safe_load((FOLDER / f"{software}.yaml").read_text())
    sections.pop(DEFAULTS, None)
    assert set(sections) <= set(get_args(Role))
    roles: dict[str, set[str]] = {}
    listed: Counter[str] = Counter()
    for role, section in sections.items():
        rows = {OTHERS: section} if isinstance(section, str) else section
        for field, text in rows.items():
            for key in text.split():
                roles.setdefault(key, set()).add(role)
                listed[key] += field == OTHERS
                assert field == OTHERS or "*" not in key
    assert [key for key, found in roles.items() if len(found) > 1] == []
    assert [key for key, times in listed.items() if times > 1] == []


@pytest.mark.parametrize("software", TABLES)
def test_earlier_names_are_no_keys_of_today(software: str) -> None:
    table = key_table(software)
    keys = {*table.fields.values(), *table.flags.values()}
    assert not set(table.earlier) & keys
    assert {table.roles[key] for key in table.earlier} <= {table.roles[key] for key in keys}


def test_keys_that_say_the_opposite_and_defaults() -> None:
    table = key_table("megatron-bridge")
    assert table.flag_of["model.bias"] == table.flag_of["model.add_bias_linear"] == "--disable-bias-linear"
    assert {"model.bias", "model.add_bias_linear"} <= table.opposite
    assert table.flag_of["model.encoder_seq_length"] == "--seq-length"
    assert key_table("ms-swift").defaults["--global-batch-size"] == "16"


def test_the_stage_of_deepspeed_decides(tmp_path: Path) -> None:
    text = json.dumps(
        {
            "bf16": {"enabled": True},
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": "${STAGE}"},
        }
    )
    read = written(tmp_path, {"ds.json": text}, model="llama2-7b", world_size=8)
    assert read.legal is None and "zero_optimization.stage" in read.unknown


def test_the_page_shows_the_tables() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.support.key_page writes it"

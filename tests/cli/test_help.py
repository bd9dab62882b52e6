"""Help texts of the command line: sections of flags, notation of plans, completion."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest

from cli.suggest import Output
from planner.options.batch import BatchOptions
from planner.options.cluster import ClusterOptions
from planner.options.command import WIDTH
from planner.options.flags import sections_of
from planner.options.model import ModelOptions
from planner.options.notation import NOTATION
from planner.options.parallel import ParallelOptions
from runtime.faults.fault_options import FaultOptions
from runtime.settings.training_options import DataOptions, OutputOptions, TrainingOptions
from tests.support.commands import Command

pytestmark = pytest.mark.oldest

ROOT = Path(__file__).parents[2]

GROUPS = (
    *(ModelOptions, ClusterOptions, BatchOptions, ParallelOptions, Output),
    *(TrainingOptions, DataOptions, OutputOptions, FaultOptions),
)


@pytest.mark.parametrize("group", GROUPS)
def test_every_flag_has_a_section(group: type) -> None:
    found = sections_of(group)
    for field in dataclasses.fields(group):
        assert field.name in found or field.metadata["hidden"]
    starts = {name for base in group.__mro__ for name in getattr(base, "SECTIONS", {})}
    assert starts <= {field.name for field in dataclasses.fields(group)}


def test_help_has_sections_and_ends_with_what_changes_nothing(planner_command: Command) -> None:
    code, out, _ = planner_command("launch", "-h")
    assert code == 0
    heads = re.findall(r"^(\S.*):$", out, re.MULTILINE)
    order = ["Model", "Cluster", "Batch", "Pins", "Optimizer", "Learning rate", "Data", "Checkpoints"]
    assert [head for head in heads if head in order] == order
    assert heads[-2:] == ["Accepted and ignored (always on)", "Examples"]
    assert out.index("--use-flash-attn") > out.index("--max-restarts")
    # No name is broken at the end of a line.
    assert "--no-create-attention-mask-in-dataloader" in out
    assert planner_command("launch", "--help")[1] == out
    assert "Arguments:" in planner_command("data", "info", "-h")[1]
    assert re.findall(r"^\w+:$", planner_command("timeline", "-h")[1], re.MULTILINE) == [
        "Arguments:",
        "Options:",
        "Examples:",
    ]
    assert planner_command("-h")[0] == planner_command("data", "prepare", "-h")[0] == 0


def test_the_notation_of_plans_is_described_once(planner_command: Command) -> None:
    assert all(len(line) <= WIDTH for line in NOTATION.splitlines())
    assert NOTATION in (ROOT / "docs" / "planning.md").read_text()
    help_text = planner_command("suggest", "--help")[1]
    assert all(line in help_text for line in NOTATION.splitlines())


def test_the_notation_covers_what_layouts_print() -> None:
    from tests.support.layouts import parse_layout
    from tests.support.models import LLAMA

    every = parse_layout(
        "tp=2,sp=true,pp=2,vpp=2,schedule=interleaved_zb,cp=2,cp_form=ring,dp=2,zero=1,zero_replicas=2", LLAMA
    )
    for word in every.describe().split():
        name, equals, _ = word.partition("=")
        assert not equals or f"{name}=" in NOTATION


def completed(planner_command: Command, monkeypatch: pytest.MonkeyPatch, line: str) -> list[str]:
    words = line.split(" ")
    monkeypatch.setenv("_PLANNER_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    code, out, _ = planner_command()
    assert code == 0
    return out.split()


def test_shells_complete_commands_flags_and_names(
    planner_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert completed(planner_command, monkeypatch, "planner sug") == ["suggest"]
    flags = completed(planner_command, monkeypatch, "planner suggest --tensor-model")
    assert flags == ["--tensor-model-parallel-size"]
    assert completed(planner_command, monkeypatch, "planner suggest --device rtx-5") == ["rtx-5090"]
    assert "dualpipev" in completed(planner_command, monkeypatch, "planner suggest --pipeline-schedule d")


def test_completion_imports_the_chosen_command_alone(
    planner_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("cli.") and name != "cli.main"]:
        monkeypatch.delitem(sys.modules, name)
    completed(planner_command, monkeypatch, "planner dev")
    assert not {"cli.suggest", "cli.launch", "cli.catalogues"} & sys.modules.keys()
    completed(planner_command, monkeypatch, "planner devices --t")
    assert "cli.catalogues" in sys.modules and not {"cli.suggest", "cli.launch"} & sys.modules.keys()

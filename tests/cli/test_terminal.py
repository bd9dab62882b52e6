"""Output on terminals of 80 and 160 columns, with and without colours, and of each help."""

from __future__ import annotations

import re
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer

from benchmarks.terminal import in_terminal
from cli import waiting
from cli.app import make_app
from cli.help_examples import EXAMPLES
from cli.main import COMMANDS
from tests.support.commands import Command, told
from tests.support.jobs import LAYOUT, TINY, write_corpus

JOB = "--model llama2-70b --world-size 64 --local-world-size 8 --device a100-80g --max-global-batch-size 16"

WIDTHS = (80, 160)

COLOUR = "\x1b[1;32m"

UNITS = re.compile(
    r"\b(layers?|width|heads?|tokens?|sequences?|rows|entries|experts?|groups?|rank of|devices?|nodes?"
    r"|gigabits|GiB|hours?|minutes|seconds?|money|steps?|iterations?|rate|weight|decay|factor|share|times"
    r"|ranks?|plans?|number|copies|bandwidth|cards|days|batches|norm|value|scale|overflows|seed|epsilon"
    r"|base|term|momentum|deviation|documents|processes|failures|collective|logits|probabilities"
    r"|only 0)\b",
    re.IGNORECASE,
)
"""Units that help texts name for the numbers of flags."""


@pytest.mark.slow
@pytest.mark.parametrize("columns", WIDTHS)
def test_suggest_fits_one_screen_the_plan_first(columns: int, tmp_path: Path) -> None:
    shown = in_terminal("suggest", *JOB.split(), columns=columns, folder=tmp_path)
    assert shown.code == 0
    first = next(line for line in shown.lines if line.startswith("tp="))
    assert COLOUR + first in shown.raw
    answer = shown.lines[shown.lines.index(first) :]
    assert len(answer) < 24 and max(map(len, answer)) <= columns
    for name in ("run: planner launch", "step ", "tokens/s ", "MFU ", "memory ", "next: ", "ties: "):
        assert sum(line.startswith(name) for line in answer) == 1, name
    assert sum("█" in line for line in answer) == 8


@pytest.mark.slow
def test_colours_are_for_terminals_that_want_them(tmp_path: Path, planner_command: Command) -> None:
    plain = in_terminal("suggest", *JOB.split(), columns=80, folder=tmp_path, NO_COLOR="1")
    assert not re.search(r"\x1b\[[\d;]*3\dm", plain.raw) and "█" in plain.raw
    assert "\x1b" not in planner_command("suggest", *JOB.split())[1]


@pytest.mark.slow
@pytest.mark.parametrize("columns", WIDTHS)
def test_explain_fits_the_width(columns: int, tmp_path: Path) -> None:
    shown = in_terminal(
        "explain", *JOB.split(), "--layout", "tp=16", "--no-what-if", columns=columns, folder=tmp_path
    )
    assert shown.code == 0 and max(map(len, shown.lines)) <= columns
    assert "best: tp=" in shown.text and "tensor_parallel=16 " in shown.text


@pytest.mark.ranks
@pytest.mark.parametrize("columns", WIDTHS)
def test_launch_shows_steps_and_ends_with_what_was_measured(columns: int, tmp_path: Path) -> None:
    words = [*TINY, *LAYOUT, "--world-size", "2", "--data-path", write_corpus(tmp_path), "--split", "90,10,0"]
    words += ["--train-iters", "4", "--log-interval", "1"]
    shown = in_terminal("launch", *words, columns=columns, folder=tmp_path)
    assert shown.code == 0, shown.text
    steps = [line for line in shown.lines if re.match(r"step +\d+/\d+  loss ", line)]
    assert steps and max(map(len, steps)) < 80
    table = [line for line in shown.lines if "predicted" in line or "measured" in line]
    assert table and max(map(len, table)) <= columns


def test_who_waits_for_more_than_a_second_is_told_for_what(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(waiting, "PATIENCE_S", 0.0)
    with waiting.waiting("planning"):
        time.sleep(0.05)
    # No terminal, no line.
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with waiting.waiting("planning"):
        deadline = time.monotonic() + 20
        shown = ""
        while "planning" not in shown and time.monotonic() < deadline:
            time.sleep(0.01)
            shown += capsys.readouterr().err
    assert "planning" in shown


def commands(group: Any, path: tuple[str, ...] = ()) -> dict[str, Any]:
    """All commands by the words that are typed for them."""
    if not hasattr(group, "commands"):
        return {" ".join(path): group}
    found: dict[str, Any] = {}
    for name, one in group.commands.items():
        found |= commands(one, (*path, name))
    return found


@pytest.fixture(scope="module")
def every_command() -> dict[str, Any]:
    return commands(typer.main.get_command(make_app(COMMANDS, [])))


@pytest.mark.slow
def test_every_help_has_80_columns_and_every_option_says_what_it_is(
    every_command: dict[str, Any], planner_command: Command
) -> None:
    assert set(EXAMPLES) <= set(every_command)
    assert {name.split()[0] for name in every_command} == set(COMMANDS)
    for name, command in every_command.items():
        code, out, _ = planner_command(*name.split(), "--help")
        assert code == 0 and max(map(len, out.splitlines())) <= 80, name
        assert ("Examples:" in out) == (name in EXAMPLES)
        for option in command.params:
            if option.hidden or option.param_type_name != "option":
                continue
            assert option.help, (name, option.opts)
            names, text = option.get_help_record(typer.Context(command))
            if names.endswith(("<int>", "<float>")):
                assert UNITS.search(text), (name, names, text)


def test_the_list_of_commands_is_cut_nowhere(planner_command: Command) -> None:
    out = planner_command("--help")[1]
    assert out.count("...") == 1 and max(map(len, out.splitlines())) <= 80


@pytest.mark.slow
def test_examples_of_the_helps_can_be_typed(
    every_command: dict[str, Any], planner_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.sh").write_text(
        "torchrun --nproc_per_node 8 --nnodes 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 "
        "--num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 "
        "--global-batch-size 256 --vocab-size 32000 --bf16 --tensor-model-parallel-size 4 --swiglu "
        "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
        "--untie-embeddings-and-output-weights\n"
    )
    quick = ("suggest", "explain", "check", "export", "convert-config", "script", "timeline", "compare")
    for name, lines in EXAMPLES.items():
        text = "\n".join(lines).replace("\\\n", " ")
        assert max(map(len, lines)) <= 76
        for command in map(shlex.split, text.splitlines()):
            assert command[:2] == ["planner", name]
            words = [word.replace("other.json", "plan.json") for word in command[1:]]
            if name == "launch":
                words = [word.replace("plan.json", "small.json") for word in words]
                small = "suggest --model gpt2-nano --device cpu --world-size 2 --gbs 32 --save small.json"
                assert planner_command(*small.split())[0] == 0
                words.append("--print-command")
            if name in (*quick, "launch", "models", "devices", "engines"):
                code, _, err = planner_command(*words)
                assert code == 0 and "error" not in told(err), shlex.join(words)
            else:
                # Commands that train, trace or need files are not run; their flags are known.
                known = {flag for one in every_command[name].params for flag in one.opts}
                assert {word for word in words if word.startswith("--")} <= known


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("--objective", "troughput"), "throughput"),
        (("--cp-comm-type", "rng"), "ring"),
        (("--recompute-granularity", "ful"), "full"),
        (("--position-embedding-type", "rop"), "rope"),
        (("--wrld-size", "8"), "--world-size"),
        (("--pin", "tensor_paralel=2"), "tensor_parallel"),
        (("--optimizer", "adm"), "adam"),
        (("--lr-decay-style", "cosin"), "cosine"),
    ],
)
def test_the_nearest_of_what_is_misspelt_is_named(
    planner_command: Command, words: tuple[str, ...], meant: str
) -> None:
    job = ("--model", "gpt2-124m", "--world-size", "8", "--device", "h100", "--gbs", "16")
    name = "launch" if words[0].startswith("--lr") else "suggest"
    code, _, err = planner_command(name, *job, *words)
    assert code == 2 and f"did you mean {meant}?" in err


def test_shells_complete_pins(planner_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def completed(line: str) -> list[str]:
        monkeypatch.setenv("_PLANNER_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
        return planner_command()[1].split()

    assert completed("planner suggest --pin tensor") == ["tensor_parallel="]
    assert completed("planner suggest --pin recompute=") == [
        "recompute=none",
        "recompute=selective",
        "recompute=full",
    ]
    assert completed("planner suggest --model llama2-7") == ["llama2-7b", "llama2-70b"]
    assert completed("planner explain --layout vp") == ["vpp="]
    assert "megatron" in completed("planner export plan.json --to meg")

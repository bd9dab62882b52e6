"""`planner launch` as a user types it: what it prints and writes, and how it stops."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import typer

from cli.launch import leave
from costmodels.catalogue import local_machine
from planner import Plan
from runtime.launch.supervisor import Outcome
from tests.support import ROOT
from tests.support.commands import Command
from tests.support.jobs import (
    LAYOUT,
    TIMEOUT_S,
    TINY,
    losses,
    wait_until,
    write_corpus,
)
from tests.support.running_jobs import descendants, is_alive
from tests.support.scripts import MINDSPEED

ON_TWO = (*LAYOUT, "--world-size", "2")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("data"))


def test_a_dry_run_prints_the_torchrun_command_and_writes_nothing(
    planner_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = planner_command(
        "launch",
        *TINY,
        *ON_TWO,
        "--print-command",
        "--train-iters",
        "7",
        "--save",
        "my checkpoints",
        "--lr",
        "1e-3",
    )
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    start, flags = out.split(" -m runtime.pretrain ")
    assert start.endswith(" --standalone --nproc-per-node=2")
    assert "torchrun" in start or "torch.distributed.run" in start
    words = shlex.split(flags)
    for expected in (
        ["--pin", "dp=2", "--pin", "zero=1"],
        ["--train-iters", "7"],
        ["--save", "my checkpoints"],
    ):
        at = words.index(expected[0])
        assert words[at : at + len(expected)] == expected
    assert list(tmp_path.iterdir()) == []


def test_flags_of_other_scripts_reach_the_ranks(planner_command: Command, tmp_path: Path) -> None:
    """Flags of MindSpeed's guide to mixtures of experts: those that change nothing, and its experts."""
    accepted = [
        *("--use-mcore-models", "--use-flash-attn", "--use-fused-rotary-pos-emb", "--overlap-grad-reduce"),
        *("--moe-model-type", "megatron_moe", "--moe-permutation-async-comm", "--moe-grouped-gemm"),
        *("--moe-token-dispatcher-type", "alltoall", "--no-gradient-accumulation-fusion"),
        *("--no-bias-gelu-fusion", "--no-bias-dropout-fusion", "--moe-router-fusion", "--log-throughput"),
        *("--timing-log-option", "max", "--timing-log-level", "0", "--no-barrier-with-level-1-timing"),
        *("--num-workers", "4", "--distributed-backend", "nccl"),
    ]
    experts = ["--num-experts", "4", "--moe-router-topk", "2", "--expert-model-parallel-size", "2"]
    code, out, err = planner_command("launch", *TINY, *ON_TWO, *accepted, *experts, "--print-command")
    assert (code, err) == (0, "")
    words = shlex.split(out)
    assert set(accepted) | set(experts) <= set(words)


def test_a_dry_run_of_a_plan_names_the_plan(planner_command: Command, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    assert planner_command("suggest", *TINY, *ON_TWO, "--save", plan)[0] == 0
    code, out, _ = planner_command(
        "launch", "--plan", plan, "--print-command", "--log-dir", tmp_path / "logs"
    )
    assert code == 0
    assert f"--plan {plan}" in out and "--model" not in out
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.ranks
def test_launch_trains_and_compares_the_plan_with_what_happened(
    planner_command: Command, tmp_path: Path, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    folder = tmp_path / "run"
    code, out, err = planner_command(
        *("launch", *TINY, *ON_TWO, "--data-path", data, "--split", "90,10,0", "--train-iters", "6"),
        *("--log-interval", "2", "--eval-iters", "1", "--log-dir", folder, "--save", folder / "checkpoints"),
    )
    assert code == 0
    phases = ["planning", "preparing the data", "starting 2 ranks", "planning", "opening the data"]
    phases += ["building the model", "the first evaluation", "the first step"]
    assert err.splitlines() == [f"planner: {phase}" for phase in phases]
    plan = Plan.load(folder / "plan.json")
    assert plan.layout.data_parallel == 2
    assert plan.layout.describe() in out
    assert len(re.findall(r"iteration +\d+/ +6 \| consumed samples", out)) == 3
    assert out.count("validation loss at iteration") == 2
    assert list(losses(folder)) == [2, 4, 6]
    assert (folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "6"
    log = (folder / "output.log").read_text()
    assert all(line in out for line in log.splitlines() if not line.startswith("runtime: "))
    assert "TFLOP/s" not in out
    assert f"last checkpoint: {folder}/checkpoints/iter_0000006, of iteration 6 of 6" in out
    assert "--train-iters 12" in out and re.search(r"the step is .* the predicted range", out)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    table = out[out.index("predicted", out.index("validation loss at iteration 6")) :].splitlines()
    assert "measured" in table[0]
    for row, predicted, key in (
        (table[1], plan.estimate.step_time_s, "step_time_s"),
        (table[2], plan.estimate.peak_memory_bytes / 2**30, "peak_memory_bytes"),
    ):
        first, second, ratio = map(float, row.split()[-3:])
        assert first == pytest.approx(predicted, rel=1e-3)
        scale = 1 if key == "step_time_s" else 2**30
        seen = [record[key] / scale for record in records if key in record]
        assert min(seen) * 0.999 <= second <= max(seen) * 1.001
        assert ratio == pytest.approx(first / second, abs=0.01)


@pytest.mark.ranks
def test_mindspeeds_guide_to_experts_trains_in_small_on_four_ranks(
    planner_command: Command, tmp_path: Path, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers of four experts, top 2, tp 2, ep 2, sequence parallel, rotary, distributed optimizer."""
    monkeypatch.chdir(ROOT)
    # The script's bf16 is planned for processors that multiply in it, whichever this one is.
    (tmp_path / "cpuinfo").write_text("vendor_id\t: GenuineIntel\nflags\t\t: fma avx512f avx512_bf16\n")
    monkeypatch.setattr(local_machine, "CPUINFO", tmp_path / "cpuinfo")
    small = {"--hidden-size": "32", "--num-attention-heads": "4", "--seq-length": "32", "--vocab-size": "257"}
    small |= {"--max-position-embeddings": "32", "--train-iters": "12", "--lr": "1e-2", "--data-path": data}
    words = MINDSPEED.split()
    for name, value in small.items():
        words[words.index(name) + 1] = value
    for name in ("--vocab-file", "--merge-file"):
        del words[words.index(name) : words.index(name) + 2]
    on_four = ("--device", "cpu", "--world-size", "4", "--log-dir", tmp_path / "run")
    code, out, err = planner_command("launch", *words, *on_four)
    assert code == 0 and "warning" not in err
    assert "note: experts are dropless" in out and "nothing balances routers" in out
    layout = Plan.load(tmp_path / "run" / "plan.json").layout
    assert (layout.tensor_parallel, layout.expert_parallel, layout.data_parallel) == (2, 2, 2)
    assert layout.sequence_parallel and layout.zero_stage == 1 and layout.offload_activations
    curve = losses(tmp_path / "run")
    assert curve[1] == pytest.approx(math.log(257), rel=0.02)
    assert curve[12] < 0.75 * curve[1]
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    shares = [record["expert_load"] for record in records if "expert_load" in record]
    assert len(shares) == 12
    for layers in shares:
        assert list(layers) == ["0", "1"]
        for layer in layers.values():
            assert len(layer) == 4 and sum(layer) == pytest.approx(4.0, abs=1e-3)


@pytest.mark.ranks
def test_a_closed_terminal_saves_and_leaves_no_process(tmp_path: Path, data: str) -> None:
    folder = tmp_path / "run"
    words = [*TINY, *ON_TWO, "--data-path", data, "--train-iters", "1000000", "--eval-iters", "0"]
    words += ["--log-interval", "1", "--log-dir", str(folder), "--save", str(folder / "saved")]
    launcher, terminal = pty.fork()
    if launcher == 0:
        os.chdir(ROOT)
        # The tests may be run by nohup.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.execv(sys.executable, [sys.executable, "-m", "planner", "launch", *words])
    reader = threading.Thread(target=drain, args=(terminal,), daemon=True)
    reader.start()
    wait_until(lambda: len(losses(folder)) >= 3, "the first steps")
    below = descendants(launcher)
    # A terminal closes: nobody reads any more, and its processes get a signal.
    os.kill(launcher, signal.SIGHUP)
    _, status = os.waitpid(launcher, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0 and not any(map(is_alive, below))
    assert (folder / "saved" / "latest_checkpointed_iteration.txt").exists()


def drain(terminal: int) -> None:
    """Read what is shown on a terminal until it is closed."""
    with contextlib.suppress(OSError):
        while os.read(terminal, 1 << 16):
            pass


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (Outcome(0, "", stopped_by=signal.SIGTERM), 0),
        (Outcome(0, "", stopped_by=signal.SIGHUP), 0),
        (Outcome(0, "", stopped_by=signal.SIGINT), 130),
        (Outcome(143, "", stopped_by=signal.SIGTERM), 143),
        (Outcome(4, "diverged"), 4),
        (Outcome(0, ""), 0),
    ],
)
def test_exit_codes_are_as_documented(outcome: Outcome, code: int) -> None:
    with pytest.raises(typer.Exit) if code else contextlib.nullcontext() as stop:
        leave(outcome)
    assert code == (stop.value.exit_code if stop else 0)


@pytest.mark.ranks
def test_ctrl_c_saves_stops_every_process_and_says_how_to_go_on(tmp_path: Path, data: str) -> None:
    folder = tmp_path / "run"
    words = [*TINY, *ON_TWO, "--data-path", data, "--train-iters", "1000000", "--eval-iters", "0"]
    words += ["--log-interval", "1", "--log-dir", str(folder), "--save", str(folder / "saved")]
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        launcher = subprocess.Popen(
            # Ctrl-C is ignored at the start, as in what a shell sends to the background.
            ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-m", "planner", "launch", *words],
            cwd=ROOT,
            stdout=out,
            stderr=err,
        )
    try:
        wait_until(lambda: len(losses(folder)) >= 3 or launcher.poll() is not None, "the first steps")
        assert launcher.poll() is None, (tmp_path / "err").read_text()
        below = descendants(launcher.pid)
        assert len(below) == 3  # torchrun and two ranks
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(TIMEOUT_S) == 130
        assert not any(map(is_alive, below))
        assert not list(folder.glob("torchrun-*"))
    finally:
        launcher.kill()
        launcher.wait()
    errors = (tmp_path / "err").read_text()
    assert errors.endswith(f"planner: stopped by SIGINT: all ranks have ended, their output is in {folder}\n")
    out_text = (tmp_path / "out").read_text()
    assert "Traceback" not in errors + out_text
    saved = int((folder / "saved" / "latest_checkpointed_iteration.txt").read_text())
    assert f"last checkpoint: {folder}/saved/iter_{saved:07d}, of iteration {saved} of 1000000\n" in out_text
    assert f"\nto go on: planner launch --plan {folder}/plan.json" in out_text


def test_a_vocabulary_of_ones_own_goes_from_the_corpus_to_generated_text(
    planner_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chinese poems: every character is a token, and a trained model writes characters of theirs."""
    monkeypatch.chdir(tmp_path)
    poem = "床前明月光，疑是地上霜。举头望明月，低头思故乡。\n"
    Path("poems.txt").write_text(poem * 100, encoding="utf-8")
    made = planner_command("data", "vocab", "--input", "poems.txt", "--output", "vocab")
    assert made[0] == 0, made
    taken = ("--tokenizer-model", "vocab", "--output-prefix", "poems")
    assert planner_command("data", "prepare", "--input", "poems.txt", *taken)[0] == 0
    words = [*TINY, *ON_TWO, "--data-path", "poems_text_document", "--eval-iters", "0", "--train-iters", "2"]
    assert planner_command("launch", *words, "--save", "run")[0] == 0
    asked = ("--prompt", "床前", "--max-new-tokens", "6", "--device", "cpu")
    code, out, _ = planner_command("generate", "--load", "run", *asked)
    text = out.strip().removeprefix("床前")
    assert code == 0 and len(text) == 6 and set(text) <= set(poem)

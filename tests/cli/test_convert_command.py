"""`planner convert` and `planner generate`: what they print, and one line for wrong input."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.entry import ENTRY
from runtime.generation import command
from runtime.generation.generate_options import GenerateOptions
from runtime.launch.supervisor import Outcome
from tests.support.commands import Command, told
from tests.support.hub import cache_model
from tests.support.models import MODELS
from tests.support.stored_models import write_checkpoint
from tests.support.worker_pool import WorkerPool


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints: a Llama of bytes, whose vocabulary of 250 leaves some of them out."""
    folder = tmp_path_factory.mktemp("checkpoint") / "ours"
    write_checkpoint(MODELS["llama"].model_copy(update={"vocab": 300}), folder)
    return folder


def test_a_checkpoint_becomes_a_model_and_a_checkpoint_again(
    planner_command: Command, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    code, out, err = planner_command("convert", "--input", checkpoint, "--output", tmp_path / "hf")
    assert (code, told(err)) == (0, "")
    cached = cache_model(tmp_path / "cache", "org/hf", {})
    for file in (tmp_path / "hf").iterdir():
        file.rename(cached / file.name)
    assert out.startswith(f"{tmp_path / 'hf'}: Hugging Face model of parity-llama, 0.2 M parameters in 39 ")
    code, out, err = planner_command("convert", "--load-dir", "org/hf", "--save-dir", tmp_path / "back")
    assert (code, told(err)) == (0, "")
    assert out.startswith(f"{tmp_path / 'back'}: checkpoint of hf, ")
    texts = []
    for folder in (checkpoint, "org/hf", tmp_path / "back"):
        arguments = (
            "generate",
            "--load",
            folder,
            "--prompt",
            "abc",
            "--max-new-tokens",
            "6",
            "--device",
            "cpu",
        )
        code, out, err = planner_command(*arguments)
        assert (code, told(err)) == (0, "")
        texts.append(out)
    assert texts[0].startswith("abc") and len(set(texts)) == 1


def test_several_prompts_are_continued_together(
    planner_command: Command, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "prompts").write_text("second one\n\nthe third\n")
    arguments = ("generate", "--load", checkpoint, "--prompt", "first", "--prompt-file", tmp_path / "prompts")
    options = ("--max-new-tokens", "5", "--temperature", "0.7", "--seed", "3", "--device", "cpu")
    code, out, err = planner_command(*arguments, *options, "--json")
    assert (code, told(err)) == (0, "")
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["prompt"] for record in records] == ["first", "second one", "the third"]
    assert all(record["ended"] == "length" and len(record["tokens"]) == 5 for record in records)
    code, out, _ = planner_command(*arguments, *options)
    expected = [f"--- {n}\n{r['prompt']}{r['text']}\n" for n, r in enumerate(records, start=1)]
    assert (code, out) == (0, "".join(expected))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("convert", "--input: none given: name a folder"),
        ("convert --input nowhere", "--output: none given"),
        (
            "convert --input nowhere --output out",
            "nowhere: neither a folder of checkpoints (it has no latest_checkpointed_iteration.txt) nor of a",
        ),
        ("convert --input CHECKPOINT --output out --dtype int4", "--dtype int4: expected"),
        (
            "convert --input CHECKPOINT --output out --max-shard-size big",
            "--max-shard-size big: expected a size such as 5GB",
        ),
        ("convert --input CHECKPOINT --output out --ckpt-step 5", "--ckpt-step 5: "),
        ("convert --input CHECKPOINT --output out --seq-length 5", "--seq-length 5: of no use here"),
        ("generate", "--load: none given"),
        ("generate --load CHECKPOINT", "no prompt: give --prompt TEXT, or --prompt-file FILE"),
        (
            "generate --load CHECKPOINT --prompt-file nowhere",
            "--prompt-file nowhere: cannot be read: No such file",
        ),
        ("generate --load CHECKPOINT --prompt a --top-p 1.5", "--top-p 1.5: must be above 0 and at most 1"),
        ("generate --load CHECKPOINT --prompt a --top-k 0", "--top-k 0: must be at least"),
        ("generate --load CHECKPOINT --prompt a --temperature nan", "--temperature nan: must be 0"),
        (
            "generate --load CHECKPOINT --prompt a --context-parallel-size 2",
            "--context-parallel-size 2: generation splits neither sequences nor batches over ranks",
        ),
        (
            "generate --load CHECKPOINT --prompt a --max-new-tokens 0",
            "--max-new-tokens 0: must be at least 1",
        ),
        ("generate --load nowhere --prompt a", "nowhere: neither a folder of checkpoints"),
    ],
)
def test_wrong_input_is_one_line(
    planner_command: Command, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    arguments: str, message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    given = [str(checkpoint) if word == "CHECKPOINT" else word for word in arguments.split()]
    code, out, err = planner_command(*given)
    assert (code, out) == (2, "")
    err = told(err)
    assert err.startswith("planner: error: ") and message in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def shown_by_ranks(options: GenerateOptions) -> str:
    """The output of this rank for the process that started it."""
    os.environ[command.EVENTS_VARIABLE] = "1"
    printed = StringIO()
    with redirect_stdout(printed):
        command.generate(options, options.prompts(), torch.device("cpu"), command._FirstRank())
    return printed.getvalue()


def test_ranks_show_their_text_through_the_process_that_started_them(
    planner_command: Command, checkpoint: Path, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("generate", "--load", str(checkpoint), "--prompt", "h\né", "--max-new-tokens", "4")
    code, expected, _ = planner_command(*arguments, "--device", "cpu")
    assert code == 0
    options = GenerateOptions(
        load=str(checkpoint), prompt=["h\né"], max_new_tokens=4, device="cpu", tensor_model_parallel_size=2
    )
    first, second = pool.run(shown_by_ranks, 2, options)
    assert second == ""
    commands = []

    def job(words: Sequence[str], ranks: int, folder: Path, on_line: Any, on_metrics: Any) -> Outcome:
        commands.append((list(words), ranks))
        for line in first.splitlines():
            on_line(line)
        return Outcome(0, "")

    monkeypatch.setattr(command, "run_job", job)
    code, out, err = planner_command(*arguments, "--device", "cpu", "--tensor-model-parallel-size", "2")
    assert (code, out, told(err)) == (0, expected, "")
    [(words, ranks)] = commands
    start = words.index("runtime.generation")
    assert ranks == 2 and words[start - 1] == ENTRY and find_spec("runtime.generation.__main__")
    assert words[start + 1 :][:4] == ["--load", str(checkpoint), "--prompt", "h\né"]
    assert words[-2:] == ["--tensor-model-parallel-size", "2"]
    monkeypatch.setattr(command, "run_job", lambda *_: Outcome(2, "no such model"))
    code, out, err = planner_command(*arguments, "--device", "cpu", "--tensor-model-parallel-size", "2")
    assert (code, out, told(err)) == (2, "", "planner: error: no such model\n")

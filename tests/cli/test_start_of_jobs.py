"""Jobs that `planner launch` and `planner generate` refuse before a process starts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from planner import Plan
from runtime.checkpoint.owner import ownership
from runtime.data.tokenizers import ByteTokenizer
from runtime.huggingface.tokenizer_files import write_tokenizer
from runtime.launch.preparation import make_log_dir
from runtime.settings import checks
from tests.support.commands import Command
from tests.support.hub import CONFIG, cache_model
from tests.support.jobs import LAYOUT, TINY
from tests.support.models import MODELS
from tests.support.stored_models import write_checkpoint

ON_TWO = (*TINY, *LAYOUT, "--world-size", "2")


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def start(*_: Any, **__: Any) -> None:
        pytest.fail("ranks were started")

    for module in ("cli.launch.run_with_restarts", "runtime.generation.command.run_job"):
        monkeypatch.setattr(module, start)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of a model of eight heads and four layers."""
    write_checkpoint(MODELS["llama"].model_copy(update={"vocab": 300}), tmp_path / "ours")
    return tmp_path / "ours"


def refused(answer: tuple[int, str, str], *parts: str) -> None:
    code, _, err = answer
    *before, line = err.splitlines()
    assert code == 2 and line.startswith("planner: error: ")
    assert all(told.startswith("planner: ") for told in before)  # Phases until then.
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    ("words", "named"), [(("--tp", "64"), "tensor_parallel 64"), (("--pp", "5"), "pipeline_parallel 5")]
)
def test_a_split_is_checked_against_the_model_before_ranks_start(
    planner_command: Command, checkpoint: Path, words: tuple[str, ...], named: str
) -> None:
    answer = planner_command("generate", "--load", checkpoint, "--prompt", "x", "--device", "cpu", *words)
    refused(answer, named)


def test_more_ranks_than_the_machine_bears_are_refused(
    planner_command: Command, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "available_cores", lambda: 2)
    monkeypatch.setattr(checks, "available_memory", lambda: 24 * 2.0**30)
    big = ("--device", "cpu", "--world-size", "500", "--max-global-batch-size", "500")
    what = "--world-size 500: 500 ranks on the CPU of this machine, which has 2 cores and 24.0 GiB of memory"
    refused(planner_command("launch", *TINY, *big), what, "start at most 16 here")
    assert planner_command("launch", *TINY, *ON_TWO[len(TINY) :], "--print-command")[0] == 0
    monkeypatch.setattr(checks, "available_memory", lambda: 2.0**30)
    refused(
        planner_command(
            *("generate", "--load", checkpoint, "--prompt", "x", "--device", "cpu", "--tp", "2", "--pp", "2")
        ),
        "--tp x --pp 2 x 2: 4 ranks on the CPU",
        "start at most",
    )


def test_a_plan_for_more_ranks_than_the_machine_bears_is_refused(
    planner_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tmp_path / "plan.json"
    assert planner_command("suggest", *ON_TWO, "--save", plan)[0] == 0
    peak = Plan.load(plan).estimate.peak_memory_bytes
    monkeypatch.setattr(checks, "available_memory", lambda: 1.9 * peak)
    refused(planner_command("launch", "--plan", plan), f"the plan {plan}: 2 ranks on the CPU", "at most 1")


@pytest.mark.slow
def test_a_folder_of_checkpoints_has_one_writer(planner_command: Command, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    with ownership(folder, "--save saved"):
        answer = planner_command("launch", *ON_TWO, "--save", folder)
    refused(answer, f"--save {folder}: in use by process {os.getpid()} on host ")


def test_one_of_several_tasks_does_not_launch(
    planner_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    refused(planner_command("launch", *ON_TWO), "OMPI_COMM_WORLD_SIZE=2: the scheduler has started this 2")
    assert planner_command("suggest", *ON_TWO)[0] == 0


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (("--load", "missing"), ("--load missing: there is no such folder", "--load-or-start")),
        (("--load", "missing", "--save", "other"), ("--load missing: there is no such folder",)),
        (("--load", "empty"), ("--load empty: holds no checkpoint", "--load-or-start")),
        (("--load", "file"), ("--load file: a file; name the folder",)),
        (("--load", "file", "--load-or-start"), ("--load file: a file; name the folder",)),
        (
            ("--load", "empty", "--save", "empty", "--exit-on-missing-checkpoint"),
            ("--load empty: holds no checkpoint, and --exit-on-missing-checkpoint is given",),
        ),
        (("--load-or-start",), ("--load-or-start needs --load FOLDER",)),
        (
            ("--load", "empty", "--load-or-start", "--exit-on-missing-checkpoint"),
            ("--load-or-start and --exit-on-missing-checkpoint exclude each other",),
        ),
    ],
)
def test_a_job_does_not_begin_anew_unasked(
    planner_command: Command, tmp_path: Path, flags: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("root:x:0:0")
    refused(planner_command("launch", *ON_TWO, *flags), *parts)


@pytest.mark.parametrize("also", [(), ("--finetune",)])
def test_a_checkpoint_of_another_model_is_refused_before_ranks_start(
    planner_command: Command, checkpoint: Path, tmp_path: Path, also: tuple[str, ...]
) -> None:
    answer = planner_command("launch", *ON_TWO, "--load", checkpoint, *also)
    refused(answer, f"checkpoint {checkpoint}", "is of another model (", "layers 4")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_data_of_another_tokenizer_than_that_of_an_id_is_refused(
    planner_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = json.dumps(CONFIG | sizes | {"intermediate_size": 64, "vocab_size": 60_000})
    write_tokenizer(cache_model(tmp_path / "cache", "org/Tiny", {"config.json": config}), ByteTokenizer())
    Path("text.txt").write_text("Hello world. " * 1000)
    for name, words in (("own", ("--tokenizer-model", "org/Tiny")), ("other", ())):
        made = planner_command("data", "prepare", "--input", "text.txt", "--output-prefix", name, *words)
        assert made[0] == 0
    job = ("launch", "--model", "org/Tiny", "--seq-length", "16", "--eval-iters", "0", *ON_TWO[len(TINY) :])
    answer = planner_command(*job, "--data-path", "other_text_document")
    refused(answer, "--model org/Tiny has the tokenizer Tiny-", "but the data was prepared with gpt2")
    with pytest.raises(pytest.fail.Exception, match="ranks were started"):
        planner_command(*job, "--data-path", "own_text_document")


def test_jobs_of_one_second_have_folders_of_their_own(tmp_path: Path) -> None:
    made = [make_log_dir(tmp_path / "runs" / "now-gpt2", is_new=True) for _ in range(3)]
    assert [path.name for path in made] == ["now-gpt2", "now-gpt2-2", "now-gpt2-3"]
    assert all(path.is_dir() for path in made)

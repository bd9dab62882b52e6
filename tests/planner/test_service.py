"""Questions as mappings have the answers of the command line, one line of an error, and no files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from costmodels.errors import InputError
from planner.service.fields import fields, question_schema
from planner.service.questions import answer, answered, read_question
from tests.support.hub import CONFIG

JOB = {"model": "gpt2-124m", "world_size": 8, "device": "a100-80g", "global_batch_size": 64}


def printed(planner_command: Any, words: tuple[str, ...]) -> dict[str, Any]:
    """The answer of `planner suggest --json`."""
    code, out, _ = planner_command("suggest", *words, "--json")
    assert code in (0, 3)
    return comparable(json.loads(out))


def comparable(found: dict[str, Any]) -> dict[str, Any]:
    """An answer as JSON without the time that it took."""
    return {name: value for name, value in json.loads(json.dumps(found)).items() if name != "elapsed_s"}


@pytest.mark.parametrize(
    "more",
    [
        {"bf16": True, "tp": "2..4", "pin": "mbs=1 pp=1", "tokens": "300B", "price_per_hour": "$2"},
        {"lora_rank": "16", "quantize_base": "nf4", "seq_length": 512, "precision": "bf16"},
        {"world_size": "4,8", "tokens": "10B", "gbs": None, "max_global_batch_size": 32},
        {"model": "llama2-70b", "world_size": "1", "lora_rank": 8, "engine": "megatron"},
        {"layout": "tp=2+sp pp=2 dp=2 mbs=1 x 32", "inter_node_gbps": "100"},
    ],
)
def test_an_answer_is_what_the_command_prints(more: dict[str, Any], planner_command: Any) -> None:
    question = JOB | more
    if "gbs" in more:
        question.pop("global_batch_size")
    asked, found = answered(question, files=False)
    assert comparable(found.as_json()) == printed(planner_command, asked.words)


def test_a_pasted_config_is_the_model_of_the_file_that_it_is_saved_as(
    planner_command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    question = {**JOB, "model": "somebody/A model", "config": json.dumps(CONFIG), "seq_length": 1024}
    asked, found = answered(question, files=False)
    assert asked.config_file == "A-model.json" and found.best.model.name == "A-model"
    assert (found.best.model.layers, found.best.model.kv_heads) == (16, 4)
    monkeypatch.chdir(tmp_path)
    (tmp_path / asked.config_file).write_text(json.dumps(CONFIG))
    assert comparable(found.as_json()) == printed(planner_command, asked.words)
    assert comparable(answer({**question, "config": CONFIG})) == comparable(found.as_json())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"wrold_size": 8}, "unknown field 'wrold_size': did you mean world_size?"),
        ({"world_size": "many"}, "'--world-size': 'many' is not a whole number"),
        ({"gbs": 3}, "gbs and global_batch_size are the same field; give one"),
        ({"global_batch_size": 2.5}, "--global-batch-size '2.5' is not a whole number"),
        ({"global_batch_size": True}, "--global-batch-size 'True' is not a number"),
        ({"global_batch_size": [8]}, "--global-batch-size: expected one value, not a list"),
        ({"tp": "3"}, "--tp 3 does not divide world size 8"),
        ({"precision": "int3"}, "precision 'int3': expected one of fp32"),
        ({"bf16": "perhaps"}, "--bf16 'perhaps': expected true or false"),
        ({"config": "{"}, "model config 'gpt2-124m.json' is not valid JSON at line 1"),
        ({"config": "[" * 100_000}, "is nested too deeply"),
        (
            {"model": "Qwen/None-8B"},
            "paste the text of its config.json as config, which stands at https://huggingface",
        ),
        ({"layout": "x" * 20_000}, "--layout: 20,000 characters"),
    ],
)
def test_wrong_questions_end_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as found:
        answer(JOB | changes, files=False)
    assert message in str(found.value) and "\n" not in str(found.value)


@pytest.mark.parametrize(
    "value", ["", "-1", "0", "1e999", "nan", "<script>", "\x00\n", "1" * 400, "..", "1,"]
)
def test_no_value_of_any_field_ends_otherwise(value: str) -> None:
    for name in fields():
        try:
            asked = read_question({"world_size": "8", name: value}, files=False)
            asked.question.model.spec()
            asked.question.keywords(())
        except InputError as error:
            assert "\n" not in str(error)


def test_a_stranger_has_no_file_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text(json.dumps(CONFIG))
    named = ["folder", *(f"secret{end}" for end in ("", ".json", ".jsonl", ".yaml", ".yml", ".csv", ".YAML"))]
    for name in named[1:]:
        (tmp_path / name).write_text(json.dumps(CONFIG))
    opened: list[str] = []
    watching = [True]

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if watching and event == "open":
            opened.append(str(args[0]))

    sys.addaudithook(watch)
    try:
        for name in fields():
            for file in [*named, *(str(tmp_path / one) for one in named)]:
                with pytest.raises(InputError):
                    answer({**JOB, "tokens": "1B", name: file}, files=False)
        strange = [one for one in opened if "secret" in one or "folder" in one]
        # The same values are files where whoever asks may read them.
        answer(JOB | {"model": "secret.json"})
    finally:
        watching.clear()
    assert not strange and any(one.endswith("secret.json") for one in opened)


def test_each_field_says_what_it_is() -> None:
    schema = question_schema()
    assert {"model", "config", "world_size", "device", "engine", "lora_rank"} <= schema["properties"].keys()
    for name, about in schema["properties"].items():
        assert about["description"].endswith("."), name
        assert about["type"] in ("string", "integer", "number", "boolean", "array")


def test_a_plan_needs_no_processes_threads_or_torch() -> None:
    """A browser's Python (Pyodide) has neither processes, threads nor torch."""
    program = """
import sys
import _thread

sys.modules.update(dict.fromkeys({names}))  # Nowhere to be found.

def refuse(*args, **kwargs):
    raise RuntimeError("can't start new thread")
_thread.start_new_thread = _thread.start_joinable_thread = refuse
import planner
plan = planner.suggest("llama3-8b", world_size=8, device="h100", global_batch_size=64)
# Pyodide has this module, and starts no process.
import importlib
del sys.modules["subprocess"], sys.modules["_posixsubprocess"]
import subprocess
subprocess.Popen = refuse
from planner.service.questions import answer
job = dict(model="llama3-8b", world_size="4..16", device="h100", max_global_batch_size=64, tokens="1T")
assert answer(job)["chosen"]
print(plan.layout.describe())
"""
    names = {"subprocess", "multiprocessing", "_posixsubprocess", "torch", "concurrent", "asyncio", "ctypes"}
    done = subprocess.run(
        [sys.executable, "-c", program.format(names=names)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tp=")

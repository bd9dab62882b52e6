"""Tools for agents: over the protocol's own client, in one line where they are wrong, and as pages say."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import planner
from cli.help_examples import EXAMPLES
from costmodels.errors import InputError
from planner.service.questions import answer
from planner.service.tools import TOOLS, call
from tests.support import ROOT
from tests.support.agent_pages import LLMS, PAGES, SKILL
from tests.support.pages import blocks

JOB = {"model": "gpt2-124m", "world_size": 8, "device": "a100-80g", "global_batch_size": 64}
SLOW = 120.0


def over_stdio(*calls: tuple[str, dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    """The tools that a server lists, and the results of calls to it, by the SDK's client."""
    anyio = pytest.importorskip("anyio")
    pytest.importorskip("mcp")
    from mcp import Client
    from mcp.client.stdio import StdioServerParameters

    async def ask() -> tuple[list[Any], list[Any]]:
        server = StdioServerParameters(
            command=sys.executable, args=["-m", "planner", "mcp"], env={"PYTHONPATH": str(ROOT)}, cwd=ROOT
        )
        async with Client(server, read_timeout_seconds=SLOW) as client:
            tools = (await client.list_tools()).tools
            return tools, [await client.call_tool(name, given) for name, given in calls]

    return anyio.run(ask)


@pytest.mark.slow
def test_the_sdks_client_gets_the_answers_of_the_command_line() -> None:
    wrong = {**JOB, "world_size": 1, "model": "llama2-70b", "to": "megatron"}
    tools, found = over_stdio(
        *((tool.name, tool.example) for tool in TOOLS.values()),
        ("suggest", JOB | {"device": "h1000"}),
        ("export", wrong),
        ("suggest", {"model": "gpt2-124m"}),
        ("nothing", {}),
    )
    assert [tool.name for tool in tools] == list(TOOLS)
    for tool in tools:
        assert tool.input_schema == json.loads(json.dumps(TOOLS[tool.name].schema)) and tool.description
    results = dict(zip(TOOLS, found, strict=False))
    for name, result in results.items():
        assert not result.is_error, (name, result.content)
        assert json.loads(result.content[0].text) == result.structured_content
    suggested = results["suggest"].structured_content
    question = TOOLS["suggest"].example
    expected = json.loads(json.dumps(answer(question, top=3)))
    assert suggested | {"elapsed_s": 0} == expected | {"elapsed_s": 0}
    plan = planner.suggest(**question)
    assert suggested["plans"][0]["layout"] == plan.layout.model_dump(mode="json")
    assert "--tensor-model-parallel-size" in results["export"].structured_content["text"]
    assert results["check"].structured_content["legal"] is True
    assert results["explain"].structured_content["verdicts"][0]["asked"]
    for result, line in zip(
        found[len(TOOLS) :],
        ("h1000", "no layout of llama2-70b", "no world size", "tool 'nothing'"),
        strict=True,
    ):
        [content] = result.content
        assert result.is_error and line.replace("_", "-") in content.text.replace("_", "-"), content.text
        assert "\n" not in content.text and "Traceback" not in content.text


@pytest.mark.parametrize("name", TOOLS)
def test_every_field_of_a_tool_has_a_type_and_a_description(name: str) -> None:
    tool = TOOLS[name]
    assert len(tool.description) > 60 and tool.schema["type"] == "object"
    for field, about in tool.schema["properties"].items():
        assert about["type"] and len(about["description"]) > 12, field
        assert about["type"] != "array" or about["items"]
    assert set(tool.schema.get("required", ())) <= set(tool.schema["properties"])
    assert set(tool.example) <= set(tool.schema["properties"])


@pytest.mark.parametrize(
    ("name", "given", "line"),
    [
        ("suggest", JOB | {"colour": "red"}, "unknown field 'colour'"),
        ("suggest", JOB | {"top": 1000}, "top 1000: expected a whole number from 1 to 20"),
        ("suggest", JOB | {"world_size": "1..100000"}, "expected at most 8"),
        ("suggest", JOB | {"world_size": 1 << 20}, "expected at most 131072"),
        ("suggest", JOB | {"model": "/etc/passwd"}, "model /etc/passwd"),
        ("suggest", JOB | {"device": "mine.yaml"}, "no files are read here"),
        ("suggest", JOB | {"config": "x" * (1 << 21)}, "expected at most 1,048,576"),
        ("explain", JOB | {"layout": 4}, "layout: expected a layout such as tp=4,pp=2"),
        ("explain", JOB | {"world_size": "8,16"}, "explain takes one size"),
        ("check", {"files": {"../train.sh": "x"}}, "expected a file name without a folder"),
        ("check", {"files": {}}, "files: expected 1 to 8 texts"),
        ("check", {"files": {"a.sh": "torchrun x.py"}, "model": "/etc/passwd"}, "no files are read here"),
        ("export", JOB | {"to": "excel"}, "to 'excel': expected one of megatron"),
        ("models", {"name": "no-such-model-at-all"}, "no name holds it"),
        ("devices", {"colour": 1}, "unknown field 'colour'"),
        ("suggets", {}, "did you mean suggest?"),
    ],
)
def test_wrong_calls_end_in_one_line(name: str, given: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError) as caught:
        call(name, given)
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_files_of_a_check_are_named_as_they_were_given(tmp_path: Path) -> None:
    found = call("check", TOOLS["check"].example)
    assert found["plan"]["fits"] is True
    with pytest.raises(InputError, match=r"^file train.sh: "):
        call("check", {"files": {"train.sh": "echo nothing"}, "device": "h100"})


def test_pages_for_agents_are_made_of_these_descriptions_and_of_examples_that_tests_run() -> None:
    for path, made in PAGES.items():
        assert path.read_text() == made(), f"python -m tests.support.agent_pages writes {path.name} again"
    head = yaml.safe_load(SKILL.read_text().split("---")[1])
    assert head["name"] == "planner" and len(head["description"]) < 1024
    shown = [json.loads(block.text) for block in blocks(SKILL) if block.language == "json"]
    assert shown == [tool.example for tool in TOOLS.values()]
    # `tests/cli/test_terminal.py` runs these.
    typed = {line for lines in EXAMPLES.values() for line in lines}
    for page in PAGES:
        [text] = [block.text for block in blocks(page) if block.language == "console"]
        assert {line.removeprefix("$ ") for line in text.splitlines()} <= typed
    for link in re.findall(r"\]\(([\w-]+\.md)\)", LLMS.read_text()):
        assert (LLMS.parent / link).is_file(), link


@pytest.mark.slow
def test_llms_txt_alone_leads_to_a_plan_and_a_slurm_script(
    planner_command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    [text] = [block.text for block in blocks(LLMS) if block.language == "console"]
    lines = [line[2:] for line in text.replace("\\\n", " ").splitlines() if line.startswith("$ planner")]
    [suggest] = [line for line in lines if "--save plan.json" in line]
    [script] = [line for line in lines if line.endswith("--to slurm")]
    for line in (suggest, script):
        code, out, err = planner_command(*shlex.split(line)[1:])
        assert code == 0, err
    plan = planner.Plan.load(tmp_path / "plan.json")
    assert 2 <= plan.layout.tensor_parallel <= 8 and plan.cluster.world_size == 16
    assert out.startswith("#!/bin/bash") and "#SBATCH --nodes=2" in out
    (tmp_path / "job.sbatch").write_text(out)
    assert subprocess.run(["bash", "-n", "job.sbatch"], cwd=tmp_path).returncode == 0

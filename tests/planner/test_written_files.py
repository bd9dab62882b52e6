"""Texts of users in generated files: whatever they are, they stay texts."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import planner
from costmodels.errors import InputError
from planner.formats.targets import TARGETS, export
from planner.formats.writing.written import words_of, written
from planner.plan import Plan
from planner.scripts.job import JobScript
from planner.scripts.schedulers import SCHEDULERS
from planner.scripts.slurm import time_limit
from tests.support.commands import Command
from tests.support.jobs import TIMEOUT_S

CANARY = "canary"

STUB = """#!/bin/bash
printf '%s\\0' "$@" > "$CALL"
"""
"""Stands for a command: notes its words."""

NASTY = (
    "$(touch canary)",
    "`touch canary`",
    "a; touch canary",
    "a' ; touch canary ; '",
    'a" ; touch canary ; "',
    "a && touch canary #",
    "${IFS}",
    "a\ntouch canary",
    "a\r#SBATCH --wrap=x",
    "a\x85---\x85kind: Pod",
    "a\u2028---\u2028kind: Pod",
    "a\x9bb",
    "a\x00b",
    "\ud800",
    "-x",
    "--",
    "*",
    "~",
    "a\\",
    "1e3",
    "no",
    "0o17",
    "!!python/object:a",
    "&a",
    "{a: b}",
    "a: b",
    "# a",
    "\u4e00 \u3000",
)

TEXTS = st.one_of(
    st.sampled_from(NASTY),
    st.text(max_size=12),
    st.text(alphabet="$(){}`'\";&|<>\\ #\n\t~*-=a/", max_size=12),
    st.builds("{}{}".format, st.sampled_from(NASTY), st.text(max_size=3)),
)

DRAWS = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planner.suggest("llama2-7b", world_size=16, device="a100-80g", global_batch_size=32)


@pytest.fixture(scope="module")
def megatron() -> Plan:
    return planner.suggest(
        "llama2-7b", engine="megatron", world_size=16, device="a100-80g", global_batch_size=32
    )


@pytest.fixture
def sandbox(tmp_path: Path) -> Callable[[str], list[str] | None]:
    """Runs a script where commands that start ranks are stubs, and nothing else is: the words of the last."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("planner", "mpirun", "torchrun", "python", "srun"):
        (commands / name).write_text(STUB)
        (commands / name).chmod(0o755)
    (commands / "scontrol").write_text("#!/bin/bash\necho gpu07\n")
    (commands / "scontrol").chmod(0o755)
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "hosts").write_text("a\n")

    def run(text: str) -> list[str] | None:
        call = tmp_path / "call"
        call.unlink(missing_ok=True)
        environment = {
            "PATH": f"{commands}:{os.environ['PATH']}",
            "CALL": str(call),
            "HOSTFILE": "hosts",
            "SLURM_JOB_NODELIST": "gpu[07-08]",
            "SLURM_JOB_ID": "7",
            "NODE_RANK": "0",
            "MASTER_ADDR": "a",
            "JOB_COMPLETION_INDEX": "0",
            "MASTER_PORT": "1",
            "SLURM_NODEID": "0",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
        }
        done = subprocess.run(
            ["bash", "-c", text], env=environment, cwd=folder, capture_output=True, timeout=TIMEOUT_S
        )
        assert done.returncode == 0, done.stderr
        assert {path.name for path in folder.iterdir()} <= {"hosts", "llama2-7b.yaml", "llama2-7b.json"}
        return call.read_text().split("\0")[:-1] if call.exists() else None

    return run


def runnable(text: str, to: str) -> str:
    """The part of a generated file that a shell runs."""
    if to == "kubernetes":
        document = list(yaml.safe_load_all(text))[-1]
        spec = document["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        return str(spec["containers"][0]["command"][2])
    if to == "dlc":
        return next(line.partition("=")[2] for line in text.splitlines() if line.startswith("command="))
    return text


def words_after(flag: str, words: list[str]) -> str:
    return words[words.index(flag) + 1]


@pytest.mark.parametrize("to", ["slurm", "kubernetes", "dlc", "mpi", "shell"])
@given(text=TEXTS, other=TEXTS)
@example(text="$(touch canary).json", other="${A}`touch canary`")
@DRAWS
def test_words_arrive_as_they_are_and_run_nothing(
    to: str, text: str, other: str, plan: Plan, sandbox: Callable[[str], list[str] | None]
) -> None:
    job = JobScript(plan=plan, plan_file=text, arguments=["--save", other], name=other, image=None)
    try:
        script = SCHEDULERS[to](job)
    except InputError as error:
        assert "\n" not in str(error) and str(error).isprintable()
        return
    script.encode()
    call = sandbox(runnable(script, to))
    assert call is not None
    assert words_after("--save", call) == other
    if to != "kubernetes":  # Its plan is in the manifest.
        assert words_after("--plan", call) == text


@pytest.mark.parametrize("to", ["kubernetes", "dlc", "shell"])
@given(program=TEXTS)
@DRAWS
def test_programs_keep_their_words(
    to: str, program: str, megatron: Plan, sandbox: Callable[[str], list[str] | None]
) -> None:
    try:
        words = shlex.split(program)
        script = SCHEDULERS[to](JobScript(plan=megatron, plan_file="p", program=program))
    except InputError as error:
        assert "\n" not in str(error) and str(error).isprintable()
        return
    except ValueError:
        with pytest.raises(InputError, match="--program"):
            SCHEDULERS[to](JobScript(plan=megatron, plan_file="p", program=program))
        return
    call = sandbox(runnable(script, to))
    assert call is not None
    at = call.index("--master-port") + 2
    assert call[at : at + len(words)] == words


@given(name=TEXTS, device=TEXTS)
@example(name="a\u2028---\u2028kind: Pod", device="a\x85b: c")
@settings(parent=DRAWS, max_examples=15)
def test_names_stay_in_their_comments(name: str, device: str, plan: Plan) -> None:
    """Readers of YAML 1.1 take U+0085 and U+2028 for ends of lines, and so of comments."""
    cluster = plan.cluster.model_copy(
        update={"device": plan.cluster.device.model_copy(update={"name": device})}
    )
    renamed = plan.model_copy(
        update={"model": plan.model.model_copy(update={"name": name}), "cluster": cluster}
    )
    usual = [json.dumps(document) for document in documents(plan)]
    found = list(documents(renamed))
    data = found[0]["data"]
    assert json.loads(data["plan.json"])["model"]["name"] == name
    found[0]["data"] = yaml.safe_load(usual[0])["data"]
    assert [json.dumps(document) for document in found] == usual
    for to in ("slurm", "shell", "mpi", "dlc"):
        ours, theirs = (
            SCHEDULERS[to](JobScript(plan=each, plan_file="p", name="n")) for each in (plan, renamed)
        )
        assert [line for line in theirs.splitlines() if not line.startswith("# ")] == [
            line for line in ours.splitlines() if not line.startswith("# ")
        ]
        assert len(theirs.splitlines()) == len(ours.splitlines())


def documents(plan: Plan, **values: Any) -> list[Any]:
    job = JobScript(plan=plan, plan_file="p", **{"name": "n", **values})
    return list(yaml.safe_load_all(SCHEDULERS["kubernetes"](job)))


@given(image=TEXTS, claim=TEXTS.filter(bool))
@DRAWS
def test_manifests_hold_what_they_are_given(image: str, claim: str, plan: Plan) -> None:
    try:
        job = documents(plan, image=image, volume_claim=claim, kind="job")[-1]
    except InputError as error:
        assert str(error).isprintable()
        return
    spec = job["spec"]["template"]["spec"]
    assert spec["containers"][0]["image"] == (image or "planner:latest")
    assert spec["volumes"][-1]["persistentVolumeClaim"]["claimName"] == claim


@pytest.mark.parametrize("target", ["nanotron", "mindformers"])
@given(name=TEXTS)
@DRAWS
def test_names_in_exported_files_are_read_back(target: str, name: str, plan: Plan) -> None:
    renamed = plan.model_copy(update={"model": plan.model.model_copy(update={"name": name})})
    values = yaml.safe_load(export(renamed, to=target).text)
    assert name == (values["general"]["run"] if target == "nanotron" else values["trainer"]["model_name"])


@given(text=TEXTS)
@example(text="gpus\n#SBATCH --wrap=x")
@DRAWS
def test_directives_hold_one_value(text: str, plan: Plan) -> None:
    for name in ("partition", "account", "time_limit"):
        job = JobScript(plan=plan, plan_file="p", **{name: text})  # type: ignore[arg-type]
        try:
            script = SCHEDULERS["slurm"](job)
        except InputError as error:
            assert f"--{name.replace('_', '-')}" in str(error) and "\n" not in str(error)
            continue
        directive = {"time_limit": "time"}.get(name, name)
        lines = [line for line in script.splitlines() if line.startswith(f"#SBATCH --{directive}=")]
        assert lines == [f"#SBATCH --{directive}={text}"] and not set(text) & set(" \t'\"#")


@pytest.mark.parametrize(
    ("text", "is_time"),
    [
        *((good, True) for good in ("30", "90:00", "24:00:00", "7-0", "1-12:30", "2-00:00:30", "0")),
        *((bad, False) for bad in ("banana", "", "1h", "1:2:3:4", "-1", "1-", "1 2", "24:00:00\n", "1-2-3")),
    ],
)
def test_time_limits_are_those_of_slurm(text: str, is_time: bool) -> None:
    """The forms of sbatch's manual page."""
    if is_time:
        assert time_limit(text) == text
        return
    with pytest.raises(InputError, match="days-hours:minutes:seconds"):
        time_limit(text)


def test_the_command_says_what_cannot_be_written(
    planner_command: Command, plan: Plan, megatron: Plan, tmp_path: Path
) -> None:
    plan.save(tmp_path / "plan.json")
    megatron.save(tmp_path / "megatron.json")
    for file, words, named in (
        ("plan.json", ("--to", "slurm", "--time-limit", "banana"), "--time-limit 'banana': expected minutes"),
        ("plan.json", ("--to", "slurm", "--partition", "a\n#SBATCH --x=y"), "--partition"),
        ("plan.json", ("--to", "slurm", "--setup", "a\nb"), "--setup"),
        ("megatron.json", ("--to", "slurm", "--program", 'x.py "unclosed'), "--program"),
        ("megatron.json", ("--to", "msrun", "--program", "x.py 'unclosed"), "--program"),
    ):
        code, shown, err = planner_command("script", tmp_path / file, *words)
        assert (code, shown) == (2, "") and named in err and err.count("\n") == 1, err


@given(text=TEXTS)
@settings(max_examples=200, deadline=None)
def test_one_word_is_one_word_to_a_shell(text: str) -> None:
    try:
        typed = written(text, "word", "it")
    except InputError:
        return
    assert shlex.split(typed) == [text]


def test_words_without_an_end_are_refused() -> None:
    assert words_of("x.py 'a b'", "--program") == ["x.py", "a b"]
    with pytest.raises(InputError, match="no closing quotation"):
        words_of('x.py "a', "--program")


def test_all_targets_are_looked_at() -> None:
    """A new one that writes names of users belongs into the tests above."""
    assert set(SCHEDULERS) == {"slurm", "kubernetes", "dlc", "mpi", "shell", "msrun"}
    assert set(TARGETS) >= {"nanotron", "mindformers"}

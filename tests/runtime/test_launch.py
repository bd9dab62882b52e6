"""Starting a job and watching it: what is passed on, how it ends, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from costmodels.catalogue.local_machine import available_cores
from runtime import entry
from runtime.entry import ENTRY
from runtime.job.measurement import Measurement, measurement
from runtime.launch import fork_server, supervisor
from runtime.launch.agent import END
from runtime.launch.supervisor import TORCHRUN_FOLDER, JobStopped, Outcome, run_job
from runtime.launch.torchrun import AGENT, shell_line, torchrun_command
from runtime.launch.warm_ranks import CAN_FORK, WarmRanks
from runtime.processes.children import children
from tests.support import ROOT
from tests.support.jobs import LAYOUT, TINY, wait_until, write_corpus
from tests.support.running_jobs import is_alive

ON_LINUX = pytest.mark.skipif(not CAN_FORK, reason="ranks are forked on Linux only")


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs import this repository from the folder in which they start."""
    monkeypatch.chdir(ROOT)


def script(text: str) -> list[str]:
    """A job that is not torchrun, but quick."""
    return [sys.executable, "-c", textwrap.dedent(text)]


class Watched:
    """Lines and records that a job has sent to its launcher."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.records: list[dict[str, Any]] = []

    def run(self, command: list[str], log_dir: Path) -> Outcome:
        return run_job(command, 2, log_dir, self.lines.append, self.records.append)


def test_lines_and_metrics_are_passed_on_and_the_output_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    watched = Watched()
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 99}\n')
    outcome = watched.run(
        script(
            f"""
            import os, sys
            from runtime.logs.metrics_file import drop_metrics_after
            file = drop_metrics_after({str(tmp_path)!r}, 0).open("a")
            for step in (1, 2):
                file.write('{{"iteration": %d}}\\n' % step)
                file.flush()
                print("step", step)
            print("a warning", file=sys.stderr)
            print("threads", os.environ["OMP_NUM_THREADS"])
            """
        ),
        tmp_path,
    )
    assert outcome == Outcome(0, "")
    threads = f"threads {max(1, available_cores() // 2)}"
    assert sorted(watched.lines) == sorted(["step 1", "step 2", "a warning", threads])
    assert [record["iteration"] for record in watched.records] == [1, 2]
    assert sorted((tmp_path / "output.log").read_text().splitlines()) == sorted(watched.lines)


def test_input_that_the_job_refuses_is_reported_in_its_own_words(tmp_path: Path) -> None:
    watched = Watched()
    outcome = watched.run(
        script(
            """
            import json, os, sys
            with open(os.environ["PLANNER_ERROR_FILE"], "w") as file:
                json.dump({"message": "the vocabulary is too small", "exit_code": 3}, file)
            print("runtime.pretrain: error: the vocabulary is too small", file=sys.stderr)
            sys.exit(1)
            """
        ),
        tmp_path,
    )
    assert outcome == Outcome(3, "the vocabulary is too small", restart=False)
    assert watched.lines == []
    # A later job in the same folder does not inherit the report.
    assert watched.run(script("raise SystemExit(7)"), tmp_path).message.startswith(
        "training failed with exit code 7; all ranks were stopped, logs are in"
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full to write to")
def test_a_full_disk_under_the_log_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "output.log").symlink_to("/dev/full")
    watched = Watched()
    assert watched.run(script("print('one'); print('two')"), tmp_path) == Outcome(0, "")
    assert watched.lines == ["one", "two"]
    assert capsys.readouterr().err == (
        f"planner: warning: {tmp_path}/output.log cannot be written (No space left on device)\n"
    )


AGENT_REPORT = """
W1120 12:36:45.271000 22696 torch/distributed/elastic/multiprocessing/api.py:1028] Sending closing signal
E1120 12:36:45.335000 22696 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: {code}) \
local_rank: 3 (pid: 22701) of binary: /usr/bin/python
Traceback (most recent call last):
  rank      : 1 (local_rank: 1)
  exitcode  : -15 (pid: 22702)  (SIGTERM)
"""


@pytest.mark.parametrize(
    ("code", "how"), [(-9, "rank 3 was killed by SIGKILL; all"), (1, "rank 3 exited with code 1; all")]
)
def test_torchruns_report_of_a_dead_rank_becomes_one_line(tmp_path: Path, code: int, how: str) -> None:
    watched = Watched()
    report = AGENT_REPORT.format(code=code)
    command = script(f"import sys; print('boom', file=sys.stderr); sys.stderr.write({report!r}); sys.exit(1)")
    outcome = watched.run(command, tmp_path)
    assert outcome.exit_code == 1
    assert how in outcome.message and "\n" not in outcome.message
    assert [line for line in watched.lines if line] == ["boom"]
    assert "Traceback" in (tmp_path / "output.log").read_text()


def test_an_interrupt_ends_the_job_before_it_is_raised_again(tmp_path: Path) -> None:
    started: list[int] = []

    def interrupt(line: str) -> None:
        started.append(int(line))
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_job(
            script("import os, time; print(os.getpid(), flush=True); time.sleep(3600)"),
            *(2, tmp_path, interrupt, lambda record: None),
        )
    assert started and not is_alive(started[0])


@pytest.mark.parametrize("ends", ["well", "badly", "interrupted"])
def test_the_folder_that_torchrun_writes_in_goes_with_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    monkeypatch.delenv(TORCHRUN_FOLDER, raising=False)
    folders: list[Path] = []

    def seen(line: str) -> None:
        folders.append(Path(line))
        assert (folders[0] / "attempt_0").is_dir() and tmp_path in folders[0].parents
        if ends == "interrupted":
            raise KeyboardInterrupt

    write = f"import os, sys, time; folder = os.environ[{TORCHRUN_FOLDER!r}]; "
    write += "os.mkdir(folder + '/attempt_0'); print(folder, flush=True); "
    last = {"well": "", "badly": "sys.exit(3)", "interrupted": "time.sleep(3600)"}[ends]
    expected = pytest.raises(KeyboardInterrupt) if ends == "interrupted" else contextlib.nullcontext()
    with expected:
        run_job(script(write + last), 2, tmp_path, seen, lambda record: None)
    assert len(folders) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["output.log"]


def test_a_job_that_does_not_listen_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "STOP_TIMEOUT_S", 0.3)
    started: list[int] = []

    def interrupt(line: str) -> None:
        started.append(int(line))
        raise KeyboardInterrupt

    deaf = f"import os, signal, time; signal.signal({int(END)}, signal.SIG_IGN); "
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run_job(
            script(deaf + "print(os.getpid(), flush=True); time.sleep(3600)"),
            *(2, tmp_path, interrupt, lambda record: None),
        )
    assert started and not is_alive(started[0])
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


@pytest.mark.ranks
@pytest.mark.parametrize("forks", [False, pytest.param(True, marks=ON_LINUX)], ids=["torchrun", "forked"])
def test_a_killed_rank_ends_the_job_and_is_named(tmp_path: Path, forks: bool) -> None:
    victims: list[int] = []
    torchruns: list[int] = []

    def kill(record: dict[str, Any]) -> None:
        if record["iteration"] == 3 and not victims:
            [agent] = [pid for pid in children(os.getpid()) if len(children(pid)) == 2]
            torchruns.append(agent)
            victims.extend(children(agent))
            os.kill(victims[1], signal.SIGKILL)

    command = torchrun_command(
        2,
        [
            *(*TINY, *LAYOUT, "--data-path", write_corpus(tmp_path), "--train-iters", "100000"),
            *("--log-interval", "1", "--eval-iters", "0", "--log-dir", str(tmp_path)),
        ],
    )
    lines: list[str] = []
    with WarmRanks() as warm:
        outcome = run_job(command, 2, tmp_path, lines.append, kill, warm=warm if forks else None)
    assert outcome.exit_code == 1
    assert outcome.message == f"rank 1 was killed by SIGKILL; all ranks were stopped, logs are in {tmp_path}"
    assert not any("Traceback" in line for line in lines)
    wait_until(lambda: not any(map(is_alive, victims + torchruns)), "all processes to end")


def test_the_command_is_torchruns_on_this_machine() -> None:
    command = torchrun_command(4, ["--plan", "a b.json"])
    assert command[:3] == [sys.executable, ENTRY, "runtime.launch.agent"]
    assert command[-4:] == [ENTRY, "runtime.pretrain", "--plan", "a b.json"]
    assert "--nproc-per-node=4" in command
    line = shell_line(command)
    assert "torchrun --standalone --nproc-per-node=4" in line or "-m torch.distributed.run" in line
    assert line.endswith("-m runtime.pretrain --plan 'a b.json'")


def test_the_first_logged_step_is_not_measured(tmp_path: Path) -> None:
    assert measurement(tmp_path) is None
    rows = [(9.0, 5), (1.0, 7), (3.0, 6), (2.0, 6)]
    text = '{"iteration": 0, "validation_loss": 1.0}\n'
    text += "".join(
        f'{{"iteration": {number}, "step_time_s": {seconds}, "peak_memory_bytes": {peak}}}\n'
        for number, (seconds, peak) in enumerate(rows, start=1)
    )
    (tmp_path / "metrics.jsonl").write_text(text)
    assert measurement(tmp_path) == Measurement(2.0, 7)
    (tmp_path / "metrics.jsonl").write_text("\n".join(text.splitlines()[:2]))
    assert measurement(tmp_path) == Measurement(9.0, 5)


def agent(heeds: str) -> list[str]:
    """A job of one rank, which heeds signals as it likes."""
    rank = f"import signal, sys, time; {heeds}; print('ready', flush=True); time.sleep(60)"
    return script(
        f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {rank!r}]).returncode)"
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_job_that_saves_is_asked_to_and_ends_by_itself(tmp_path: Path, number: signal.Signals) -> None:
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip(f"what started the tests ignores {number.name} (nohup), and so do jobs")
    lines: list[str] = []

    def told(line: str) -> None:
        lines.append(line)
        if line == "ready":
            os.kill(os.getpid(), number)

    heeds = "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(0)))"
    outcome = run_job(agent(heeds), 2, tmp_path, told, lambda record: None, saves=True)
    assert outcome == Outcome(0, "", stopped_by=number)
    assert sorted(lines) == sorted(
        [
            *("ready", "saved"),
            f"planner: {number.name}: saving after the running step; a second signal does not wait",
        ]
    )


def test_a_job_with_nothing_to_save_yet_is_not_started_again(tmp_path: Path) -> None:
    def told(line: str) -> None:
        if line == "ready":
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(JobStopped) as stop:
        run_job(agent("pass"), 2, tmp_path, told, lambda record: None, saves=True)
    assert stop.value.number is signal.SIGTERM


def test_a_second_signal_does_not_wait_for_the_save(tmp_path: Path) -> None:
    def told(line: str) -> None:
        if line in ("ready", "heard"):
            os.kill(os.getpid(), signal.SIGINT)

    heeds = "signal.signal(signal.SIGTERM, lambda *_: print('heard', flush=True))"
    with pytest.raises(KeyboardInterrupt):
        run_job(agent(heeds), 2, tmp_path, told, lambda record: None, saves=True)


@ON_LINUX
def test_ranks_are_not_forked_beside_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    command = torchrun_command(2, ["--train-iters", "3"])
    environment = {"PLANNER_RESTART_COUNT": "1", "NO_UTF_8": os.fsdecode(b"caf\xe9")}
    job = {"ranks": 2, "arguments": command[-2:], "environment": environment, "command": command}
    read, write = os.pipe()
    os.write(write, f"{json.dumps(job)}\n".encode())
    became: list[list[str]] = []

    def become(program: str, words: list[str]) -> None:
        became.append(words)
        raise SystemExit(0)

    monkeypatch.setattr(fork_server, "PRELOADED_MODULES", ())
    monkeypatch.setattr(os, "execv", become)
    monkeypatch.setattr(os, "environ", {})
    released = threading.Event()
    thread = threading.Thread(target=released.wait, daemon=True)
    thread.start()
    try:
        with os.fdopen(read) as told, pytest.raises(SystemExit):
            monkeypatch.setattr(sys, "stdin", told)
            fork_server.main()
    finally:
        released.set()
        thread.join()
        os.close(write)
    assert became == [command]
    assert os.environ == environment


@pytest.mark.ranks
@ON_LINUX
@pytest.mark.parametrize(
    ("number", "then", "code"),
    [("fork_server.END", "time.sleep(3600)", 1), ("signal.SIGTERM", "time.sleep(1); os._exit(0)", 0)],
    ids=["the launcher's", "a scheduler's"],
)
def test_forked_ranks_have_as_long_as_who_asks_them_gives(number: str, then: str, code: int) -> None:
    script = (
        "import os, signal, time\n"
        "from runtime.launch import fork_server\n"
        "def become(agent, *_):\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"    os.kill(agent, {number})\n"
        f"    {then}\n"
        "fork_server._become = become\n"
        "print(fork_server.run(1, [], grace_s=0.1))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{code}\n", "")


@pytest.mark.ranks
@pytest.mark.parametrize("saves", [True, False])
def test_a_scheduler_that_signals_all_processes_lets_ranks_save(tmp_path: Path, saves: bool) -> None:
    rank = tmp_path / "rank.py"
    heeds = (
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), print('saved', flush=True), sys.exit(0)))"
    )
    rank.write_text(
        f"import signal, sys, time\n{heeds if saves else ''}\nprint('ready', flush=True)\ntime.sleep(3600)\n"
    )
    command = entry.command(AGENT, "--standalone", "--nproc-per-node=1", str(rank))
    lines: list[str] = []

    def told(line: str) -> None:
        lines.append(line)
        if line == "ready":
            [agent] = [pid for pid in children(os.getpid()) if children(pid)]
            for pid in (agent, *children(agent), os.getpid()):
                os.kill(pid, signal.SIGTERM)

    if saves:
        outcome = run_job(command, 1, tmp_path, told, lambda record: None, saves=True)
        assert outcome == Outcome(0, "", stopped_by=signal.SIGTERM) and "saved" in lines
    else:
        with pytest.raises(JobStopped):
            run_job(command, 1, tmp_path, told, lambda record: None)


def test_a_signal_before_there_is_anything_to_save_is_no_reason_to_start_again(tmp_path: Path) -> None:
    lines: list[str] = []

    def told(line: str) -> None:
        lines.append(line)
        if line == "ready" and lines.count("ready") == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    rank = "import os, time; print(os.getpid(), flush=True); print('ready', flush=True); time.sleep(3600)"
    again = f"import subprocess, sys\nwhile True: subprocess.run([sys.executable, '-c', {rank!r}])"
    with pytest.raises(JobStopped) as stop:
        run_job(script(again), 2, tmp_path, told, lambda record: None, saves=True)
    assert stop.value.number is signal.SIGTERM
    started = [int(line) for line in lines if line.isdecimal()]
    wait_until(lambda: started and not any(map(is_alive, started)), "what the job has started to end")


@ON_LINUX
def test_ranks_are_found_where_there_is_no_ps(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        monkeypatch.setenv("PATH", "")
        assert child.pid in children(os.getpid())
        assert child.stdin is not None
        child.stdin.write(b"\n")


@pytest.mark.ranks
@ON_LINUX
def test_a_process_that_gets_no_job_ends_with_its_launcher() -> None:
    with WarmRanks() as warm:
        warm.prepare(2)
        assert warm.waiting is not None
        pid = warm.waiting.pid
        assert is_alive(pid)
    assert not is_alive(pid)


@pytest.mark.ranks
def test_ranks_import_what_every_layout_needs_and_no_more() -> None:
    """PyTorch's compiler comes with the first DTensor all the same: `forked` does it once for all."""
    slow = (
        *("torch._dynamo", "torch._inductor", "torch.distributed.checkpoint", "torch.distributed.pipelining"),
        *("torch.distributed.run", "torch.utils.tensorboard", "tensorboard", "transformers", "torchao"),
        *("safetensors", "scipy", "networkx", "rich.progress"),
    )
    names = f"import sys, runtime.pretrain; print([name for name in {slow!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", names], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"

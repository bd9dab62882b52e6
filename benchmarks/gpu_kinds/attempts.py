"""One attempt of a kind: its commands one after the other, their output and their files."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_kinds.kinds import Kind
from costmodels.errors import InputError
from planner.plan import Plan
from runtime.job.prediction import predicted_peak
from runtime.processes.tether import tether

ROOT = Path(__file__).resolve().parents[2]

TRACE_S = 3.0
"""Seconds that a process has to write its stack before it is killed."""

REASONS = (
    (r".*\bAssertion\b.*\bfailed\b.*", False),
    (r".*(?:CUDA error:|CUDA driver error:|CUBLAS_STATUS_|CUDNN_STATUS_).*", False),
    (r"(?:\S+ )?(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt)\b.*", True),
    (r".*\S.*", True),
)
"""Patterns of lines that give the reason of a failure, the most reliable first; and whether the last such
line counts, or the first.

The device writes its assertion before anything else fails of it, once for each thread.
"""


@dataclass(frozen=True)
class Form:
    """The differences of an attempt from the original job."""

    name: str
    variables: Mapping[str, str] = field(default_factory=dict)
    flags: str = ""
    """Additional arguments of the training commands."""


AS_IT_IS = Form("as it is")

SECOND_TRIES = (
    Form("CUDA_LAUNCH_BLOCKING=1", {"CUDA_LAUNCH_BLOCKING": "1"}),
    Form("not compiled", flags="--no-compile"),
)
"""Second tries, which show the origin of a failure: waiting for each kernel, and without compiled kernels."""


@dataclass(frozen=True)
class Machine:
    """The machine and the folders that all attempts share."""

    output: Path
    """Folder of logs, metrics and plans."""
    work: Path
    """Folder of checkpoints and compiled kernels, which are deleted afterwards."""
    places: Mapping[str, Path]
    train: str
    """Flags of every training command."""
    on_gpu: bool
    threads: int
    """Number of threads of each process for computing on a CPU, and for compiling."""
    compiles: bool = False
    """True if layers are compiled on a CPU too."""


@dataclass(frozen=True)
class Result:
    """The outcome of an attempt."""

    ran: bool
    seconds: float
    said: str = ""
    """The reason why the attempt failed."""
    refused: bool = False
    """True if a command refused to run with its arguments or on this device."""
    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    """Norms of the gradients."""
    predicted: float | None = None
    """Peak bytes by the plan; None without a plan, or if the device is no GPU."""
    allocated: int | None = None
    reserved: int | None = None
    """Peak bytes reserved by the allocator; None if they were not measured."""


TRAINING = {"train": "runtime.pretrain", "alone": "benchmarks.gpu_kinds.alone"}
"""Modules that take the flags of training commands."""


def commands(kind: Kind, form: Form, machine: Machine) -> list[list[str]]:
    """The words of each command of an attempt: a module and its arguments, without the folder of logs."""
    places = {name: str(path) for name, path in machine.places.items()}
    places["work"] = str(machine.work / kind.folder / _folder(form))
    found = []
    for command in kind.do:
        what, *words = shlex.split(command.format(**places))
        trains = what in TRAINING or words[0] == "launch"
        if what in TRAINING:
            given = _without(shlex.split(machine.train.format(**places)), words)
            # The argument of `alone` itself comes first.
            words = [TRAINING[what], *words, *given]
        else:
            words = [what, *words]
        if trains and not re.search(r" --(?:fp16|fp32|fp8|mxfp8)\b", command):
            words.append("--bf16")
        if trains:
            words += shlex.split(form.flags or "--compile" * machine.compiles)
        if not machine.on_gpu and (trains or words[1] == "generate"):
            words += ["--device", "cpu", *(["--world-size", "1"] if words[1] == "launch" else [])]
        found.append(words)
    return found


def _without(given: list[str], own: list[str]) -> list[str]:
    """Flags with one value each, without those that a command sets itself."""
    rest, at = [], 0
    while at < len(given):
        end = at + 1
        while end < len(given) and not given[end].startswith("--"):
            end += 1
        if given[at] not in own:
            rest += given[at:end]
        at = end
    return rest


def attempt(kind: Kind, form: Form, machine: Machine, limit_s: float) -> Result:
    """Run the commands of a kind within `limit_s` seconds in total."""
    logs = machine.output / kind.folder / _folder(form)
    work = machine.work / kind.folder / _folder(form)
    for folder in (logs, work):
        folder.mkdir(parents=True, exist_ok=True)
    began, said, code = time.monotonic(), "", 0
    for number, words in enumerate(commands(kind, form, machine), start=1):
        own = logs / str(number)
        own.mkdir(exist_ok=True)
        keeps_log = words[0] in TRAINING.values() or words[1] == "launch"
        words += ["--log-dir", str(own)] if keeps_log else []
        left_s = limit_s - (time.monotonic() - began)
        code = _run(words, own, _environment(form, machine), max(0.0, left_s))
        if code:
            text = (own / "output.txt").read_text(encoding="utf-8", errors="replace")
            said = f"did not end within {limit_s:.0f} s: {hung(text)}" if code == TIMED_OUT else reason(text)
            break
    shutil.rmtree(work, ignore_errors=True)
    refused = code == InputError.exit_code
    return Result(
        not code, time.monotonic() - began, said, refused, **left_by(logs, machine.on_gpu, kind.is_planned)
    )


TIMED_OUT = -1000
"""The exit code of a process that did not end in time."""


def process_command(peaks: Path, words: list[str]) -> list[str]:
    """The command that runs a module with its arguments, and writes the peak bytes of its GPU to `peaks`."""
    return [sys.executable, "-m", "benchmarks.gpu_kinds.process", str(peaks), *words]


def _run(words: list[str], folder: Path, environment: dict[str, str], limit_s: float) -> int:
    """Run a module in a process and session of its own, which ends with this one; returns its exit code."""
    with (folder / "output.txt").open("wb") as output:
        output.write(f"$ {shlex.join(words)}\n".encode())
        output.flush()
        running = subprocess.Popen(
            tether(process_command(folder / "peaks.json", words)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        try:
            return running.wait(limit_s)
        except subprocess.TimeoutExpired:
            # faulthandler writes where its threads are.
            running.send_signal(signal.SIGABRT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(TRACE_S)
            return TIMED_OUT
        finally:
            # All processes that it has started are in its session.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()


def _environment(form: Form, machine: Machine) -> dict[str, str]:
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    threads = str(machine.threads)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": threads,
        "TORCHINDUCTOR_COMPILE_THREADS": threads,
        "TORCHINDUCTOR_CACHE_DIR": str(machine.work / "compiled"),
        "TRITON_CACHE_DIR": str(machine.work / "compiled" / "triton"),
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
        **form.variables,
    }


def reason(text: str) -> str:
    """The line of a process's output that best explains its failure."""
    lines = [line.strip() for line in text.splitlines()]
    for pattern, last in REASONS:
        found = [line for line in lines if re.fullmatch(pattern, line)]
        if found:
            return found[-1 if last else 0][:400]
    return "it said nothing"


def hung(text: str) -> str:
    """The last line of a hanging process, and the stacks of its threads when it was ended."""
    before, _, trace = text.partition("Fatal Python error: Aborted")
    lines = [line.strip() for line in before.splitlines() if line.strip()]
    own = re.search(r"^Current thread .*\n\s*(File .*)", trace, re.MULTILINE)
    at = f"; it was in {own[1]}" if own else ""
    return f"it said {lines[-1][:200] if lines else 'nothing'}{at}"


def left_by(logs: Path, on_gpu: bool, is_of_plan: bool) -> dict[str, Any]:
    """Losses, norms and peaks, read from the folders of an attempt's commands."""
    losses: dict[int, float] = {}
    norms: dict[int, float] = {}
    found: dict[str, Any] = {}
    for folder in sorted(logs.iterdir()):
        metrics, plan, peaks = (folder / name for name in ("metrics.jsonl", "plan.json", "peaks.json"))
        for line in metrics.read_text(encoding="utf-8").splitlines() if metrics.is_file() else ():
            record = json.loads(line)
            if "loss" in record:
                # Not a number is written as null.
                loss, norm = (
                    float("nan") if record[name] is None else record[name] for name in ("loss", "grad_norm")
                )
                losses[record["iteration"]], norms[record["iteration"]] = loss, norm
                if on_gpu:
                    # Ranks that a launcher has started leave no other figure.
                    found["allocated"] = max(record["peak_memory_bytes"], found.get("allocated") or 0)
        if plan.is_file() and on_gpu and is_of_plan:
            found["predicted"] = predicted_peak(Plan.load(plan)).value
        if peaks.is_file():
            seen = json.loads(peaks.read_text(encoding="utf-8"))
            found |= {name: max(seen[name], found.get(name) or 0) for name in ("allocated", "reserved")}
    return {"losses": tuple(losses.values()), "norms": tuple(norms.values()), **found}


def _folder(form: Form) -> str:
    return re.sub(r"\W+", "_", form.name)

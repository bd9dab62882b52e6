"""Some six hundred wrong inputs and how each must end: `python -m tests.fuzz.bad_inputs`.

The inputs are data, in bad_inputs.yaml. Each input is typed in an empty folder, most of them in a fork of
this process and some in a process of their own. Some are typed as an ordinary user, where this process is
root's. An input must end with its exit code and one line on stderr that names the fault, without a traceback,
in a few times what `planner --version` takes here and now. It must execute nothing, and leave neither a file
nor a process behind.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import yaml

from cli.tables import console, table
from costmodels.errors import InputError
from planner.options.flags import run
from tests.support.ordinary_user import can_be_ordinary, drop_capabilities, is_ordinary

ROOT = Path(__file__).parents[2]

CASES = Path(__file__).with_suffix(".yaml")

SLOWEST = 15.0
"""Processor time that a refusal may take, in that of `planner --version`: some five seconds."""

STUCK = 150.0
"""Wall-clock time after which an input hangs, likewise."""

LONGEST_LINE = 2000
"""Characters of a message that somebody still reads."""

JOB_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that would make a process a rank."""


@dataclass(frozen=True)
class Case:
    """One input and its end."""

    group: str
    words: tuple[str, ...]
    code: int
    says: tuple[str, ...]
    """Fragments of the line on stderr."""
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    folders: tuple[str, ...] = ()
    links: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    """Changes of a valid plan by dotted path, which makes p.json."""
    nested: str = ""
    """A JSON file of a hundred thousand lists in each other."""
    process: bool = False
    """The case runs in a process of its own, not in a fork."""
    cwd: str = ""
    """`gone`: its folder is removed before it starts."""
    user: bool = False
    """True if an ordinary user types the input, who may not read every folder."""

    @property
    def title(self) -> str:
        """The input as one types it."""
        return shlex.join(self.words)

    def needs(self, name: str) -> bool:
        """Return whether the case names the valid input `name`."""
        return any("{" + name + "}" in word for word in self.words)


@dataclass(frozen=True)
class End:
    """The end of a command on an input."""

    code: int | None
    """None: it was killed, as it did not end."""
    err: str
    wall_s: float
    cpu_s: float
    left: tuple[str, ...]
    """Files and processes that it left behind."""


THING = re.compile(r"@([a-z]+)((?:\.[a-z]+)?)")
"""A thing that lies where a file or a folder is named, such as `@fifo.json`."""


def thing_path(kind: str, ending: str) -> str:
    """The place of a thing in the folder of a case."""
    return {
        "locked": f"locked/x{ending}",
        "readonly": f"readonly/x{ending}",
        "below": f"file/x{ending}",
        "long": "x" * 300 + ending,
        "names": "/".join(["x" * 200] * 25) + ending,
        "canary": f"$(touch canary)`touch canary`;touch canary;{ending}",
    }.get(kind, kind + ending)


def make_thing(kind: str, ending: str, folder: Path) -> None:
    """Put a thing into the folder of a case."""
    path = folder / thing_path(kind, ending)
    links = {"zero": "/dev/zero", "full": "/dev/full", "loop": path.name, "dangling": "nowhere/at/all"}
    if kind in ("locked", "readonly"):
        path.parent.mkdir(exist_ok=True)
        path.parent.chmod(0 if kind == "locked" else 0o555)
    elif kind == "below":
        path.parent.write_text("a file")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind in links:
        path.symlink_to(links[kind])
    elif kind == "secret":
        path.write_text("{}")
        path.chmod(0)
    elif kind == "bytes":
        path.write_bytes(random.Random(1).randbytes(4096))
    elif kind == "empty":
        path.write_text("")
    elif kind not in ("long", "names", "canary"):
        raise InputError(f"bad_inputs.yaml: @{kind}{ending}: unknown thing")


def _placed(content: Mapping[str, Any], commands: Mapping[str, list[str]]) -> Iterator[Case]:
    """Every place where a path is named, with some of the things that may lie there in turns."""
    for group, (things, each, places) in content.items():
        turn = 0
        for words in places:
            for _ in range(each):
                kind = things[turn % len(things)]
                turn += 1
                name = kind.removesuffix("!")
                typed = [part for word in shlex.split(words) for part in commands.get(word, [word])]
                typed = [word.replace("@", f"@{name}") for word in typed]
                # An ordinary user types all that such users may not do, and every other one of the rest.
                yield Case(group, tuple(typed), 2, (), user=kind.endswith("!") or turn % 2 == 0)


def read_cases(path: Path = CASES) -> list[Case]:
    """The cases of a table."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    commands = {f"${name}": shlex.split(text) for name, text in content["commands"].items()}
    found = list(_placed(content["places"], commands))
    for group, rows in content["cases"].items():
        for words, code, says, *more in rows:
            typed = [part for word in shlex.split(words) for part in commands.get(word, [word])]
            changes = dict(more[0]) if more else {}
            changes["folders"] = tuple(changes.get("folders", ()))
            found.append(Case(group, tuple(typed), code, tuple(says), **changes))
    return found


def valid_inputs(folder: Path, with_checkpoint: bool = True) -> dict[str, str]:
    """Valid files by the names that cases give them: a plan, token files, text, a folder of checkpoints."""
    import planner
    from runtime.data import IndexedWriter

    plan = planner.suggest("gpt2-nano", world_size=2, device="cpu", max_global_batch_size=8)
    plan.save(folder / "plan.json")
    with IndexedWriter(str(folder / "words"), "uint16") as writer:
        for number in range(40):
            writer.add_document([*range(number % 17, 90 + number % 11), 256])
    (folder / "text.txt").write_text("a line of text\n" * 20)
    valid = {"plan": "plan.json", "corpus": "words", "text": "text.txt"}
    if with_checkpoint:
        from tests.fuzz.valid_files import saved_checkpoint
        from tests.support.worker_pool import WorkerPool

        WorkerPool(1).run(saved_checkpoint, 1, str(folder / "checkpoint"))
        valid["checkpoint"] = "checkpoint"
    return {name: str(folder / path) for name, path in valid.items()}


def prepare(case: Case, folder: Path, valid: Mapping[str, str]) -> list[str]:
    """Make what a case needs in its folder; returns its words."""
    for below in case.folders:
        (folder / below).mkdir(parents=True)
    for name, content in case.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for name, target in case.links.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(target)
    if case.nested:
        (folder / case.nested).write_text("[" * 100_000 + "]" * 100_000)
    if case.plan:
        plan = json.loads(Path(valid["plan"]).read_text())
        for dotted, value in case.plan.items():
            *above, last = dotted.split(".")
            place = plan
            for name in above:
                place = place[name]
            place[last] = value
        (folder / "p.json").write_text(json.dumps(plan))
    things = {found for word in (*case.words, *case.env.values()) for found in THING.findall(word)}
    for kind, ending in sorted(things):
        make_thing(kind, ending, folder)
    words = [THING.sub(lambda found: thing_path(found[1], found[2]), word) for word in case.words]
    for name, valid_path in valid.items():
        words = [word.replace("{" + name + "}", valid_path) for word in words]
    return words


def attempt(case: Case, folder: Path, valid: Mapping[str, str], limit_s: float) -> End:
    """Type one input in `folder`, which is empty, and see how it ends within `limit_s`."""
    work = folder / "work"
    work.mkdir()
    words = prepare(case, work, valid)
    before = _files(work)
    paths = {name: folder / name for name in ("out", "err")}
    environment = {name: value for name, value in os.environ.items() if name not in JOB_VARIABLES}
    # The default corpus must not be needed to refuse, nor a user's own files.
    own = {
        "XDG_CACHE_HOME": str(folder / "cache"),
        "HOME": str(folder),
        "XDG_CONFIG_HOME": str(folder / "config"),
    }
    given = {
        name: THING.sub(lambda found: str(work / thing_path(found[1], found[2])), value)
        for name, value in case.env.items()
    }
    environment |= own | given
    start = _process if case.process else _fork
    since = time.monotonic()
    child = start(case, words, work, paths, environment)
    try:
        code, cpu_s = _wait(child, since + limit_s)
        wall_s = time.monotonic() - since
        left = [f"process {pid}" for pid in _session(child)]
    finally:
        _end_session(child)
    left += sorted(_files(work) - before) if work.exists() else []
    for locked in work.glob("*ed*"):  # `locked`, which is to be removed.
        if locked.is_dir() and not locked.is_symlink():
            locked.chmod(0o755)
    err = paths["err"].read_text(errors="replace")
    return End(code, err, wall_s, cpu_s, tuple(left))


def faults(case: Case, end: End, version_cpu_s: float) -> list[str]:
    """Faults in the end of a command on an input, in words."""
    lines = [line for line in end.err.splitlines() if line.strip()]
    found = []
    if end.code is None:
        return [f"hangs: no end after {end.wall_s:.0f} s"]
    if "Traceback" in end.err:
        found.append(f"traceback: {lines[-1][:200]}")
    if end.code != case.code:
        found.append(f"exit code {end.code} instead of {case.code}")
    if case.code:
        errors = [line for line in lines if ": error: " in line]
        if len(errors) != 1 or lines[-1] != errors[0]:
            found.append(f"{len(errors)} lines of error among {len(lines)}: {' / '.join(lines)[:200]}")
        if any(len(line) > LONGEST_LINE for line in lines):
            found.append("a line that nobody reads to its end")
        missing = [part for part in case.says if part not in end.err]
        if missing and not found:
            found.append(f"does not say {', '.join(map(repr, missing))}: {lines[-1][:300]}")
    if any("canary" in name and "$(" not in name for name in end.left):
        found.append("executes what it is given")
    if case.code and end.left:
        found.append(f"leaves {', '.join(end.left)[:200]}")
    if end.cpu_s > SLOWEST * version_cpu_s:
        found.append(f"takes {end.cpu_s:.1f} s of the processor, {end.cpu_s / version_cpu_s:.0f} x --version")
    return found


def version_seconds() -> tuple[float, float]:
    """Wall-clock and processor time of `planner --version`: the second of two, with warm caches."""
    seconds = []
    for _ in range(2):
        before, since = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        subprocess.run([*COMMAND, "--version"], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        seconds.append((time.monotonic() - since, cpu_s))
    return seconds[-1]


COMMAND = (sys.executable, "-c", "import sys; sys.argv[0] = 'planner'; from cli.main import main; main()")
"""The console script, of this checkout."""


def _process(
    case: Case, words: list[str], work: Path, paths: Mapping[str, Path], environment: dict[str, str]
) -> int:
    script = 'cd "$1"; [ "$2" = gone ] && rmdir "$1"; shift 2; exec "$@"'
    environment = environment | {"PYTHONPATH": str(ROOT)}
    with paths["out"].open("wb") as out, paths["err"].open("wb") as err:
        return subprocess.Popen(
            ["sh", "-c", script, "sh", str(work), case.cwd, *COMMAND, *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=environment,
            start_new_session=True,
            preexec_fn=drop_capabilities if case.user and not is_ordinary() else None,
        ).pid


def _fork(
    case: Case, words: list[str], work: Path, paths: Mapping[str, Path], environment: dict[str, str]
) -> int:
    pid = os.fork()
    if pid == 0:
        _typed(words, work, paths, environment, case.user and not is_ordinary())
    return pid


def _typed(
    words: list[str], work: Path, paths: Mapping[str, Path], environment: dict[str, str], drops: bool
) -> NoReturn:
    """Run a command in a fork of this process."""
    code = 70
    try:
        os.setsid()
        os.chdir(work)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(paths[name], os.O_WRONLY | os.O_CREAT), number)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="backslashreplace")
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace")
        os.environ.clear()
        os.environ.update(environment)
        if drops:
            drop_capabilities()
        if words[0] == "rank":
            from runtime.pretrain import app

            sys.argv = ["runtime.pretrain", *words[1:]]
            run(app, "runtime.pretrain")
        else:
            from cli.main import main

            sys.argv = ["planner", *words]
            main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        with suppress(OSError):
            sys.stdout.flush()
        with suppress(OSError):
            sys.stderr.flush()
        os._exit(code)


def _wait(pid: int, until: float) -> tuple[int | None, float]:
    """Exit code of a child, None if it was killed at `until`, and its processor time."""
    code: int | None = None
    while True:
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            break
        if time.monotonic() > until:
            _end_session(pid)
            _, _, usage = os.wait4(pid, 0)
            break
        time.sleep(0.005)
    return code, usage.ru_utime + usage.ru_stime


def _session(leader: int) -> Iterator[int]:
    """Processes that run in the session of a child."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader and fields[0] != "Z":
                yield int(path.parent.name)


def _end_session(leader: int) -> None:
    for pid in _session(leader):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")} if folder.exists() else set()


def try_all(
    cases: Sequence[Case],
    valid: Mapping[str, str],
    version_s: tuple[float, float],
    say: Callable[[str], None] = lambda line: None,
    stuck: float = STUCK,
) -> list[tuple[Case, End, list[str]]]:
    """Type every input, each in a folder of its own."""
    done = []
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="bad-input-") as folder:
            end = attempt(case, Path(folder), valid, stuck * version_s[0])
        wrong = faults(case, end, version_s[1])
        done.append((case, end, wrong))
        if wrong:
            say(f"{case.title}: {'; '.join(wrong)}")
    return done


app = typer.Typer(add_completion=False)


@app.command()
def main(
    inputs: Annotated[int, typer.Option(help="Inputs to try, drawn at random; 0 for all.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the draw.")] = 1,
    only: Annotated[str, typer.Option(help="Part of the input or of its group.")] = "",
    stuck: Annotated[
        float, typer.Option(help="Times `planner --version` after which an input hangs.")
    ] = STUCK,
    show: Annotated[bool, typer.Option("--show", help="Print what each input ends with.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Type wrong inputs and see whether each ends as it must."""
    if inputs < 0:
        raise InputError(f"--inputs {inputs}: must be 0 (all) or more")
    cases = [case for case in read_cases() if only in case.title or only in case.group]
    if not can_be_ordinary():
        print("as nobody can be an ordinary user here, their inputs are left out", file=sys.stderr)
        cases = [case for case in cases if not case.user]
    if not cases:
        raise InputError(f"--only {only}: no input has this in it")
    if inputs:
        cases = random.Random(seed).sample(cases, min(inputs, len(cases)))
    with tempfile.TemporaryDirectory(prefix="bad-inputs-") as folder:
        valid = valid_inputs(Path(folder), any(case.needs("checkpoint") for case in cases))
        version_s = version_seconds()
        # Modules of the commands are imported here, once, and every fork has them.
        import runtime.checkpoint
        import runtime.pretrain  # noqa: F401

        done = try_all(cases, valid, version_s, lambda line: print(line, file=sys.stderr, flush=True), stuck)
    failed = sum(bool(wrong) for _, _, wrong in done)
    slowest = max(end.cpu_s for _, end, _ in done) / version_s[1]
    if as_json:
        rows = [{"words": case.title, **asdict(end), "faults": wrong} for case, end, wrong in done]
        json.dump({"version_s": version_s[0], "inputs": rows, "failed": failed}, sys.stdout)
        print()
    else:
        if show:
            for case, end, _ in done:
                print(f"{case.title}\n    {end.code} {end.cpu_s:.2f} s: {end.err.strip()[:400]}")
        groups = Counter(case.group for case in cases)
        wrong_in = Counter(case.group for case, _, wrong in done if wrong)
        longest = max(end.wall_s for _, end, _ in done)
        users = Counter(case.group for case in cases if case.user)
        lines = [
            [group, str(count), str(users[group]), str(wrong_in[group])] for group, count in groups.items()
        ]
        console().print(table(("inputs of", "tried", "as a user", "wrong"), lines, left=("inputs of",)))
        print(
            f"{len(done)} inputs, {users.total()} of them as an ordinary user, {failed} end wrongly; the "
            f"longest takes {longest:.1f} s on the clock, and the slowest {slowest:.1f} times the processor "
            f"time of `planner --version` ({version_s[1]:.2f} s)"
        )
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    run(app, "tests.fuzz.bad_inputs")

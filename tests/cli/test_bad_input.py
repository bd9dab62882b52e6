"""Every kind of wrong input ends in one line that names the argument, the value and what would be right."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.commands import Command, told
from tests.support.jobs import write_corpus

NANO = ("--model", "gpt2-nano", "--device", "cpu", "--world-size", "2")
LAUNCH = ("launch", *NANO)
EIGHT = ("--max-global-batch-size", "8")
A100 = ("--device", "a100-80g")


class Files(NamedTuple):
    """Files and folders that wrong input refers to."""

    folder: Path
    corpus: str
    """Prefix of good token files."""
    plan: Path
    """A plan for two ranks of the CPU."""

    def path(self, name: str, content: bytes = b"") -> Path:
        """A new file."""
        path = self.folder / name
        path.write_bytes(content)
        return path

    def truncated_index(self) -> str:
        """Prefix of a pair whose .idx ends too early."""
        index = Path(self.corpus + ".idx").read_bytes()
        self.path("cut.bin", Path(self.corpus + ".bin").read_bytes())
        return str(self.path("cut.idx", index[:-9]).with_suffix(""))

    def foreign_index(self) -> str:
        """Prefix of a pair whose .idx is of another format."""
        self.path("foreign.bin")
        return str(self.path("foreign.idx", b"PK\x03\x04" + bytes(60)).with_suffix(""))

    def half_a_plan(self) -> Path:
        return self.path("half.json", self.plan.read_bytes()[:200])

    def plan_without_layout(self) -> Path:
        plan: dict[str, Any] = json.loads(self.plan.read_text())
        del plan["layout"]
        return self.path("partial.json", json.dumps(plan).encode())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("input")


@pytest.fixture(scope="module")
def corpus(folder: Path) -> str:
    return write_corpus(folder)


@pytest.fixture
def files(tmp_path: Path, corpus: str, folder: Path, planner_command: Command) -> Files:
    plan = folder / "plan.json"
    if not plan.exists():
        assert planner_command("suggest", *NANO, *EIGHT, "--save", plan)[0] == 0
    return Files(tmp_path, corpus, plan)


Words = Callable[[Files], Sequence[str | Path]]

CASES: dict[str, tuple[Words, int, tuple[str, ...]]] = {
    "unknown model": (
        lambda f: ("launch", "--model", "gpt-9", *EIGHT),
        2,
        ("unknown model 'gpt-9'", "did you mean", "`planner models`"),
    ),
    "unknown model to suggest": (
        lambda f: ("suggest", "--model", "gpt2-nanoo", "--world-size", "2", *EIGHT),
        2,
        ("unknown model 'gpt2-nanoo'", "did you mean gpt2-nano"),
    ),
    "several words after one flag": (
        lambda f: ("suggest", *NANO, *EIGHT, "--recompute-modules", "core_attn", "layernorm"),
        2,
        ("unexpected extra argument", "layernorm", "put commas, no blanks, between several names"),
    ),
    "world size that nothing divides": (
        lambda f: (*LAUNCH[:-1], "7", "--global-batch-size", "8"),
        2,
        ("7 devices", "--global-batch-size 8", "world sizes that work: 6"),
    ),
    "world size that nothing divides, to suggest": (
        lambda f: (
            "suggest",
            *A100,
            "--model",
            "gpt2-nano",
            "--world-size",
            "13",
            "--global-batch-size",
            "8",
        ),
        2,
        ("world size 13 is not a multiple of local world size 8", "use 8 or 16"),
    ),
    "world size zero": (
        lambda f: ("launch", "--model", "gpt2-nano", "--world-size", "0", *EIGHT),
        2,
        ("--world-size 0: must be at least 1",),
    ),
    "heads not divisible": (
        lambda f: (
            *("suggest", *A100, "--model", "gpt2-124m", "--world-size", "8", *EIGHT),
            *("--tensor-model-parallel-size", "8"),
        ),
        2,
        ("--tensor-model-parallel-size 8 does not divide 12 heads", "use 1, 2, 3, 4, 6, 12"),
    ),
    "heads not divisible, to launch": (
        lambda f: (*LAUNCH, *EIGHT, "--num-attention-heads", "1", "--pin", "tp=2"),
        2,
        ("tp 2 does not divide 1 heads", "use 1"),
    ),
    "no layout fits": (
        lambda f: ("launch", "--model", "gpt3-175b", "--device", "cpu", "--world-size", "2", *EIGHT),
        3,
        ("no layout of gpt3-175b fits 2 x cpu", "lacks", "GiB", "it fits on devices of at least"),
    ),
    "no layout fits, to suggest": (
        lambda f: ("suggest", *A100, "--model", "gpt-22b", "--world-size", "1", *EIGHT, "--json"),
        3,
        ("no layout of gpt-22b fits 1 x a100-80g", "lacks", "fits"),
    ),
    "truncated .idx": (
        lambda f: (*LAUNCH, *EIGHT, "--data-path", f.truncated_index()),
        2,
        ("--data-path", "cut.idx: truncated or corrupt index", "prepare it again"),
    ),
    "foreign .idx": (
        lambda f: (*LAUNCH, *EIGHT, "--data-path", f.foreign_index()),
        2,
        ("--data-path", "foreign.idx: not a Megatron index", "MMIDIDX"),
    ),
    "missing .idx": (
        lambda f: (*LAUNCH, *EIGHT, "--data-path", f.folder / "none"),
        2,
        ("--data-path", "none.idx: no such file", "`planner data prepare`"),
    ),
    "missing vocabulary file": (
        lambda f: (*LAUNCH, *EIGHT, "--vocab-file", f.folder / "none.json", "--merge-file", f.path("m")),
        2,
        ("--vocab-file", "none.json: cannot be read: No such file"),
    ),
    "missing vocabulary file, to data prepare": (
        lambda f: (
            *("data", "prepare", "--input", f.path("text.txt", b"text"), "--output-prefix", f.folder / "out"),
            *("--vocab-file", f.folder / "none.json", "--merge-file", f.path("m"), "--workers", "1"),
        ),
        2,
        ("--vocab-file", "none.json: cannot be read: No such file"),
    ),
    "vocabulary file without merges": (
        lambda f: (*LAUNCH, *EIGHT, "--vocab-file", f.path("v.json")),
        2,
        ("--vocab-file given without --merge-file: give both, or neither",),
    ),
    "vocabulary smaller than the tokenizer": (
        lambda f: (*LAUNCH, *EIGHT, "--tokenizer-type", "GPT2BPETokenizer"),
        2,
        ("50257 entries", "the model's vocabulary holds 512", "give --vocab-size 50257"),
    ),
    "vocabulary smaller than the data": (
        lambda f: (*LAUNCH, *EIGHT, "--vocab-size", "128", "--data-path", f.corpus),
        2,
        ("--data-path", "holds token id 256", "vocabulary of 128", "give --vocab-size"),
    ),
    "plan for another world size": (
        lambda f: ("launch", "--plan", f.plan, "--world-size", "4"),
        2,
        ("--world-size 4", "plan.json is for world size 2", "plan again"),
    ),
    "missing plan": (
        lambda f: ("launch", "--plan", f.folder / "none.json"),
        2,
        ("none.json: no such file", "planner suggest --save"),
    ),
    "broken JSON": (
        lambda f: ("launch", "--plan", f.half_a_plan()),
        2,
        ("half.json: broken JSON at line",),
    ),
    "JSON that is no plan": (
        lambda f: ("launch", "--plan", f.plan_without_layout()),
        2,
        ("partial.json", "layout", "Field required"),
    ),
    "plan and model": (
        lambda f: ("launch", "--plan", f.plan, "--model", "gpt2-nano"),
        2,
        ("--plan", "--model cannot change it", "leave that out"),
    ),
    "unwritable checkpoint folder": (
        lambda f: (*LAUNCH, *EIGHT, "--save", f.path("file") / "below"),
        2,
        ("--save", "file/below: cannot write there (Not a directory)", "give a writable folder"),
    ),
    "unwritable log folder": (
        lambda f: (*LAUNCH, *EIGHT, "--data-path", f.corpus, "--log-dir", f.path("file") / "below"),
        2,
        ("--log-dir", "file/below: cannot write there", "give a writable folder"),
    ),
    "batch not divisible": (
        lambda f: (*LAUNCH, "--global-batch-size", "7", "--pin", "dp=2"),
        2,
        ("--global-batch-size 7 is not divisible by", "dp 2; use a multiple of 2"),
    ),
    "both kinds of batch": (
        lambda f: (*LAUNCH, *EIGHT, "--global-batch-size", "8"),
        2,
        ("--global-batch-size 8 and --max-global-batch-size 8", "give one"),
    ),
    "no batch": (
        lambda f: ("launch",),
        2,
        ("no batch size: give --global-batch-size or --max-global-batch-size",),
    ),
    "unknown flag": (
        lambda f: (*LAUNCH, *EIGHT, "--train-iter", "5"),
        2,
        ("unknown flag --train-iter: did you mean --train-iters?",),
    ),
    "missing value": (lambda f: (*LAUNCH, *EIGHT, "--train-iters"), 2, ("--train-iters", "requires an arg")),
    "word for a number": (
        lambda f: (*LAUNCH, *EIGHT, "--train-iters", "many"),
        2,
        ("--train-iters", "'many' is not a whole number"),
    ),
    "dropout": (
        lambda f: (*LAUNCH, *EIGHT, "--attention-dropout", "0.1"),
        2,
        ("--attention-dropout 0.1: must be 0",),
    ),
    "fp16": (lambda f: (*LAUNCH, *EIGHT, "--fp16"), 2, ("precision fp16", "trains in fp32")),
    "experts of a dense model": (
        lambda f: (*LAUNCH, *EIGHT, "--expert-model-parallel-size", "2"),
        2,
        (
            "--expert-model-parallel-size 2 and expert_tensor_parallel 1 need a mixture of experts",
            "use 1 and 1",
        ),
    ),
    "another dispatcher": (
        lambda f: (*LAUNCH, *EIGHT, "--moe-token-dispatcher-type", "allgather"),
        2,
        ("--moe-token-dispatcher-type allgather: tokens travel to experts by all-to-all; use alltoall",),
    ),
    "no time for a collective": (
        lambda f: (*LAUNCH, *EIGHT, "--distributed-timeout-minutes", "0"),
        2,
        ("--distributed-timeout-minutes 0.0: must be positive",),
    ),
    "more time for a collective than clocks count": (
        lambda f: (*LAUNCH, *EIGHT, "--distributed-timeout-minutes", "1e300"),
        2,
        ("--distributed-timeout-minutes 1e+300: must be positive and at most 525600 (a year)",),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_wrong_input_ends_in_one_line(
    planner_command: Command,
    files: Files,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
) -> None:
    work = files.folder / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    # The default corpus must not be needed to refuse.
    monkeypatch.setenv("XDG_CACHE_HOME", str(files.folder / "cache"))
    words, expected, parts = CASES[case]
    code, _, err = planner_command(*words(files))
    assert code == expected
    err = told(err)
    assert err.startswith("planner: error: ") and err.count("\n") == 1
    for part in parts:
        assert part in err
    # No folder of a run that never was.
    assert list(work.iterdir()) == []


def test_a_device_that_is_not_here_is_refused(
    planner_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.job.devices.local_device_count", lambda: 0)
    code, _, err = planner_command("launch", "--model", "gpt2-nano", "--device", "h100", *EIGHT)
    assert code == 2
    assert told(err) == (
        "planner: error: --device h100: this machine has no GPUs; leave it out or give cpu\n"
    )


@pytest.mark.parametrize(
    ("words", "environment", "parts"),
    [
        (
            ("--plan", "PLAN"),
            {},
            ("plan is for world size 2", "this job's is 1", "start 2 ranks or plan again"),
        ),
        (("--plan", "PLAN"), {"WORLD_SIZE": "4"}, ("WORLD_SIZE=4 without MASTER_ADDR", "torchrun")),
        (
            ("--plan", "PLAN", "--world-size", "2"),
            {},
            ("--world-size 2: torchrun started 1 ranks; leave the flag out",),
        ),
        ((*NANO[:4], *EIGHT, "--save", "FILE/below"), {}, ("--save", "cannot write there")),
        ((*NANO[:4], *EIGHT, "--data-path", "/none"), {}, ("--data-path /none.idx: no such file",)),
        ((*NANO[:4], *EIGHT, "--train-iters", "0"), {}, ("--train-iters 0: must be at least 1",)),
        ((*NANO[:4], *EIGHT, "--no-such-flag"), {}, ("--no-such-flag",)),
        ((*NANO[:4], *EIGHT), {"PMI_SIZE": "2"}, ("PMI_SIZE=2: the scheduler has started this 2 times",)),
        ((*NANO[:4], *EIGHT, "--load", "/none"), {}, ("--load /none: there is no such folder",)),
        ((*NANO[:2], *EIGHT, "--device", "h100"), {}, ("--device h100: this machine has no GPUs",)),
        # The command waits for the owner.
        pytest.param(
            *((*NANO[:4], *EIGHT, "--save", "OWNED"), {}, ("--save", "in use by process ", " on host ")),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_rank_refuses_wrong_input_in_one_line(
    files: Files,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    environment: dict[str, str],
    parts: tuple[str, ...],
) -> None:
    import torch.distributed

    from planner.options.flags import run
    from runtime.checkpoint.owner import ownership
    from runtime.pretrain import app

    for name in (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "TORCHELASTIC_RUN_ID",
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    taken = files.folder / "taken"
    taken.mkdir(exist_ok=True)
    paths = {"PLAN": str(files.plan), "FILE/below": str(files.path("file") / "below"), "OWNED": str(taken)}
    monkeypatch.setattr("sys.argv", ["runtime.pretrain", *(paths.get(word, word) for word in words)])
    with ownership(taken, "--save taken"), pytest.raises(SystemExit) as stopped:
        run(app, "runtime.pretrain")
    assert stopped.value.code == 2
    err = told(capsys.readouterr().err)
    assert err.startswith("runtime.pretrain: error: ") and err.count("\n") == 1
    for part in parts:
        assert part in err
    # The process is free to join another job.
    assert not torch.distributed.is_initialized()

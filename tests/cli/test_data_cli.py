"""`planner data prepare` as a Megatron user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from cli import data
from planner.options.flags import run
from runtime.data.indexed_dataset import IndexedDataset
from runtime.data.tokenizers import ByteTokenizer
from runtime.huggingface.tokenizer_files import write_tokenizer

Words = list[str | Path]


def planner(*arguments: str | Path) -> int:
    """Run the command as `planner` mounts it; the exit code."""
    app = typer.Typer()
    app.add_typer(data.app, name="data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["planner", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            run(app, "planner")
    return int(stopped.value.code or 0)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.json"
    path.write_text("".join(json.dumps({"text": f"Hello world {number}"}) + "\n" for number in range(20)))
    return path


def test_megatrons_command_line(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments: Words = [
        "--input",
        text,
        "--output-prefix",
        tmp_path / "my-gpt2",
        "--dataset-impl",
        "mmap",
    ]
    arguments += [
        "--tokenizer-type",
        "GPT2BPETokenizer",
        "--append-eod",
        "--workers",
        "2",
        "--chunk-size",
        "1",
    ]
    assert planner("data", "prepare", *arguments) == 0
    dataset = IndexedDataset(tmp_path / "my-gpt2_text_document")
    assert dataset.get(0).tolist() == [15496, 995, 657, 50256]
    output, error = capsys.readouterr()
    assert output.count("\n") == 1 and "20 documents, 80 tokens" in output
    # No bar where there is no terminal to draw it on.
    assert error == ""


def test_inputs_repeat_and_expand(tmp_path: Path, text: Path) -> None:
    (tmp_path / "more.txt").write_text("more")
    arguments: Words = [
        "--input",
        tmp_path / "corp*.json",
        "--input",
        tmp_path / "more.txt",
        "--workers",
        "1",
    ]
    arguments += ["--output-prefix", tmp_path / "out", "--tokenizer-type", "ByteTokenizer"]
    assert planner("data", "prepare", *arguments) == 0
    dataset = IndexedDataset(tmp_path / "out_text_document")
    assert dataset.documents == 21 and bytes(dataset.get(20).tolist()) == b"more"


def test_several_keys_and_files_as_megatron_takes_them(tmp_path: Path) -> None:
    path = tmp_path / "in.json"
    path.write_text('{"text": "ab", "title": ["c", "d"]}\n')
    arguments: Words = ["--input", path, path, "--json-keys", "text", "title", "--workers", "1"]
    arguments += ["--output-prefix", tmp_path / "out", "--tokenizer-type", "ByteTokenizer"]
    assert planner("data", "prepare", *arguments) == 0
    assert IndexedDataset(tmp_path / "out_text_document").tokens.tolist() == [97, 98] * 2
    assert IndexedDataset(tmp_path / "out_title_document").lengths.tolist() == [1] * 4


def test_merge_and_info(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "parts").mkdir()
    for name in ("a", "b"):
        arguments: Words = [
            "--input",
            text,
            "--output-prefix",
            tmp_path / "parts" / name,
            "--append-eod",
        ]
        assert planner("data", "prepare", *arguments, "--workers", "1") == 0
    capsys.readouterr()
    assert planner("data", "merge", "--input", tmp_path / "parts", "--output-prefix", tmp_path / "all") == 0
    assert capsys.readouterr().out == f"{tmp_path}/all.bin and .idx: 40 documents, 160 tokens\n"
    assert planner("data", "info", tmp_path / "all", tmp_path / "parts" / "b_text_document.idx") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        f"{tmp_path}/all: 40 documents (0 empty) in 40 sequences, 160 tokens as uint16"
    )
    assert "40 of the first 40 documents end with 50256" in lines[2]
    assert lines[3].endswith("begins 15496 995 657 50256: 'Hello world 0<|endoftext|>'")
    assert lines[4].startswith(f"{tmp_path}/parts/b_text_document: 20 documents")
    assert planner("data", "info", "--json", tmp_path / "all", "--tokenizer-type", "ByteTokenizer") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["documents"], found["tokens"], found["largest"]) == (40, 160, 50256)
    assert found["ended"] == 0 and found["first_text"] is None
    assert (found["prepared_with"], found["tokenizer"], found["lacking"]) == ("gpt2", "bytes", "not of bytes")


def test_pairs_are_read_and_merged_as_their_tokenizer_prepared_them(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, kind in (("a", "ByteTokenizer"), ("b", "GPT2BPETokenizer")):
        arguments: Words = [
            "--input",
            text,
            "--output-prefix",
            tmp_path / name,
            "--tokenizer-type",
            kind,
        ]
        assert planner("data", "prepare", *arguments, "--workers", "1") == 0
    a, b = (tmp_path / f"{name}_text_document" for name in "ab")
    capsys.readouterr()
    assert planner("data", "info", a, b) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].endswith("end with 256, the end of a document of bytes")
    assert lines[3].endswith(": 'Hello world 0'") and lines[7].endswith(": 'Hello world 0'")
    assert planner("data", "info", a, "--tokenizer-type", "GPT2BPETokenizer") == 0
    assert capsys.readouterr().out.splitlines()[2].endswith("a document of gpt2; bytes prepared them")
    assert planner("data", "merge", "--input", a, b, "--output-prefix", tmp_path / "all") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{b}: was prepared with gpt2 (50257 ids" in line and f"but {a} with bytes (257 ids" in line
    assert list(tmp_path.glob("all*")) == []
    for pair in (a, b):
        Path(f"{pair}.tokenizer").unlink()
    assert planner("data", "merge", "--input", a, a, "--output-prefix", tmp_path / "all") == 0
    assert "planner: note: " in capsys.readouterr().err
    assert planner("data", "info", tmp_path / "all") == 0
    assert "no record of its tokenizer: name it with --tokenizer-type" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("info", "none"), "none.idx: no such file"),
        (("merge", "--input", "none", "--output-prefix", "out"), "none.idx: no such file"),
        (("merge", "--input", "none"), "--output-prefix: none given"),
        (("merge", "--output-prefix", "out"), "--input: none given"),
    ],
)
def test_wrong_pairs_are_one_line(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    assert planner("data", *words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"--input": "none.json"}, "--input none.json: no such file"),
        (
            {"--vocab-file": "none-vocab.json", "--merge-file": "none"},
            "--vocab-file none-vocab.json: cannot be",
        ),
        ({"--tokenizer-model": "none.json"}, "--tokenizer-model none.json: cannot be read"),
        ({"--dataset-impl": "lazy"}, "--dataset-impl 'lazy': only mmap"),
        ({"--json-keys": "body"}, "corpus.json:1: no 'body' in this object"),
        ({"--workers": "many"}, "--workers"),
        ({"--output-prefix": ""}, "--output-prefix: none given"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], changed: dict[str, str], message: str
) -> None:
    arguments = {"--input": str(text), "--output-prefix": str(tmp_path / "out"), "--workers": "1", **changed}
    assert planner("data", "prepare", *(part for pair in arguments.items() for part in pair)) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("planner: error: ") and message in error
    assert list(tmp_path.glob("out*")) == []


def test_data_stays_light() -> None:
    """Neither the command line nor the data package loads torch; the former not even the tokenizers."""
    code = (
        "import sys, cli.data; assert 'tokenizers' not in sys.modules; "
        "import runtime.data; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_the_tokenizer_of_a_model(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tokenizer(tmp_path / "base" / "huggingface", ByteTokenizer())
    rest: Words = ["--input", text, "--output-prefix", tmp_path / "made", "--append-eod"]
    assert planner("data", "prepare", "--model", tmp_path / "base", *rest) == 0
    dataset = IndexedDataset(tmp_path / "made_text_document")
    assert dataset.get(3).tolist() == [*b"Hello world 3", 256]
    capsys.readouterr()
    cases: list[tuple[Words, str]] = [
        (["--model", tmp_path / "none"], "no tokenizer.json there; give a folder of a Hugging Face model or"),
        (["--model", tmp_path / "base", "--tokenizer-type", "ByteTokenizer"], "another one are named"),
    ]
    for words, message in cases:
        assert planner("data", "prepare", *words, *rest) == 2
        assert message in capsys.readouterr().err.replace("\n", " ")

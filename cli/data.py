"""`planner data`: turn text into the token files that training reads."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import typer

from costmodels.errors import InputError
from planner.flags import flag, takes

app = typer.Typer(help="Prepare text for training.", no_args_is_help=True)


@app.callback()
def data() -> None:
    """Prepare text for training."""


@dataclass(frozen=True)
class Source:
    """The text to read."""

    input: list[str] = flag(
        [], "file of text, or a pattern in quotes; may be repeated", "--input", metavar="FILE"
    )
    json_key: str = flag("text", "the key that holds the text of a JSON object", "--json-keys", "--json-key")
    format: str | None = flag(
        None, "jsonl, json (an array) or text (one document a file); found out if not given", "--format"
    )


@dataclass(frozen=True)
class Encoding:
    """How text becomes token ids."""

    tokenizer_type: str = flag(
        "GPT2BPETokenizer", "GPT2BPETokenizer, HuggingFaceTokenizer or ByteTokenizer", "--tokenizer-type"
    )
    vocab_file: str | None = flag(None, "vocab.json of a GPT2BPETokenizer; GPT-2's own if not given")
    merge_file: str | None = flag(None, "merges.txt of a GPT2BPETokenizer; GPT-2's own if not given")
    tokenizer_model: str | None = flag(None, "tokenizer.json of a HuggingFaceTokenizer, or its folder")
    append_eod: bool = flag(False, "end each document that is not empty with the end-of-document token")


@dataclass(frozen=True)
class Output:
    """What is written, and by how many processes."""

    output_prefix: str = flag(
        "", "writes PREFIX_{key}_document.bin and .idx", "--output-prefix", metavar="PREFIX"
    )
    workers: int | None = flag(None, "processes that encode text; all cores if not given")
    chunk_size: int = flag(1024, "documents that a process takes at a time")
    dataset_impl: str = flag("mmap", "kind of token files: mmap is the only one")


@app.command()
@takes(source=Source, encoding=Encoding, output=Output)
def prepare(source: Source, encoding: Encoding, output: Output) -> None:
    """Turn JSON lines, a JSON array or plain text into Megatron's .bin and .idx files."""
    # Imported here so that the other commands start without numpy's and the tokenizers' share of a second.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from runtime.data.prepare import Summary
    from runtime.data.prepare import prepare as prepare_files
    from runtime.data.tokenizers import load_tokenizer

    if not output.output_prefix:
        raise InputError("--output-prefix: none given: name the files to write, as my-corpus")
    if output.dataset_impl != "mmap":
        raise InputError(f"--dataset-impl {output.dataset_impl!r}: only mmap is written")
    files = _expand(source.input)
    tokenizer = load_tokenizer(
        encoding.tokenizer_type, encoding.vocab_file, encoding.merge_file, encoding.tokenizer_model
    )
    start = drawn = time.perf_counter()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    silent = not console.is_terminal
    with Progress(*columns, console=console, transient=True, auto_refresh=False, disable=silent) as bar:
        task = bar.add_task("tokenizing", total=sum(file.stat().st_size for file in files))

        def show(summary: Summary) -> None:
            # Drawn from here and not by rich's thread: the workers are forked from this process.
            nonlocal drawn
            now = time.perf_counter()
            if now - drawn > 0.1:
                drawn = now
                description = f"{summary.documents:,} documents"
                bar.update(task, completed=summary.bytes_read, description=description, refresh=True)

        summary = prepare_files(
            files,
            output.output_prefix,
            tokenizer,
            source.json_key,
            encoding.append_eod,
            output.workers,
            output.chunk_size,
            source.format,
            show,
        )
    seconds = time.perf_counter() - start
    print(
        f"{summary.prefix}.bin and .idx: {summary.documents:,} documents, {summary.tokens:,} tokens "
        f"({tokenizer.name}) from {summary.bytes_read / 1e6:,.1f} MB in {seconds:.1f} s"
    )


def _expand(inputs: list[str]) -> list[Path]:
    files = []
    for name in inputs:
        path = Path(name)
        matches = (
            [path] if path.exists() else sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
        )
        if not matches:
            raise InputError(f"--input {name}: no such file")
        files += matches
    if not files:
        raise InputError("--input: none given: name a file of JSON lines, a JSON array or plain text")
    return files

"""`planner data`: turn text into token files for training, merge token files, and show their contents."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.paths import file_bytes
from planner.options.command import HELP, Command
from planner.options.flags import flag, flag_groups
from planner.options.limits import AT_LEAST_1

if TYPE_CHECKING:
    from runtime.data import Summary, Tokenizer

app = typer.Typer(help="Prepare text for training.", no_args_is_help=True, context_settings=HELP)


@app.callback()
def data() -> None:
    """Prepare text for training."""


class SeveralWordsCommand(Command):
    """A command without arguments; each of its repeatable flags may also take several words at once."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        several = {
            name for one in self.get_params(ctx) if getattr(one, "multiple", False) for name in one.opts
        }
        words: list[str] = []
        current: str | None = None
        is_first = False
        for word in args:
            if word.startswith("--"):
                current, is_first = (word if word in several else None), True
            elif current is not None and not is_first:
                words.append(current)
            else:
                is_first = False
            words.append(word)
        return super().parse_args(ctx, words)


@dataclass(frozen=True)
class Source:
    """The text to read."""

    input: list[str] = flag(
        [],
        "Files of text (.gz, .bz2, .xz and .zst too), patterns in quotes, or folders.",
        "--input",
        metavar="FILE...",
    )
    json_keys: list[str] = flag(
        ["text"],
        "Keys that hold the text of a JSON object; each gets files of its own.",
        "--json-keys",
        "--json-key",
        metavar="KEY...",
    )
    prompt_key: str | None = flag(
        None, "Key of a text that stands before that of --json-keys and is not predicted.", metavar="KEY"
    )
    format: str | None = flag(
        None,
        "jsonl, json (an array), wiki (WikiExtractor's <doc ...>) or text (one document a file); found out "
        "if not given.",
        "--format",
    )


@dataclass(frozen=True)
class Encoding:
    """The tokenizer that turns text into token ids."""

    tokenizer_type: str | None = flag(
        None,
        "GPT2BPETokenizer (unless --tokenizer-model is given), HuggingFaceTokenizer or ByteTokenizer.",
        "--tokenizer-type",
    )
    vocab_file: str | None = flag(None, "vocab.json of a GPT2BPETokenizer; GPT-2's own if not given.")
    merge_file: str | None = flag(None, "merges.txt of a GPT2BPETokenizer; GPT-2's own if not given.")
    tokenizer_model: str | None = flag(
        None, "tokenizer.json of a HuggingFaceTokenizer, its folder, or an id on the Hugging Face Hub."
    )
    model: str | None = flag(
        None,
        "Folder of a Hugging Face model or of checkpoints, or an id on the Hub, whose tokenizer to take.",
        "--model",
        metavar="FOLDER",
    )

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the flags name."""
        if self.model is not None:
            from runtime.huggingface.model_tokenizer import named_tokenizer

            if self.tokenizer_type or self.vocab_file or self.merge_file or self.tokenizer_model:
                raise InputError(
                    f"--model {self.model}: its tokenizer and another one are named; give one of them"
                )
            return named_tokenizer(self.model)
        from runtime.data import load_tokenizer
        from runtime.data.tokenizers import implied_kind

        files = self.vocab_file, self.merge_file, self.tokenizer_model
        return load_tokenizer(self.tokenizer_type or implied_kind(*files) or "GPT2BPETokenizer", *files)


@dataclass(frozen=True)
class Output:
    """The files to write, and the processes that write them."""

    output_prefix: str = flag(
        "",
        "Prefix of the files: PREFIX_{key}_document.bin and .idx, and .tokenizer, which names their "
        "tokenizer.",
        "--output-prefix",
        metavar="PREFIX",
    )
    append_eod: bool = flag(False, "End each document that is not empty with the end-of-document token.")
    workers: int | None = flag(
        None,
        "Processes that encode text, but no more than cores; all cores if not given.",
        within=AT_LEAST_1,
    )
    chunk_size: int = flag(1024, "Documents that a process takes at a time.", within=AT_LEAST_1)
    dataset_impl: str = flag("mmap", "Kind of token files: mmap is the only one.")


@app.command(cls=SeveralWordsCommand)
@flag_groups(source=Source, encoding=Encoding, output=Output)
def prepare(source: Source, encoding: Encoding, output: Output) -> None:
    """Turn JSON lines, a JSON array, WikiExtractor's output or plain text into Megatron's .bin and .idx."""
    # Imported here so that the other commands start without numpy's and the tokenizers' share of a second.
    from runtime.data import prepare as prepare_files
    from runtime.data.sources import expand
    from runtime.settings.idle_flags import idle_flag_notes

    _check_prefix(output.output_prefix)
    if output.dataset_impl != "mmap":
        raise InputError(f"--dataset-impl {output.dataset_impl!r}: only mmap is written")
    files = expand(source.input)
    tokenizer = encoding.tokenizer()
    for line in idle_flag_notes(encoding):
        print(f"planner: note: {line}", file=sys.stderr)
    keys = [key for word in source.json_keys for key in word.split()]
    start = time.perf_counter()
    with _bar("tokenizing", sum(map(file_bytes, files))) as show:
        summary = prepare_files(
            files,
            output.output_prefix,
            tokenizer,
            keys,
            output.append_eod,
            output.workers,
            output.chunk_size,
            source.format,
            show,
            source.prompt_key,
        )
    others = "" if len(set(keys)) == 1 else f" and those of {', '.join(dict.fromkeys(keys[1:]))}"
    print(
        f"{summary.prefix}.bin and .idx{others}: {summary.documents:,} documents, {summary.tokens:,} tokens "
        f"({tokenizer.name}) from {summary.bytes_read / 1e6:,.1f} MB in {time.perf_counter() - start:.1f} s"
    )


@dataclass(frozen=True)
class Vocabulary:
    """The corpus and the vocabulary to make of it."""

    input: list[str] = flag(
        [],
        "Files of text (.gz, .bz2, .xz and .zst too), patterns in quotes, or folders.",
        "--input",
        metavar="FILE...",
    )
    json_keys: list[str] = flag(
        ["text"], "Keys that hold the text of a JSON object.", "--json-keys", "--json-key", metavar="KEY..."
    )
    output: str = flag("", "Folder for tokenizer.json and tokenizer_config.json.", metavar="FOLDER")
    kind: str = flag("char", "char (characters, as for Chinese), word (words) or bpe (byte pairs).")
    vocab_size: int = flag(50000, "Tokens at most, special ones included.", within=AT_LEAST_1)


@app.command(cls=SeveralWordsCommand)
@flag_groups(vocabulary=Vocabulary)
def vocab(vocabulary: Vocabulary) -> None:
    """Make a vocabulary of a corpus: the tokenizer of its commonest characters, words or byte pairs."""
    from runtime.data.vocabulary import make_vocabulary

    if not vocabulary.output:
        raise InputError("--output: none given: name a folder for the tokenizer, as my-vocab")
    keys = [key for word in vocabulary.json_keys for key in word.split()]
    made = make_vocabulary(vocabulary.input, vocabulary.output, vocabulary.kind, vocabulary.vocab_size, keys)
    print(
        f"{vocabulary.output}/tokenizer.json: {made.vocab_size:,} tokens, {made.eod} ends a document; "
        f"prepare data with --tokenizer-model {vocabulary.output}"
    )


@dataclass(frozen=True)
class Pairs:
    """The token files to merge."""

    input: list[str] = flag(
        [],
        "Prefixes of .bin/.idx pairs, in the order to keep, or folders whose pairs are taken by name.",
        "--input",
        metavar="PREFIX...",
    )
    output_prefix: str = flag("", "Writes PREFIX.bin and .idx.", "--output-prefix", metavar="PREFIX")


@app.command(cls=SeveralWordsCommand)
@flag_groups(pairs=Pairs)
def merge(pairs: Pairs) -> None:
    """Merge .bin/.idx pairs of one tokenizer into one, as Megatron-LM's tools/merge_datasets.py does."""
    from runtime.data import merge as merge_pairs

    _check_prefix(pairs.output_prefix)
    summary = merge_pairs(
        pairs.input, pairs.output_prefix, note=lambda text: print(f"planner: note: {text}", file=sys.stderr)
    )
    print(f"{summary.prefix}.bin and .idx: {summary.documents:,} documents, {summary.tokens:,} tokens")


@app.command(cls=Command)
def info(
    prefixes: Annotated[list[str], typer.Argument(metavar="PREFIX...", help="Prefixes of .bin/.idx pairs.")],
    tokenizer_type: Annotated[
        str | None,
        typer.Option(
            help="GPT2BPETokenizer, HuggingFaceTokenizer or ByteTokenizer, instead of the one that prepared "
            "a pair."
        ),
    ] = None,
    vocab_file: Annotated[str | None, typer.Option(help="vocab.json of a GPT2BPETokenizer.")] = None,
    merge_file: Annotated[str | None, typer.Option(help="merges.txt of a GPT2BPETokenizer.")] = None,
    tokenizer_model: Annotated[
        str | None, typer.Option(help="tokenizer.json, its folder, or an id on the Hub.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each pair.")] = False,
) -> None:
    """Show the contents of .bin/.idx pairs: documents, tokens, ids and the first text."""
    from runtime.data.description import Description, describe
    from runtime.data.tokenizers import implied_kind, load_tokenizer

    kind = tokenizer_type or implied_kind(vocab_file, merge_file, tokenizer_model)
    tokenizer = load_tokenizer(kind, vocab_file, merge_file, tokenizer_model) if kind else None

    def lines(found: Description) -> Iterator[str]:
        yield (
            f"{found.prefix}: {found.documents:,} documents ({found.empty_documents:,} empty) in "
            f"{found.sequences:,} sequences{' with modes' * found.is_multimodal}, {found.tokens:,} tokens as "
            f"{found.dtype}"
        )
        if found.tokens:
            yield f"  ids {found.smallest} to {found.largest}, longest sequence {found.longest:,} tokens"
            if found.tokenizer is not None:
                other = found.prepared_with not in (None, found.tokenizer)
                yield (
                    f"  {found.ended:,} of the first {found.looked_at:,} documents end with {found.eod}, the "
                    f"end of a document of {found.tokenizer}"
                    + f"; {found.prepared_with} prepared them"
                    * other
                )
            text = repr(found.first_text) if found.lacking is None else f"no text: {found.lacking}"
            yield f"  begins {' '.join(map(str, found.first_ids[:8]))}: {text}"

    for prefix in prefixes:
        found = describe(prefix, tokenizer)
        if as_json:
            print(json.dumps({**asdict(found), "prefix": str(found.prefix)}))
        else:
            print("\n".join(lines(found)))


def _check_prefix(prefix: str) -> None:
    if not prefix:
        raise InputError("--output-prefix: none given: name the files to write, as my-corpus")


@contextmanager
def _bar(title: str, total: int) -> Iterator[Callable[[Summary], None]]:
    """A progress bar on a terminal; the function that it yields shows a summary."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    silent = not console.is_terminal
    drawn = time.perf_counter()
    with Progress(*columns, console=console, transient=True, auto_refresh=False, disable=silent) as bar:
        task = bar.add_task(title, total=total)

        def show(summary: Summary) -> None:
            # Drawn from here and not by rich's thread: the workers are forked from this process.
            nonlocal drawn
            now = time.perf_counter()
            if now - drawn > 0.1:
                drawn = now
                description = f"{summary.documents:,} documents"
                bar.update(task, completed=summary.bytes_taken, description=description, refresh=True)

        yield show

"""Preparation of Megatron's token files from raw text, in parallel; the bytes do not depend on the number of
processes."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from costmodels.catalogue.local_machine import available_cores
from costmodels.errors import InputError
from runtime.data.documents import FORMATS, Piece, Texts, detect_format, extract_texts, read_pieces
from runtime.data.indexed_dataset import best_dtype
from runtime.data.indexed_writer import IndexedWriter
from runtime.data.record import record_of
from runtime.data.sources import expand
from runtime.data.summary import Summary
from runtime.data.tokenizers import Tokenizer
from runtime.processes.pools import default_context


@dataclass(frozen=True)
class EncodedPiece:
    """The documents of a piece under one key, as token ids.

    `tokens` are all ids one after the other; `lengths` the ids of each sequence, none of which is empty.
    `sequences` are the numbers of sequences of each document.
    """

    tokens: npt.NDArray[np.integer]
    lengths: npt.NDArray[np.int64]
    sequences: npt.NDArray[np.int64]


Result = tuple[list[EncodedPiece], int, int]
"""A piece under each key, the bytes of text, and those of the file that it took."""


@dataclass(frozen=True)
class _Encoder:
    """An encoder of pieces of files to token ids; it runs in the worker processes."""

    tokenizer: Tokenizer
    keys: tuple[str, ...]
    append_eod: bool
    prompt_key: str | None = None

    def __call__(self, form: str, piece: Piece) -> Result:
        if self.prompt_key is not None:
            prompts, *answers = extract_texts(piece, form, (self.prompt_key, *self.keys))
            return [self._answers(prompts, texts) for texts in answers], piece.size, piece.taken
        texts = extract_texts(piece, form, self.keys)
        return [self._encode(documents) for documents in texts], piece.size, piece.taken

    def _answers(self, prompts: Sequence[Texts], answers: Sequence[Texts]) -> EncodedPiece:
        """One sequence for each prompt with its answer; ids of prompts are stored as their complement."""
        texts = [
            [one if isinstance(one, str) else "".join(one) for one in part] for part in (prompts, answers)
        ]
        asked, told = map(self.tokenizer.encode, texts)
        end = [self.tokenizer.eod] * self.append_eod
        pairs = [
            np.concatenate([~np.asarray(prompt, np.int32), np.asarray([*answer, *end], np.int32)])
            for prompt, answer in zip(asked, told, strict=True)
        ]
        lengths = np.fromiter(map(len, pairs), np.int64, len(pairs))
        tokens = np.concatenate([np.empty(0, np.int32), *pairs])
        return EncodedPiece(tokens, lengths[lengths > 0], (lengths > 0).astype(np.int64))

    def _encode(self, documents: Sequence[Texts]) -> EncodedPiece:
        """Encode documents like Megatron-LM's tools/preprocess_data.py: sentences without tokens are left
        out, and the end-of-document token belongs to the last non-empty sentence."""
        sentences = [[document] if isinstance(document, str) else document for document in documents]
        ids = self.tokenizer.encode([sentence for document in sentences for sentence in document])
        counts = np.fromiter(map(len, sentences), np.int64, len(sentences))
        sizes = np.fromiter(map(len, ids), np.int64, len(ids))
        owner = np.repeat(np.arange(len(sentences)), counts)[sizes > 0]
        lengths = sizes[sizes > 0]
        tokens = np.concatenate([np.empty(0, best_dtype(self.tokenizer.vocab_size)), *ids], casting="unsafe")
        if self.append_eod and lengths.size:
            is_last = np.append(owner[1:] != owner[:-1], True)
            tokens = np.insert(tokens, np.cumsum(lengths)[is_last], self.tokenizer.eod)
            lengths = lengths + is_last
        return EncodedPiece(tokens, lengths, np.bincount(owner, minlength=len(sentences)))


_worker: _Encoder


def _start_worker(encoder: _Encoder) -> None:
    global _worker
    # A terminal sends Ctrl-C to this process too: the one that started it ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _worker = encoder


def _work(form: str, piece: Piece) -> Result:
    return _worker(form, piece)


def prepare(
    inputs: Sequence[str | Path],
    output_prefix: str | Path,
    tokenizer: Tokenizer,
    json_keys: str | Sequence[str] = "text",
    append_eod: bool = True,
    workers: int | None = None,
    chunk_size: int = 1024,
    form: str | None = None,
    progress: Callable[[Summary], object] | None = None,
    prompt_key: str | None = None,
) -> Summary:
    """Write `{output_prefix}_{key}_document.bin` and `.idx` from text files, for each of `json_keys`, and
    `.tokenizer`, the record of the tokenizer.

    `inputs` are files, patterns or folders (`runtime.data.sources.expand`), read in order. `form` is jsonl
    (an object with the keys, or a string, per line), json (an array of either), wiki (WikiExtractor's <doc
    ...>) or text (each file is one document). It is detected per file if None. `workers` processes, but no
    more than there are cores or work, take `chunk_size` documents at a time. An end-of-document token follows
    each document that is not empty. `progress` is called after every chunk with the summary so far. The text
    under `prompt_key` is put before that of each other key, and is not predicted.

    Raises InputError, with file and line if known, and writes nothing then.
    """
    keys = (json_keys,) if isinstance(json_keys, str) else tuple(dict.fromkeys(json_keys))
    _check(keys, prompt_key, workers, chunk_size, form)
    files = expand([str(path) for path in inputs])
    prefixes = [Path(f"{output_prefix}_{key}_document") for key in keys]
    summary = Summary(prefixes[0])
    encoder = _Encoder(tokenizer, keys, append_eod, prompt_key)
    pieces = _pieces(files, form, chunk_size)
    dtype, record = best_dtype(tokenizer.vocab_size), record_of(tokenizer)
    if prompt_key is not None:
        dtype, record = np.dtype(np.int32), replace(record, hides_prompts=True)
    try:
        with ExitStack() as stack:
            writers = [stack.enter_context(IndexedWriter(prefix, dtype, record)) for prefix in prefixes]
            encoded = stack.enter_context(closing(_encode(encoder, pieces, _processes(workers))))
            for parts, read, taken in encoded:
                for writer, part in zip(writers, parts, strict=True):
                    writer.add_documents(part.tokens, part.lengths, part.sequences)
                tokens = sum(part.tokens.size for part in parts)
                summary = summary.plus(parts[0].sequences.size, tokens, read, taken)
                if progress:
                    progress(summary)
            if not summary.tokens:
                raise InputError(f"--input {inputs[0]}: holds no text")
            for writer in writers:
                # All are whole on disk before the first gets its name.
                writer.finish()
    except OSError as error:
        raise InputError(f"{error.filename or output_prefix}: {error.strerror or error}") from None
    return summary


def _check(
    keys: Sequence[str], prompt_key: str | None, workers: int | None, chunk_size: int, form: str | None
) -> None:
    """Raise `InputError` for contradictory or impossible arguments of `prepare`."""
    if workers is not None and workers < 1:
        raise InputError(f"--workers {workers}: expected at least 1")
    if chunk_size < 1:
        raise InputError(f"--chunk-size {chunk_size}: expected at least 1")
    if form is not None and form not in FORMATS:
        raise InputError(f"--format {form!r}: expected one of {', '.join(FORMATS)}")
    if not keys or not all(keys):
        raise InputError("--json-keys: expected at least one name")
    if prompt_key in keys:
        raise InputError(
            f"--prompt-key {prompt_key}: is one of --json-keys too; name the key of the answers there"
        )


def _pieces(files: Sequence[Path], form: str | None, most: int) -> Iterator[tuple[str, Piece]]:
    for path in files:
        kind = form or detect_format(path)
        for piece in read_pieces(path, kind, most):
            yield kind, piece


def _processes(wanted: int | None) -> int:
    """Most workers to start; encoding keeps cores busy, so more workers than cores would only wait."""
    cores = available_cores()
    return cores if wanted is None else min(wanted, cores)


def _encode(
    encoder: _Encoder, pieces: Iterable[tuple[str, Piece]], most: int
) -> Generator[Result, None, None]:
    """Encoded pieces in order by `most` workers or fewer; only a few pieces per worker are held at once."""
    with _one_thread_each():
        rest = iter(pieces)
        # A worker that finds nothing to do costs as much to start as one that does.
        first = list(islice(rest, most))
        workers = len(first)
        if workers <= 1:
            yield from (encoder(form, piece) for form, piece in chain(first, rest))
            return
        pending: deque[Future[Result]] = deque()
        with ProcessPoolExecutor(
            workers, mp_context=default_context(), initializer=_start_worker, initargs=(encoder,)
        ) as pool:
            try:
                for form, piece in chain(first, rest):
                    pending.append(pool.submit(_work, form, piece))
                    if len(pending) > 2 * workers:
                        yield pending.popleft().result()
                while pending:
                    yield pending.popleft().result()
            except BrokenProcessPool:
                raise InputError(
                    f"--workers {workers}: a worker process was killed, probably for want of memory: give "
                    "fewer workers or a smaller --chunk-size"
                ) from None
            finally:
                pool.shutdown(cancel_futures=True)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Keep the tokenizers library from starting a thread per core in each process."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before

"""Raw text to Megatron's token files, on many processes, with the same bytes for any number of them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from costmodels.errors import InputError
from runtime.data.documents import FORMATS, Piece, detect_format, extract_texts, read_pieces
from runtime.data.indexed import IndexedWriter, best_dtype
from runtime.data.tokenizers import Tokenizer

Encoded = tuple[npt.NDArray[np.integer], npt.NDArray[np.integer], int]


@dataclass(frozen=True)
class Summary:
    """What has been written so far: the prefix of the files, and counts of documents, tokens, text bytes."""

    prefix: Path
    documents: int = 0
    tokens: int = 0
    bytes_read: int = 0


@dataclass(frozen=True)
class _Encoder:
    """Turns a piece of a file into token ids; runs in the worker processes."""

    tokenizer: Tokenizer
    key: str
    append_eod: bool

    def __call__(self, form: str, piece: Piece) -> Encoded:
        """(all ids one after the other, the number of ids of each document, bytes of text)."""
        documents = self.tokenizer.encode(extract_texts(piece, form, self.key))
        dtype = best_dtype(self.tokenizer.vocab_size)
        end = np.array([self.tokenizer.eod] if self.append_eod else [], dtype)
        lengths = np.array([ids.size + end.size if ids.size else 0 for ids in documents], np.int64)
        parts = [part for ids in documents if ids.size for part in (ids, end)]
        tokens = np.concatenate([np.empty(0, dtype), *parts]).astype(dtype)
        return tokens, lengths, piece.size


_worker: _Encoder


def _start_worker(encoder: _Encoder) -> None:
    global _worker
    _worker = encoder


def _work(form: str, piece: Piece) -> Encoded:
    return _worker(form, piece)


def prepare(
    inputs: Sequence[str | Path],
    output_prefix: str | Path,
    tokenizer: Tokenizer,
    json_key: str = "text",
    append_eod: bool = True,
    workers: int | None = None,
    chunk_size: int = 1024,
    form: str | None = None,
    progress: Callable[[Summary], object] | None = None,
) -> Summary:
    """Write `{output_prefix}_{json_key}_document.bin` and `.idx` from text files.

    `inputs` are read in order; `form` is jsonl (an object with `json_key`, or a string, per line), json (an
    array of either) or text (each file is one document), detected per file if None. `workers` processes (all
    cores if None) take `chunk_size` documents at a time. An end-of-document token follows each document that
    is not empty. `progress` is called after every chunk with the summary so far.

    Raises InputError, with file and line where there is one; then nothing is written.
    """
    if workers is not None and workers < 1:
        raise InputError(f"--workers {workers}: expected at least 1")
    if chunk_size < 1:
        raise InputError(f"--chunk-size {chunk_size}: expected at least 1")
    if form is not None and form not in FORMATS:
        raise InputError(f"--format {form!r}: expected one of {', '.join(FORMATS)}")
    if not inputs:
        raise InputError("--input: expected at least one file of text")
    summary = Summary(Path(f"{output_prefix}_{json_key}_document"))
    encoder = _Encoder(tokenizer, json_key, append_eod)
    try:
        files = [(path, form or detect_format(path)) for path in map(Path, inputs)]
        pieces = ((kind, piece) for path, kind in files for piece in read_pieces(path, kind, chunk_size))
        writer = IndexedWriter(summary.prefix, best_dtype(tokenizer.vocab_size))
        with writer, closing(_encode(encoder, pieces, workers or os.cpu_count() or 1)) as encoded:
            for tokens, lengths, size in encoded:
                writer.add_documents(tokens, lengths)
                summary = Summary(
                    summary.prefix,
                    summary.documents + lengths.size,
                    summary.tokens + tokens.size,
                    summary.bytes_read + size,
                )
                if progress:
                    progress(summary)
            if not summary.tokens:
                raise InputError(f"--input {inputs[0]}: holds no text")
    except OSError as error:
        raise InputError(f"{error.filename or output_prefix}: {error.strerror or error}") from None
    return summary


def _encode(
    encoder: _Encoder, pieces: Iterable[tuple[str, Piece]], workers: int
) -> Generator[Encoded, None, None]:
    """Encoded pieces in order; no more than a few per worker are held at once."""
    with _one_thread_each():
        if workers == 1:
            yield from (encoder(form, piece) for form, piece in pieces)
            return
        pending: deque[Future[Encoded]] = deque()
        with ProcessPoolExecutor(workers, initializer=_start_worker, initargs=(encoder,)) as pool:
            try:
                for form, piece in pieces:
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
